"""What commands write and where: PNG and tables on standard output, full disks, closed pipes, pictures of any size, names of channels."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

np = pytest.importorskip("numpy")
PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

import texvlm  # noqa: E402
from texvlm import cli  # noqa: E402
from texvlm.cli import bench, image  # noqa: E402
from texvlm.cli.channels import describe  # noqa: E402
from texvlm.cli.image import read_picture  # noqa: E402
from texvlm.cli.view import channel_names  # noqa: E402
from texvlm.video.composed import channel_notes  # noqa: E402


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """Smooth, as photographs are, [160, 240, 3]."""
    small = np.random.default_rng(0).integers(0, 255, (10, 15, 3), dtype=np.uint8)
    path = tmp_path / "photo.png"
    PIL.fromarray(small).resize((240, 160), PIL.Resampling.BICUBIC).save(path)
    return path


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes standard output a full disk."""
    with open("/dev/full", "w") as device:
        yield lambda: monkeypatch.setattr(sys, "stdout", device)


VERBS = {
    "select": ["select", "PHOTO", "-k", "3"],
    "select --csv": ["select", "PHOTO", "-k", "3", "--csv"],
    "view": ["view", "PHOTO", "-k", "3", "--dpi", "20", "-o", "OUT.png"],
    "view -o -": ["view", "PHOTO", "-k", "3", "--dpi", "20", "-o", "-"],
    "channels": ["channels"],
    "doctor": ["doctor"],
    "bench": ["bench", "tiles"],
    "video": ["video", "FOLDER", "-k", "3", "--json", "-"],
    "chat": ["chat", "--tiny", "--image", "PHOTO", "--ask", "what", "--budget", "5", "--max-new-tokens", "1"],
    "help": ["select", "--help"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_is_one_line(
    verb: str, photo: Path, full: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photo.parent)
    names = {"PHOTO": photo.name, "FOLDER": ".", "OUT.png": "out.png"}
    full()
    assert cli.main([names.get(word, word) for word in VERBS[verb]]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("texvlm") and last.endswith(": cannot write to standard output: No space left on device")


@pytest.mark.parametrize(
    "command",
    [
        ["select", "PHOTO", "--json", "/dev/full"],
        ["view", "PHOTO", "-k", "3", "--dpi", "20", "-o", "/dev/full"],
        ["channels", "--json", "/dev/full"],
        ["video", "FOLDER", "-k", "3", "--json", "/dev/full"],
        ["chat", "--tiny", "--image", "PHOTO", "--ask", "what", "--budget", "5", "--show", "/dev/full"],
    ],
    ids=lambda command: command[0],
)
def test_a_full_device_by_name_is_one_line(command: list[str], photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"PHOTO": str(photo), "FOLDER": str(photo.parent)}
    assert cli.main([names.get(word, word) for word in command]) == 2
    assert capsys.readouterr().err == f"texvlm {command[0]}: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize(("where", "line"), [("> /dev/full", True), ("| true", False)])
def test_python_adds_nothing_when_it_ends(where: str, line: bool, photo: Path) -> None:
    """What is not yet written is not tried again; a closed pipe is no reason for words."""
    root = str(Path(cli.__file__).parents[2])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"PYTHONPATH": root}
    command = f"{sys.executable} -m texvlm select {photo} {where}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ("texvlm select: cannot write to standard output: No space left on device\n" if line else "")
    assert done.returncode == 1


def test_view_writes_to_standard_output(photo: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["view", str(photo), "-k", "3", "--dpi", "20", "-o", "-"]) == 0
    out, err = capfdbinary.readouterr()
    with PIL.open(io.BytesIO(out)) as drawn:
        assert drawn.format == "PNG" and min(drawn.size) > 100
    assert b"cascade" in err and b"the picture is at" not in err


def test_no_png_for_a_terminal(photo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["view", str(photo), "-o", "-"]) == 2
    assert "which is a terminal here" in capsys.readouterr().err


def test_csv_says_what_json_says(photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["select", str(photo), "--path", "multiscale", "-k", "12", "--csv", "--json", str(tmp_path / "kept.json")]
    assert cli.main(both) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "index,row,col,x,y,width,height,lod,score"
    rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader([header, *lines])]
    assert rows == json.loads((tmp_path / "kept.json").read_text())["cells"] and len(rows) == 12
    assert cli.main([*both[:-1], "-"]) == 2
    assert "--csv and --json - both" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["select", "--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {name:8}" in said for name in header.split(","))


def test_pictures_beyond_the_limit_want_max_size(
    photo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (30_000, 10_000):  # Pillow warns up to twice the limit, and refuses from there on
        monkeypatch.setattr(PIL, "MAX_IMAGE_PIXELS", limit)
        assert cli.main(["select", str(photo)]) == 2
        assert f"more than {limit:,} pixels, Pillow's limit: --max-size" in capsys.readouterr().err
        picture = read_picture(str(photo), 60)
        assert (picture.image.shape, picture.full) == ((3, 40, 60), (160, 240))
        assert limit == PIL.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(("kind", "decoded"), [("png", (240, 160)), ("jpg", (60, 40))])
def test_a_jpeg_shrinks_while_it_is_decoded(
    orientation: int, kind: str, decoded: tuple[int, int], photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = PIL.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"saved.{kind}"
    with PIL.open(photo) as file:
        file.save(path, exif=exif, **({"quality": 95} if kind == "jpg" else {}))
        shrunk = np.array(file.resize((30, 20), PIL.Resampling.LANCZOS))
    sizes, to_rgb = [], image._to_rgb
    monkeypatch.setattr(image, "_to_rgb", lambda file, *rest: sizes.append(file.size) or to_rgb(file, *rest))
    picture = read_picture(str(path), 30)
    assert sizes == [decoded]
    turned = orientation == 6
    assert picture.full == ((240, 160) if turned else (160, 240))
    assert picture.remarks[-1] == f"shrunk from {'160 x 240' if turned else '240 x 160'} (--max-size)"
    wanted = torch.from_numpy(np.rot90(shrunk, -1).copy() if turned else shrunk).permute(2, 0, 1).float()
    assert (picture.image.float() - wanted).abs().mean() < 2


def test_channels_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["channels"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["index", "name", "needs", "reducer", "film", "description"]
    for channel, line in zip(texvlm.CHANNELS, lines, strict=True):
        assert line.split()[:2] == [str(channel.index), channel.name] and line.endswith(f"  {channel.description}")
        assert f" {channel.reducer} " in line
    assert "--previous" in lines[7] and "--previous" not in lines[8]
    assert cli.main(["channels", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["index"], row["halo"]) for row in found] == [(channel.index, channel.halo) for channel in texvlm.CHANNELS]
    assert found[12]["range"] == [0, None] and found[5]["range"] == [-1, 1]


def test_what_the_list_says_is_what_happens() -> None:
    """What a channel needs is what it is absent without; what a film does with it, a stream's notes say."""
    alone = texvlm.build_channels(torch.rand(3, 16, 16)).meta
    embedding = texvlm.Embedding(texvlm.DigitsEmbedding())
    notes = channel_notes([row["name"] for row in describe()], embedding, None, exact=False)
    words = {"lagged": "lagged", "carried": "moved along|carried along", "given": "absent: not given"}
    for row in describe():
        assert (row["needs"] is not None) == str(alone[row["name"]]).startswith("absent"), row
        if row["name"] == "previous_relevance":
            continue  # whose note is of the missing query
        said = {film for film, marks in words.items() for mark in marks.split("|") if mark in notes[row["name"]]}
        assert row["film"] in (said or {"exact"}), row


@pytest.mark.parametrize("text", ["all", "minimal", "embedding", "embedding,x", "edge, minimal", "minimal,text", "3,text", "39"])
def test_the_command_line_and_python_know_the_same_names(text: str) -> None:
    words = [int(word) if word.isdecimal() else word for word in text.replace(",", " ").split()]
    texture = texvlm.build_channels(torch.rand(3, 16, 16), channels=words, levels=1)
    assert channel_names(text) == list(texture.names)
    if len(words) == 1 and isinstance(words[0], str):
        assert texvlm.build_channels(torch.rand(3, 16, 16), channels=words[0], levels=1).names == texture.names
    assert len(set(texture.names)) == texture.channels


def test_all_is_what_none_is() -> None:
    previous, following = torch.rand(2, 3, 32, 32)
    every, default = (texvlm.build_channels(following, previous, channels=channels) for channels in ("all", None))
    assert (every.names, every.meta) == (default.names, default.meta)
    assert torch.equal(every.data, default.data)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("words", [["--help"], ["pyramid", "--help"], ["pyramid", "--quick", "-h", "--json", "x"]])
def test_bench_shows_help_anywhere(
    words: list[str], inside: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inside:
        monkeypatch.setattr(bench, "checkout", lambda: None)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", *words])
    said = capsys.readouterr().out
    assert said.startswith("usage: texvlm bench ") and "--quick" in said
    assert ("pyramid" in said) == inside and ("in a checkout only" in " ".join(said.split())) != inside


def test_bench_refuses_what_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["bench", "nonsense"]) == 2
    assert "no such benchmark: nonsense" in capsys.readouterr().err
    monkeypatch.setattr(bench, "checkout", lambda: None)
    assert cli.main(["bench", "pyramid"]) == 2
    assert "run this in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("error", [BrokenPipeError(), KeyboardInterrupt()])
def test_a_benchmark_that_nobody_reads_is_ended(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("builtins.print", refuse)
    with pytest.raises(type(error)):
        bench.told([sys.executable, "-uSc", "import time; print('begun'); time.sleep(100)"], tmp_path)


def test_what_a_benchmark_prints_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.told([sys.executable, "-Sc", "print('one'); print('two'); raise SystemExit(3)"], tmp_path) == 3
    assert capsys.readouterr().out == "one\ntwo\n"
