"""What holds of `texvlm.qwen` with the newest transformers holds with the oldest that it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from texvlm.qwen.families import OLDEST

ROOT = Path(__file__).resolve().parent.parent
THERE = Path(sys.prefix) / "transformers-oldest"
"""Where `make test` puts it."""
FILES = ["", "_modes", "_chat", "_gradients", "_pictures", "_running", "_videos"]
LEFT_OUT = ["compiled", "threads", "workers", "misuse", "one_line", "checkpoint", "allocator", "selectors", "moe"]
"""What transformers has no part in, and what takes long."""


@pytest.mark.long
def test_the_oldest_transformers() -> None:
    """The tests of the invariants, in a process of their own."""
    if not (THERE / "transformers").is_dir():
        pytest.skip("the oldest transformers is not installed")
    run = "import sys, pytest, transformers; print('transformers', transformers.__version__); sys.exit(pytest.main(sys.argv[1:]))"
    files = [f"tests/test_qwen{name}.py" for name in FILES]
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", " and ".join(f"not {word}" for word in LEFT_OUT)]
    path = os.pathsep.join(filter(None, [str(THERE), os.environ.get("PYTHONPATH")]))
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", run, *options, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"transformers {OLDEST}." in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 150, done.stdout[-500:]
