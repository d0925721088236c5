"""Builds texvlm/lib/libtexvlm.so, all ops for Python and C++ programs alike, and texvlm._C, which loads it and binds what is not an op.

CUDA sources are compiled wherever nvcc is found.

Switches: TEXVLM_NO_CUDA=1 leaves CUDA out; TEXVLM_CUDA_ARCHS="80;90;120" chooses the compute capabilities;
TEXVLM_SANITIZE=1 builds with AddressSanitizer and UBSan; TEXVLM_EMULATE=1 compiles the CUDA kernels for the host, for tests (see
tests/shim); MAX_JOBS limits the compiler processes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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


def cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, else the one that the nvcc on PATH belongs to (nvcc may be a wrapper script), else none."""
    if os.environ.get("TEXVLM_NO_CUDA") == "1":
        return None
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=False)
        if top := re.search(r"_HERE_=(\S+)", dry.stderr):
            candidates.append(str(Path(top[1]).parent))
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    for home in candidates:
        if home and any((Path(home) / d / "cuda_runtime_api.h").exists() for d in ("include", "targets/x86_64-linux/include")):
            return Path(home)
    return None


def cuda_release(home: Path) -> str:
    out = subprocess.run([str(home / "bin" / "nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\d+\.\d+)", out)[1]


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


def extensions() -> list[setuptools.Extension]:
    binding = "csrc/bind.cpp"
    sources = sorted({str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.cpp")} - {binding})
    sources += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "gl").glob("*.cpp"))
    headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h*")) + sorted(
        str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cuh")
    )
    # No contraction into fused multiply-adds: integers that arithmetic decides (bins, ranks, labels) then agree on all machines.
    # -fopenmp at compile time only: the OpenMP symbols then resolve to the runtime that torch itself has
    # loaded, so there is one pool of threads.
    cxx = [
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
    ]
    link = ["-ldl", "-pthread"]  # csrc/gl opens libEGL at run time, in threads of its own
    define: list[tuple[str, str | None]] = []
    make = cpp_extension.CppExtension
    kwargs: dict[str, list[str]] = {}
    if os.environ.get("TEXVLM_SANITIZE") == "1":
        sanitize = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
        cxx = [*[f for f in cxx if f not in ("-O3", "-g0")], "-O1", "-g1", *sanitize]
        link += sanitize
        define.append(("TEXVLM_NO_ISA_DISPATCH", None))
    compile_args = {"cxx": cxx}
    if os.environ.get("TEXVLM_EMULATE") == "1":
        sources += emulated_kernels()
        headers += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests" / "shim").glob("*.h"))
        kwargs = {"include_dirs": [str(ROOT / "tests" / "shim")]}
        define += [
            ("TEXVLM_WITH_CUDA", None),
            ("TEXVLM_EMULATE", None),
            ("TEXVLM_CUDA_ARCHS", "emulated"),
            ("TEXVLM_CUDA_VERSION", "emulated"),
        ]
    elif home := cuda_home():
        archs = cuda_archs()
        gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs] + [
            f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"
        ]
        compile_args["nvcc"] = ["-O3", "-fmad=false", "--threads=2", "-Xcompiler=-fvisibility=hidden", *gencode]
        cpp_extension.CUDA_HOME = str(home)  # torch looks for it only when it was built with CUDA itself
        sources += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cuda").glob("*.cu"))
        define += [
            ("TEXVLM_WITH_CUDA", None),
            ("TEXVLM_CUDA_ARCHS", "+".join(archs)),
            ("TEXVLM_CUDA_VERSION", cuda_release(home)),
        ]
        if torch.version.cuda is not None:
            make = cpp_extension.CUDAExtension
        else:
            kwargs = {
                "libraries": ["cudart_static", "rt", "dl", "pthread"],
                "library_dirs": [str(home / d) for d in ("lib64", "targets/x86_64-linux/lib") if (home / d).exists()],
                "include_dirs": [str(home / "include")],
            }

    def build(name: str, sources: list[str], link_args: list[str]) -> setuptools.Extension:
        lists = {key: list(value) for key, value in kwargs.items()}  # torch appends to what it is given
        return make(
            name,
            sources,
            define_macros=define,
            extra_compile_args=compile_args,
            extra_link_args=[*link, *link_args],
            depends=headers,
            **lists,
        )

    library = build(LIBRARY, sources, ["-Wl,-soname,libtexvlm.so"])
    library.libraries.remove("torch_python")  # programs without Python load it too
    module = build("texvlm._C", [binding], ["-Wl,-rpath,$ORIGIN/lib"])
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


setup(
    packages=find_packages(include=["texvlm", "texvlm.*"]),
    ext_modules=extensions(),
    cmdclass={"build_ext": Build},
    zip_safe=False,
)
