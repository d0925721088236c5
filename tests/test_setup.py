"""The build as setup.py plans it: a graph that ninja accepts, each source once, objects of kernels from elsewhere."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from texvlm import _load
from texvlm.cli.toolkit import cuda_home

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _ordinary_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user builds it, also where these tests run on a build of another kind (`make sanitize`)."""
    for name in ("TEXVLM_SANITIZE", "TEXVLM_EMULATE", "TEXVLM_KERNELS", "TEXVLM_NO_CUDA"):
        monkeypatch.delenv(name, raising=False)


def planned(folder: Path, *targets: str) -> list[str]:
    """The commands of a first build in this folder, which ninja would run."""
    setup: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
    paths = (str(folder / "temp of it"), str(folder / "lib" / "libtexvlm.so"), str(folder / "_C.so"))
    (folder / "build.ninja").write_text(setup["ninja_file"](setup["chosen_config"](), *paths))
    command = [sys.executable, "-m", "ninja", "-n", "-v", "-f", str(folder / "build.ninja"), *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.match(r"\[\d+/\d+\]", line)]


def compiled(commands: list[str]) -> list[str]:
    return sorted(found[1] for line in commands if (found := re.search(r" -c (\S+) -o ", line)))


def test_every_source_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXVLM_NO_CUDA", "1")
    sources = [*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/gl/*.cpp"), ROOT / "csrc" / "precompiled.h"]
    commands = planned(tmp_path)
    assert compiled(commands) == sorted(str(p.relative_to(ROOT)) for p in sources)
    for line in commands:  # what knows no torch is compiled without its headers
        assert ("-include precompiled.h" in line) == bool(re.search(r" -c csrc/\w+\.cpp ", line))


def test_kernels_know_no_torch_and_may_come_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cuda_home() is None:
        return  # then there is nothing to compile them with
    monkeypatch.setenv("TEXVLM_CUDA_ARCHS", "7.5 99")  # built by nobody
    kernels = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/cuda/*.cu"))
    alone = planned(tmp_path, "kernels")
    assert compiled(alone) == kernels
    assert not [line for line in alone if "torch" in line.replace(str(ROOT), "")]
    for name in kernels:
        (tmp_path / f"{Path(name).stem}.o").touch()
    monkeypatch.setenv("TEXVLM_KERNELS", str(tmp_path))
    everything = planned(tmp_path)
    assert not [name for name in compiled(everything) if name.endswith(".cu")]
    assert str(tmp_path / "pyramid.o") in next(line for line in everything if "libtexvlm.so" in line)


def test_as_many_compilers_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = runpy.run_path(str(ROOT / "setup.py"))["jobs"]
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert 1 <= jobs() <= (os.cpu_count() or 1)
    meminfo = "MemTotal: 8000000 kB\nMemFree: 100000 kB\nMemAvailable: {} kB\n"
    all_cores = jobs()
    monkeypatch.setattr(Path, "exists", lambda path: True)
    for available, limit, wanted in ((1_000_000, "max\n", 1), (1 << 30, "max\n", all_cores), (1 << 30, f"{2 << 30}\n", 1)):
        texts = {"meminfo": meminfo.format(available), "memory.max": limit}  # of the machine, and of the container
        monkeypatch.setattr(Path, "read_text", lambda path, texts=texts: texts[path.name])
        assert jobs() == wanted
    monkeypatch.setenv("MAX_JOBS", "7")
    assert jobs() == 7


def test_all_name_the_same_versions_of_torch() -> None:
    low, high = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    for name in ("README.md", "setup.py", "Makefile", "texvlm/cli/doctor.py"):
        text = (ROOT / name).read_text()
        assert set(re.findall(r"2\.(\d+) to 2\.(\d+)", text)) == {(low, str(int(high) - 1))}, name
        assert set(re.findall(r"\(2, (\d+)\) <= .*? < \(2, (\d+)\)", text)) <= {(low, high)}, name


def test_a_wheel_wants_one_minor_version_of_torch(tmp_path: Path) -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    for switch, version, need in (("1", f"0.1.0+torch{minor}", f"torch=={minor}.*"), ("", "0.1.0", "torch<2.15,>=2.11")):
        out = tmp_path / f"wheel-{switch}"
        out.mkdir()
        subprocess.run(
            [sys.executable, "setup.py", "-q", "dist_info", "-o", str(out)],
            cwd=ROOT,
            env={**os.environ, "TEXVLM_WHEEL": switch},
            check=True,
            capture_output=True,
        )
        said = next(out.glob("*/METADATA")).read_text().splitlines()
        assert f"Version: {version}" in said
        assert [line for line in said if line.startswith(("Requires-Dist: torch=", "Requires-Dist: torch<"))] == [
            f"Requires-Dist: {need}"
        ]


def test_a_wheel_for_another_torch_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = tmp_path / "texvlm-0.1.0+torch2.9.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: texvlm\nVersion: 0.1.0\nRequires-Dist: torch==2.9.*\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _load.mismatch() is None  # another texvlm's
    monkeypatch.setattr(_load, "HERE", (tmp_path / "texvlm").resolve())
    assert _load.mismatch() == (
        f"this wheel of it is for torch 2.9, and you run {torch.__version__}",
        f"the wheel for torch {'.'.join(torch.__version__.split('.')[:2])}, or pip install 'torch==2.9.*'",
    )


@pytest.mark.parametrize("beside", [None, "texvlm-0.1.0.dist-info", "texvlm.egg-info", "torch-2.9.0.dist-info"])
def test_what_was_built_here_reads_no_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: str | None) -> None:
    """It would be read at each import."""
    for name in [beside] if beside else []:
        (tmp_path / name).mkdir()
        (tmp_path / name / "METADATA").write_text("Metadata-Version: 2.1\nName: texvlm\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_load, "HERE", (tmp_path / "texvlm").resolve())

    def read(self: object, name: str) -> None:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", read)
    assert _load.mismatch() is None
