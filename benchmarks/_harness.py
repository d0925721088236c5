"""The harness of all benchmarks: one process, interleaved rounds, medians, ratios, gates, JSON.

    from benchmarks import _harness

    bench = _harness.Bench(__doc__)            # the first line of the file's docstring is the question
    times = bench.compare("1024 x 1024, C = 3", {"texvlm": ours, "OpenCV": peer}, moves=bytes_moved)
    bench.gate("faster than OpenCV", times.ratio("OpenCV"), at_least=2.0)
    bench.gate("copy bound", times.against_copy, at_most=1.5)
    bench.finish("yes: ...")                   # the last line printed is the answer

Every benchmark takes --quick (fewer rounds), --json FILE, --threads N and --strict (exit status 1 when a
gate is missed).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

US = "texvlm"
COPY = "torch copy"
PACKAGES = (
    "torch",
    "texvlm",
    "numpy",
    "opencv-contrib-python-headless",
    "opencv-python-headless",
    "opencv-python",
    "scipy",
    "scikit-image",
    "kornia",
)
MIN_ROUNDS, MAX_ROUNDS = 7, 201
SAMPLE_SECONDS = 2e-4  # a shorter call is repeated inside one round until a sample lasts this long
TABLE_SECONDS = 3.0  # what one table may take, within the bounds on the rounds

Call = Callable[[], Any]


def copy_call(moved: int, fresh: bool = False) -> Call:
    """A torch copy that moves as many bytes: it reads moved / 2 and writes moved / 2.

    Args:
        moved: bytes read plus bytes written.
        fresh: False: into one buffer, written before (warm). True: into a buffer allocated in each call
            (`clone`), so that it pays for new pages where an op's own output of that size does.
    """
    source = torch.ones(max(1, int(moved) // 2), dtype=torch.uint8)
    if fresh:
        return source.clone
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def median(samples: list[float]) -> float:
    """The median of seconds."""
    return statistics.median(samples)


def measure(calls: Mapping[str, Call], seconds: float = TABLE_SECONDS, min_rounds: int = MIN_ROUNDS) -> dict[str, list[float]]:
    """Seconds per call of each function, one sample a round, interleaved, so that noise meets all alike.

    Each is warmed up by at least two calls. The order turns by one from round to round.
    """
    repeats, total = {}, 0.0
    for name, call in calls.items():
        call()
        once = min(_timed(call, 1) for _ in range(2))
        repeats[name] = max(1, round(SAMPLE_SECONDS / max(once, 1e-7)))
        total += once * repeats[name]
    rounds = min(MAX_ROUNDS, max(min_rounds, int(seconds / max(total, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                samples[name].append(_timed(calls[name], repeats[name]))
    finally:
        if enabled:
            gc.enable()
    return samples


def _timed(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def peak_memory(call: Call) -> int | None:
    """Bytes by which one call raises the process's resident memory at its peak, after a call to warm up.

    Free memory of the allocator is given back first, so that none of the call's own hides in it. None where
    /proc does not tell.
    """
    call()
    gc.collect()
    if us := sys.modules.get("texvlm"):
        us.empty_cache()  # its kept buffers would hide the call's own
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
        keep = call()
        peak = _status("VmHWM")
        del keep
    except (OSError, AttributeError, KeyError):
        return None
    return max(0, peak - before)


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


class Others:
    """What other processes compute from now on.

    Where they hold the cores, OpenMP's threads wait for each other at the end of every loop, as long as the scheduler gives one its turn
    late: calls of many short loops then take tens of times as long (README.md, end_to_end).
    """

    def __init__(self) -> None:
        self.begun, self.seconds = time.perf_counter(), self._seconds()

    @staticmethod
    def _seconds() -> float:
        """Of all processors, less this process's own; 0 where /proc does not tell."""
        try:
            ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return 0.0
        user, nice, system, _idle, _waiting, *rest = map(int, ticks)
        return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])

    def cores(self) -> float:
        """On how many cores they computed, on average."""
        return max(0.0, (self._seconds() - self.seconds) / max(time.perf_counter() - self.begun, 1e-9))


def await_quiet(cores: float, seconds: float) -> None:
    """Waits until others compute on no more cores than these, for a second; so many seconds at most."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        others = Others()
        time.sleep(1)
        if others.cores() <= cores:
            return


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = next(line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    try:
        import texvlm

        isa = texvlm.build_info().get("cpu", "")
    except ImportError:
        isa = ""
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "texvlm_isa": isa,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Installed versions of us and the peers."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


@dataclass
class Times:
    """One table: seconds of each function; `us` is the row that ratios refer to."""

    title: str
    samples: dict[str, list[float]]
    us: str
    moves: int | None = None
    fresh: bool = False

    def median(self, name: str | None = None) -> float:
        return median(self.samples[name or self.us])

    def ratio(self, peer: str, us: str | None = None) -> float:
        """How many times longer the peer takes than we do: medians of rounds that were interleaved."""
        return self.median(peer) / self.median(us)

    def best(self, *peers: str) -> str:
        """The fastest of these peers (of all, the copy left out, by default)."""
        names = peers or tuple(n for n in self.samples if n not in (self.us, COPY))
        return min(names, key=self.median)

    @property
    def against_copy(self) -> float:
        """How many times longer we take than a copy that moves as many bytes."""
        return self.median() / self.median(COPY)


@dataclass
class Bench:
    """One benchmark file: its question, its tables, its gates and its answer."""

    doc: str | None
    argv: list[str] | None = None
    tables: list[dict[str, Any]] = field(default_factory=list)
    gates: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.question = (self.doc or "").strip().partition("\n")[0]
        parser = argparse.ArgumentParser(description=self.question)
        parser.add_argument("--quick", action="store_true", help="fewer rounds; gates are printed all the same")
        parser.add_argument("--json", metavar="FILE", help="write all figures there")
        parser.add_argument("--threads", type=int, help="threads of torch and OpenCV (default: theirs)")
        parser.add_argument("--strict", action="store_true", help="exit status 1 when a gate is missed")
        self.args = parser.parse_args(self.argv)
        if self.args.threads:
            torch.set_num_threads(self.args.threads)
            if "cv2" in sys.modules:
                sys.modules["cv2"].setNumThreads(self.args.threads)
        torch.manual_seed(0)
        print(self.question)
        m = machine()
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        print(f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, load {m['load']}; {packages}")
        if m["load"] > 0.5:
            print("the machine is busy: medians wander, compare the minima")

    @property
    def quick(self) -> bool:
        return bool(self.args.quick)

    def compare(
        self,
        title: str,
        calls: Mapping[str, Call],
        moves: int | None = None,
        fresh: bool = False,
        us: str | None = None,
        seconds: float = TABLE_SECONDS,
    ) -> Times:
        """Times all of `calls` in interleaved rounds and prints a table.

        Args:
            title: of the table.
            calls: by name; ours first (or named by `us`).
            moves: the bytes that ours must read and write; adds the row of a torch copy that moves as many.
            fresh: ours writes into newly allocated memory, so the copy does too.
            us: the row that ratios refer to.
            seconds: what the table may take, beyond 7 rounds.
        """
        us = us or next(iter(calls))
        calls = dict(calls)
        if moves is not None:
            calls[COPY] = copy_call(moves, fresh)
        times = Times(title, measure(calls, seconds / 6 if self.quick else seconds), us, moves, fresh)
        self._print(times)
        rows = {
            name: {
                "median_ms": 1e3 * median(s),
                "min_ms": 1e3 * min(s),
                "rounds": len(s),
                "ratio": times.ratio(name),
            }
            for name, s in times.samples.items()
        }
        self.tables.append({"title": title, "us": us, "moves_bytes": moves, "fresh": fresh, "rows": rows})
        return times

    def _print(self, times: Times) -> None:
        rounds = len(next(iter(times.samples.values())))
        print(f"\n{times.title}  ({rounds} rounds)")
        width = max(28, *(len(name) for name in times.samples))
        print(f"  {'':{width}} {'median ms':>10} {'min ms':>10} {'ratio':>8} {'of minima':>10}")
        for name, samples in times.samples.items():
            note = ""
            if name == COPY and times.moves:
                kind = "fresh" if times.fresh else "warm"
                note = f"   {times.moves / 1e6:.2f} MB, {kind}, {times.moves / median(samples) / 1e9:.1f} GB/s"
            ratio, minima = f"{times.ratio(name):.2f}", f"{min(samples) / min(times.samples[times.us]):.2f}"
            milliseconds = f"{1e3 * median(samples):10.4f} {1e3 * min(samples):10.4f}"
            print(f"  {name:{width}} {milliseconds} {ratio:>8} {minima:>10}{note}", flush=True)

    def gate(self, name: str, measured: float, *, at_least: float | None = None, at_most: float | None = None) -> bool:
        """Prints and records whether a figure is what was wanted."""
        if (at_least is None) == (at_most is None):
            raise ValueError("a gate takes either at_least or at_most")
        ok = measured >= at_least if at_least is not None else measured <= at_most  # type: ignore[operator]
        wanted = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
        print(f"  {'pass' if ok else 'MISS'}  {name}: {measured:.2f} (wanted {wanted})", flush=True)
        self.gates.append({"name": name, "at_least": at_least, "at_most": at_most, "measured": measured, "ok": ok})
        return ok

    def figure(self, name: str, value: Any) -> None:
        """Records a figure beside the tables."""
        self.figures[name] = value

    def finish(self, answer: str) -> int:
        """Writes the JSON and prints the answer, the last line. Returns the exit status."""
        missed = [g["name"] for g in self.gates if not g["ok"]]
        if self.args.json:
            result = {
                "question": self.question,
                "answer": answer,
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "machine": machine(),
                "versions": versions(),
                "quick": self.quick,
                "tables": self.tables,
                "gates": self.gates,
                "figures": self.figures,
            }
            Path(self.args.json).write_text(json.dumps(result, indent=1) + "\n")
        note = f"; missed: {'; '.join(missed)}" if missed else ""
        print(f"\n{len(self.gates) - len(missed)} of {len(self.gates)} gates passed{note}")
        print(answer, flush=True)
        return 1 if missed and self.args.strict else 0
