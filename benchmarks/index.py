"""How many pictures a second does `texvlm.data.index` read, against a plain pool of processes that keeps nothing of them?

1024² JPEGs, 273 of 4096 cells by "salience", as many processes as cores. The peer is `multiprocessing.Pool.imap_unordered` over the same
function, which neither writes rows nor survives a killed worker. Both start their processes within the time, forked from a server that has
imported torch. Rounds are interleaved; others on the machine slow both alike. Then what a process needs: memory after many pictures.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks._harness import US, Bench, machine, median
from benchmarks._photographs import SCENES, photographs
from texvlm.data import Select, index, initialise_worker
from texvlm.data.indexing import Row

SIDE, K = 1024, 273
POOL = "multiprocessing.Pool, nothing written"


def write(folder: Path, count: int) -> list[str]:
    """So many files, of a few pictures."""
    names = []
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()).resize((SIDE, SIDE)) for _, image in photographs(SCENES)]
    for picture in pictures:
        names.append(folder / f"{len(names):05}.jpg")
        picture.save(names[-1], quality=90)
    for number in range(len(pictures), count):
        names.append(folder / f"{number:05}.jpg")
        os.link(names[number % len(pictures)], names[-1])
    return [str(name) for name in names[:count]]


def by_pool(names: list[str], workers: int) -> None:
    context = multiprocessing.get_context("forkserver")
    with context.Pool(workers, initialise_worker) as pool:
        for _ in pool.imap_unordered(Row(Select(K), tokens=False), names):
            pass


def by_index(names: list[str], workers: int, folder: Path, **options: Any) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    index(names, folder / "out", K, workers=workers, **options)


def resident(pid: int) -> int:
    """Megabytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> int:
    bench = Bench(__doc__)
    workers = machine()["cores"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = write(folder, 64 if bench.quick else 1000)
        by_pool(names[:16], workers), by_index(names[:16], workers, folder)  # the server starts
        calls: dict[str, Callable[[], None]] = {
            US: lambda: by_index(names, workers, folder),
            POOL: lambda: by_pool(names, workers),
            f"{US}, tokens": lambda: by_index(names, workers, folder, tokens=True),
        }
        seconds: dict[str, list[float]] = {title: [] for title in calls}
        for turn in range(3):
            for title in (*list(calls)[turn:], *list(calls)[:turn]):
                begun = time.perf_counter()
                calls[title]()
                seconds[title].append(time.perf_counter() - begun)
        print(f"\n{len(names)} pictures of {SIDE}², {workers} processes")
        rates = {title: len(names) / median(samples) for title, samples in seconds.items()}
        for title, rate in rates.items():
            print(f"  {title:40} {rate:8.1f} pictures a second")

        memory: list[int] = []

        def note(done: int, total: int) -> None:
            if done in (total // 4, total - workers):
                memory.append(max(resident(child.pid or 0) for child in multiprocessing.active_children()))

        by_index(names, workers, folder, progress=note)
        print(f"  a process holds {memory[0]} MB after a quarter of them, {memory[1]} MB near the end")
    bench.figure("pictures_per_second", rates)
    bench.figure("resident_mb", memory)
    share = rates[US] / rates[POOL]
    bench.gate("of the rate of a plain pool", share, at_least=0.9)
    bench.gate("memory near the end, over that after a quarter", memory[1] / memory[0], at_most=1.1)
    return bench.finish(
        f"{rates[US]:.1f} pictures a second by {workers} processes, {share:.2f} of what a plain pool does that writes nothing"
    )


if __name__ == "__main__":
    sys.exit(main())
