"""What texvlm.vllm makes of mm_processor_kwargs and of a processor's rows, without vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import texvlm
from texvlm.qwen import QwenVLAdapter, auto_budget, tiny_batch, tiny_model
from texvlm.qwen.pictures import IMAGE
from texvlm.vllm import ARCHITECTURES, register
from texvlm.vllm.choosing import Chooser, frames, shortened
from texvlm.vllm.options import PATHS, Options, named, others

KEEP = {"texvlm_keep": 273}


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = "import sys, texvlm.vllm; assert not {'vllm', 'transformers'} & set(sys.modules); import texvlm.vllm.options; "
    subprocess.run([sys.executable, "-c", code + "assert not {'vllm', 'transformers'} & set(sys.modules)"], check=True)


@pytest.mark.parametrize("version", [None, "0.31.9", "0.32.0", "0.33.1rc1"])
def test_registering(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, str] = dict.fromkeys(ARCHITECTURES[:2], "vLLM's own")

    class Registry:
        get_supported_archs = staticmethod(lambda: there.keys())
        register_model = staticmethod(there.__setitem__)

    class Module:
        __version__ = version
        ModelRegistry = Registry

    monkeypatch.setitem(sys.modules, "vllm", None if version is None else Module)  # type: ignore[arg-type]
    if version in (None, "0.31.9"):
        with pytest.raises(ImportError, match=f"texvlm.vllm needs vllm >= 0.32, got {version or 'none'}"):
            register()
        return
    for _ in range(2):
        register()
        assert there == {name: f"texvlm.vllm.models:{name}" for name in ARCHITECTURES[:2]}  # no more than vLLM has


@pytest.mark.parametrize(
    ("server", "request_", "groups", "budget"),
    [
        ({}, {}, 80, 80),
        ({}, {"texvlm_keep": 10}, 80, 10),
        ({}, {"texvlm_keep": 100}, 80, 80),
        (KEEP, {}, 4096, 273),
        (KEEP, {}, 100, 100),
        (KEEP, {"texvlm_keep": 64}, 4096, 64),
        (KEEP, {"texvlm_keep": 500}, 4096, 273),
        (KEEP, {"texvlm_keep": None}, 4096, 273),
        ({**KEEP, "texvlm_max": 400}, {"texvlm_keep": 500}, 4096, 400),
        ({**KEEP, "texvlm_max": None}, {"texvlm_keep": 500}, 4096, 500),
        ({"texvlm_max": 400}, {}, 4096, 400),
        ({"texvlm_keep": "auto"}, {}, 16384, 546),
        ({"texvlm_keep": "auto"}, {"texvlm_keep": 600}, 16384, 546),
        (KEEP, {"texvlm_keep": "auto"}, 16384, 273),
    ],
)
def test_budgets(server: dict[str, Any], request_: dict[str, Any], groups: int, budget: int) -> None:
    assert auto_budget(16384) == 546
    assert Options.of(server, request_).budget(groups) == budget


REFUSED = [
    ({}, {"texvlm_keep": 0}, "texvlm_keep must be a whole number of at least 1, 'auto' or None, got 0"),
    ({}, {"texvlm_keep": True}, "texvlm_keep must be .*, got True"),
    ({}, {"texvlm_keep": "all"}, "texvlm_keep must be .*, got 'all'"),
    ({}, {"texvlm_keep": [5, 2.5]}, "texvlm_keep must be .*, got 2.5"),
    ({"texvlm_keep": [5, 6]}, {}, "texvlm_keep must be .*, got \\[5, 6\\]"),
    ({}, {"texvlm_k": 5}, "mm_processor_kwargs must be of texvlm_keep, .*, got texvlm_k"),
    ({"texvlm_k": 5}, {}, "mm_processor_kwargs must be of texvlm_keep, .*, got texvlm_k"),
    ({}, {"images_kwargs": {"texvlm_keep": 5}}, "texvlm_keep must stand in mm_processor_kwargs itself, got it in images_kwargs"),
    ({}, {"texvlm_max": 5}, "texvlm_max is for the server to say, got it in a request"),
    ({}, {"texvlm_embedding": "os:environ"}, "texvlm_embedding is for the server to say"),
    ({**KEEP, "texvlm_max": 100}, {}, "texvlm_max must be at least texvlm_keep, 273, got 100"),
    ({}, {"texvlm_path": "multiscale"}, "texvlm_path must be one of .*, got 'multiscale'"),
    ({}, {"texvlm_path": "random"}, "texvlm_path must be one of .*, got 'random'"),
    ({}, {"texvlm_path": "os:system"}, "texvlm_path must be one of .*, got 'os:system'"),
    ({"texvlm_path": "mine"}, {}, "texvlm_path must be one of .*, or package.module:name, got 'mine'"),
    ({"texvlm_query": ["a", "b"]}, {}, "texvlm_query must be one text or vector for a server to say"),
]


@pytest.mark.parametrize(("server", "request_", "message"), REFUSED)
def test_what_is_refused(server: dict[str, Any], request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.of(server, request_)


def test_lists_are_one_for_each() -> None:
    options = Options.of({"texvlm_max": 30}, {"texvlm_keep": [5, None, 99], "texvlm_query": "7"})
    assert [(o.budget(80), o.query) for o in options.each(3)] == [(5, "7"), (30, "7"), (30, "7")]
    assert options.budget(80) == 30
    assert [o.query for o in Options(query=["7", None]).each(2)] == ["7", None]
    assert Options(query=[0.5, 0.5]).each(3)[2].query == [0.5, 0.5]
    with pytest.raises(ValueError, match="texvlm_keep must be one, or one for each of 2 pictures, got 3"):
        options.each(2)
    assert others({"fps": 2, **KEEP}) == {"fps": 2}


def test_runs_are_shortened() -> None:
    assert shortened([1, 9, 9, 9, 2, 9, 9, 3], 9, [2, 1]) == [1, 9, 9, 2, 9, 3]
    with pytest.raises(ValueError, match="must be 1 runs of tokens, got 0"):
        shortened([1, 2], 9, [1])
    assert frames(torch.tensor([[0, 3], [2, 1], [2, 4]]), 4) == [1, 0, 2, 0]


allocator = texvlm.Allocator(participation=[]).requires_grad_(False)
"""A server names it."""


@pytest.mark.parametrize("path", [*(p for p in PATHS if p not in ("query", "video")), f"{__name__}:allocator"])
def test_rows_and_geometry_are_the_adapters(path: str) -> None:
    model = tiny_model("qwen3_vl")
    batch = tiny_batch(model, [(64, 96), (40, 48)])
    chooser = Chooser(model.config, {"texvlm_path": path})
    data = {name: batch[name] for name in ("pixel_values", "image_grid_thw")}
    chooser.cut(data, chooser.options({"texvlm_keep": [17, 9]}))
    selector = named("texvlm_path", path) if ":" in path else path
    expected = QwenVLAdapter(model, selector, gate="scale").prepare(batch, k=[17, 9])
    assert torch.equal(data["pixel_values"], expected["pixel_values"])
    assert torch.equal(data["image_kept"][:, 1], expected["texvlm_cells"][:, 2])
    kept = list(data["image_kept"].split(data["image_kept_count"].tolist()))
    geometry = chooser.geometry(IMAGE, data["image_grid_thw"].tolist(), kept).keywords()
    assert all(torch.equal(value, expected[f"image_{name}"]) for name, value in geometry.items())


def test_bytes_are_chosen_from_as_what_is_normalised_later() -> None:
    """vLLM normalises on the device; levels of 1 / 255 then are what the tower sees, and what is chosen from."""
    model = tiny_model("qwen3_vl")
    batch = tiny_batch(model, [(64, 96)])
    levels = ((batch["pixel_values"] + 1) * 127.5).round().byte()
    found = []
    for rows in (levels, levels / 127.5 - 1):
        chooser = Chooser(model.config, {})
        data = {"pixel_values": rows, "image_grid_thw": batch["image_grid_thw"]}
        chooser.cut(data, chooser.options({"texvlm_keep": 20, "texvlm_path": "salience"}))
        assert data["pixel_values"].dtype == rows.dtype
        found.append(data["image_kept"])
    assert torch.equal(*found)


def test_a_server_that_names_what_cannot_be_is_told_at_the_start() -> None:
    config = tiny_model("qwen3_vl").config
    for server, message in (
        ({**KEEP, "texvlm_path": "texvlm:nothing"}, "texvlm_path must be package.module:name, but texvlm has no nothing"),
        ({**KEEP, "texvlm_embedding": "texvlm"}, "texvlm_embedding must be package.module:name, got 'texvlm'"),
        ({**KEEP, "texvlm_path": f"{__name__}:mixed"}, "texvlm_path must keep tokens of one level"),
    ):
        with pytest.raises(ValueError, match=message):
            Chooser(config, server)
    with pytest.raises(ValueError, match="model must be one of the families"):
        Chooser(type("Other", (), {"model_type": "llava"}), KEEP)


mixed = texvlm.CascadeConfig.preset("multiscale")
