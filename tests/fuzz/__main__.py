"""Calls everything public with hostile arguments, in a child process that is watched.

A finding is a crash by a signal, a hang, growth of memory, a result that is not finite where all arguments were, or an exception that is
no ValueError, TypeError, RuntimeError or OSError, or says nothing. Each is printed as code and kept in a file; the run goes on in a new
child. The exit status says whether there was any.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a child is a fork, and has no threads but its own
os.environ.setdefault("TEXVLM_CACHE_MB", "64")

import torch

from fuzz.calls import Call, drawn, judged, quiet, smaller
from fuzz.programs import all_programs

GIB = 1 << 30
WARM = 20  # seconds after which what is kept for later calls is there
STAYS = 3  # calls after which memory has grown: a large result is there while its call is
OFTEN_ENOUGH = 2  # crashes and hangs of what a program calls, after which it is left out


class Fuzz:
    """A run: children one after another, and what they found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        programs = all_programs()
        if args.only:
            programs = [p for p in programs if args.only in p.name]
        self.often = [p for p in programs if not p.rare] or programs
        self.rare = [p for p in programs if p.rare] or programs
        self.shared = mmap.mmap(-1, 16)  # the number of the call that is being made, and how many have been
        self.findings: dict[tuple[str, str], Call] = {}
        self.deadly: Counter[str] = Counter()

    def call(self, number: int) -> Call:
        return drawn(self.often, self.rare, self.args.seed, number)

    def child(self, first: int, until: float, pipe: Connection) -> None:
        """Calls, from this number on."""
        calls = struct.unpack_from("q", self.shared, 8)[0]
        number = first
        while time.monotonic() < until and number < self.args.calls:
            struct.pack_into("qq", self.shared, 0, number, calls)
            call = self.call(number)
            number += 1
            if self.deadly[call.program.name] >= OFTEN_ENOUGH:
                continue
            calls += 1
            wrong = judged(call)
            if wrong and (call.program.name, wrong) not in self.findings:
                self.findings[call.program.name, wrong] = call
                pipe.send((wrong, number - 1, smaller(call, lambda c, wrong=wrong: judged(c) == wrong)))
        struct.pack_into("qq", self.shared, 0, number, calls)

    def forked(self, work, *args) -> tuple[int, Connection]:
        """A child that does this, and where it sends."""
        mine, its = Pipe(duplex=False)
        pid = os.fork()
        if pid:
            its.close()
            return pid, mine
        try:
            sys.stdout.flush()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)  # what libraries print about broken files
            quiet()
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + 2 * GIB,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work(*args, its)
        except BaseException as error:
            its.send((f"the fuzzer itself: {type(error).__name__}: {error}", -1, None))
            os._exit(1)
        os._exit(0)

    def watched(self, pid: int, pipe: Connection, until: float) -> str | None:
        """Waits for a child; how it ended, if not well."""
        resident, number, since, spent = None, -1, time.monotonic(), 0.0
        large: set[int] = set()
        while True:
            while pipe.poll(0.05):
                try:
                    wrong, at, call = pipe.recv()
                except EOFError:
                    break
                if call is None:
                    raise SystemExit(wrong)
                self.found(wrong, at, call)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else None
            now, at = time.monotonic(), struct.unpack_from("q", self.shared, 0)[0]
            if at != number:
                number, since, spent = at, now, seconds_of(pid)
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
            if resident is None and now > until - self.args.seconds + WARM:
                resident = pages
            large = {*large, at} if pages > (resident or pages) + GIB / 2 or pages > 3 * GIB else set()
            wrong = None
            # Of the processor's time, since it may be shared; who waits for a lock uses none.
            if seconds_of(pid) - spent > self.args.hang or now - since > 10 * self.args.hang:
                wrong = f"hangs for more than {self.args.hang:g} s"
            elif len(large) > STAYS:
                wrong = "memory grows"
            if wrong:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return wrong

    def found(self, wrong: str, number: int, call: Call) -> None:
        """Says it, and keeps it."""
        self.findings[call.program.name, wrong] = call
        folder = Path(self.args.out)
        folder.mkdir(parents=True, exist_ok=True)
        text = f"# {call.program.name}: {wrong} (seed {self.args.seed}, call {number})\n{call.code()}"
        (folder / f"{call.program.name}-{number}.py").write_text(text)
        print(f"\n{text}", flush=True)

    def dies(self, call: Call) -> bool:
        """Whether a call alone ends its process, or does not end."""
        pid, pipe = self.forked(lambda _: judged(call))
        return self.watched(pid, pipe, time.monotonic() + self.args.hang) is not None

    def run(self) -> int:
        """All of it; the exit status."""
        start = time.monotonic()
        until, first = start + self.args.seconds, 0
        while time.monotonic() < until and first < self.args.calls:
            pid, pipe = self.forked(self.child, first, until)
            ended = self.watched(pid, pipe, until)
            first, calls = struct.unpack("qq", self.shared[:])
            if ended is None:
                break
            call = self.call(first)
            self.deadly[call.program.name] += 1
            if (call.program.name, ended) not in self.findings:
                self.found(ended, first, smaller(call, self.dies))
            struct.pack_into("qq", self.shared, 0, first + 1, calls + 1)
            first += 1
        return self.report(time.monotonic() - start)

    def report(self, seconds: float) -> int:
        """The table at the end."""
        calls = struct.unpack_from("q", self.shared, 8)[0]
        print(f"\n{calls} calls, {calls / max(seconds, 1e-9):.0f} a second, {len(self.findings)} findings")
        for (name, wrong), _ in sorted(self.findings.items()):
            print(f"  {name:28} {wrong}")
        for name in sorted(n for n, times in self.deadly.items() if times >= OFTEN_ENOUGH):
            print(f"  {name:28} left out after {OFTEN_ENOUGH} crashes")
        return 1 if self.findings else 0


def seconds_of(pid: int) -> float:
    """How long a process has been computing."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--calls", type=int, default=1 << 39, help="at most so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang", type=float, default=20, help="seconds that a call may compute; it may wait ten times as long")
    parser.add_argument("--only", help="what is called has this in its name")
    parser.add_argument("--out", default="build/fuzz", help="where findings are kept")
    torch.set_num_threads(1)
    return Fuzz(parser.parse_args(argv)).run()


if __name__ == "__main__":
    sys.exit(main())
