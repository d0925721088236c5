"""One command for a machine with an NVIDIA GPU: build for the card, test, benchmark, write the figures.

`make gpu-verify`. A part that fails does not stop the others; benchmarks/results/gpu-CARD.json says how each
ended, and the folder beside it holds what the benchmarks measured.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TAIL = 40  # lines of a failed part's output that are kept


def cards() -> list[dict[str, Any]]:
    """The CUDA devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [{"name": p.name, "arch": f"{p.major}{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)} for p in found]


def run(name: str, command: list[str], archs: str) -> dict[str, Any]:
    """Runs one part, echoing what it prints, and returns how it ended."""
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
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    result = {"name": name, "ok": process.returncode == 0, "seconds": round(time.perf_counter() - start, 1)}
    if lines:
        result["last_line"] = lines[-1]
    if process.returncode:
        result["tail"] = lines[-TAIL:]
    print(f"== {name}: {'ok' if result['ok'] else 'FAILED'} after {result['seconds']} s\n", flush=True)
    return result


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
    python, venv = sys.executable, os.environ.get("VENV", ".venv")
    card = re.sub(r"[^a-z0-9]+", "-", found[0]["name"].lower()).strip("-")
    parts = [
        run(name, command, archs)
        for name, command in {
            "extras": ["make", f"VENV={venv}", f"{venv}/.extra-test", f"{venv}/.extra-bench"],
            "build": [python, "setup.py", "build_ext", "--inplace", "--force"],
            "doctor": [python, "-m", "texvlm", "doctor"],
            "tests": [python, "-m", "pytest", "-q"],
            "benchmarks": [python, "-m", "benchmarks", "--json", str(RESULTS / f"gpu-{card}")],
        }.items()
    ]
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cards": found,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "parts": parts,
    }
    target = RESULTS / f"gpu-{card}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    failed = [part["name"] for part in parts if not part["ok"]]
    print(f"gpu-verify: {'failed: ' + ', '.join(failed) if failed else 'all parts ok'}; written to {target.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
