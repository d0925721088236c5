import torch

from cases import Bad, Case, rand
from texvlm.reference.text import WEIGHTS


def weights(g):
    """Any weights will do, as long as they keep the hidden layers alive and the logistic function off its ends."""
    return torch.randn(WEIGHTS, generator=g) * 0.1


def picture(h, w, batch=1, scale=1.0):
    return lambda dtype, g: (rand(g, batch, 3, h, w, dtype=dtype) * scale, weights(g))


def strided(dtype, g):
    return rand(g, 2, 37, 70, 3, dtype=dtype).permute(0, 3, 1, 2)[..., ::2], weights(g)


def uint8(dtype, g):
    return (rand(g, 1, 3, 40, 33) * 255).to(torch.uint8), weights(g)


def not_finite(dtype, g):
    image = rand(g, 1, 3, 40, 40, dtype=dtype)
    image[0, 1, 3, 4], image[0, 0, 9, 9] = float("nan"), float("-inf")
    return image, weights(g)


# Four layers of sums of hundreds of terms, in another order than the reference's.
CASES = [
    Case("text_regions", "64x80", picture(64, 80), atol=2e-5, inductor=True),
    Case("text_regions", "batch-33x20", picture(33, 20, batch=2), atol=2e-5),
    Case("text_regions", "130x197", picture(130, 197), atol=2e-5),
    Case("text_regions", "3x300", picture(3, 300), atol=2e-5),
    Case("text_regions", "300x1", picture(300, 1), atol=2e-5),
    Case("text_regions", "1x1", picture(1, 1), atol=2e-5),
    Case("text_regions", "beyond-one", picture(20, 50, scale=3.0), atol=2e-5),
    Case("text_regions", "strided", strided, atol=2e-5),
    Case("text_regions", "uint8", uint8, dtypes=(torch.float32,), atol=2e-5),
    Case("text_regions", "not-finite", not_finite, atol=2e-5),
    Case("text_regions", "empty-batch", picture(16, 16, batch=0)),
]

BAD = [
    Bad("text_regions", "channels", lambda: (torch.rand(1, 4, 8, 8), torch.zeros(WEIGHTS)), r"image must be \[B, 3, H, W\]"),
    Bad("text_regions", "size", lambda: (torch.rand(1, 3, 0, 8), torch.zeros(WEIGHTS)), "height and width must be at least 1"),
    Bad("text_regions", "weights", lambda: (torch.rand(1, 3, 8, 8), torch.zeros(7)), "weights must be the 11569 numbers.*got 7"),
    Bad("text_regions", "weights-rank", lambda: (torch.rand(1, 3, 8, 8), torch.zeros(1, WEIGHTS)), r"weights must be \[N\]"),
    Bad(
        "text_regions", "weights-dtype", lambda: (torch.rand(1, 3, 8, 8), torch.zeros(WEIGHTS).double()), "weights must be Float"
    ),
]
