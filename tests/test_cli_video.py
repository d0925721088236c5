"""`video`: the film and the JSON that it writes, how both end, the table, refusals in one line."""

from __future__ import annotations

import importlib
import json
import re
import signal
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from films import encode, moving

av = pytest.importorskip("av", reason="PyAV is not installed")
PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
pytest.importorskip("skimage", reason="scikit-image is not installed")

import texvlm  # noqa: E402
from texvlm import cli  # noqa: E402
from texvlm.cli import reel, video  # noqa: E402
from texvlm.selection import Selection  # noqa: E402


@pytest.fixture
def film(tmp_path: Path) -> Path:
    encode(tmp_path / "in.mp4", moving(8, (96, 160)), rate=20)
    return tmp_path / "in.mp4"


def read(path: Path) -> list[tuple[float, np.ndarray]]:
    with av.open(str(path)) as container:
        return [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def noise(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 255, (count, 48, 64, 3), dtype=np.uint8))


def run(*argv: object) -> int:
    return cli.main(["video", *map(str, argv)])


def selected(cells: list[int], lods: list[int], grid: tuple[int, int], cell: int = 16) -> Selection:
    n = len(cells)
    size = (grid[0] * cell, grid[1] * cell)
    score = torch.linspace(1, 0.5, n)[None]
    lod = torch.tensor([lods], dtype=torch.float32)
    return Selection(torch.tensor([cells]), torch.tensor([n]), grid, cell, score, torch.ones(1, n), None, lod, None, size)


# ---- what is written ----


def test_the_film_and_the_table(film: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "two words.mp4"
    assert run(film, "-o", output, "-k", 7) == 0
    out = capsys.readouterr().out
    for word in ("decode", "detect", "select", "draw", "encode", "ms a frame", "8 frames", "of the tiles changed", "1 first"):
        assert word in out, word
    assert f"the film is at {output}" in out
    written = read(output)
    assert [seconds for seconds, _ in written] == pytest.approx([i / 20 for i in range(8)], abs=1e-3)
    assert all(n % 2 == 0 for n in written[0][1].shape[:2])
    assert len({picture.tobytes() for _, picture in written}) == 8


@pytest.mark.parametrize("size", [(1, 1), (9, 7), (33, 17), (16, 900), (900, 16)])
def test_any_size(size: tuple[int, int], tmp_path: Path) -> None:
    folder = tmp_path / "grey pictures"
    folder.mkdir()
    for index in range(3):
        PIL.fromarray(np.random.default_rng(index).integers(0, 255, size, dtype=np.uint8)).save(folder / f"{index}.png")
    assert run(folder, "-o", tmp_path / "out.mkv", "--json", tmp_path / "out.json") == 0
    assert len(read(tmp_path / "out.mkv")) == 3
    cells = json.loads((tmp_path / "out.json").read_text())
    assert cells["film"]["grid"] == [-(-n // 16) for n in size]
    assert all(len(frame["cells"]) == min(273, -(-size[0] // 16) * -(-size[1] // 16)) for frame in cells["frames"])


def test_a_film_of_one_frame_and_times_that_vary(tmp_path: Path) -> None:
    pictures = [PIL.fromarray(picture) for picture in noise(3)]
    pictures[0].save(tmp_path / "one.gif")
    assert run(tmp_path / "one.gif", "-o", tmp_path / "one.mp4") == 0
    assert len(read(tmp_path / "one.mp4")) == 1
    pictures[0].save(tmp_path / "varies.gif", save_all=True, append_images=pictures[1:], duration=[100, 700, 50])
    assert run(tmp_path / "varies.gif", "-o", tmp_path / "varies.mp4") == 0
    assert [seconds for seconds, _ in read(tmp_path / "varies.mp4")] == pytest.approx([0, 0.1, 0.8], abs=1e-3)


def test_cells_as_json(film: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(film, "--json", "-", "-k", 5, "--every", 2, "--size", "64x80", "--cell", 8, "--path", "salience") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == ["film", "frames", "ended"] and found["ended"] == "complete"
    head = {"path": str(film), "width": 80, "height": 64, "rate": 10, "cell": 8, "grid": [8, 10], "k": 5, "by": "salience"}
    assert found["film"] == head
    assert [frame["frame"] for frame in found["frames"]] == [0, 1, 2, 3]
    assert [frame["seconds"] for frame in found["frames"]] == pytest.approx([0, 0.1, 0.2, 0.3], abs=1e-3)
    assert found["frames"][0]["key"] == "first"
    assert "decode" in err and "draw" not in err  # the table, and no film
    assert not (tmp_path / cli.FILM).exists()
    first = next(iter(texvlm.video.frames(film, (64, 80))))
    selection = texvlm.select(first, 5, 8, "salience")
    assert found["frames"][0]["cells"] == selection.indices[0].tolist()
    assert found["frames"][0]["scores"] == pytest.approx(selection.score[0].tolist(), abs=1e-5)
    keys = {key for frame in found["frames"] for key in frame}
    assert keys == {"frame", "seconds", "key", "dirty", "tiles", "cells", "lods", "scores"}
    listed = re.findall(r"(?:frames|^) {2,10}(\w+)", cli.CELLS.split("frames  ")[1].split("ended ")[0], re.MULTILINE)
    assert set(listed) | {"frame", "tiles"} == keys  # what the help lists


def test_a_query_and_other_options(film: Path, tmp_path: Path) -> None:
    argv = (
        "--json",
        tmp_path / "out.json",
        "--query",
        "seven",
        "--threshold",
        "4/255",
        "--measure",
        "mean",
        "--tile",
        16,
        "--limit",
        3,
    )
    assert run(film, *argv) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["frames"]) == 3 and found["film"]["by"] == "query" and found["ended"] == "complete"


@pytest.mark.parametrize("path", ["video", *(path for path in cli.SELECT_PATHS if path != "query")])
def test_every_path(film: Path, tmp_path: Path, path: str) -> None:
    assert run(film, "-o", tmp_path / "out.mp4", "--path", path, "--limit", 2, "-k", 9) == 0
    assert len(read(tmp_path / "out.mp4")) == 2


# ---- panels ----


def test_what_the_panels_show() -> None:
    frame = torch.randint(0, 255, (3, 240, 320), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    panels = reel.Panels(240, 320, 16)
    picture = panels.draw(frame, selected([150, 250], [0, 0], (15, 20)), "")
    assert picture.shape == (480 + reel.BAR, 640, 3)
    kept, film, heat, seen = picture[:240, :320], picture[:240, 320:], picture[240:480, :320], picture[240:480, 320:]
    whole = frame.permute(1, 2, 0).numpy()
    assert np.array_equal(film[40:], whole[40:])  # above are the titles
    for y, x in ((7 * 16, 10 * 16), (12 * 16, 10 * 16)):
        place = np.s_[y : y + 16, x : x + 16]
        assert np.array_equal(kept[place], whole[place]) and np.array_equal(seen[place], whole[place])
    best, last = heat[112:128, 160:176].mean((0, 1)), heat[192:208, 160:176].mean((0, 1))
    assert best[1] > last[1] + 30
    outside = np.s_[208:, :]
    assert kept[outside].max() < 0.45 * 255 and np.array_equal(kept[outside], heat[outside])
    coarse = texvlm.Texture(frame).level(3)
    smooth = torch.nn.functional.interpolate(coarse, (240, 320), mode="bilinear")[0].permute(1, 2, 0).numpy()
    assert np.abs(seen[outside] - 255 * smooth[outside]).max() < 1


def test_tokens_of_several_levels_in_the_panels() -> None:
    frame = torch.randint(0, 255, (3, 240, 320), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seen = reel.Panels(240, 320, 16).draw(frame, selected([44, 150], [2, 0], (15, 20)), "")[240:480, 320:]
    level = texvlm.Texture(frame).level(2)
    smooth = torch.nn.functional.interpolate(level, (240, 320), mode="bilinear")[0].permute(1, 2, 0).numpy()
    assert np.abs(seen[40:96, 64:128] - 255 * smooth[40:96, 64:128]).max() < 1
    assert np.array_equal(seen[112:128, 160:176], frame.permute(1, 2, 0).numpy()[112:128, 160:176])


@pytest.mark.parametrize("size", [(1080, 1920), (720, 1280), (1920, 1080), (200, 2000), (10, 10), (2160, 3841)])
def test_the_panels_fit_a_screen(size: tuple[int, int]) -> None:
    panels = reel.Panels(*size, 16)
    picture = panels.draw(torch.zeros(3, *size, dtype=torch.uint8), selected([], [], tuple(-(-n // 16) for n in size)), "text")
    assert picture.shape[0] * picture.shape[1] <= 1.05 * reel.LARGEST and picture.shape[1] >= reel.NARROWEST
    assert picture.shape[0] % 2 == picture.shape[1] % 2 == 0


# ---- how it ends ----


def test_a_film_that_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole.mp4"
    encode(tmp_path / "index_last.mp4", noise(8))
    with (
        av.open(str(tmp_path / "index_last.mp4")) as source,
        av.open(str(whole), "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    data = whole.read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    assert run(tmp_path / "cut.mp4", "-o", tmp_path / "out.mp4", "--json", tmp_path / "out.json") == video.CUT_OFF
    out = capsys.readouterr().out
    cells = json.loads((tmp_path / "out.json").read_text())
    count = len(cells["frames"])
    assert cells["ended"] == "cut off" and 0 < count < 8
    assert f"is cut off or broken: {cli.plural(8 - count, 'frame')} missing" in out
    assert len(read(tmp_path / "out.mp4")) == count


def test_ctrl_c_loses_nothing(film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, handler = texvlm.VideoStream.update, signal.getsignal(signal.SIGINT)

    def interrupted(self: Any, frame: Any) -> Any:
        if self.stats.frame == 3:
            signal.raise_signal(signal.SIGINT)
        return update(self, frame)

    monkeypatch.setattr(texvlm.VideoStream, "update", interrupted)
    assert run(film, "-o", tmp_path / "out.mp4", "--json", tmp_path / "out.json") == video.INTERRUPTED
    cells = json.loads((tmp_path / "out.json").read_text())
    assert cells["ended"] == "interrupted" and len(cells["frames"]) == 5  # the frame at hand is finished
    assert len(read(tmp_path / "out.mp4")) == 5
    assert signal.getsignal(signal.SIGINT) == handler


def test_what_goes_wrong_half_way_leaves_what_there_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(4):
        PIL.new("RGB", (40 + index // 3, 30), (60 * index, 0, 0)).save(folder / f"{index}.png")
    assert run(folder, "-o", tmp_path / "out.mp4", "--json", tmp_path / "out.json") == 2
    err = capsys.readouterr().err
    assert "3.png is 41 x 30" in err and err.count("\n") == 1
    assert len(read(tmp_path / "out.mp4")) == 3
    assert len(json.loads((tmp_path / "out.json").read_text())["frames"]) == 3


# ---- refusals, and what is not installed ----


def complaint(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_refusals_are_one_line(film: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.mp4").write_text("not a film")
    assert "no such file" in complaint(capsys, tmp_path / "nowhere.mp4", "-o", tmp_path / "out.mp4")
    assert "is not a film" in complaint(capsys, tmp_path / "notes.mp4", "-o", tmp_path / "out.mp4")
    assert "from a file" in complaint(capsys, "-", "-o", tmp_path / "out.mp4")
    assert "must end in .mp4, .mkv, .mov" in complaint(capsys, film, "-o", tmp_path / "out.png")
    assert "no such folder" in complaint(capsys, film, "-o", tmp_path / "no" / "out.mp4")
    assert "no such folder" in complaint(capsys, film, "-o", tmp_path / "out.mp4", "--json", tmp_path / "no" / "out.json")
    assert "is the film that is read" in complaint(capsys, film, "-o", film)
    assert "--query is empty" in complaint(capsys, film, "-o", tmp_path / "out.mp4", "--query", " ")
    assert not (tmp_path / "out.mp4").exists()
    assert len(read(film)) == 8


@pytest.mark.parametrize(
    "argv",
    [("--size", "64"), ("--size", "0x64"), ("--threshold", "2"), ("--threshold", "1/0"), ("--every", "0"), ("--tile", "4")],
)
def test_arguments_that_make_no_sense(argv: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run("film.mp4", *argv)
    assert refused.value.code == 2 and f"argument {argv[0]}: must be" in capsys.readouterr().err


def test_without_pyav_the_extra_is_named(
    film: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def load(name: str) -> Any:
        if name == "av":
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(reel, "importlib", types.SimpleNamespace(import_module=load))
    assert "pip install 'texvlm[video]'" in complaint(capsys, film, "-o", tmp_path / "out.mp4")


def test_a_bar_on_a_terminal_and_a_table_without_rich(film: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(film, "--json", tmp_path / "out.json") == 0
    capsys.readouterr()
    for name in ("rich.console", "rich.progress", "rich.table"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert run(film, "--json", tmp_path / "out.json") == 0
    assert re.search(r"^decode +[\d.]+ +[\d.]+ +8$", capsys.readouterr().out, re.MULTILINE)
