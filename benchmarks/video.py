"""What does a frame of a film cost a stream, beside a full recompute of its channels and its selection?

720p films that differ in what changes from frame to frame: `build_channels` of the 12 channels that a stream keeps exact and `select` of
their texture, against `VideoStream.update` and `select`, the same frames in turn; all 40 channels with relevance; frames a second with
decoding; memory over 2000 frames. The selections are compared too: they must be the same.
"""

from __future__ import annotations

import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import texvlm
from benchmarks._harness import US, Bench
from tests import films

SIZE = (720, 1280)
CHANNELS = [channel.name for channel in texvlm.CHANNELS if channel.index < 12]
GATES = {"moving": 6.5, "typing": 9.0, "scrolling": 2.0, "still": 40.0, "pan": None, "fade": None, "noisy": None}
FULL = "full recompute"


def forth_and_back(frames: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The film without end, no cut in it."""
    return itertools.cycle([*frames, *frames[-2:0:-1]])


def whole_frames(bench: Bench, name: str, count: int, gate: float | None) -> float:
    """A frame of this film by a stream and by a full recompute. Returns the ratio."""
    frames = list(films.film(name, count, SIZE))
    stream = texvlm.VideoStream(CHANNELS)
    ours, theirs = forth_and_back(frames), forth_and_back(frames)
    dirty: list[float] = []
    last = [frames[0]]

    def streamed() -> texvlm.Selection:
        stream.update(next(ours))
        dirty.append(stream.stats.dirty / stream.stats.tiles)
        return stream.select()

    def recomputed() -> texvlm.Selection:
        frame = next(theirs)
        texture = texvlm.build_channels(frame, last[0], channels=CHANNELS, flow=None)
        last[0] = frame
        return texvlm.select(texture)

    for _ in range(3):
        assert torch.equal(streamed().indices, recomputed().indices)
    times = bench.compare(f"{name}, 720p", {US: streamed, FULL: recomputed}, seconds=6)
    changed = sum(dirty) / len(dirty)
    ratio = times.ratio(FULL)
    print(f"  {changed:.3f} of the tiles change; stages of the last frame, ms: {stages(stream)}")
    bench.figure(name, {"dirty": changed, "stages_ms": dict(stream.stats.milliseconds)})
    if gate is not None:
        bench.gate(f"{name}: times as fast as a full recompute", ratio, at_least=gate)
    return ratio


def stages(stream: texvlm.VideoStream) -> str:
    """Milliseconds by stage."""
    return ", ".join(f"{stage} {ms:.2f}" for stage, ms in stream.stats.milliseconds.items())


def all_forty(bench: Bench, count: int) -> None:
    """All channels with relevance to a query: what a stream brings up to date, and build_channels of everything."""
    frames = list(films.film("moving", count, SIZE))
    embedding = texvlm.DigitsEmbedding()
    stream = texvlm.VideoStream(embedding=embedding, query="seven")
    ours, theirs = forth_and_back(frames), forth_and_back(frames)
    last = [texvlm.build_channels(frames[0], query="seven", embedding=embedding)]

    def streamed() -> None:
        stream.update(next(ours))

    def with_relevance() -> None:
        stream.update(next(ours))
        stream.relevance()

    def recomputed() -> None:
        last[0] = texvlm.build_channels(next(theirs), last[0], query="seven", embedding=embedding)

    for _ in range(3):
        streamed()
    calls = {US: streamed, "with its relevance read": with_relevance, FULL: recomputed}
    times = bench.compare("all 40 channels, moving, 720p", calls, seconds=12)
    print(f"  stages of the last frame, ms: {stages(stream)}")
    bench.gate("40 channels: times as fast as build_channels(frame, previous=texture)", times.ratio(FULL), at_least=20)


def with_decoding(bench: Bench, name: str, frames: int, gate: float) -> None:
    """Frames a second, read from an H.264 file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        films.encode(path, (frame.permute(1, 2, 0).numpy() for frame in films.film(name, frames, SIZE)))
        stream, start, seen = texvlm.VideoStream(CHANNELS), 0.0, 0
        for frame in texvlm.video.frames(path):
            stream.update(frame)
            stream.select()
            seen += 1
            start = start or time.perf_counter()  # the first frame, which computes everything, is not counted
    rate = (seen - 1) / (time.perf_counter() - start)
    bench.gate(f"{name}: frames a second with decoding, 720p", rate, at_least=gate)


def memory(bench: Bench, frames: int) -> None:
    """Growth of the resident memory, after the first tenth."""
    source = forth_and_back(list(films.film("moving", 20, (360, 640))))
    stream = texvlm.VideoStream(CHANNELS)
    begin = 0
    for t in range(frames):
        stream.update(next(source))
        stream.select()
        if t == frames // 10:
            begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) / 1024
    bench.gate(f"growth of the memory over {frames} frames, MB", grown, at_most=8)


def main() -> int:
    bench = Bench(__doc__)
    count = 9 if bench.quick else 25
    ratios = {name: whole_frames(bench, name, count, gate) for name, gate in GATES.items()}
    all_forty(bench, count)
    for name, gate in (("camera", 60), ("pan", 30)):
        with_decoding(bench, name, 30 if bench.quick else 150, gate)
    memory(bench, 200 if bench.quick else 2000)
    return bench.finish(
        "times as fast as a full recompute: " + ", ".join(f"{name} {ratio:.1f}" for name, ratio in ratios.items())
    )


if __name__ == "__main__":
    sys.exit(main())
