import torch

from cases import Bad, Case, rand


def changed(h, w, tile=8, channels=3, batch=2, threshold=0.0, noise=0.0, measure="largest"):
    """A frame with noise, and here and there a thing that moved, beside what is stored; both strided as `torch.rand` has it."""

    def make(dtype, g):
        stored = rand(g, batch, channels, h, w)
        frame = stored + noise * (rand(g, *stored.shape) - 0.5)
        for b in range(batch):
            for y, x in ((h // 2, w // 3), (0, w - 1)):
                frame[b, b % channels, y : y + 5, x : x + 5] += 0.3
        return frame.to(dtype), stored.to(dtype), tile, threshold, measure

    return make


def uint8(measure, threshold):
    """Differences of up to 2 steps beside larger ones."""

    def make(dtype, g):
        frame, stored, tile, *_ = changed(41, 70, 16)(torch.float32, g)
        stored = (stored * 180 + 4).to(torch.uint8)
        frame = (
            stored
            + torch.randint(-2, 3, stored.shape, generator=g).to(torch.uint8)
            + ((frame - 0.3).round() * 40).to(torch.uint8)
        )
        frame[0, 0, 20:30, 30:40] += 60
        return frame, stored, tile, threshold, measure

    return make


def packed(of):
    """Pixel after pixel in memory."""

    def make(dtype, g):
        frame, stored, *rest = of(dtype, g)
        return (*(t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for t in (frame, stored)), *rest)

    return make


def strided(dtype, g):
    """A frame that is no run of memory in any dimension, and another order in the store."""
    frame, stored, *rest = changed(24, 36)(dtype, g)
    wide = torch.zeros(2, 5, 36, 48, dtype=dtype)
    wide[:, :3, :, ::2] = frame.transpose(2, 3)
    return wide[:, :3, :, ::2].transpose(2, 3), stored.transpose(2, 3).contiguous().transpose(2, 3), *rest


def not_finite(dtype, g):
    """What is not finite counts as 0: equal to 0 and to itself, not to 1."""
    nan, inf = float("nan"), float("inf")
    frame, stored = torch.zeros(2, 1, 3, 8, 40, dtype=dtype)
    for x, (a, b) in enumerate(((nan, nan), (nan, 0.0), (inf, -inf), (0.0, inf), (nan, 1.0))):
        frame[0, 1, 3, 8 * x + 2], stored[0, 1, 3, 8 * x + 2] = a, b
    return frame, stored, 8


MANY = {"mutates": (1,)}
CASES = [
    Case("dirty_tiles", "16x40", changed(16, 40), inductor=True, **MANY),
    Case("dirty_tiles", "odd", changed(37, 29, 13, threshold=0.1, noise=0.15), **MANY),
    Case("dirty_tiles", "noise", changed(50, 61, 20, threshold=0.1, noise=0.19), **MANY),
    Case("dirty_tiles", "mean", changed(50, 61, 20, threshold=0.05, noise=0.2, measure="mean"), **MANY),
    Case("dirty_tiles", "mean-packed", packed(changed(50, 61, 21, threshold=0.05, noise=0.2, measure="mean")), **MANY),
    Case("dirty_tiles", "smaller-than-a-tile", changed(7, 5, 64, threshold=0.2), **MANY),
    Case("dirty_tiles", "packed", packed(changed(33, 50, 16)), **MANY),
    Case("dirty_tiles", "five-channels", packed(changed(20, 30, channels=5)), **MANY),
    Case("dirty_tiles", "uint8", uint8("largest", 2 / 255), dtypes=(torch.float32,), **MANY),
    Case("dirty_tiles", "uint8-mean", uint8("mean", 2 / 255), dtypes=(torch.float32,), **MANY),
    Case("dirty_tiles", "uint8-packed-mean", packed(uint8("mean", 2 / 255)), dtypes=(torch.float32,), **MANY),
    Case("dirty_tiles", "strided", strided, **MANY),
    Case("dirty_tiles", "not-finite", not_finite, **MANY),
    Case("dirty_tiles", "empty-batch", changed(16, 16, batch=0), **MANY),
]


def bad(**other):
    """Arguments of a call that would be good but for these."""
    frame = torch.rand(1, 3, 16, 20)
    return lambda: tuple(
        ({"frame": frame, "reference": frame.clone(), "tile": 8, "threshold": 0.0, "measure": "largest"} | other).values()
    )


shared = torch.rand(400)
BAD = [
    Bad("dirty_tiles", "rank", bad(frame=torch.rand(3, 16, 20)), r"frame must be \[B, C, H, W\].*got \[3, 16, 20\]"),
    Bad(
        "dirty_tiles", "dtype", bad(frame=torch.zeros(1, 3, 16, 20).long()), "frame must be float32, float64, float16 or bfloat16"
    ),
    Bad("dirty_tiles", "empty", bad(frame=torch.rand(1, 3, 0, 20)), "height and width must be at least 1"),
    Bad(
        "dirty_tiles",
        "size",
        bad(reference=torch.rand(1, 3, 16, 21)),
        r"reference must be as large as the frame.*\[1, 3, 16, 21\]",
    ),
    Bad(
        "dirty_tiles",
        "dtypes",
        bad(reference=torch.rand(1, 3, 16, 20).half()),
        r"reference must be Float \(as the frame\), got Half",
    ),
    Bad(
        "dirty_tiles", "expanded", bad(reference=torch.rand(1, 1, 16, 20).expand(1, 3, 16, 20)), "reference must be written once"
    ),
    Bad(
        "dirty_tiles",
        "overlap",
        lambda: (shared[:300].view(1, 3, 10, 10), shared[50:350].view(1, 3, 10, 10), 8),
        "reference must be in memory of its own",
    ),
    Bad("dirty_tiles", "tile", bad(tile=7), "tile must be at least 8 pixels, got 7"),
    Bad("dirty_tiles", "threshold", bad(threshold=-0.1), "threshold must be finite and at least 0, got -0.1"),
    Bad("dirty_tiles", "nan", bad(threshold=float("nan")), "threshold must be finite and at least 0, got nan"),
    Bad("dirty_tiles", "measure", bad(measure="median"), "measure must be largest or mean, got 'median'"),
    Bad(
        "dirty_tiles",
        "gradient",
        lambda: (torch.rand(1, 3, 16, 20).requires_grad_(), torch.rand(1, 3, 16, 20), 8),
        r"texvlm::dirty_tiles: works in place and is not differentiable.*frame.detach\(\)",
    ),
]
