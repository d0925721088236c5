"""CUDA kernels on the host: the shim against known answers, and the proof that it fails where a kernel is wrong.

The programs under tests/shim know nothing of torch: drivers, which compare the results of kernels with plain loops, and kernels with
planted faults. Each exists in three builds, as no single one sees everything (see tests/shim/Makefile).
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "build" / "shim"
DRIVERS = sorted(p.stem for p in (ROOT / "tests" / "shim" / "drivers").glob("*.cu"))
BUILDS = ("plain", "asan", "tsan")
FIXED, RANDOM, STARVE = 0, 1, 2

# What each build says to a fault. "wrong": the result, and no more than that; what is missing is not seen there.
WRONG = r"^wrong$"
RACE = r"data race.*\n(.*\n)*?.*faults.cu:\d+"
EVERYWHERE = ("plain", "asan", "tsan")
CAUGHT = {
    "static shared memory": {"plain": WRONG, "asan": "heap-buffer-overflow"},
    "dynamic shared memory": {"plain": WRONG, "asan": "heap-buffer-overflow"},
    "global memory": {"asan": "heap-buffer-overflow"},
    "alignment": {"asan": "misaligned address"},
    "read after write": {"plain": WRONG, "tsan": RACE},
    "write after read": {"plain": WRONG, "tsan": RACE},
    "syncwarp": {"plain": WRONG, "tsan": RACE},
    "atomic": {"tsan": RACE},
    "fence": {"tsan": RACE},
    "divergent barrier": dict.fromkeys(EVERYWHERE, r"faults.cu:\d+: divergent barrier: others wait at .*faults.cu:\d+"),
    "mask": dict.fromkeys(EVERYWHERE, r"faults.cu:\d+: bad mask: lane \d+ is not in the mask"),
    "ended lane": dict.fromkeys(EVERYWHERE, r"lane 5 .* ended|names lanes that have ended"),
    "deadlock": dict.fromkeys(EVERYWHERE, r"no thread can go on(.*\n)*.*waits at __sync"),
    "surface": dict.fromkeys(EVERYWHERE, r"faults.cu:\d+: surface out of bounds"),
}


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    if "gcc" not in subprocess.run(["c++", "-v"], capture_output=True, text=True, check=False).stderr:
        pytest.skip("the sanitizers are set up for gcc, and c++ is another compiler")
    make = ["make", "-s", "-C", str(ROOT / "tests" / "shim"), f"-j{os.cpu_count() or 1}"]
    plain = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    with (PROGRAMS / ".lock").open("w") as lock:  # the first worker makes them, the others find them made
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(make, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr[-4000:]


def run(build: str, program: str, *arguments: str, seed: int = FIXED, blocks: int = 1) -> tuple[int, str]:
    env = {**os.environ, "TEXVLM_SHIM_SEED": str(seed), "TEXVLM_SHIM_BLOCKS": str(blocks)}
    env["TSAN_OPTIONS"] = "atexit_sleep_ms=0"  # the second that it gives other threads to end: here are none
    done = subprocess.run(
        [str(PROGRAMS / build / program), *arguments], capture_output=True, text=True, check=False, env=env, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def schedules(build: str) -> list[tuple[int, int]]:
    """Seed and resident blocks. Races show in any order of execution, so one is enough; wrong results only in some."""
    return [(RANDOM, 4)] if build != "plain" else [(seed, blocks) for seed in range(6) for blocks in (1, 4)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "build"), [(d, b) for d in DRIVERS for b in BUILDS if b != "asan" or d in ("warps", "textures")]
)
def test_driver(driver: str, build: str) -> None:
    for seed, blocks in schedules(build):
        assert run(build, driver, seed=seed, blocks=blocks) == (0, "right\n"), (seed, blocks)


@pytest.mark.parametrize("fault", CAUGHT)
def test_sound_kernels_pass(fault: str) -> None:
    for build in BUILDS:
        for seed, blocks in ((FIXED, 1), (RANDOM, 4), (STARVE, 1)):
            assert run(build, "faults", "sound", fault, seed=seed, blocks=blocks) == (0, "right\n"), (build, seed, blocks)


@pytest.mark.parametrize(("fault", "build"), [(fault, build) for fault, builds in CAUGHT.items() for build in builds])
def test_fault_is_caught(fault: str, build: str) -> None:
    for seed, blocks in ((FIXED, 1), (RANDOM, 1), (FIXED, 4)):
        status, said = run(build, "faults", "faulty", fault, seed=seed, blocks=blocks)
        assert status != 0, (seed, blocks)
        assert re.search(CAUGHT[fault][build], said, re.MULTILINE), said[:2000]
