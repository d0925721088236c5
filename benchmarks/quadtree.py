"""At equal tokens, is a picture nearer to itself at mixed levels than at one level, foveated or downscaled; what does allotting cost?

Photographs of scikit-image and scikit-learn, k tokens of 16 x 16 samples over the 8 x coarse picture, which counts for all: the total is
that of "downscaled", once with antialiased cubic filters (the best there is to be had of torch) and once by area and bilinear. What is
shown is enlarged octave by octave, cubically. The fovea looks at the centre; its tokens lie over the same coarse picture.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import texvlm
from benchmarks._harness import US, Bench
from benchmarks._photographs import photographs
from benchmarks._reading import COARSE, blocks_of, coarse_tokens, downscaled, shown
from texvlm.quadtree import tree_shapes

CELL = 16
BUDGETS = (137, 273)
MIXED, DETAIL = "multiscale", "multiscale, detail alone"


def by_area(image: torch.Tensor, tokens: int) -> torch.Tensor:
    """The whole picture with as many pixels as these tokens have samples, by area, and bilinearly to its size again."""
    height, width = image.shape[1:]
    by = min(1.0, (tokens * CELL * CELL / (height * width)) ** 0.5)
    small = F.interpolate(image[None].float(), (int(height * by), int(width * by)), mode="area")
    return F.interpolate(small, (height, width), mode="bilinear")[0]


def foveated(image: torch.Tensor) -> torch.Tensor:
    """What 273 tokens around the centre show, over the coarse picture: from coarse tokens to fine ones."""
    height, width = image.shape[1:]
    layout = texvlm.FoveaLayout(e0=80.0 * min(height, width) / 1024)
    tokens = texvlm.sample_foveated(texvlm.Texture(image), torch.tensor([[[0.5, 0.5]]]), layout)
    canvas = shown(image, []).float() / 255
    order = tokens.lod[0, 0].argsort(descending=True)
    for i in order.tolist():
        side = max(1, round(layout.patch * 2 ** float(tokens.lod[0, 0, i])))
        y, x = (round(float(tokens.uv[0, 0, i, a]) * n - side / 2) for a, n in ((1, height), (0, width)))
        patch = F.interpolate(tokens.patches[0, 0, i][None], (side, side), mode="bicubic")[0]
        top, left, bottom, right = max(0, y), max(0, x), min(height, y + side), min(width, x + side)
        if top < bottom and left < right:
            canvas[:, top:bottom, left:right] = patch[:, top - y : bottom - y, left - x : right - x]
    return canvas.clamp(0, 1) * 255


def error(seen: torch.Tensor, image: torch.Tensor) -> float:
    return float((seen.float() - image.float()).square().mean())


def errors(image: torch.Tensor, k: int) -> dict[str, float]:
    """Mean squared errors of 8-bit values, by what is shown."""
    total = k + max(1, image[0].numel() // 4**COARSE // CELL**2)
    found = {
        MIXED: shown(image, blocks_of(texvlm.select(image, k, CELL, "multiscale"))),
        DETAIL: shown(image, blocks_of(texvlm.select(image, k, CELL, "multiscale", weights={"text": 0.0}))),
        "salience, one level": shown(image, blocks_of(texvlm.select(image, k, CELL))),
        "downscaled, cubic": downscaled(image, total, CELL),
        "downscaled, by area": by_area(image, total),
    }
    if k == 273:
        found["foveated"] = foveated(image)
    return {name: error(seen, image) for name, seen in found.items()}


def main() -> int:
    bench = Bench(__doc__)
    answers = []
    for k in BUDGETS:
        rows = {name: errors(image, k) for name, image in photographs()}
        bench.figure(f"mean squared errors, {k} tokens", rows)
        names = list(next(iter(rows.values())))
        print(f"\n{k} tokens: mean squared error of 8-bit values\n  {'':22}" + "".join(f"{name:>26}" for name in names))
        for picture, row in rows.items():
            print(f"  {picture:22}" + "".join(f"{row[name]:26.1f}" for name in names))
        for peer in names[2:]:
            ratios = [row[MIXED] / row[peer] for row in rows.values()]
            better, mean = sum(r < 1 for r in ratios), sum(ratios) / len(ratios)
            print(f"  against {peer}: lower on {better} of {len(ratios)}, in the mean {mean:.2f} times")
            bench.gate(
                f"{k} tokens, against {peer}: share of the photographs with less error", better / len(ratios), at_least=0.9
            )
            bench.gate(f"{k} tokens, against {peer}: mean ratio of errors", mean, at_most=0.67)
            if k == 273:
                answers.append(f"{mean:.2f} of {peer}'s error")
    values = [torch.rand(1, h, w) * 2.0**level for level, (h, w) in enumerate(tree_shapes(64, 64, 4))]
    slowest = 0.0
    for k in (137, 273, 1024):
        times = bench.compare(f"cut of 4096 cells x 4 levels, {k} tokens", {US: lambda k=k: texvlm.quadtree_cut(values, k)})
        slowest = max(slowest, 1e3 * times.median())
    bench.gate("allotting, milliseconds", slowest, at_most=1)
    image = torch.rand(1, 3, 2048, 2048)
    bench.compare("select, multiscale, 2048 x 2048, cells of 32", {US: lambda: texvlm.select(image, 273, 2 * CELL, "multiscale")})
    assert coarse_tokens(1024, CELL) == 64
    return bench.finish(f"at 273 tokens mixed levels leave {', '.join(answers)}; allotting takes {slowest:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
