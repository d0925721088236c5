"""What do Gaussians at past fixations cost, against SciPy's and torch's way?"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import interpolate

import texvlm
from benchmarks._harness import US, Bench
from texvlm import reference

HEIGHT, WIDTH, POINTS, SIGMA = 1080, 1920, 32, 0.05


def main() -> int:
    bench = Bench(__doc__)
    points, weights = torch.rand(1, POINTS, 2), torch.rand(1, POINTS) * 0.3
    y, x = torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5

    def separable() -> torch.Tensor:
        """The best torch way: two tables and a product of matrices."""
        scale = -1 / (2 * (SIGMA * WIDTH) ** 2)
        along = torch.exp(scale * (x - points[0, :, :1] * WIDTH) ** 2)
        down = torch.exp(scale * (y - points[0, :, 1:] * HEIGHT) ** 2) * weights[0, :, None]
        return (down.T @ along).clamp(max=1)

    calls = {
        US: lambda: texvlm.gaussian_splat(points, weights, SIGMA, HEIGHT, WIDTH),
        "torch, separable": separable,
    }
    try:
        from scipy import ndimage

        def blurred() -> object:
            impulses = torch.zeros(HEIGHT, WIDTH)
            impulses[(points[0, :, 1] * HEIGHT).long(), (points[0, :, 0] * WIDTH).long()] = weights[0]
            return ndimage.gaussian_filter(impulses.numpy(), SIGMA * WIDTH)

        calls["SciPy gaussian_filter"] = blurred
    except ImportError:
        print("SciPy is not installed: its row is left out (pip install scipy)")
    times = bench.compare(f"{POINTS} Gaussians in {WIDTH} x {HEIGHT}", calls, moves=4 * HEIGHT * WIDTH, fresh=True)
    if "SciPy gaussian_filter" in calls:
        bench.gate("times as fast as SciPy", times.ratio("SciPy gaussian_filter"), at_least=5)
    bench.gate("times as fast as torch", times.ratio("torch, separable"), at_least=0.8)
    small = bench.compare(
        f"{POINTS} Gaussians in 64 x 64",
        {
            US: lambda: texvlm.gaussian_splat(points, weights, SIGMA, 64, 64),
            "reference": lambda: reference.gaussian_splat(points, weights, SIGMA, 64, 64),
        },
    )
    grid = torch.rand(1, 27, 48)
    large = bench.compare(
        f"attention of 48 x 27 tokens to {WIDTH} x {HEIGHT}",
        {
            US: lambda: texvlm.attention_map(grid, HEIGHT, WIDTH),
            "torch interpolate": lambda: interpolate(grid[:, None], (HEIGHT, WIDTH), mode="bilinear", align_corners=False),
        },
        moves=4 * HEIGHT * WIDTH,
        fresh=True,
    )
    bench.gate("enlarging, times as fast as torch", large.ratio("torch interpolate"), at_least=0.8)
    return bench.finish(
        f"{1e3 * times.median():.1f} ms for {POINTS} Gaussians at 1080p, {times.ratio('torch, separable'):.1f} times as fast as torch's "
        f"product of matrices; {small.ratio('reference'):.0f} times as fast as the reference at 64 x 64"
    )


if __name__ == "__main__":
    sys.exit(main())
