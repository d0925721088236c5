"""`make gpu-verify` must not fail for a slip on the first card it meets: all of it runs here, small, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import _gpu, _gpu_verify

ROOT = Path(__file__).resolve().parent.parent


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=900
    )


def test_the_gpu_benchmark_runs_small(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    done = script("-m", "benchmarks._gpu", "--smoke", "--device", "cpu", "--json", str(target))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    measured = json.loads(target.read_text())
    assert len(measured["rows"]) > 15 and measured["answers"]["fractional bits of a weight"] == 8.0
    assert measured["answers"]["rounding of a weight"] == measured["answers"]["rounding of the LOD"] == "nearest"
    assert next(iter(measured["answers"])) == "fractional bits of a weight"  # before all else
    assert not [answer for answer in measured["answers"].values() if str(answer).startswith("not answered")]
    assert [row for row in measured["rows"] if "zero_fill_ms" in row]


def test_figures_are_written_row_by_row(tmp_path: Path) -> None:
    card = _gpu.Card(torch.device("cpu"), True, tmp_path / "gpu.json")
    assert card.file is not None
    card.row("first", lambda: None)
    assert [row["name"] for row in json.loads(card.file.read_text())["rows"]] == ["first"]
    card.ask("why", lambda: "because")
    assert json.loads(card.file.read_text())["answers"] == {"why": "because"}
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_without_a_card_it_says_so() -> None:
    if _gpu_verify.cards():
        return
    done = script("benchmarks/_gpu_verify.py")
    assert done.returncode == 1 and "no NVIDIA GPU that torch can use, nothing verified" in done.stdout


@pytest.mark.long
def test_a_dry_run_walks_every_part() -> None:
    done = script("benchmarks/_gpu_verify.py", "--dry-run")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    target = Path(done.stdout.split("written to ")[-1].split()[0])
    report = json.loads(target.read_text())
    names = ["build", "doctor", "texture rounding", "gpu tests", "benchmarks", "compute-sanitizer"]
    assert [(part["name"], part["ended"]) for part in report["parts"]] == [(name, "ok") for name in names]
    assert len(report["benchmarks"]["rows"]) > 15
    assert "| fractional bits of a weight | 8.0 |" in target.with_suffix(".md").read_text()
    assert sorted(path.suffix for path in target.parent.iterdir()) == [".json", ".md"]


def test_what_is_cut_off_is_incomplete_and_loses_nothing(tmp_path: Path) -> None:
    """The report is there after every part, with the rows that a part had measured when it was stopped."""
    rows = {"rows": [{"name": "a row", "ms": 1.0, "call_ms": 2.0}], "answers": {}}

    def parts(asked: Path, measured: Path, dry: bool) -> list[_gpu_verify.Part]:
        slow = (
            f"import time; open({str(measured)!r}, 'w').write({json.dumps(rows)!r}); print('begun', flush=True); time.sleep(60)"
        )
        look = f"import json; print(json.load(open({str(tmp_path / 'gpu-dry-run.json')!r}))['benchmarks']['rows'][0]['name'])"
        return [
            _gpu_verify.Part("slow", 2, [sys.executable, "-c", slow]),
            _gpu_verify.Part("look", 20, [sys.executable, "-c", look]),
            _gpu_verify.Part("bad", 20, [sys.executable, "-c", "raise SystemExit(3)"]),
            _gpu_verify.Part("bare", 20, [sys.executable, "-c", ""], needs="no_such_module"),
        ]

    ended = _gpu_verify.walk([_gpu_verify.DRY], tmp_path, True, parts)
    assert [part["ended"] for part in ended] == ["incomplete", "ok", "failed", "incomplete"]
    assert ended[0]["tail"] == ["begun"] and ended[1]["last_line"] == "a row"


@pytest.mark.parametrize(("bits", "direction", "said"), [(8.0, "down", "8 down"), (7.98, "down", None), (8.0, "neither", None)])
def test_the_emulation_takes_the_card_s_answer(tmp_path: Path, bits: float, direction: str, said: str | None) -> None:
    asked = tmp_path / "asked.json"
    answers = {"fractional bits of a weight": bits, "rounding of a weight": direction}
    asked.write_text(json.dumps({"rows": [], "answers": answers}))
    assert _gpu_verify.rounding(asked) == ({} if said is None else {"TEXVLM_TEXTURE_ROUNDING": said})
    assert _gpu_verify.rounding(tmp_path / "nothing.json") == {}


def test_the_reference_rounds_as_it_is_told() -> None:
    code = (
        "import torch; from texvlm.reference.hardware import fixed_point; print(fixed_point(torch.tensor(0.99 / 64)).item() * 64)"
    )
    assert [float(script("-c", code, TEXVLM_TEXTURE_ROUNDING=how).stdout) for how in ("6 down", "6 nearest")] == [0.0, 1.0]


def test_the_sanitizer_sees_each_tensor_by_itself(tmp_path: Path) -> None:
    part = next(p for p in _gpu_verify.parts(tmp_path, tmp_path, True) if p.name == "compute-sanitizer")
    assert part.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_only_what_touches_the_card_is_run_there() -> None:
    done = script("-m", "pytest", "-q", "--collect-only", "--card", "tests/test_hardware.py", "tests/test_setup.py")
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(found) > 20 and all("[cuda" in line or "-cuda" in line for line in found), found


def test_it_needs_no_environment_of_its_own() -> None:
    done = subprocess.run(
        ["make", "-n", "gpu-verify", "VENV=/nowhere", "PYTHON=python3", "ARGS=--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "python3 benchmarks/_gpu_verify.py --dry-run"
