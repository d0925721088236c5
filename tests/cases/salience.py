import torch

from cases import Bad, Case, rand


def picture(h, w, batch=2, moving=False):
    def make(dtype, g):
        image = rand(g, batch, 3, h, w, dtype=dtype)
        return (image, rand(g, batch, 3, h, w, dtype=dtype)) if moving else (image,)

    return make


def strided(dtype, g):
    return (rand(g, 2, 19, 34, 3, dtype=dtype).permute(0, 3, 1, 2)[..., ::2],)


def uint8(dtype, g):
    return ((rand(g, 1, 3, 20, 17) * 255).to(torch.uint8),)


def not_finite(dtype, g):
    image = rand(g, 1, 3, 16, 16, dtype=dtype)
    image[0, 1, 3, 4], image[0, 0, 9, 9] = float("nan"), float("inf")
    return (image,)


# Whitening divides by standard deviations that are small where few places are averaged over many, and the maximum divides again.
CASES = [
    Case("saliency", "12x16", picture(12, 16), grads=(0,), atol=5e-5, inductor=True),
    Case("saliency", "9x13-moving", picture(9, 13, moving=True), grads=(0, 1), atol=5e-5),
    Case("saliency", "33x20", picture(33, 20, batch=1), grads=(0,), atol=5e-5),
    Case("saliency", "1x40", picture(1, 40), grads=(0,), atol=5e-5),
    Case("saliency", "64x64-moving", picture(64, 64, moving=True), atol=5e-5),
    Case("saliency", "530x300-moving", picture(530, 300, batch=1, moving=True), atol=5e-5),
    Case("saliency", "130x70", picture(130, 70), atol=5e-5),
    Case("saliency", "too-small", picture(5, 7), atol=5e-5),
    Case("saliency", "one-pixel", picture(1, 1), atol=5e-5),
    Case("saliency", "strided", strided, grads=(0,), atol=5e-5),
    Case("saliency", "uint8", uint8, dtypes=(torch.float32,), atol=5e-5),
    Case("saliency", "not-finite", not_finite, atol=5e-5),
    Case("saliency", "empty-batch", picture(16, 16, batch=0)),
]

BAD = [
    Bad("saliency", "channels", lambda: (torch.rand(1, 4, 8, 8),), r"image must be \[B, 3, H, W\].*got \[1, 4, 8, 8\]"),
    Bad("saliency", "dtype", lambda: (torch.ones(1, 3, 8, 8, dtype=torch.int32),), "image must be float32.*got Int"),
    Bad("saliency", "zero-size", lambda: (torch.rand(1, 3, 0, 8),), "height and width must be at least 1"),
    Bad(
        "saliency", "previous", lambda: (torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 9)), "previous must be of the shape of image"
    ),
    Bad(
        "saliency", "previous-dtype", lambda: (torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8).double()), "previous must be Float"
    ),
]
