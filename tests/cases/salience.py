import torch

import texvlm
from cases import FLOATS, Bad, Case, rand
from cases.channels import changed_tiles


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


def updated(h, w, tile=8, batch=2, bytes=False, first=False):
    """The state after two pictures, made by the reference, and a third one."""

    def make(dtype, g):
        from texvlm import reference

        image = rand(g, batch, 3, h, w, dtype=dtype)
        image = (image * 255).to(torch.uint8) if bytes else image
        colours, features = (t.zero_() for t in texvlm.saliency_state(image))
        before, then = changed_tiles(g, image, tile)
        dirty, now = changed_tiles(g, then, tile)
        if not first:
            reference.update_saliency(image, colours, features, before, before, tile, True)
            reference.update_saliency(then, colours, features, before, before, tile)
        return now, colours, features, dirty, before, tile, first

    return make


def reference_update(image, colours, features, *rest):
    from texvlm import reference

    return reference.update_saliency(image, colours, features, *rest), colours, features


# Whitening divides by standard deviations that are small where few places are averaged over many, and the maximum divides again.
CASES = [
    *(
        Case("update_saliency", label, make, reference=reference_update, mutates=(1, 2), dtypes=dtypes, atol=5e-5)
        for label, make, dtypes in [
            ("40x55", updated(40, 55), FLOATS),
            ("270x190", updated(270, 190, tile=32, batch=1), FLOATS[:2]),
            ("301x131", updated(301, 131, tile=16), FLOATS[:1]),
            ("first", updated(33, 20, first=True), FLOATS[:2]),
            ("bytes", updated(90, 75, tile=16, batch=3, bytes=True), FLOATS[:1]),
            ("1x40", updated(1, 40), FLOATS[:2]),
        ]
    ),
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

picture_8x8, mask = torch.rand(1, 3, 8, 8), torch.ones(1, 1, 1, dtype=torch.bool)


def state(tile=8, masks=(mask, mask), colours=(3, 64, 1), features=(7, 85, 1), dtype=torch.float32):
    """Arguments of update_saliency: a picture of 8 x 8 has its colours at level 0, and features at levels 0 to 2."""
    return picture_8x8, torch.zeros(colours, dtype=dtype), torch.zeros(features), *masks, tile


BAD = [
    Bad("update_saliency", "colours", lambda: state(colours=(3, 16, 1)), r"colours must be \[3 B, T, 1\] = \[3, 64, 1\]"),
    Bad("update_saliency", "features", lambda: state(features=(7, 84, 1)), r"features must be \[7 B, T', 1\] = \[7, 64, 1\]"),
    Bad("update_saliency", "dtype", lambda: state(dtype=torch.float64), "colours must be Float .the arithmetic's., got Double"),
    Bad("update_saliency", "tile", lambda: state(tile=0, features=(7, 64, 1)), "tile must be from 8"),
    Bad("update_saliency", "mask", lambda: state(masks=(mask[0], mask), features=(7, 64, 1)), "dirty must be"),
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
