import torch

from cases import Bad, Case, rand


def copied(h, w, batch=2, channels=3, cell=4, bound=0.0, noise=0.0):
    """A picture of few different cells, here and there with noise."""

    def make(dtype, g):
        if batch == 0:
            return torch.zeros(0, channels, h, w, dtype=dtype), cell, bound
        rows, columns = -(-h // cell), -(-w // cell)
        kinds = rand(g, 3, channels, cell, cell)
        kind = torch.randint(3, (batch, rows, columns), generator=g)
        image = kinds[kind].permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * cell, columns * cell)[..., :h, :w]
        return (image + noise * rand(g, *image.shape)).to(dtype), cell, bound

    return make


def uint8(dtype, g):
    """Differences of up to 3 steps, at a bound of 2."""
    image, cell, _ = copied(19, 30)(torch.float32, g)
    return (image * 250 + 4 * rand(g, *image.shape)).to(torch.uint8), cell, 2 / 255


def channels_last(dtype, g):
    image, cell, bound = copied(30, 22, bound=0.02, noise=0.021)(dtype, g)
    return image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), cell, bound


def strided(dtype, g):
    image, cell, bound = copied(24, 36)(dtype, g)
    wide = torch.zeros(2, 5, 24, 72, dtype=dtype)
    wide[:, :3, :, ::2] = image
    return wide[:, :3, :, ::2].transpose(2, 3), cell, bound


def grey(dtype, g):
    image, cell, bound = copied(18, 20, channels=1)(dtype, g)
    return image.expand(-1, 3, -1, -1), cell, bound


def not_finite(dtype, g):
    image = torch.zeros(1, 3, 16, 20, dtype=dtype)
    image[0, 1, 5, 6], image[0, 0, 9, 9], image[0, 2, 9, 13], image[0, 2, 1, 1] = float("nan"), *[float("inf")] * 2, float("nan")
    return image, 4, 1e300


CASES = [
    Case("predict_cells", "24x32", copied(24, 32), inductor=True),
    Case("predict_cells", "bound", copied(40, 40, bound=0.05, noise=0.06)),
    Case("predict_cells", "wide-bound", copied(33, 29, bound=0.5)),
    Case("predict_cells", "19x30-odd", copied(19, 30, cell=7, bound=0.1, noise=0.15)),
    Case("predict_cells", "3x50", copied(3, 50, cell=5, noise=0.1, bound=0.09)),
    Case("predict_cells", "50x1", copied(50, 1, cell=3, noise=0.1, bound=0.09)),
    Case("predict_cells", "cells-of-one", copied(9, 11, cell=1)),
    Case("predict_cells", "one-cell", copied(9, 11, cell=16)),
    Case("predict_cells", "80-rows", copied(160, 36, batch=1, cell=2)),
    Case("predict_cells", "large-cells", copied(70, 150, cell=33, bound=0.02, noise=0.021)),
    Case("predict_cells", "five-channels", copied(16, 24, channels=5)),
    Case("predict_cells", "grey", grey),
    Case("predict_cells", "uint8", uint8, dtypes=(torch.float32,)),
    Case("predict_cells", "channels-last", channels_last),
    Case("predict_cells", "strided", strided),
    Case("predict_cells", "not-finite", not_finite),
    Case("predict_cells", "empty-batch", copied(16, 16, batch=0)),
]

image = torch.rand(1, 3, 8, 8)
BAD = [
    Bad("predict_cells", "rank", lambda: (image[0], 4), r"image must be \[B, C, H, W\].*got \[3, 8, 8\]"),
    Bad("predict_cells", "dtype", lambda: (image.long(), 4), "image must be float32, float64, float16 or bfloat16"),
    Bad("predict_cells", "size", lambda: (image[:, :, :0], 4), "height and width must be at least 1"),
    Bad("predict_cells", "cell", lambda: (image, 0), "cell must be at least 1, got 0"),
    Bad("predict_cells", "negative", lambda: (image, 4, -0.1), "bound must be finite and at least 0, got -0.1"),
    Bad("predict_cells", "nan", lambda: (image, 4, float("nan")), "bound must be finite and at least 0, got nan"),
    Bad("predict_cells", "infinite", lambda: (image, 4, float("inf")), "bound must be finite and at least 0, got inf"),
]
