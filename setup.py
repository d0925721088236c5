"""Builds texvlm/lib/libtexvlm.so, all ops for Python and C++ programs alike, and texvlm._C, which loads it and binds what is not an op.

CUDA sources are compiled wherever the CUDA toolkit is found (texvlm/cli/toolkit.py says where it is looked for).

Switches: TEXVLM_NO_CUDA=1 leaves CUDA out; TEXVLM_CUDA_ARCHS="80;90;120" chooses the compute capabilities;
TEXVLM_SANITIZE=1 builds with AddressSanitizer and UBSan; TEXVLM_EMULATE=1 compiles the CUDA kernels for the host, for tests (see
tests/shim); MAX_JOBS limits the compiler processes.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import setuptools
from setuptools import find_packages, setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    sys.exit(
        "texvlm is built against the PyTorch that you use, and found none. Install torch (2.11 to 2.13) first, then:\n"
        "    pip install --no-build-isolation ."
    )

ROOT = Path(__file__).resolve().parent


# The file is run, not imported: importing it would import texvlm, which is not built yet. `doctor` makes the same search.
_toolkit = runpy.run_path(str(ROOT / "texvlm" / "cli" / "toolkit.py"))
cuda_home, cuda_release = _toolkit["cuda_home"], _toolkit["cuda_release"]


def cuda_archs() -> list[str]:
    """Compute capabilities to compile for, the last one also as PTX.

    The card that is present; without one, all that a CUDA build of torch may meet; beside a CPU-only torch, where the kernels are
    compiled and linked to prove that they build, one.
    """
    if chosen := os.environ.get("TEXVLM_CUDA_ARCHS"):
        return [a.replace(".", "") for a in re.split(r"[;, ]+", chosen) if a]
    if torch.version.cuda is None:
        return ["90"]
    if torch.cuda.is_available():
        capabilities = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        return sorted({f"{major}{minor}" for major, minor in capabilities}, key=int)
    return ["75", "80", "86", "89", "90", "100", "120"]


LIBRARY = "texvlm.lib.libtexvlm"  # in a folder that is no package: it is nothing to import
BINDING = "csrc/bind.cpp"


def emulated_kernels() -> list[str]:
    """The CUDA sources as C++: each in a file of its own that first includes the shim, which lets g++ compile them."""
    folder = ROOT / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "csrc" / "cuda").glob("*.cu"):
        name = path.relative_to(ROOT)
        wrapper, text = (
            folder / f"{path.stem}.cpp",
            f'#define TEXVLM_SHIM_SOURCE "{name}"\n#include <cuda_runtime.h>\n#include "../../{name}"\n',
        )
        if not wrapper.exists() or wrapper.read_text() != text:
            wrapper.write_text(text)
    return sorted(str(p.relative_to(ROOT)) for p in [*folder.glob("*.cpp"), *(ROOT / "tests" / "shim").glob("*.cpp")])


@dataclass
class Config:
    """What the library and the module are compiled and linked with."""

    sources: list[str]
    headers: list[str]
    cxx: list[str]
    link: list[str]
    nvcc: list[str] = field(default_factory=list)
    define: list[tuple[str, str | None]] = field(default_factory=list)
    places: dict[str, list[str]] = field(default_factory=dict)  # include_dirs, library_dirs, libraries
    make: Callable[..., setuptools.Extension] = cpp_extension.CppExtension

    def extension(self, name: str, sources: list[str], link: list[str]) -> setuptools.Extension:
        """One of the two, from its sources and what only it is linked with."""
        return self.make(
            name,
            sources,
            define_macros=self.define,
            extra_compile_args={"cxx": self.cxx, **({"nvcc": self.nvcc} if self.nvcc else {})},
            extra_link_args=[*self.link, *link],
            depends=self.headers,
            **{key: list(value) for key, value in self.places.items()},  # torch appends to what it is given
        )


def files(*patterns: str) -> list[str]:
    """Files of the checkout, relative to it, in an order that does not depend on the file system."""
    return [name for pattern in patterns for name in sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(pattern))]


def host_config() -> Config:
    """The host code alone.

    No contraction into fused multiply-adds: integers that arithmetic decides (bins, ranks, labels) then agree on all machines.
    -fopenmp at compile time only: the OpenMP symbols then resolve to the runtime that torch itself has loaded, so there is one pool
    of threads.
    """
    return Config(
        sources=[name for name in files("csrc/*.cpp", "csrc/gl/*.cpp") if name != BINDING],
        headers=files("csrc/**/*.h*", "csrc/**/*.cuh"),
        cxx=[
            "-O3",
            "-fopenmp",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
            "-g0",
            "-Wall",
            "-Wno-unknown-pragmas",
            "-Wno-psabi",
        ],
        link=["-ldl", "-pthread"],  # csrc/gl opens libEGL at run time, in threads of its own
    )


def add_sanitizers(config: Config) -> None:
    sanitize = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
    config.cxx = [*[flag for flag in config.cxx if flag not in ("-O3", "-g0")], "-O1", "-g1", *sanitize]
    config.link += sanitize
    config.define.append(("TEXVLM_NO_ISA_DISPATCH", None))


def add_kernels(config: Config, archs: list[str], release: str) -> None:
    """What the host code must know of the kernels beside it."""
    config.define += [("TEXVLM_WITH_CUDA", None), ("TEXVLM_CUDA_ARCHS", "+".join(archs)), ("TEXVLM_CUDA_VERSION", release)]


def add_emulated(config: Config) -> None:
    """The kernels as C++, for tests."""
    config.sources += emulated_kernels()
    config.headers += files("tests/shim/*.h")
    config.places = {"include_dirs": [str(ROOT / "tests" / "shim")]}
    config.define.append(("TEXVLM_EMULATE", None))
    add_kernels(config, ["emulated"], "emulated")


def add_cuda(config: Config, home: Path) -> None:
    """The kernels, by the toolkit at `home`; beside a torch without CUDA its runtime is linked statically."""
    release = cuda_release(home)
    if release is None:
        sys.exit(f"{home / 'bin' / 'nvcc'} does not run. TEXVLM_NO_CUDA=1 builds without CUDA.")
    archs = cuda_archs()
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    gencode.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    config.nvcc = ["-O3", "-fmad=false", "--threads=2", "-Xcompiler=-fvisibility=hidden", *gencode]
    config.sources += files("csrc/cuda/*.cu")
    add_kernels(config, archs, release)
    cpp_extension.CUDA_HOME = str(home)  # torch looks for it only when it was built with CUDA itself
    if torch.version.cuda is not None:
        config.make = cpp_extension.CUDAExtension
        return
    config.places = {
        "libraries": ["cudart_static", "rt", "dl", "pthread"],
        "library_dirs": [str(home / d) for d in ("lib64", "targets/x86_64-linux/lib") if (home / d).exists()],
        "include_dirs": [str(home / "include")],
    }


def extensions() -> list[setuptools.Extension]:
    config = host_config()
    if os.environ.get("TEXVLM_SANITIZE") == "1":
        add_sanitizers(config)
    if os.environ.get("TEXVLM_EMULATE") == "1":
        add_emulated(config)
    elif os.environ.get("TEXVLM_NO_CUDA") != "1" and (home := cuda_home()):
        add_cuda(config, home)
    library = config.extension(LIBRARY, config.sources, ["-Wl,-soname,libtexvlm.so"])
    library.libraries.remove("torch_python")  # programs without Python load it too
    module = config.extension("texvlm._C", [BINDING], ["-Wl,-rpath,$ORIGIN/lib"])
    module.libraries.append("texvlm")
    return [library, module]


class Build(cpp_extension.BuildExtension):
    """torch's builder, with as many jobs as cores and memory allow (a translation unit takes up to 1.5 GB)."""

    def get_ext_filename(self, ext_name: str) -> str:
        """The library has a plain name: what it holds does not depend on the version of Python."""
        path = super().get_ext_filename(ext_name)
        return os.path.join(os.path.dirname(path), "libtexvlm.so") if ext_name.endswith("libtexvlm") else path

    def copy_extensions_to_source(self) -> None:
        """In place, the library gets its folder."""
        (ROOT / "texvlm" / "lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def build_extensions(self) -> None:
        """Builds with MAX_JOBS set."""
        if "MAX_JOBS" not in os.environ:
            pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 62
            os.environ["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, pages // (3 << 29))))
        self.extensions[1].library_dirs.append(os.path.join(self.build_lib, "texvlm", "lib"))
        super().build_extensions()


if __name__ == "__main__":  # so that tests can look inside; pip too runs this file as __main__
    setup(
        packages=find_packages(include=["texvlm", "texvlm.*"]),
        ext_modules=extensions(),
        cmdclass={"build_ext": Build},
        zip_safe=False,
    )
