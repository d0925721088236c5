"""`bench`: the benchmarks of a checkout, one process each, all of them even if one fails."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

from texvlm.cli import Complaint


def folder() -> Path:
    """The checkout's benchmarks, beside the package or below the working directory."""
    import texvlm

    for root in (Path(texvlm.__file__).resolve().parent.parent, Path.cwd()):
        if (root / "benchmarks").is_dir() and (root / "csrc" / "ops.cpp").exists():
            return root / "benchmarks"
    raise Complaint("the benchmarks are part of the source, not of the installed package: run this in a checkout of texvlm")


def question(path: Path) -> str:
    """The first line of a benchmark's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def run(args: argparse.Namespace) -> int:
    """The command."""
    home = folder()
    known = {path.stem: path for path in sorted(home.glob("*.py")) if not path.stem.startswith("_")}
    names = args.names or list(known)
    if strangers := [name for name in names if name not in known]:
        raise Complaint(f"no such benchmark: {', '.join(strangers)} (there are: {', '.join(known) or 'none'})")
    if not names:
        raise Complaint(f"no benchmarks in {home}")
    if args.list:
        for name in names:
            print(f"{name:12} {question(known[name])}")
        return 0

    failed = []
    for name in names:
        print(f"== {name}: {question(known[name])}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=home.parent, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
