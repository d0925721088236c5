"""What do the features of cells cost, beside patches that torch then reduces, and how far are they from a copy of their bytes?"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench

SIDE, CELL = 1024, 16
TERMS = ["rms:edge", "entropy", "mean:saliency"]
SMOOTH = ["mean:red", "variance:green", "max:blue", "rms:edge", "mean:saliency"]
CHANNELS = ["red", "green", "blue", "edge", "saliency"]


def by_patches(texture: texvlm.Texture, centres: torch.Tensor, lod: float, samples: int) -> torch.Tensor:
    """The terms of SMOOTH, of patches of all channels."""
    red, green, blue, edge, saliency = texture.patches(centres, lod, size=samples).flatten(3).unbind(2)
    return torch.stack(
        [red.mean(-1), green.var(-1, correction=0), blue.amax(-1), edge.square().mean(-1).sqrt(), saliency.mean(-1)], -1
    )


def main() -> int:
    bench = Bench(__doc__)
    texture = texvlm.build_channels(torch.rand(1, 3, SIDE, SIDE), channels=CHANNELS)
    columns = SIDE // CELL
    cells = torch.arange(columns * columns)[None]
    centres = (torch.stack([cells % columns, cells // columns], -1) + 0.5) / columns
    texel = 4 * len(CHANNELS)
    answers = []
    for count, samples in ((4096, 1), (2000, 4), (500, 16), (4096, 16)):
        some = cells[:, :count]
        with torch.no_grad():
            calls = {
                US: lambda some=some, samples=samples: texvlm.cell_features(texture, some, SMOOTH, CELL, samples),
                "of a picture's salience": lambda some=some, samples=samples: texvlm.cell_features(
                    texture, some, TERMS, CELL, samples
                ),
                "patches, then torch": lambda n=count, s=samples: by_patches(texture, centres[:, :n], 4 - s.bit_length() + 1, s),
            }
            title = f"{count} cells x {samples * samples} samples"
            times = bench.compare(title, calls, moves=count * samples * samples * texel)
        bench.gate(f"{title}: faster than patches and torch", times.ratio("patches, then torch"), at_least=1)
        answers.append(f"{1e3 * times.median():.2f} ms ({title}, {times.ratio('patches, then torch'):.1f} times patches)")
    learning = texture.replace(texture.data.clone().requires_grad_())
    few = cells[:, ::8]

    def train(features: torch.Tensor) -> None:
        learning.data.grad = None
        features.sum().backward()

    calls = {
        US: lambda: train(texvlm.cell_features(learning, few, SMOOTH, CELL)),
        "patches, then torch": lambda: train(by_patches(learning, centres[:, ::8], 0.0, CELL)),
    }
    times = bench.compare("512 cells of every pixel, forward and backward", calls)
    bench.gate("forward and backward against patches and torch", times.ratio("patches, then torch"), at_least=0.8)
    return bench.finish(f"{'; '.join(answers)}; with gradients {times.ratio('patches, then torch'):.1f} times as fast")


if __name__ == "__main__":
    sys.exit(main())
