"""How much faster are all 40 channels of 1024 x 1024 than the best pipeline of OpenCV, SciPy and scikit-image that makes the same layers?

Both get the picture, the previous one, 16 embedding planes at patch pitch, token grids and past fixations, and both end with a
channels-last pyramid of 40 channels with the reducers of the table. The opponent's layers are of the same kind, each by the fastest call
of those libraries that makes it (several were tried where there is a choice); numbers differ where the methods do.
"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench, Call, measure, median, peak_memory
from benchmarks._opponent import opponent
from benchmarks.distance import textured

SIDE = 1024
PATCH = 16
TEXELS = texvlm.pyramid.texel_count(SIDE, SIDE, texvlm.level_count(SIDE, SIDE))
GROUPS = {
    "0-2 picture": [0, 1, 2],
    "3 edge": [3],
    "4 contrast_edge": [4],
    "5-6 passes": [5, 6],
    "7 motion": [7],
    "8 saliency": [8],
    "9-11 positions": [9, 10, 11],
    "12-14 clusters": [12, 13, 14],
    "15-16 previous": [15, 16],
    "17, 37 histories": [17, 37],
    "18-33 embedding": list(range(18, 34)),
    "34 edge_distance": [34],
    "35-36 attention": [35, 36],
    "38 boundary (with its clusters)": [38],
    "39 text": [39],
}


class Inputs:
    """One frame and what comes with it, the same for both sides."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.image = textured(SIDE)
        self.previous = self.image.roll((2, 3), dims=(2, 3))
        grid = SIDE // PATCH
        unit = torch.nn.functional.normalize(torch.randn(1, 16, grid, grid, generator=generator), dim=1)
        self.given = {
            "embedding": unit,
            "attention": torch.rand(1, grid, grid, generator=generator),
            "previous_attention": torch.rand(1, grid, grid, generator=generator),
            "previous_relevance": torch.rand(1, grid, grid, generator=generator),
            "previous_saliency": torch.rand(1, SIDE // 4, SIDE // 4, generator=generator),
        }
        self.points = torch.rand(1, 5, 2, generator=generator)

    def build(self, channels: list[int] | None = None, dtype: torch.dtype | None = None) -> Call:
        def call() -> texvlm.Texture:
            with torch.no_grad():
                return texvlm.build_channels(
                    self.image,
                    self.previous,
                    channels=channels,
                    given=self.given,
                    fixations=self.points,
                    gaze=self.points,
                    dtype=dtype,
                )

        return call


def main() -> int:
    bench = Bench(__doc__)
    inputs = Inputs()
    whole = inputs.build()
    calls: dict[str, Call] = {US: whole, "texvlm, half": inputs.build(dtype=torch.float16)}
    if peer := opponent(inputs.image, inputs.previous, inputs.given, inputs.points):
        calls["OpenCV + SciPy + scikit-image"] = peer
    texture = whole()
    assert not [note for note in texture.meta.values() if str(note).startswith("absent")]
    size = texture.data.nbytes
    times = bench.compare("all 40 channels, all levels", calls, moves=3 * 4 * SIDE**2 * 2 + size)
    if peer:
        bench.gate("faster than the best pipeline of the others", times.ratio("OpenCV + SciPy + scikit-image"), at_least=5)
    peak = peak_memory(whole)
    if peak is not None:
        bench.gate("peak memory over the texture's", peak / size, at_most=1.5)
    half = inputs.build(dtype=torch.float16)().data.nbytes
    bench.gate("half storage over single", half / size, at_most=0.5)
    samples = measure({name: inputs.build(channels) for name, channels in GROUPS.items()}, seconds=4)
    table = {name: 1e3 * median(taken) for name, taken in samples.items()}
    print("\nmilliseconds by channel, each group by itself, with its mips and what it alone needs (flow for 7 is made in 15-16):")
    for name, ms in table.items():
        print(f"  {name:34}{ms:8.2f}")
        bench.figure(f"ms by channel: {name}", ms)
    answer = f"{1e3 * times.median():.0f} ms for 40 channels and all levels of 1024 x 1024"
    if peer:
        answer += f", {times.ratio('OpenCV + SciPy + scikit-image'):.1f} times as fast as the others' best pipeline"
    return bench.finish(answer + (f"; peak memory {peak / size:.2f} of the texture" if peak is not None else ""))


if __name__ == "__main__":
    sys.exit(main())
