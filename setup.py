"""Builds texvlm/lib/libtexvlm.so, all ops for Python and C++ programs alike, and texvlm._C, which loads it and binds what is not an op.

CUDA sources are compiled wherever the CUDA toolkit is found (texvlm/cli/toolkit.py says where it is looked for).

Switches: TEXVLM_NO_CUDA=1 leaves CUDA out; TEXVLM_CUDA_ARCHS="80;90;120" chooses the compute capabilities;
TEXVLM_SANITIZE=1 builds with AddressSanitizer and UBSan; TEXVLM_EMULATE=1 compiles the CUDA kernels for the host, for tests (see
tests/shim), TEXVLM_EMULATE=traffic so that they tell what they read and write; TEXVLM_KERNELS=FOLDER takes CUDA objects that
`setup.py kernels` has compiled for the same cards; TEXVLM_WHEEL=1 packs a wheel that asks for the minor
version of torch that is there; MAX_JOBS limits the compiler processes; CXX, CXXFLAGS and LDFLAGS are honoured.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    sys.exit(
        "texvlm is built against the PyTorch that you use, and found none. Install torch (2.11 to 2.14) first, then:\n"
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
PRECOMPILED = "csrc/precompiled.h"  # the headers of torch, parsed once


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
    cxx: list[str]
    link: list[str]
    libraries: list[str] = field(default_factory=lambda: ["c10", "torch", "torch_cpu"])
    include: list[str] = field(default_factory=lambda: [*cpp_extension.include_paths(), sysconfig.get_path("include")])
    search: list[str] = field(default_factory=cpp_extension.library_paths)
    define: list[tuple[str, str | None]] = field(default_factory=list)
    nvcc: list[str] = field(default_factory=list)
    own: dict[str, list[str]] = field(default_factory=dict)  # further flags of the sources in a folder
    kernels: dict[str, str] = field(default_factory=dict)  # objects and their .cu: empty where it has been compiled before


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
        cxx=[
            "-std=c++20",
            "-fPIC",
            "-DNDEBUG",
            "-O3",
            "-fwrapv",
            "-fopenmp",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
            "-g0",
            "-Wall",
            "-Wno-unknown-pragmas",
            "-Wno-psabi",
            "-DTORCH_EXTENSION_NAME=_C",
        ],
        link=["-ldl", "-pthread"],  # csrc/gl opens libEGL at run time, in threads of its own
    )


def add_sanitizers(config: Config) -> None:
    """AddressSanitizer, and of UBSan's checks those that it has not itself: pointers that go astray it sees where they are read.

    Those take half of the compiler's time, and a third of what is left goes where accesses are checked by calls. Emulated kernels, which
    are most of what the tests wait for, check them in line, and their alignment too: that is no fault on the host, but one on a card.
    """
    left_out = "-fno-sanitize=null,alignment,object-size,vptr,pointer-overflow"
    sanitize = ["-fsanitize=address,undefined", left_out, "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
    calls = "--param=asan-instrumentation-with-call-threshold="
    config.own["build/emulated"] = ["-fsanitize=alignment", calls + "7000"]  # gcc's default
    config.cxx = [*[flag for flag in config.cxx if flag not in ("-O3", "-g0")], "-O1", "-g1", *sanitize, calls + "0"]
    config.link += sanitize
    config.define.append(("TEXVLM_NO_ISA_DISPATCH", None))


def add_kernels(config: Config, archs: list[str], release: str) -> None:
    """What the host code must know of the kernels beside it."""
    config.define += [("TEXVLM_WITH_CUDA", None), ("TEXVLM_CUDA_ARCHS", "+".join(archs)), ("TEXVLM_CUDA_VERSION", release)]


def add_emulated(config: Config) -> None:
    """The kernels as C++, for tests."""
    config.sources += emulated_kernels()
    config.cxx.append("-Itests/shim")
    config.define.append(("TEXVLM_EMULATE", None))
    if os.environ["TEXVLM_EMULATE"] == "traffic":
        config.own["build/emulated"] = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-U__SANITIZE_THREAD__"]
        config.own["tests/shim"] = ["-DTEXVLM_SHIM_TRAFFIC"]
    add_kernels(config, ["emulated"], "emulated")


def add_cuda(config: Config, home: Path) -> None:
    """The kernels, by the toolkit at `home`; beside a torch without CUDA its runtime is linked statically.

    They know nothing of torch or Python: their objects serve every build for the same cards (TEXVLM_KERNELS names a folder of them).
    """
    release = cuda_release(home)
    if release is None:
        sys.exit(f"{home / 'bin' / 'nvcc'} does not run. TEXVLM_NO_CUDA=1 builds without CUDA.")
    archs = cuda_archs()
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    gencode.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    nvcc = shlex.split(os.environ.get("PYTORCH_NVCC", str(home / "bin" / "nvcc")))
    host = ["-Xcompiler=-fPIC,-fvisibility=hidden", "-DTEXVLM_WITH_CUDA"]
    config.nvcc = [*nvcc, "-std=c++20", "-O3", "-fmad=false", "--threads=2", *host, *gencode]
    compiled = os.environ.get("TEXVLM_KERNELS")
    folder = compiled or f"build/cuda-{'+'.join(archs)}"
    config.kernels = {f"{folder}/{Path(name).stem}.o": "" if compiled else name for name in files("csrc/cuda/*.cu")}
    add_kernels(config, archs, release)
    config.include.append(str(home / "include"))
    config.search += [str(home / d) for d in ("lib64", "targets/x86_64-linux/lib") if (home / d).exists()]
    beside_cuda = torch.version.cuda is not None
    config.libraries += ["cudart", "c10_cuda", "torch_cuda"] if beside_cuda else ["cudart_static", "rt", "dl", "pthread"]


def chosen_config() -> Config:
    """What the switches and the machine ask for."""
    config = host_config()
    if os.environ.get("TEXVLM_SANITIZE") == "1":
        add_sanitizers(config)
    if os.environ.get("TEXVLM_EMULATE") in ("1", "traffic"):
        add_emulated(config)
    elif os.environ.get("TEXVLM_NO_CUDA") != "1" and (home := cuda_home()):
        add_cuda(config, home)
    return config


def ninja_file(config: Config, temp: str, library: str, module: str) -> str:
    """The whole build as a graph for ninja, which compiles what changed. Paths are relative to the checkout.

    The files that know torch are compiled with its headers precompiled. The folder of the precompiled ones comes first where the
    compiler looks for PRECOMPILED; where they are of no use to it, it finds the header itself.
    """
    define = [f"-D{name}" + ("" if value is None else f"={value}") for name, value in config.define]
    flags = [*config.cxx, *define, *(f"-isystem{folder}" for folder in config.include)]
    link = [f"-L{folder}" for folder in config.search] + [f"-l{name}" for name in config.libraries] + config.link
    words = {
        "builddir": [temp],  # where ninja keeps its books
        "cxx": [*shlex.split(os.environ.get("CXX", "c++"))],
        "flags": [*flags, *shlex.split(os.environ.get("CXXFLAGS", ""))],
        "link": [*link, *shlex.split(os.environ.get("LDFLAGS", ""))],
        "nvcc": config.nvcc,
    }
    lines = [f"{name} = {shlex.join(value).replace('$', '$$')}" for name, value in words.items()]
    for rule, command in {
        "compile": "$cxx -MMD -MF $out.d $use $flags $kind -c $in -o $out",
        "nvcc": "$nvcc --generate-dependencies-with-compile --dependency-output $out.d -c $in -o $out",
        "link": "$cxx -shared -o $out $in $own $link",
    }.items():
        lines += [f"rule {rule}", f"  command = {command}"]
        lines += ["  depfile = $out.d", "  deps = gcc"] if rule != "link" else []

    def edge(out: str, rule: str, inputs: list[str], after: str = "", **own: str) -> str:
        to, wait, *of = (re.sub(r"([$: ])", r"$\1", path) for path in (out, after, *inputs))
        lines.append(f"build {to}: {rule} {' '.join(of)}" + (f" | {wait}" if wait else ""))
        lines.extend(f"  {name} = {value}" for name, value in own.items())
        return out

    header = f"{temp}/{Path(PRECOMPILED).name}.gch"
    edge(header, "compile", [PRECOMPILED], kind="-x c++-header")
    use = shlex.join([f"-I{temp}", "-Icsrc", "-include", Path(PRECOMPILED).name])

    def compiled(source: str) -> str:
        torch_too = Path(source).parent == Path("csrc")
        kind = shlex.join(config.own.get(str(Path(source).parent), []))
        out = f"{temp}/{Path(source).with_suffix('.o')}"
        return edge(out, "compile", [source], header, use=use) if torch_too else edge(out, "compile", [source], kind=kind)

    kernels = [edge(out, "nvcc", [source]) if source else out for out, source in config.kernels.items()]
    edge("kernels", "phony", kernels)
    edge(library, "link", [compiled(s) for s in config.sources] + kernels, own="-Wl,-soname,libtexvlm.so")
    own = shlex.join([f"-L{Path(library).parent}", "-ltexvlm", "-ltorch_python", "-Wl,-rpath,$ORIGIN/lib"]).replace("$", "$$")
    edge("all", "phony", [edge(module, "link", [compiled(BINDING)], library, own=own)])
    return "\n".join([*lines, "default all", ""])


def jobs() -> int:
    """As many compilers as cores and memory allow (one takes up to 1.5 GB), or MAX_JOBS."""
    if chosen := os.environ.get("MAX_JOBS"):
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(memory // (3 << 29) for memory in memory_there())]))


def memory_there() -> list[int]:
    """Bytes that the machine has available, and those that a container may take in all, as far as Linux says."""
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    available = re.search(r"MemAvailable: *(\d+)", meminfo.read_text()) if meminfo.exists() else None
    most = re.match(r"\d+", limit.read_text()) if limit.exists() else None  # or "max"
    return [*([int(available[1]) << 10] if available else []), *([int(most[0])] if most else [])]


class Build(build_ext):
    """Has ninja make both files; `setup.py kernels` has it make the CUDA objects alone."""

    targets: Sequence[str] = ()

    def get_ext_filename(self, ext_name: str) -> str:
        """The library has a plain name: what it holds does not depend on the version of Python."""
        path = super().get_ext_filename(ext_name)
        return os.path.join(os.path.dirname(path), "libtexvlm.so") if ext_name.endswith("libtexvlm") else path

    def copy_extensions_to_source(self) -> None:
        """In place, the library gets its folder."""
        (ROOT / "texvlm" / "lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def build_extensions(self) -> None:
        """Writes the graph and runs ninja on it."""
        graph = Path(self.build_temp) / "build.ninja"
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_text(ninja_file(chosen_config(), self.build_temp, *(self.get_ext_fullpath(e.name) for e in self.extensions)))
        command = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else ["ninja"]
        try:
            subprocess.run([*command, "-v", "-f", str(graph), "-j", str(jobs()), *self.targets], cwd=ROOT, check=True)
        except FileNotFoundError:
            sys.exit("texvlm is built by ninja, and there is none: pip install ninja")
        except subprocess.CalledProcessError:
            sys.exit("texvlm could not be compiled: the first error above says why")


class Kernels(Build):
    """The objects of the CUDA kernels, without anything of torch."""

    targets = ("kernels",)


class Package(Distribution):
    """What pyproject.toml says; as a wheel for others (TEXVLM_WHEEL=1) it wants the minor version of torch that its name then says."""

    def parse_config_files(self, *args: object, **kwargs: object) -> None:
        """Reads pyproject.toml."""
        super().parse_config_files(*args, **kwargs)
        if os.environ.get("TEXVLM_WHEEL") == "1":
            minor = ".".join(torch.__version__.split(".")[:2])
            self.metadata.version += f"+torch{minor}"
            wanted = [f"torch=={minor}.*" if n.startswith("torch") else n for n in self.install_requires]
            self.install_requires = self.metadata.install_requires = wanted


if __name__ == "__main__":  # so that tests can look inside; pip too runs this file as __main__
    setup(
        distclass=Package,
        packages=find_packages(include=["texvlm", "texvlm.*"]),
        ext_modules=[Extension(LIBRARY, []), Extension("texvlm._C", [])],
        cmdclass={"build_ext": Build, "kernels": Kernels},
        zip_safe=False,
    )
