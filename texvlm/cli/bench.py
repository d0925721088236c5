"""`bench`: the benchmarks of a checkout, one process each. `python -m benchmarks` is the same."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from texvlm.cli import Complaint


def checkout() -> Path | None:
    """The folder that holds the benchmarks: around the package, or the working directory."""
    roots = (Path(__file__).resolve().parents[2], Path.cwd())
    return next((root for root in roots if (root / "benchmarks" / "_harness.py").exists()), None)


def names() -> list[str]:
    """The benchmarks; none outside of a checkout."""
    root = checkout()
    return [] if root is None else sorted(p.stem for p in (root / "benchmarks").glob("*.py") if not p.stem.startswith("_"))


def told(command: list[str], folder: Path) -> int:
    """Runs a command, passes on what it prints, and returns its exit status. Where nobody takes what it prints, it is ended."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
        except BaseException:
            process.kill()
            raise
    return process.returncode


def run(args: argparse.Namespace) -> int:
    """The command."""
    root, known = checkout(), names()
    if root is None:
        raise Complaint("the benchmarks are part of the source, not of the installed package: run this in a checkout")
    if strangers := [name for name in args.names if name not in known]:
        raise Complaint(f"no such benchmark: {', '.join(strangers)} (there are: {', '.join(known)})")
    options = ["--quick"] * args.quick + ["--strict"] * args.strict
    options += ["--threads", str(args.threads)] if args.threads else []
    if args.json is not None:
        try:
            args.json.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Complaint(f"cannot write into {args.json}: {error.strerror}") from None
    failed = []
    for name in args.names or known:
        figures = [] if args.json is None else ["--json", str((args.json / f"{name}.json").resolve())]
        print(f"== {name}", flush=True)
        if told([sys.executable, "-u", "-m", f"benchmarks.{name}", *options, *figures], root):
            failed.append(name)
        print(flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
