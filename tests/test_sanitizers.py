"""The compiled code under AddressSanitizer and UBSan: a build of its own, which runs the contract and the meaning tests.

Twice: with the CPU's kernels, and with the CUDA kernels, which this build compiles for the host as well (see tests/shim).
Left out: compile and inductor (they compile code that is not ours), subprocesses, and what only uses the ops that others test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitized"
FILES_LEFT_OUT = (  # not even imported
    # Subprocesses.
    "cli",
    "cpp",
    "fuzz",  # whose memory is limited, while AddressSanitizer reserves terabytes
    "gpu_script",
    "readme",
    "sanitizers",
    "shim",
    # Text of the sources, pages and packages: nothing that is compiled.
    "app",
    "documentation",
    "notebooks",
    "setup",
    "source",
    "memory",  # under AddressSanitizer there is no cache
    # Networks, training loops, pools of processes and decoders over ops that have tests of their own.
    "allocator",
    "data",
    "embedding",
    "index",
    "learned",
    "megapixel_digits",
    "pretrained",
    "providers",
    "qwen",
    "tiny_vlm",
    "towers",
    "training",
    "video",
    "vllm",
)
LEFT_OUT = (
    "compile",
    "import",
    "inductor",
    "every_loop",
    "thread_count",
    "export",
    "loader",
    "fork",
    "gradcheck",  # hundreds of calls of one kernel on one case; that gradients equal the reference's is tested
    "second_derivatives",
    "opcheck",  # fakes and schemas, with calls that other tests of the contract make
    # What is found in pictures and learned: loops that equal the reference find what the reference finds.
    "pops_out",
    "last_row_of_cells",
    "any_angle",
    "against_opencv",
    "hardly_matters",
    "does_not_break_regions",
    "on_dark",
    "moves_the_gaze",
    "mixed_levels_show",
    "best_cells_hold",
    "needles_in",
    "is_read_less_is_lost",
    "connected_and_as_many",
    "odd_spot",
)
# Under emulation also what says nothing about kernels, and what is about the CPU's own loops and memory.
FILES_LEFT_OUT_EMULATED = (
    *FILES_LEFT_OUT,
    "attention",  # a thousand queries, thread by thread; the contract's cases, which are small, are run
    "documents",  # large pictures: hours, thread by thread
    "first_hour",  # Python
    "paths",  # many stages in a row
    "torch",
)
LEFT_OUT_EMULATED = (
    *LEFT_OUT,
    "functorch",
    "bad_input",
    "photograph",
    "threads_agree",  # of the CPU
    "any_number_of_threads",
    "depend_on_threads",
    "serial_one",
    "grey_is_summed",  # a gradcheck
    "logarithms_are_right",  # one too
    # Contexts and threads of OpenGL.
    "ends_in_silence",
    "python_runs_on",
    "nothing_is_loaded",
    "test_without",
    "storage_is_limited",
    # Many stages in a row, each of which has cases in the contract.
    "keeps_valid_disjoint",
    "one_graph_serves",
    "motion_is_one_thing",
    "all_forty",
    "odd_pictures",
    "brings_its_own",
    "storage_halves",
    "flow_compensates",
    "subset_equals_the_whole",
    "uint8_equals_float",
    "of_a_batch_are_apart",
    # Statistics over thousands of calls, and sizes that only let runs of queries meet threads: thread by thread, most of the time.
    "test_films",  # of 121 x 187; any tiles of smaller pictures are updated by another test
    "-70-",  # footprints and patches scattered over 70 x 70; those over 21 x 21 stay
    "inclusion",
    "includes",
    "error_budget",
    "exact_whatever_rounding",
    "threads_do_not_matter",
    "any_function_of_the_choice",  # nine hundred thousand selections: over an hour
    "memory_holds_no_noise",
    "constant_pictures_give_even",
    "dim_pictures_too",
    "shares_add_up",
)

pytestmark = pytest.mark.sanitizers


def library(name: str) -> str:
    return subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    """The sanitized build in build/sanitized, and the environment to load it in."""
    if "gcc" not in subprocess.run(["c++", "-v"], capture_output=True, text=True, check=False).stderr:
        pytest.skip("the sanitizers are set up for gcc, and c++ is another compiler")
    build = {**os.environ, "TEXVLM_SANITIZE": "1", "TEXVLM_EMULATE": "1"}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(BUILD), "--build-lib", str(BUILD / "lib")]
    done = subprocess.run(command, cwd=ROOT, env=build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # Both libraries, or the first C++ exception aborts; leak checking would report Python's and torch's own memory.
    return {
        **os.environ,
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": str(BUILD / "lib"),
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # beside other workers, threads that spin hold the cores that others wait for
    }


def test_an_overflow_aborts(env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import texvlm; texvlm._C.overflow()"],
        env=env,
        cwd=BUILD,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def run_tests(env: dict[str, str], files: tuple[str, ...], left_out: tuple[str, ...]) -> None:
    words = " and ".join(f"not {word}" for word in left_out)
    ignored = [f"--ignore-glob=*/test_{name}*.py" for name in files]
    workers = ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "worksteal"]
    options = ["-q", "-x", *workers, "-p", "no:cacheprovider", "-o", f"pythonpath={BUILD / 'lib'}", *ignored, "-k", words]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    tail = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, tail
    assert "AddressSanitizer" not in tail
    assert "runtime error" not in tail


@pytest.mark.gl
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_the_gl_threads(env: dict[str, str], kind: str, tmp_path: Path) -> None:
    """csrc/gl alone, in a program of its own; the drivers are not compiled for ThreadSanitizer, so what it says of them is left out."""
    program = tmp_path / "gl_threads"
    sources = [*(str(p) for p in sorted((ROOT / "csrc" / "gl").glob("*.cpp"))), str(ROOT / "tests" / "cpp" / "gl_threads.cpp")]
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={kind}", "-fno-sanitize-recover=undefined", f"-I{ROOT / 'csrc' / 'gl'}"]
    subprocess.run(["g++", *flags, *sources, "-o", str(program), "-ldl", "-pthread"], check=True)
    drivers = tmp_path / "drivers"
    drivers.write_text("".join(f"race:{name}\n" for name in ("swrast_dri.so", "libgallium", "libLLVM", "libEGL", "libnvidia")))
    environment = {k: v for k, v in env.items() if k != "LD_PRELOAD"} | {"TSAN_OPTIONS": f"suppressions={drivers}"}
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # TSan of older compilers cannot bear random addresses

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*fixed, str(program), *arguments], env=environment, capture_output=True, text=True, check=False)

    done = run() if kind == "thread" else run("fork")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    if kind == "thread":  # and it would have said so
        assert "data race" in run("race").stderr


def test_launches(env: dict[str, str], tmp_path: Path) -> None:
    """As many as benchmarks/results/launches.json says; fewer are written there: python -m benchmarks._launches --size 128 --json FILE."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "launches.json").read_text())
    target = tmp_path / "launches.json"
    command = [sys.executable, "benchmarks/_launches.py", "--size", str(kept["size"]), "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, env={**env, "TEXVLM_EMULATE": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {name: call["launches"] for name, call in json.loads(target.read_text())["calls"].items()}
    assert found == {name: call["launches"] for name, call in kept["calls"].items()}


def test_the_tests_pass(env: dict[str, str]) -> None:
    run_tests(env, FILES_LEFT_OUT, LEFT_OUT)


def test_the_tests_pass_on_cuda_kernels(env: dict[str, str], tmp_path: Path) -> None:
    """CPU tensors go the way of CUDA tensors, and every .cu has been executed in the end."""
    launches = tmp_path / "launches"
    run_tests({**env, "TEXVLM_EMULATE": "1", "TEXVLM_SHIM_LAUNCHES": str(launches)}, FILES_LEFT_OUT_EMULATED, LEFT_OUT_EMULATED)
    lines = [line.split("\t") for line in launches.read_text().splitlines()]
    executed = {source for what, source, _ in lines if what == "launched"}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert sources - executed == set(), "no test launches a kernel of these"
