"""Where the CUDA toolkit is: one search, for `setup.py`, which compiles with it, and for `doctor`, which says whether it would be found.

Standard library only, and nothing of texvlm: `setup.py` runs this file before texvlm is built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path


def cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, else the one that the nvcc on PATH belongs to (which may be a wrapper script), else /usr/local/cuda.

    It is one only with nvcc and the headers: what pip installs for torch has libraries and some headers, but no compiler.
    """
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        if top := re.search(r"_HERE_=(\S+)", _output([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull])):
            candidates.append(str(Path(top[1]).parent))
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    candidates.append("/usr/local/cuda")
    return next((Path(home) for home in candidates if home and _is_toolkit(Path(home))), None)


def cuda_release(home: Path) -> str | None:
    """Its version, such as 13.0."""
    found = re.search(r"release (\d+\.\d+)", _output([str(home / "bin" / "nvcc"), "--version"]))
    return found[1] if found else None


def _is_toolkit(home: Path) -> bool:
    headers = ("include", "targets/x86_64-linux/include")
    return os.access(home / "bin" / "nvcc", os.X_OK) and any((home / d / "cuda_runtime_api.h").exists() for d in headers)


def _output(command: list[str]) -> str:
    """What a command says on both streams; nothing where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr
