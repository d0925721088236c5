"""Does the input of a training loop keep up with the model, and how many cores does a rate of pictures need?

A loader of 1024² JPEGs feeds `texvlm.data.Select` (273 of 4096 cells as uint8 patches) in worker processes, one for each core but at least
two. The consumer is of fixed speed: it sleeps for as long as a model's step would take. It is busy while it sleeps, and starves while it
waits for a batch. The first epoch, without a consumer, says what the workers can do at most; then the consumer asks for 0.6 of that, and
for 2 of it, where half the time must be lost: so the measure is one. Before, the parts in one thread, as CPU time. Cores are told from the
CPU time of the workers, what hands the samples over included: others on the machine hardly change that, as they do the rest.
"""

from __future__ import annotations

import io
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader

import texvlm
from benchmarks._harness import Bench, machine, median
from benchmarks._photographs import SCENES, photographs
from texvlm.data import Select, decode, initialise_worker
from texvlm.data.decoding import JPEG_DECODERS, jpeg_decoder

SIDE, K, BATCH = 1024, 273, 8
ENOUGH, TOO_MUCH = 0.6, 2.0
"""What the consumer asks for, over the most that the workers can do."""


class Files:
    """A Dataset of JPEGs, held in memory: what a disk adds is not the question."""

    def __init__(self, count: int) -> None:
        self.select = Select(K, dtype=torch.uint8)
        self.files = []
        for _, image in photographs(SCENES):
            buffer = io.BytesIO()
            Image.fromarray(image.permute(1, 2, 0).numpy()).resize((SIDE, SIDE)).save(buffer, "JPEG", quality=90)
            self.files.append(buffer.getvalue())
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.select(self.files[number % len(self.files)])


def cpu_milliseconds(call: Callable[[bytes], Any], files: list[bytes], rounds: int) -> float:
    """The median of this process's CPU time for one file."""
    samples = []
    for content in [*files[:2], *(files * rounds)]:
        start = time.process_time()
        call(content)
        samples.append(1e3 * (time.process_time() - start))
    return median(samples[2:])


def epoch(files: Files, workers: int, step: float) -> tuple[float, float, float]:
    """Seconds of an epoch, which share of them a consumer of `step` seconds a batch was busy, and the workers' CPU seconds a picture.

    The first batches, for which the workers start and which lie ready then, count for the last only.
    """
    before = children_seconds()
    loader = DataLoader(files, BATCH, num_workers=workers, worker_init_fn=initialise_worker)
    batches = iter(loader)
    for _ in range(2 * workers):  # as many are fetched ahead
        next(batches)
    start, busy = time.perf_counter(), 0.0
    for _ in batches:
        begun = time.perf_counter()
        time.sleep(step)
        busy += time.perf_counter() - begun
    whole = time.perf_counter() - start
    del batches, loader  # the workers end
    return whole, busy / whole, (children_seconds() - before) / len(files)


def children_seconds() -> float:
    """CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    bench = Bench(__doc__)
    cores = machine()["cores"]
    workers = max(2, cores)
    batches = (10 if bench.quick else 40) * workers
    files = Files(BATCH * (batches + 2 * workers))

    before = torch.get_num_threads()
    initialise_worker()
    rounds = 1 if bench.quick else 4
    there = [name for name in JPEG_DECODERS if _loads(name)]
    parts: dict[str, Callable[[bytes], Any]] = {f"decode, {name}": partial(decode, decoder=name) for name in (*there, "pillow")}
    images = {content: decode(content).contiguous() for content in files.files}
    chosen = {content: texvlm.select(image, K).indices[0] for content, image in images.items()}
    parts["select"] = lambda content: texvlm.select(images[content], K)
    parts["pack"] = lambda content: texvlm.pack_cells(images[content], chosen[content], patch=16, merge=1, temporal=1)
    parts["Select, all of it"] = files.select
    print(f"\nCPU ms of a picture of {SIDE}², one thread")
    costs = {name: cpu_milliseconds(call, files.files, rounds) for name, call in parts.items()}
    for name, cost in costs.items():
        print(f"  {name:28} {cost:8.2f}")
    torch.set_num_threads(before)
    bench.figure("cpu_ms", costs)

    whole, _, cpu = epoch(files, workers, 0.0)
    most = BATCH * batches / whole
    print(f"\n{workers} workers on {cores} cores: at most {most:.1f} pictures a second, {1e3 * cpu:.1f} ms of CPU each")
    shares = {}
    for asked in (ENOUGH, TOO_MUCH):
        whole, shares[asked], _ = epoch(files, workers, BATCH / (asked * most))
        rate = BATCH * batches / whole
        print(
            f"  a consumer of {asked * most:6.1f} a second got {rate:6.1f} and was busy {100 * shares[asked]:.1f} % of the time"
        )
    bench.figure("loader", {"workers": workers, "most_per_second": most, "busy": {str(k): v for k, v in shares.items()}})
    bench.gate(f"busy share at {ENOUGH} of what the workers can do", shares[ENOUGH], at_least=0.95)
    bench.gate(f"busy share at {TOO_MUCH:g} times as much: the measure sees starvation", shares[TOO_MUCH], at_most=0.75)

    bench.figure("cores_for_1000_per_second", 1000 * cpu)
    return bench.finish(
        f"busy {100 * shares[ENOUGH]:.1f} % of the time where the cores suffice; a picture of {SIDE}² takes {1e3 * cpu:.0f} ms of a core: "
        f"100 of them a second need {100 * cpu:.1f} cores, 1000 need {1000 * cpu:.0f}"
    )


def _loads(name: str) -> bool:
    try:
        return jpeg_decoder(name) is not None
    except ImportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
