"""How long does `select` take on 1024 x 1024, stage by stage, against a copy of the bytes of each stage?

And the whole of it against the plain-PyTorch reference, its peak memory, and `topk` against `torch.topk`.
"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench, peak_memory
from texvlm import reference
from texvlm.cascade import SCORE_CHANNELS, SCORE_WEIGHTS, STAGE_SAMPLES, kept_cells

SIDE, CELL, K = 1024, 16, 273
MINIMAL_CHANNELS = 13
FLOAT, INDEX = 4, 8  # bytes


def textured(side: int) -> torch.Tensor:
    """A random picture [1, 3, side, side] with detail at all scales."""
    total = torch.zeros(1, 3, side, side)
    for octave in range(8):
        noise = torch.rand(1, 3, side >> octave, side >> octave)
        total += torch.nn.functional.interpolate(noise, (side, side), mode="bilinear") * 2.0 ** (octave - 8)
    return total / total.amax()


def stages(bench: Bench, image: torch.Tensor, texture: texvlm.Texture) -> None:
    """Each stage by itself, in the order of the pipeline."""
    data, levels = texture.data, texture.levels
    table = list(reference.cascade.SCORE_CHANNELS)
    shape = (SIDE, SIDE, list(texture.reducer), levels)
    channels, weights = [texture.index(name) for name in SCORE_CHANNELS], list(SCORE_WEIGHTS.values())
    texel = FLOAT * data.shape[2]
    level0 = texel * SIDE * SIDE
    calls = {US: lambda: torch.ops.texvlm.build_channels(image, table, 1, [], [])}
    bench.compare("channels (5 planes of level 0)", calls, moves=FLOAT * image.numel() + level0, fresh=True)
    calls = {US: lambda: torch.ops.texvlm.update_mipmaps(data, *shape)}
    bench.compare("pyramid (levels above 0)", calls, moves=texel * data.shape[1])

    total = (SIDE // CELL) ** 2
    cells = torch.arange(total)[None]
    for name, samples, kept in zip(("coarse", "middle", "fine"), (*STAGE_SAMPLES, CELL), kept_cells(K, total)):

        def score(cells: torch.Tensor = cells, samples: int = samples) -> torch.Tensor:
            return torch.ops.texvlm.score_cells(data, cells, *shape, CELL, samples, channels, weights)

        count = cells.shape[1]
        moves = count * (samples * samples * texel + INDEX + FLOAT)
        bench.compare(f"{name} stage: {count} cells x {samples * samples} samples", {US: score}, moves=moves)
        scores = score()
        calls = {
            US: lambda s=scores, n=kept: torch.ops.texvlm.select_topk(s, n),
            "torch.topk": lambda s=scores, n=kept: torch.topk(s, n),
        }
        moves = count * FLOAT + kept * (FLOAT + INDEX)
        bench.compare(f"topk: {kept} of {count} (torch's order of ties is not defined)", calls, moves=moves)
        cells = cells.gather(1, texvlm.topk(scores, kept)[1]).sort(dim=1).values


def main() -> int:
    bench = Bench(__doc__)
    image = textured(SIDE)
    texture = texvlm.build_channels(image, channels=SCORE_CHANNELS)
    scores = torch.rand(1, 4096)
    with torch.no_grad():
        stages(bench, image, texture)
        calls = {US: lambda: texvlm.topk(scores, K), "torch.topk": lambda: torch.topk(scores, K)}
        times = bench.compare("topk: 273 of 4096 random scores", calls)
        bench.gate("topk against torch.topk, which keeps no order of ties", 1 / times.ratio("torch.topk"), at_most=2)
        cascade = bench.compare("select from a texture", {US: lambda: texvlm.select(texture, K, CELL)})
        bench.gate("three stages, milliseconds", 1e3 * cascade.median(), at_most=1.5)

        data = texture.data
        levels_bytes = FLOAT * data.numel()
        level0_bytes = FLOAT * data.shape[2] * SIDE * SIDE
        moves = FLOAT * image.numel() + level0_bytes + levels_bytes
        calls = {
            US: lambda: texvlm.select(image, K, CELL),
            "reference": lambda: reference.select(image, K, CELL),
        }
        whole = bench.compare("select from a picture", calls, moves=moves, fresh=True)
        bench.gate("select: faster than the reference", whole.ratio("reference"), at_least=5)

        same = torch.equal(texvlm.select(image, K, CELL).indices, reference.select(image, K, CELL).indices)
        print(f"  the same {K} cells in the same order as the reference: {'yes' if same else 'no'}")
        bench.figure("same cells as the reference", same)
        peak = peak_memory(lambda: texvlm.select(image, K, CELL))
        minimal = MINIMAL_CHANNELS * FLOAT * data.shape[1]
        if peak is None:
            print("  peak memory: this system does not tell")
        else:
            print(f"  peak memory of select: {peak / 1e6:.1f} MB; 13 channels: {minimal / 1e6:.1f} MB")
            bench.figure("peak_bytes", peak)
            bench.gate("peak memory over the 13-channel texture", peak / minimal, at_most=1.5)
    return bench.finish(
        f"select takes {1e3 * whole.median():.2f} ms ({1e3 * cascade.median():.2f} of them in the stages), "
        f"{whole.ratio('reference'):.0f} times less than the reference and {whole.against_copy:.2f} times "
        "the copy of its bytes."
    )


if __name__ == "__main__":
    sys.exit(main())
