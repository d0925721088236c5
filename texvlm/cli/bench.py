"""`bench`: the benchmarks of a checkout. Arguments go on to them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from texvlm.cli import Complaint

# As `python -m benchmarks`, under the name that was typed, so that its usage line is right.
RUN = "import runpy, sys; sys.argv[0] = 'texvlm bench'; runpy.run_module('benchmarks', run_name='__main__')"


def checkout() -> Path:
    """The folder that holds the benchmarks: around the package, or the working directory."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "benchmarks" / "_harness.py").exists():
            return root
    raise Complaint("the benchmarks are part of the source, not of the installed package: run this in a checkout")


def run(args: argparse.Namespace) -> int:
    """The command."""
    return subprocess.run([sys.executable, "-c", RUN, *args.rest], cwd=checkout(), check=False).returncode
