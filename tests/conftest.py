"""Shared fixtures: devices, seeds, and the one tolerance table."""

from __future__ import annotations

import ctypes
import fcntl
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from cases import all_cases, one_of_each

# Absolute and relative, against the reference in float64 for the first two; half types against the rounding of their storage.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--card", action="store_true", help="only the tests that run on a CUDA device")
    parser.addoption("--brief", action="store_true", help="of the contract's cases one of every op and set of gradients")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first; under --card none that would not touch the card, under --brief few cases of an op."""
    kept = sorted(items, key=lambda item: item.get_closest_marker("long") is None)
    if config.getoption("--card"):
        kept = [item for item in kept if on_card(item)]
    if config.getoption("--brief"):
        few = {str(case) for case in one_of_each(all_cases())}
        kept = [item for item in kept if not (case := given(item).get("case")) or str(case) in few]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def given(item: pytest.Item) -> dict[str, object]:
    """What a test is parametrized with."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def on_card(item: pytest.Item) -> bool:
    """Whether a test runs on a CUDA device, where there is one."""
    if "device" in given(item):
        return str(given(item)["device"]).startswith("cuda")
    return "cuda" in getattr(item, "fixturenames", ()) or item.get_closest_marker("gpu") is not None


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


BUILD = Path(__file__).resolve().parent.parent / "build"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Beside other workers of pytest-xdist, a test marked `alone` waits until their tests are over, and they wait for it.

    Who waits for the room keeps the door, so that no stream of others goes past.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    BUILD.mkdir(exist_ok=True)
    with (BUILD / ".door").open("w") as door, (BUILD / ".room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:  # by hand: a child that the test forked may still hold the file
            fcntl.flock(room, fcntl.LOCK_UN)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """OpenGL may be absent; where libEGL is there, its tests run and have to pass."""
    case = given(item).get("case")
    if item.get_closest_marker("gl") or getattr(case, "op", "").endswith("_gl"):
        try:
            ctypes.CDLL("libEGL.so.1")
        except OSError:
            pytest.skip("libEGL is not installed")
        if "cuda" in item.fixturenames and torch.cuda.is_available():
            import texvlm

            if not texvlm.gl.status("cuda").available:
                pytest.skip(f"the CUDA device has no OpenGL: {texvlm.gl.status('cuda').reason}")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that a test shall pass on; in an emulated build (tests/shim) the CPU runs the CUDA kernels."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# What may be skipped, and why; any other skip fails the run.
ALLOWED_SKIPS = (
    "the CUDA toolkit has no nvrtc",
    "no CUDA device",
    "no second GPU",
    "the sanitizers are set up for gcc",
    "libEGL is not installed",
    "the CUDA device has no OpenGL",
    "rapidocr is not installed",
    "onnxruntime is not installed",
    "torchvision is not there",  # make test-cuda-build has it
    "torchdata is not installed",
    "pyarrow is not installed",
    "Gradio is not installed",  # 340 MB, which the extra app has and the extra test has not
    "playwright is not installed",
    "Ray is not installed",  # 240 MB: make test-ray
    "vllm is not installed",  # some 2 GB: make test-vllm
    "no chromium",
    "the oldest transformers is not installed",  # make test does
)
_unexpected: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if (
        report.skipped
        and isinstance(report.longrepr, tuple)
        and not any(reason in report.longrepr[2] for reason in ALLOWED_SKIPS)
    ):
        _unexpected.append(f"{report.nodeid}: {report.longrepr[2]}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _unexpected and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _unexpected:
        terminalreporter.write_line(f"skip that is not allowed: {line}", red=True)
