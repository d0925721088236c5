"""The README's examples run as they stand, and its commands where a reader runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import films
import pytest
import qwen_folder
import torch
from packaging.requirements import Requirement
from PIL import Image

import texvlm
from texvlm.cli.reel import Writer

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for line in re.findall(r"^ {4}((?:make|pip|python|texvlm|torchrun) .*)$", README.read_text(), re.MULTILINE)
]


def run(block: int) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[block], f"README.md, example {block + 1}", "exec"), names)
    return names


def test_there_are_nine_examples() -> None:
    assert len(BLOCKS) == 9


def test_the_channels_are_those_of_the_table() -> None:
    """By number and name, each once."""
    rows = re.findall(r"^\| ([\d, -]+) \| ([a-z0-9_, ]+) \|", README.read_text(), re.MULTILINE)
    found = []
    for numbers, names in rows:
        spans = [(*map(int, part.split("-")),) for part in numbers.split(", ")]
        indices = [i for span in spans for i in range(span[0], span[-1] + 1)]
        if " to " in names:
            names = ", ".join(f"embedding_{i}" for i in range(16))
        found += zip(indices, names.split(", "), strict=True)
    assert sorted(found) == [(channel.index, channel.name) for channel in texvlm.CHANNELS]


def test_first_example_gives_273_patches() -> None:
    assert run(0)["tokens"].patches.shape == (1, 273, 3, 16, 16)


def test_second_example_takes_four_paths() -> None:
    names = run(1)
    assert names["mixed"].count.tolist() == [137]
    assert all(names[path].count.tolist() == [273] for path in ("lines", "query", "mine"))


def test_third_example_trains_a_choice() -> None:
    names = run(2)
    gradient = names["scorer"].weight.grad
    assert names["bias"].shape == (2, 273) and gradient.isfinite().all() and gradient.abs().sum() > 0


def test_fourth_example_gives_forty_answers() -> None:
    names = run(3)
    assert names["answers"].shape == (1, 1, 40) and names["sevens"].shape == (1, 240, 320)
    assert names["origin"] == "picture, previous picture and flow"


def test_training_example_learns_where_to_look() -> None:
    assert run(4)["error"] < 20  # by chance it would be about 90


def test_video_example_computes_what_moved() -> None:
    names = run(5)
    assert 0 < names["changed"] < 0.1 and names["kept"].count.tolist() == [64]
    channels = [name for name in names["texture"].names if name not in ("motion", "saliency", "edge_distance")]
    whole = texvlm.build_channels(names["frame"], channels=channels)
    assert torch.equal(names["texture"].level(0)[:, [names["texture"].index(name) for name in channels]], whole.level(0))


def test_qwen_example_pays_for_273_tokens() -> None:
    names = run(6)
    assert (names["batch"]["input_ids"] == names["model"].config.image_token_id).sum() == 273
    assert len(names["batch"]["pixel_values"]) == 4 * 273
    assert (names["inputs"]["input_ids"] == names["model"].config.image_token_id).sum() == 2048
    assert names["answer"].shape[1] <= names["batch"]["input_ids"].shape[1] + 8


def test_attention_example_reads_a_part_and_says_what_is_looked_at() -> None:
    names = run(7)
    assert names["out"].shape == (1, 8, 4096, 32) and [answer.shape for answer in names["answers"]] == 3 * [(1, 8, 1, 32)]
    assert names["found"].total <= 0.25 and len(names["found"].keep) == 4
    assert names["features"].shape == (1, 1024, 64) and names["chosen"].count.tolist() == [40]
    torch.testing.assert_close(names["seen"].sum(), torch.tensor(1.0))


def test_loader_example_feeds_two_forms_of_a_batch() -> None:
    names = run(8)
    assert names["batch"]["patches"].shape == (4, 64, 768) and names["batch"]["patches"].dtype == torch.uint8
    assert names["packed"]["cu_seqlens"].tolist() == [0, 64, 128, 192, 256] and names["packed"]["patches"].shape == (256, 768)


SOURCE = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "texvlm", "benchmarks")
ELSEWHERE = (  # what is not run here, and where it is
    "make ",  # runs these tests
    "pip ",  # the first brings the torch that they run beside, the second is `installed`
    "python -m texvlm.training",  # tests/test_training.py
    "torchrun ",
    "python -m texvlm.qwen.finetune",  # tests/test_qwen_training.py
    "texvlm index",  # tests/test_index.py
    "texvlm app",  # tests/test_app.py
)
SMALLER = {  # the same at less cost
    "Qwen/Qwen3-VL-2B-Instruct": "./model",
    "texvlm view": "texvlm view --dpi 40",
    "texvlm chat": "texvlm chat --max-new-tokens 4",
    "720x1280": "144x256",
    "bench pyramid": "bench pyramid --quick",
}


def said(command: list[str] | str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a command, or a line for the shell, prints."""
    shell = isinstance(command, str)
    done = subprocess.run(
        command, shell=shell, cwd=folder, env=environment, input="what is here\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def clone(folder: Path) -> Path:
    """The source as it is fresh, and with it the objects that this build was made of, so that it is linked and not compiled again."""
    folder.mkdir()
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "lib", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder)
    for objects in (*ROOT.glob("build/temp.*"), *ROOT.glob("build/cuda-*")):
        shutil.copytree(objects, folder / "build" / objects.name)
    return folder


def bring(site: Path, needs: Iterable[str], extra: str, brought: set[tuple[str, str]]) -> None:
    """Puts what these requirements mean into an environment, as links to what is installed here."""
    for need in map(Requirement, needs):
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        try:
            found = distribution(need.name)
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
        for deeper in {"", *need.extras} - {of for name, of in brought if name == need.name}:
            brought.add((need.name, deeper))
            bring(site, found.requires or (), deeper, brought)


def installed(source: Path, home: Path) -> Path:
    """An environment as `pip install .` makes it, with the extras that the README names, and nothing else that is here.

    The wheel is built beside this torch, whose path is in the commands that made the objects, and for the cards that they are for.
    """
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    info = texvlm.build_info()
    switches = {"TEXVLM_CUDA_ARCHS": info["cuda_archs"].replace("+", " ")} if info["cuda"] else {"TEXVLM_NO_CUDA": "1"}
    said([*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(home), "."], source, os.environ | switches)
    (wheel,) = home.glob("*.whl")
    said([*pip, "--python", str(home / "bin" / "python"), "install", "--no-index", "--no-deps", str(wheel)], source)
    (texvlm_itself,) = distributions(path=[str(site)])
    extras = re.findall(r"'(?:texvlm|\.)\[(\w+)\]'", README.read_text())
    assert {"demo", "video", "qwen"} <= set(extras)
    for extra in ("", *extras):
        bring(site, texvlm_itself.requires or (), extra, set())
    return site


@pytest.mark.long
def test_commands_run_in_a_fresh_clone_after_pip_install(tmp_path: Path) -> None:
    folder, home = clone(tmp_path / "texvlm"), tmp_path / "environment"
    site = installed(folder, home)
    picture = films.scenery((150, 200))
    for name in ("photo.jpg", "page.jpg", "digits.png", "frame1.png", "frame2.png"):
        Image.fromarray(picture).save(folder / name)
    for name in ("film.mp4", "screen.mkv"):
        writer = Writer(folder / name, 25.0)
        for t in range(3):
            writer.write(picture, t / 25)
        writer.close()
    qwen_folder.save(folder / "model")

    commands = [command for command in COMMANDS if not command.startswith(ELSEWHERE)]
    assert len(commands) >= 17 and all(command.startswith("texvlm ") for command in commands)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{home / 'bin'}{os.pathsep}{environment['PATH']}"
    for command in commands:
        for long, short in SMALLER.items():
            command = command.replace(long, short)
        said(command, folder, environment)

    header, *rows = (folder / "kept.csv").read_text().splitlines()
    assert f": {header}\n" in README.read_text() and len(rows) == 130
    assert json.loads((folder / "kept.json").read_text())["count"] == 128
    assert said("python -m texvlm select photo.jpg -k 128", folder, environment) == (folder / "kept.json").read_text()
    assert f" in {site / 'texvlm'}\n" in said("python -m texvlm doctor", folder, environment)
    for name in ("out.png", "texvlm-view.png", "seen.png"):
        with Image.open(folder / name) as drawn:
            drawn.verify()
    assert (folder / "out.mp4").stat().st_size > 0 and json.loads((folder / "cells.json").read_text())["ended"] == "complete"
