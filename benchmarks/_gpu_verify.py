"""One command for a machine with an NVIDIA GPU: build for the card, test, check, benchmark, write the figures.

`make gpu-verify`. No network is needed. A part that fails, or runs out of its time, does not stop the others;
benchmarks/results/gpu-CARD.json says how each ended and holds what the benchmarks measured, gpu-CARD.md the same as a table.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PYTEST = ["-m", "pytest", "-q", "--continue-on-collection-errors"]  # a missing package costs the tests that need it, not all
TAIL = 40  # lines of a failed part's output that are kept
# Everything that needs the card first, the slowest last, and all of it within nine minutes.
SECONDS = {"build": 240, "doctor": 30, "gpu tests": 150, "benchmarks": 90, "compute-sanitizer": 60, "all tests": 300}
TOTAL_SECONDS = 9 * 60
SANITIZED = "cuda and equal and (top or mip or sample or patch) and not _gl"  # small: it is 10 to 100 times slower


def cards() -> list[dict[str, Any]]:
    """The CUDA devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [{"name": p.name, "arch": f"{p.major}{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)} for p in found]


def run(name: str, command: list[str], archs: str, seconds: float) -> dict[str, Any]:
    """Runs one part for at most so many seconds, echoing what it prints, and returns how it ended."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    start = time.perf_counter()
    lines = []
    environment = {**os.environ, "TEXVLM_CUDA_ARCHS": archs, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        timer = threading.Timer(max(1.0, seconds), os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        process.wait()
        timer.cancel()
    result = {"name": name, "ok": process.returncode == 0, "seconds": round(time.perf_counter() - start, 1)}
    if process.returncode == -signal.SIGKILL:
        result["cut_off_after"] = round(seconds, 1)
    if lines:
        result["last_line"] = lines[-1]
    if process.returncode:
        result["tail"] = lines[-TAIL:]
    print(f"== {name}: {'ok' if result['ok'] else 'FAILED'} after {result['seconds']} s\n", flush=True)
    return result


def table(report: dict[str, Any]) -> str:
    """The report as a page of Markdown."""
    cards = ", ".join(f"{card['name']} (sm_{card['arch']})" for card in report["cards"])
    lines = [f"# {cards}", "", f"{report['date']}, torch {report['torch']}, CUDA {report['cuda']}, Python {report['python']}", ""]
    lines += ["| part | ended | seconds | last line |", "|---|---|---|---|"]
    for part in report["parts"]:
        lines.append(f"| {part['name']} | {'ok' if part['ok'] else 'FAILED'} | {part['seconds']} | {part.get('last_line', '')} |")
    if measured := report["benchmarks"]:
        lines += ["", "| what | ms | ms, called from Python | target | kept | peers, ms |", "|---|---|---|---|---|---|"]
        for row in measured["rows"]:
            target = f"{row['target_ms']:.3f} ms" if "target_ms" in row else f"{row.get('target_ratio', '')}"
            peers = ", ".join(f"{name} {ms:.4f}" for name, ms in row.get("peers", {}).items())
            kept = {True: "yes", False: "NO", None: ""}[row.get("kept")]
            lines.append(f"| {row['name']} | {row['ms']:.4f} | {row['call_ms']:.4f} | {target} | {kept} | {peers} |")
        lines += ["", "| question | answer |", "|---|---|"]
        lines += [f"| {question} | {answer} |" for question, answer in measured["answers"].items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """All parts; the exit status is 0 only if every one ended well."""
    try:
        found = cards()
    except ImportError as error:
        print(f"gpu-verify: torch does not load ({error})")
        return 1
    if not found:
        print("gpu-verify: no NVIDIA GPU that torch can use, nothing verified (see: python -m texvlm doctor)")
        return 1
    import torch

    archs = ";".join(sorted({card["arch"] for card in found}, key=int))
    python, start = sys.executable, time.perf_counter()
    card = re.sub(r"[^a-z0-9]+", "-", found[0]["name"].lower()).strip("-")
    measured = RESULTS / f"gpu-{card}-benchmarks.json"
    RESULTS.mkdir(exist_ok=True)
    measured.unlink(missing_ok=True)
    commands = {
        "build": [python, "setup.py", "build_ext", "--inplace", "--force"],
        "doctor": [python, "-m", "texvlm", "doctor"],
        "gpu tests": [python, *PYTEST, "-k", "cuda or gpu or hardware or gl"],
        "benchmarks": [python, "-m", "benchmarks._gpu", "--json", str(measured)],
    }
    if checker := shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer"):
        commands["compute-sanitizer"] = [checker, "--error-exitcode", "1", python, *PYTEST, "-x", "-k", SANITIZED]
    commands["all tests"] = [python, *PYTEST]
    parts = []
    for name, command in commands.items():
        left = TOTAL_SECONDS - (time.perf_counter() - start)
        if left < 5:
            parts.append({"name": name, "ok": False, "seconds": 0.0, "last_line": "not run: no time was left"})
        else:
            parts.append(run(name, command, archs, min(left, SECONDS[name])))
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cards": found,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "parts": parts,
        "benchmarks": json.loads(measured.read_text()) if measured.exists() else None,
    }
    measured.unlink(missing_ok=True)
    target = RESULTS / f"gpu-{card}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    target.with_suffix(".md").write_text(table(report))
    failed = [part["name"] for part in parts if not part["ok"]]
    print(f"gpu-verify: {'failed: ' + ', '.join(failed) if failed else 'all parts ok'}; written to {target.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
