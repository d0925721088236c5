"""C++ programs: the public header covers every op, and a CMake + LibTorch program builds with it, trains a texture, and ends well."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import texvlm
from texvlm.cli.toolkit import cuda_home

ROOT = Path(__file__).resolve().parent.parent


def test_the_header_has_every_op() -> None:
    header = (ROOT / "texvlm" / "include" / "texvlm" / "ops.h").read_text()
    schemas = re.findall(r'"(\w+)\(', (ROOT / "csrc" / "ops.cpp").read_text())
    ops = [name for name in schemas if not name.endswith("_backward")]
    assert ops
    assert not [name for name in ops if f'"texvlm::{name}"' not in header]


def cuda_options() -> list[str]:
    """A LibTorch with CUDA wants the toolkit's place told where nvcc on PATH is a wrapper script."""
    home = cuda_home()
    if torch.version.cuda is None or home is None:
        return []
    if not any(home.glob("lib64/libnvrtc.so*")) and not any(home.glob("targets/*/lib/libnvrtc.so*")):
        pytest.skip("the CUDA toolkit has no nvrtc, which a LibTorch with CUDA is linked to")
    return [f"-DCUDA_TOOLKIT_ROOT_DIR={home}", f"-DCUDAToolkit_ROOT={home}", f"-DCMAKE_CUDA_COMPILER={home / 'bin' / 'nvcc'}"]


@pytest.mark.long
def test_a_program_trains_a_texture(tmp_path: Path) -> None:
    options = cuda_options()
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    prefix = ";".join((torch.utils.cmake_prefix_path, texvlm.cmake_prefix_path))
    for command in (
        [
            cmake,
            "-S",
            str(ROOT / "tests" / "cpp"),
            "-B",
            str(tmp_path),
            f"-DCMAKE_PREFIX_PATH={prefix}",
            "-DCMAKE_BUILD_TYPE=Release",
            *options,
        ],
        [cmake, "--build", str(tmp_path)],
        [str(tmp_path / "train")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "FAILED" not in done.stdout
