"""One command for a machine with an NVIDIA GPU: build for the card, ask it, test, check, benchmark, write the figures.

`make gpu-verify`, or `python benchmarks/_gpu_verify.py`, in any environment with torch and a compiler; no network is needed. A part that
fails, or runs out of its time, does not stop the others. benchmarks/results/gpu-CARD.json says after every part how each ended and holds
what was measured until then, gpu-CARD.md the same as a table. `--dry-run` walks the same parts where there is no card: it compiles nothing,
collects the tests instead of running them, measures tiny pictures on the CPU, and writes into a folder of its own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TAIL = 40  # lines of a failed part's output that are kept
TOTAL_SECONDS = 9 * 60
SANITIZED = "equal and (top or mip or sample or patch) and not _gl"  # small: it is 10 to 100 times slower
ON_CARD = re.compile(
    r"\b(device|cuda): torch\.device|mark\.gpu"
)  # in files that may hold tests for a card: to collect all takes minutes
ROUNDING = "TEXVLM_TEXTURE_ROUNDING"  # how texvlm.reference.hardware rounds: "8 nearest"
DRY = {"name": "dry run", "arch": "00", "memory_gib": 0.0}


@dataclass
class Part:
    """A command, for at most so many seconds."""

    name: str
    seconds: float
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None  # a module; without it the part is incomplete


def cards() -> list[dict[str, Any]]:
    """The CUDA devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [{"name": p.name, "arch": f"{p.major}{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)} for p in found]


def parts(asked: Path, measured: Path, dry: bool) -> list[Part]:
    """All of them, what needs the card first and the slowest last. The first two files are what `benchmarks._gpu` writes."""
    python = sys.executable
    small = ["--smoke", "--device", "cpu"] if dry else []
    # A missing package costs the tests that need it, not all; --card leaves only those that run on one.
    pytest = [python, "-m", "pytest", "-q", "--continue-on-collection-errors", "--card", *(["--collect-only"] if dry else [])]
    pytest += [
        str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_*.py")) if ON_CARD.search(path.read_text())
    ]
    workers = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") and not dry else []
    checker = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    build = ["--version"] if dry else ["build_ext", "--inplace", "--force"]
    seconds = (lambda _: 3600.0) if dry else float  # the card's time is short, the host's is not
    found = [
        Part("build", seconds(240), [python, "setup.py", *build]),
        Part("doctor", seconds(30), [python, "-m", "texvlm", "doctor"]),
        Part(
            "texture rounding", seconds(30), [python, "-m", "benchmarks._gpu", "--only", "rounding", "--json", str(asked), *small]
        ),
        Part("gpu tests", seconds(180), [*pytest, *workers], needs="pytest"),
        Part("benchmarks", seconds(150), [python, "-m", "benchmarks._gpu", "--json", str(measured), *small]),
    ]
    if checker or dry:
        under = [] if dry else [str(checker), "--error-exitcode", "1"]
        # Torch hands out parts of what it holds: only without its cache an access out of bounds is one to the checker.
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        found.append(Part("compute-sanitizer", seconds(60), [*under, *pytest, "-x", "-k", SANITIZED], alone, "pytest"))
    return found


def run(part: Part, seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a part, echoing what it prints, and returns how it ended: ok, failed, or incomplete where it was cut off."""
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return {"name": part.name, "ended": "incomplete", "seconds": 0.0, "last_line": f"{part.needs} is not installed"}
    if seconds <= 0:
        return {"name": part.name, "ended": "incomplete", "seconds": 0.0, "last_line": "not run: no time was left"}
    print(f"== {part.name}: {' '.join(part.command)}", flush=True)
    start, cut, lines = time.perf_counter(), threading.Event(), []
    with subprocess.Popen(
        part.command,
        cwd=ROOT,
        env={**os.environ, **environment, **part.environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:

        def stop() -> None:
            cut.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        process.wait()
        timer.cancel()
    ended = "incomplete" if cut.is_set() else "failed" if process.returncode else "ok"
    result = {"name": part.name, "ended": ended, "seconds": round(time.perf_counter() - start, 1)}
    if lines:
        result["last_line"] = lines[-1]
    if ended != "ok":
        result["tail"] = lines[-TAIL:]
    print(f"== {part.name}: {ended} after {result['seconds']} s\n", flush=True)
    return result


def read(path: Path) -> dict[str, Any]:
    """What `benchmarks._gpu` has written until now."""
    return json.loads(path.read_text()) if path.exists() else {"rows": [], "answers": {}}


def rounding(asked: Path) -> dict[str, str]:
    """The environment by which the emulation of texture hardware rounds as this card does, where that is known."""
    answers = read(asked)["answers"]
    bits, direction = answers.get("fractional bits of a weight"), answers.get("rounding of a weight")
    known = isinstance(bits, float) and bits.is_integer() and direction in ("nearest", "down")
    return {ROUNDING: f"{bits:.0f} {direction}"} if known else {}


def table(report: dict[str, Any]) -> str:
    """The report as a page of Markdown."""
    cards = ", ".join(f"{card['name']} (sm_{card['arch']})" for card in report["cards"])
    lines = [f"# {cards}", "", f"{report['date']}, torch {report['torch']}, CUDA {report['cuda']}, Python {report['python']}", ""]
    lines += ["| part | ended | seconds | last line |", "|---|---|---|---|"]
    for part in report["parts"]:
        lines.append(f"| {part['name']} | {part['ended']} | {part['seconds']} | {part.get('last_line', '')} |")
    measured = report["benchmarks"]
    lines += ["", "| what | ms | ms, called from Python | target | kept | peers, ms |", "|---|---|---|---|---|---|"]
    for row in measured["rows"]:
        target = f"{row['target_ms']:.3f} ms" if "target_ms" in row else f"{row.get('target_ratio', '')}"
        peers = ", ".join(f"{name} {ms:.4f}" for name, ms in row.get("peers", {}).items())
        kept = {True: "yes", False: "NO", None: ""}[row.get("kept")]
        lines.append(f"| {row['name']} | {row['ms']:.4f} | {row['call_ms']:.4f} | {target} | {kept} | {peers} |")
    lines += ["", "| question | answer |", "|---|---|"]
    lines += [f"| {question} | {answer} |" for question, answer in measured["answers"].items()]
    return "\n".join(lines) + "\n"


def walk(found: list[dict[str, Any]], folder: Path, dry: bool, make: Callable[..., list[Part]] = parts) -> list[dict[str, Any]]:
    """Runs all parts, and writes the report after each of them."""
    import torch

    start = time.perf_counter()
    card = re.sub(r"[^a-z0-9]+", "-", found[0]["name"].lower()).strip("-")
    target = folder / f"gpu-{card}.json"
    asked, measured = (folder / f"gpu-{card}-{name}.json" for name in ("rounding", "benchmarks"))
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cards": found,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "parts": [],
    }
    environment = {} if dry else {"TEXVLM_CUDA_ARCHS": ";".join(sorted({card["arch"] for card in found}, key=int))}
    for file in (asked, measured):
        file.unlink(missing_ok=True)
    for part in make(asked, measured, dry):
        left = math.inf if dry else TOTAL_SECONDS - (time.perf_counter() - start)
        report["parts"].append(run(part, min(left, part.seconds), environment | rounding(asked)))
        known, before = read(measured), read(asked)
        report["benchmarks"] = {**known, "answers": before["answers"] | known["answers"]}
        target.write_text(json.dumps(report, indent=1) + "\n")
        target.with_suffix(".md").write_text(table(report))
    for file in (asked, measured):
        file.unlink(missing_ok=True)
    print(f"gpu-verify: written to {target}")
    return report["parts"]


def main() -> int:
    """All parts. The exit status is 0 if every one ended well, 1 if one failed, 2 if one is incomplete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="walk the parts on a machine without a card")
    dry = parser.parse_args().dry_run
    try:
        found = [DRY] if dry else cards()
    except ImportError as error:
        print(f"gpu-verify: torch does not load ({error})")
        return 1
    if not found:
        print(
            "gpu-verify: no NVIDIA GPU that torch can use, nothing verified (see: python -m texvlm doctor; --dry-run goes without)"
        )
        return 1
    ended = walk(found, Path(tempfile.mkdtemp(prefix="gpu-verify-")) if dry else RESULTS, dry)
    named = {how: [part["name"] for part in ended if part["ended"] == how] for how in ("failed", "incomplete")}
    said = [f"{how}: {', '.join(names)}" for how, names in named.items() if names]
    print(f"gpu-verify: {'; '.join(said) or 'all parts ok'}")
    return 1 if named["failed"] else 2 if named["incomplete"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
