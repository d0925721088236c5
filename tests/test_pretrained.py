"""Saving and loading modules: what comes back is what was saved, and what does not fit is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from texvlm import pretrained
from texvlm.pretrained import Pretrained


class Scale(Pretrained):
    def __init__(self, size: int = 3, names: list[str] | None = None) -> None:
        super().__init__()
        self.config = {"size": size, "names": names}
        self.linear = nn.Linear(size, 2)
        self.register_buffer("mean", torch.randn(size).double())


class Other(Scale):
    version = 2


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Scale(4, ["a", "b"]).save_pretrained(tmp_path / "new" / "folder")
    return tmp_path / "new" / "folder"


def refused(kind: type[Pretrained], folder: Path | str, what: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=what) as caught:
        kind.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_round_trip(tmp_path: Path) -> None:
    scale = Scale(4, ["a", "b"]).requires_grad_(False)
    scale.linear.weight.data = scale.linear.weight.data.T.contiguous().T  # not contiguous
    scale.save_pretrained(tmp_path)
    scale.save_pretrained(str(tmp_path))  # again, over the old
    same = Scale.from_pretrained(str(tmp_path))
    assert same.config == scale.config == {"size": 4, "names": ["a", "b"]}
    for name, tensor in scale.state_dict().items():
        assert torch.equal(same.state_dict()[name], tensor) and same.state_dict()[name].dtype == tensor.dtype
    assert json.loads((tmp_path / "config.json").read_text()) == {"class": "Scale", "version": 1, "size": 4, "names": ["a", "b"]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "weights.safetensors"]


def test_a_shipped_name(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pretrained, "SHIPPED", saved.parent)
    monkeypatch.chdir(tmp_path)
    assert Scale.from_pretrained("folder").config["size"] == 4
    refused(Scale, "fodler", "one of folder, got 'fodler'", FileNotFoundError)
    Scale(7).save_pretrained("folder")
    assert Scale.from_pretrained("folder").config["size"] == 7


def test_another_class(saved: Path) -> None:
    refused(Other, saved, "must hold a Other, got a Scale")


def test_a_newer_version(saved: Path) -> None:
    edit(saved, version=2)
    refused(Scale, saved, "version 1 or older, got 2")
    edit(saved, version=0)
    assert Scale.from_pretrained(saved).config["size"] == 4


@pytest.mark.parametrize("name", ["config.json", "weights.safetensors"])
def test_a_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    refused(Scale, saved, f"has no {name}", FileNotFoundError)


def test_a_missing_folder(tmp_path: Path) -> None:
    refused(Scale, tmp_path / "nowhere", "nowhere", FileNotFoundError)


def test_what_does_not_fit(saved: Path) -> None:
    edit(saved, colour="red")
    refused(Scale, saved, "does not fit Scale: .*colour")
    (saved / "config.json").write_text("[1, 2")
    refused(Scale, saved, "must be JSON with class and version")
    Scale(4).save_pretrained(saved)
    edit(saved, size=5)
    refused(Scale, saved, "does not fit its configuration: .*mean")
    (saved / "weights.safetensors").write_bytes(b"no weights")
    refused(Scale, saved, "does not fit its configuration")


def test_a_configuration_that_is_no_json_writes_nothing(tmp_path: Path) -> None:
    scale = Scale()
    scale.config["size"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        scale.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
