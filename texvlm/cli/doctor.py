"""`doctor`: what works on this machine, what is missing, and how to get it, in plain lines.

Imports nothing heavy at the top and nothing of texvlm that needs the extension, so that it can still speak when that does not load.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import texvlm
from texvlm._load import INSTALL, explain, extension, first_line
from texvlm.cli.toolkit import cuda_home, cuda_release

COMPANIONS = {  # distribution: what it is for
    "numpy": "pictures as arrays",
    "pillow": "reading pictures",
    "matplotlib": "drawing",
    "rich": "tables in the terminal",
    "av": "reading and writing films",
    "simplejpeg": "decoding JPEGs twice as fast, in texvlm.data",
    "pyarrow": "writing an index of many pictures",
    "scikit-image": "the demo's photograph, a peer in the benchmarks",
    "pytest": "the tests",
    "hypothesis": "the tests",
    "opencv-contrib-python-headless": "a peer in the benchmarks",
    "kornia": "a peer in the benchmarks",
}


class Report:
    """Lines of what is there, and a list of what is missing."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def line(self, name: str, text: str, advice: str | None = None) -> None:
        """One fact; with `advice`, one about something missing."""
        print(f"  {'-' if advice else '+'} {name:<10} {text}")
        if advice:
            self.missing.append(f"{name}: {advice}")


def run(args: object = None) -> int:
    """The command. Returns 0 unless the extension does not load."""
    report = Report()
    print(f"texvlm {texvlm.__version__} in {texvlm.__path__[0]}")
    report.line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    torch = _torch(report)
    info = _extension(report, torch)
    _compilers(report)
    _cuda(report, torch, info)
    _gl(report, torch, info)
    _companions(report)
    if report.missing:
        print("\nmissing:")
        for line in report.missing:
            print(f"  {line}")
    else:
        print("\nnothing is missing")
    return 0 if info is not None else 1


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(report: Report) -> Any:
    try:
        import torch
    except Exception as error:  # a broken torch fails in many ways, and a doctor listens to all of them
        report.line("torch", f"does not load ({first_line(error)})", "pip install torch==2.13.0")
        return None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    wrong = not (2, 11) <= tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 15)
    advice = "texvlm supports torch 2.11 to 2.14: pip install torch==2.13.0" if wrong else None
    report.line("torch", f"{torch.__version__} ({built}), {torch.get_num_threads()} threads", advice)
    return torch


def _extension(report: Report, torch: Any) -> dict[str, Any] | None:
    try:
        info = dict(extension().build_info())
    except Exception as error:
        why, what_helps = explain(error)
        report.line("extension", f"does not load: {why}", what_helps)
        return None
    ours, theirs = info["torch"], torch.__version__ if torch else "none"
    changed = ours.split("+")[0] != theirs.split("+")[0]
    advice = f"built for torch {ours}, running {theirs}: {INSTALL}" if changed else None
    report.line("extension", f"loads; built by g++ {info['compiler'].split()[0]} for torch {ours}", advice)
    report.line("processor", f"{info['cpu']}, {os.cpu_count()} cores")
    return info


def _compilers(report: Report) -> None:
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler):
        report.line("compiler", _first_output([compiler, "--version"]))
    else:
        report.line(
            "compiler",
            "none found",
            "to build texvlm, install a C++ compiler (Debian, Ubuntu: apt install g++)",
        )
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        report.line(
            "headers",
            "Python.h not found",
            "to build texvlm, install Python's headers (Debian, Ubuntu: apt install python3-dev)",
        )
    if home := cuda_home():
        report.line("nvcc", f"{cuda_release(home) or 'found, says no version'}, in {home}")
    else:
        report.line("nvcc", "none found", "to compile the CUDA kernels, install the CUDA toolkit; the CPU needs none")


def _cards(archs: str) -> str:
    """`build_info()["cuda_archs"]` as one reads it: "75+80" is "sm_75 sm_80"."""
    return " ".join(f"sm_{arch}" for arch in archs.split("+"))


def _cuda(report: Report, torch: Any, info: dict[str, Any] | None) -> None:
    if info is not None and info["cuda"]:
        report.line("kernels", f"CUDA kernels compiled in for {_cards(info['cuda_archs'])} (CUDA {info['cuda_version']})")
    elif info is not None:
        report.line("kernels", "no CUDA kernels compiled in", f"with nvcc installed, build again: {INSTALL}")
    if torch is None:
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            report.line(f"gpu {index}", f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    elif torch.version.cuda is None:
        has_card = os.path.exists("/dev/nvidia0") or os.path.exists("/dev/dxg")
        advice = "an NVIDIA card is there, but torch is CPU-only: install one with CUDA and build texvlm anew"
        report.line("gpu", "not usable by a CPU-only torch" if has_card else "none", advice if has_card else None)
    else:
        report.line("gpu", "none that torch can use (everything runs on the CPU)")


def _gl(report: Report, torch: Any, info: dict[str, Any] | None) -> None:
    """The OpenGL contexts that `backend="gl"` would use: for host memory, and for each CUDA device."""
    if info is None:
        return
    contexts = extension()
    for index in (-1, *(range(torch.cuda.device_count()) if torch is not None else ())):
        name = "gl" if index < 0 else f"gl cuda:{index}"
        try:
            found = contexts.gl_status(index)
        except RuntimeError as error:
            why, _, packages = first_line(error).removeprefix("texvlm: ").partition(" (Debian, Ubuntu: ")
            advice = packages.rstrip(")") or "NVIDIA's EGL driver, which comes with the display driver"
            report.line(name, why, f"for mipmaps by the graphics driver (optional): {advice}")
            continue
        odd = "as texvlm's" if found["odd_from_ours"] < 1e-5 else "of the driver's own, so without gradients"
        report.line(name, f"{found['renderer']}, OpenGL {found['version']}; odd sizes {odd}")
    contexts.gl_close()


def _companions(report: Report) -> None:
    versions = {name: _version(name) for name in COMPANIONS}
    report.line("optional", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "none")
    for purpose in dict.fromkeys(COMPANIONS.values()):
        absent = [name for name, version in versions.items() if not version and COMPANIONS[name] == purpose]
        if absent:
            report.missing.append(f"optional, for {purpose}: pip install {' '.join(absent)}")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} does not run: {first_line(error)}"


def _first_output(command: list[str]) -> str:
    return (_output(command).splitlines() or ["found, says nothing"])[0]
