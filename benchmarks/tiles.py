"""Does finding what changed in a frame, and storing it, take at most as long as `cv2.absdiff` of both frames alone?

uint8 frames of 720p and 1080p, planar (NCHW) and as cameras give them (HWC), at 1 and 2 threads: nothing, 3 % (one blob) and all of it has
changed since the frame before. Frames come from a ring that no cache holds, or each in memory just written, as a decoder leaves it.
absdiff finds differences only: what follows it (grey, threshold, area, a copy) is in no row but the one that says so.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch

import texvlm
from benchmarks._harness import US, Bench, Times

SIZES = {"720p": (720, 1280), "1080p": (1080, 1920)}
CHANGED = {"nothing": 0.0, "3 %": 0.03, "all": 1.0}
RING, TILE = 12, 32  # frames of a ring: 33 MB at 720p


def frames(size: tuple[int, int], share: float, is_planar: bool) -> list[torch.Tensor]:
    """A ring of frames uint8 [1, 3, H, W], of which a blob of this share differs from one to the next."""
    height, width = size
    still = torch.randint(200, (1, 3, height, width), dtype=torch.uint8)
    tall, wide = (round(n * share**0.5) for n in size)
    ring = []
    for i in range(RING):
        frame = still.clone()
        top, left = (height - tall) // 2, (width - wide) // 2
        frame[..., top : top + tall, left : left + wide] += 3 * (i + 1)
        ring.append(frame if is_planar else frame.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
    return ring


def as_array(frame: torch.Tensor):
    """What OpenCV is given: the same memory, as an image of one channel where it is planar."""
    values = frame[0].permute(1, 2, 0) if frame.stride(1) == 1 else frame[0].flatten(0, 1)
    return values.numpy()


def in_turn(call: Callable[[torch.Tensor], object], ring: list[torch.Tensor], fresh: bool) -> Callable[[], object]:
    """Calls with one frame after another, or with a copy of it that was just made."""
    at, own = [0], torch.empty_like(ring[0])

    def run() -> object:
        at[0] = (at[0] + 1) % len(ring)
        return call(own.copy_(ring[at[0]]) if fresh else ring[at[0]])

    return run


def chain(frame, stored):
    """What people write with OpenCV to know where something moved."""
    import cv2

    grey = cv2.cvtColor(cv2.absdiff(frame, stored), cv2.COLOR_RGB2GRAY)
    mask = cv2.threshold(grey, 0, 255, cv2.THRESH_BINARY)[1]
    return cv2.resize(mask, (grey.shape[1] // TILE, grey.shape[0] // TILE), interpolation=cv2.INTER_AREA)


def table(bench: Bench, title: str, ring: list[torch.Tensor], fresh: bool = False, others: bool = False) -> Times:
    """We and absdiff alone, since what runs before a call decides what its caches hold; or beside these the others."""
    import cv2

    stored = {name: ring[0].clone(memory_format=torch.preserve_format) for name in ("ours", "mean", "cv2")}
    array = as_array(stored["cv2"])
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        US: lambda f: texvlm.dirty_tiles(f, stored["ours"], TILE),
        "cv2.absdiff": lambda f: cv2.absdiff(as_array(f), array),
    }
    if others:
        calls["texvlm, means of blocks over 2"] = lambda f: texvlm.dirty_tiles(f, stored["mean"], TILE, 2 / 255, "mean")
        calls["absdiff, grey, threshold, area"] = lambda f: chain(as_array(f), array)
    if fresh:
        calls["(the frame's copy alone)"] = lambda f: f
    return bench.compare(title, {name: in_turn(call, ring, fresh) for name, call in calls.items()}, seconds=1.5)


def main() -> int:
    bench = Bench(__doc__)
    try:
        import cv2
    except ImportError:
        return bench.finish("OpenCV is not installed (pip install opencv-python-headless): nothing to compare with")
    worst: dict[str, float] = {}
    for threads in (bench.args.threads,) if bench.args.threads else (1, 2):
        torch.set_num_threads(threads)
        cv2.setNumThreads(threads)
        for size, layout, changed in itertools.product(SIZES, ("planar", "packed"), CHANGED):
            title = f"{size}, {layout}, {changed} changed, {threads} threads"
            of = 1 / table(bench, title, frames(SIZES[size], CHANGED[changed], layout == "planar")).ratio("cv2.absdiff")
            bench.gate(f"{title}: of the time of cv2.absdiff", of, at_most=1.0)
            worst[changed] = max(worst.get(changed, 0.0), of)
        ring = frames(SIZES["720p"], CHANGED["3 %"], is_planar=False)
        table(bench, f"720p, packed, 3 % changed, {threads} threads, beside others", ring, others=True)
        fresh = table(bench, f"720p, packed, 3 % changed, {threads} threads, each frame just written", ring, fresh=True)
        copy = fresh.median("(the frame's copy alone)")
        of = (fresh.median() - copy) / (fresh.median("cv2.absdiff") - copy)
        bench.gate(f"just written, {threads} threads: of the time of cv2.absdiff", of, at_most=1.0)
    bench.figure("of the time of cv2.absdiff, at most", worst)
    shares = ", ".join(f"{of:.2f} with {changed} changed" for changed, of in worst.items())
    return bench.finish(f"of the time of cv2.absdiff, at most: {shares}, copies included")


if __name__ == "__main__":
    sys.exit(main())
