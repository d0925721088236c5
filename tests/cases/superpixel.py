import torch

from cases import Bad, Case, rand


def picture(h, w, n, batch=1, smooth=4, shift=0.0):
    """Blobs with noise on them; `shift` puts values out of [0, 1]."""

    def make(dtype, g):
        low = rand(g, batch, 3, -(-h // smooth), -(-w // smooth), dtype=torch.float64)
        blobs = torch.nn.functional.interpolate(low, (h, w), mode="bilinear")
        return (blobs * 0.8 + 0.2 * rand(g, batch, 3, h, w, dtype=torch.float64) - shift).to(dtype), n

    return make


def spoilt(dtype, g):
    image = rand(g, 1, 3, 30, 40).to(dtype)
    image[0, 0, 3:9] = float("nan")
    image[0, 1, :, 7] = float("inf")
    return image, 6


def strided(dtype, g):
    return rand(g, 2, 3, 40, 66, dtype=dtype).permute(0, 1, 3, 2)[:, :, ::2], 5


def grey(dtype, g):
    return rand(g, 2, 1, 20, 24, dtype=dtype).expand(-1, 3, -1, -1), 4


def regions(h, w, n, batch=2):
    return lambda dtype, g: (
        (rand(g, batch, -(-h // 3), -(-w // 3)) * n).long().repeat_interleave(3, 1).repeat_interleave(3, 2)[:, :h, :w],
        n,
    )


def segmented(dtype, g):
    image, _ = picture(24, 30, 5, batch=2)(dtype, g)
    return image, regions(24, 30, 5)(dtype, g)[0]


F32 = (torch.float32,)
CASES = [
    Case("superpixels", "one-level", picture(31, 45, 12), dtypes=(torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    Case(
        "superpixels", "two-levels", picture(60, 75, 5, batch=2, smooth=9), dtypes=(torch.float32, torch.float64), inductor=True
    ),
    Case("superpixels", "three-levels", picture(131, 90, 3, smooth=20), dtypes=F32),
    Case("superpixels", "uint8", lambda dtype, g: ((rand(g, 1, 3, 33, 50) * 256).to(torch.uint8), 7), dtypes=F32),
    Case("superpixels", "constant", lambda dtype, g: (torch.full((1, 3, 37, 52), 0.4), 9), dtypes=F32),
    Case("superpixels", "one-superpixel", picture(20, 30, 1), dtypes=F32),
    Case("superpixels", "one-pixel", picture(1, 1, 50), dtypes=F32),
    Case("superpixels", "more-than-pixels", picture(5, 6, 100), dtypes=F32),
    Case("superpixels", "as-many-as-pixels-nearly", picture(9, 11, 90, smooth=2), dtypes=F32),
    Case("superpixels", "narrow", picture(3, 700, 8), dtypes=F32),
    Case("superpixels", "one-wide", picture(300, 1, 6), dtypes=F32),
    Case("superpixels", "out-of-range", picture(24, 30, 6, shift=0.4), dtypes=F32),
    Case("superpixels", "not-finite", spoilt, dtypes=F32),
    Case("superpixels", "strided", strided, dtypes=F32),
    Case("superpixels", "stride-0", grey, dtypes=F32),
    Case("superpixels", "empty-batch", picture(9, 9, 4, batch=0), dtypes=F32),
    Case("superpixel_channels", "blocks", regions(20, 33, 7), dtypes=F32, inductor=True),
    Case("superpixel_channels", "tall", regions(90, 2, 3), dtypes=F32),
    Case(
        "superpixel_channels",
        "strided",
        lambda dtype, g: (regions(20, 33, 7)(dtype, g)[0].permute(0, 2, 1)[:, ::2], 7),
        dtypes=F32,
    ),
    Case("superpixel_channels", "empty-batch", regions(4, 5, 2, batch=0), dtypes=F32),
    Case("boundaries", "blocks", segmented, dtypes=(torch.float32, torch.float64, torch.float16), inductor=True),
    Case(
        "boundaries",
        "uint8",
        lambda dtype, g: ((rand(g, 2, 3, 12, 15) * 256).to(torch.uint8), regions(12, 15, 4)(dtype, g)[0]),
        dtypes=F32,
    ),
]

BAD = [
    Bad("superpixels", "shape", lambda: (torch.zeros(1, 4, 3, 3), 5), r"image must be \[B, 3, H, W\].*got \[1, 4, 3, 3\]"),
    Bad("superpixels", "none", lambda: (torch.zeros(1, 3, 3, 3), 0), "n must be at least 1, got 0"),
    Bad("superpixels", "zero-size", lambda: (torch.zeros(1, 3, 0, 3), 5), "height and width must be at least 1"),
    Bad("superpixel_channels", "dtype", lambda: (torch.zeros(1, 3, 3), 5), "labels must be Long, got Float"),
    Bad(
        "superpixel_channels",
        "huge",
        lambda: (torch.zeros(1, 3, 3, dtype=torch.int64), 2**62),
        r"n must be at least 1 and below 2\^31, got",
    ),
    Bad(
        "superpixel_channels",
        "none",
        lambda: (torch.zeros(1, 3, 3, dtype=torch.int64), -1),
        r"n must be at least 1 and below 2\^31, got -1",
    ),
    Bad(
        "boundaries",
        "size",
        lambda: (torch.zeros(1, 3, 3, 3), torch.zeros(1, 3, 4, dtype=torch.int64)),
        r"labels must be \[B, H, W\].*got \[1, 3, 4\]",
    ),
]
