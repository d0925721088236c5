"""`make gpu-verify` must not fail for a slip on the first card it meets: its benchmark runs here, small, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_gpu_benchmark_runs_small(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks._gpu", "--smoke", "--device", "cpu", "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    measured = json.loads(target.read_text())
    assert len(measured["rows"]) > 15 and measured["answers"]["fractional bits of a weight"] == 8.0
    assert not [answer for answer in measured["answers"].values() if str(answer).startswith("not answered")]


def test_without_a_card_it_says_so() -> None:
    from benchmarks import _gpu_verify

    if _gpu_verify.cards():
        return
    done = subprocess.run([sys.executable, "benchmarks/_gpu_verify.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no NVIDIA GPU that torch can use, nothing verified" in done.stdout
