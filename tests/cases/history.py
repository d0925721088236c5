import torch

from cases import Bad, Case, coords, rand

WIDE = (torch.float32, torch.float64)


def splat(h, w, count=3, batch=2, sigma=0.2, base=False, weight=0.3):
    def make(dtype, g):
        points, weights = rand(g, batch, count, 2, dtype=coords(dtype)), rand(g, batch, count, dtype=coords(dtype))
        under = rand(g, batch, h, w, dtype=coords(dtype)) * 0.5 if base else None
        return points, (weights + 0.1) * weight, sigma, h, w, 0.7, under

    return make


def odd_points(dtype, g):
    points, weights, *rest = splat(6, 9, count=5)(dtype, g)
    points[0, 1, 0], weights[1, 2], weights[0, 4] = float("nan"), float("inf"), -1.0
    points[1, 0] = torch.tensor([1.3, -0.4])
    return points, weights, *rest


def grid(h, w, height, width, batch=2):
    return lambda dtype, g: (rand(g, batch, h, w, dtype=dtype), height, width)


def strided(dtype, g):
    return rand(g, 2, 10, 5, dtype=dtype).transpose(1, 2)[..., ::2], 11, 13


CASES = [
    Case("gaussian_splat", "7x9", splat(7, 9), grads=(0, 1), dtypes=WIDE, atol=1e-6, inductor=True),
    Case("gaussian_splat", "base", splat(5, 8, base=True), grads=(0, 1, 6), dtypes=WIDE, atol=1e-6),
    Case("gaussian_splat", "cut-off-at-1", splat(9, 9, count=6, weight=1.0, base=True), grads=(0, 1, 6), dtypes=WIDE, atol=1e-6),
    Case("gaussian_splat", "small-sigma", splat(40, 33, sigma=0.02), dtypes=WIDE, atol=1e-6),
    Case("gaussian_splat", "odd-points", odd_points, dtypes=WIDE, atol=1e-6),
    Case("gaussian_splat", "1x20", splat(1, 20), grads=(0, 1), dtypes=WIDE, atol=1e-6),
    Case("gaussian_splat", "no-points", splat(4, 5, count=0, base=True), grads=(6,), dtypes=WIDE, atol=1e-6),
    Case("gaussian_splat", "empty-batch", splat(4, 5, batch=0), dtypes=WIDE, atol=1e-6),
    Case("enlarge", "3x4-to-9x10", grid(3, 4, 9, 10), grads=(0,), atol=1e-6, inductor=True),
    Case("enlarge", "1x1-to-3x5", grid(1, 1, 3, 5), grads=(0,), atol=1e-6),
    Case("enlarge", "1x3-to-41x50", grid(1, 3, 41, 50), grads=(0,), atol=1e-6),  # hundreds of pixels read a texel
    Case("enlarge", "7x6-to-3x4", grid(7, 6, 3, 4), grads=(0,), atol=1e-6),
    Case("enlarge", "strided", strided, grads=(0,), atol=1e-6),
    Case("enlarge", "empty-batch", grid(3, 4, 6, 8, batch=0), atol=1e-6),
]


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


BAD = [
    Bad("gaussian_splat", "points", lambda: (zeros(1, 3), zeros(1, 3), 0.1, 4, 4), r"points must be \[B, P, 2\].*got \[1, 3\]"),
    Bad(
        "gaussian_splat",
        "weights",
        lambda: (zeros(1, 3, 2), zeros(1, 2), 0.1, 4, 4),
        r"weights must be \[B, P\].*got \[1, 2\]",
    ),
    Bad("gaussian_splat", "sigma", lambda: (zeros(1, 3, 2), zeros(1, 3), 0.0, 4, 4), "sigma must be above 0"),
    Bad("gaussian_splat", "size", lambda: (zeros(1, 3, 2), zeros(1, 3), 0.1, 0, 4), "height and width must be at least 1"),
    Bad(
        "gaussian_splat",
        "base",
        lambda: (zeros(1, 3, 2), zeros(1, 3), 0.1, 4, 4, 1.0, zeros(1, 4, 5)),
        r"base must be \[B, H, W\].*got \[1, 4, 5\]",
    ),
    Bad("enlarge", "rank", lambda: (zeros(3, 3), 4, 4), r"planes must be \[B, h, w\].*got \[3, 3\]"),
    Bad("enlarge", "size", lambda: (zeros(1, 3, 3), 4, 0), "height and width must be at least 1"),
]
