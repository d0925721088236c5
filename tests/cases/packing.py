import torch

import texvlm
from cases import Bad, Case, rand

MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def packed(
    h=16, w=24, to=None, patch=2, merge=2, temporal=2, batch=2, channels=3, count=5, levels=None, mean=None, std=None, scale=1.0
):
    """Cells at random, with a level each where `levels` says how many there are."""

    def make(dtype, g):
        image = rand(g, batch, channels, h, w, dtype=dtype)
        height, width = to or (h, w)
        rows, columns = height // (patch * merge), width // (patch * merge)
        if levels:
            level = torch.randint(levels, (batch, count), generator=g)
            tall, wide = (-(-side // 2**level) for side in (rows, columns))
            at = [(torch.rand(batch, count, generator=g) * side).long() for side in (tall, wide)]
            cells = torch.stack([level, *at], -1)
        else:
            cells = torch.randint(rows * columns, (batch, count), generator=g)
        return image, cells, height, width, patch, merge, temporal, mean or MEAN[:channels], std or STD[:channels], scale

    return make


def with_none(make):
    """Some cells are negative."""

    def changed(dtype, g):
        image, cells, *rest = make(dtype, g)
        cells[0, 1], cells[1, 3] = -1, -5
        return image, cells, *rest

    return changed


def uint8(make):
    def changed(dtype, g):
        image, cells, *rest = make(torch.float32, g)
        return (image * 255.99).to(torch.uint8), cells, *rest[:-1], 1 / 255

    return changed


def strided(make, layout):
    def changed(dtype, g):
        image, *rest = make(dtype, g)
        if layout == "channels-last":
            return image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), *rest
        wide = torch.zeros(image.shape[0], image.shape[1] + 1, image.shape[3], 2 * image.shape[2], dtype=image.dtype)
        wide[:, 1:, :, ::2] = image.transpose(2, 3)
        return wide[:, 1:, :, ::2].transpose(2, 3), *rest

    return changed


def grey(dtype, g):
    image, *rest = packed(channels=1)(dtype, g)
    return image.expand(-1, 3, -1, -1), *rest[:6], MEAN, STD, 2.0


def level_view(dtype, g):
    """A level of a texture, which is channels last, and of more channels than three."""
    image, *rest = packed(channels=5, mean=[0.5], std=[0.25])(dtype, g)
    texture = texvlm.Texture(image.repeat_interleave(2, 2).repeat_interleave(2, 3))
    return texture.level(1), *rest


F32 = (torch.float32,)
CASES = [
    Case("pack_cells", "16x24", packed(), grads=(0,), inductor=True),
    Case("pack_cells", "patches-of-3", packed(h=27, w=18, patch=3, merge=3, temporal=1), grads=(0,)),
    Case("pack_cells", "one-patch", packed(h=6, w=4, patch=2, merge=1, temporal=3, mean=[0.1], std=[2.0]), grads=(0,)),
    Case("pack_cells", "all", packed(count=24), grads=(0,)),
    Case("pack_cells", "repeated", packed(h=8, w=4, count=9), grads=(0,)),
    Case("pack_cells", "none", with_none(packed()), grads=(0,)),
    Case("pack_cells", "levels", packed(h=16, w=32, levels=3, count=9), grads=(0,)),
    Case("pack_cells", "levels-odd", packed(h=20, w=12, levels=4, count=9), grads=(0,)),
    Case("pack_cells", "levels-odd-patches", packed(h=15, w=27, patch=3, merge=1, levels=4, count=9), grads=(0,)),
    Case("pack_cells", "levels-none", with_none(packed(h=16, w=32, levels=3)), grads=(0,)),
    Case("pack_cells", "smaller", packed(h=37, w=29, to=(20, 16)), grads=(0,), atol=1e-5),
    Case("pack_cells", "larger", packed(h=7, w=11, to=(16, 20)), grads=(0,), atol=1e-5),
    Case("pack_cells", "far-smaller", packed(h=61, w=90, to=(8, 4), batch=1, count=2), grads=(0,), atol=1e-5),
    Case("pack_cells", "one-axis", packed(h=16, w=29, to=(16, 32)), grads=(0,), atol=1e-5),
    Case("pack_cells", "one-wide", packed(h=1, w=9, to=(8, 8), batch=1), grads=(0,), atol=1e-5),
    Case("pack_cells", "smaller-levels", packed(h=37, w=29, to=(20, 16), levels=4, count=7), grads=(0,), atol=1e-5),
    Case("pack_cells", "tiles", packed(h=150, w=170, to=(136, 204), levels=3, count=3, batch=1, patch=34), atol=1e-4),
    Case("pack_cells", "uint8", uint8(packed(h=32, w=32, patch=8)), dtypes=F32),
    Case("pack_cells", "uint8-levels", uint8(packed(h=20, w=28, levels=4, count=9)), dtypes=F32),
    Case("pack_cells", "uint8-smaller", uint8(packed(h=67, w=51, to=(32, 48), patch=8, count=6)), dtypes=F32),
    Case("pack_cells", "uint8-flatter", uint8(packed(h=67, w=51, to=(16, 48), patch=8, count=6)), dtypes=F32),
    Case("pack_cells", "uint8-larger", uint8(packed(h=19, w=21, to=(32, 48), patch=8, count=6)), dtypes=F32),
    Case("pack_cells", "uint8-resized-levels", uint8(packed(h=67, w=51, to=(32, 48), levels=4, count=9)), dtypes=F32),
    Case("pack_cells", "channels-last", strided(packed(), "channels-last"), grads=(0,)),
    Case("pack_cells", "channels-last-smaller", strided(packed(h=19, w=30, to=(16, 24)), "channels-last"), grads=(0,), atol=1e-5),
    Case("pack_cells", "uint8-channels-last", strided(uint8(packed(h=32, w=48, patch=8)), "channels-last"), dtypes=F32),
    Case("pack_cells", "strided", strided(packed(), "strided"), grads=(0,)),
    Case("pack_cells", "grey", grey),
    Case("pack_cells", "level-of-a-texture", level_view),
    Case("pack_cells", "no-cells", packed(count=0)),
    Case("pack_cells", "empty-batch", packed(batch=0)),
]

image = torch.rand(1, 3, 8, 12)
cells = torch.zeros(1, 2, dtype=torch.int64)


def call(**change):
    given = {"image": image, "cells": cells, "h": 8, "w": 12, "patch": 2, "merge": 2, "temporal": 2}
    given |= {"mean": [0.5], "std": [0.5], "scale": 1.0}
    return lambda: tuple((given | change).values())


BAD = [
    Bad("pack_cells", "rank", call(image=image[0]), r"image must be \[B, C, H, W\].*got \[3, 8, 12\]"),
    Bad("pack_cells", "dtype", call(image=image.long()), "image must be float32, float64, float16 or bfloat16"),
    Bad("pack_cells", "channels", call(image=torch.rand(1, 65, 8, 12)), "image must be of 1 to 64 channels, got 65"),
    Bad("pack_cells", "no-picture", call(image=image[..., :0]), "height and width must be at least 1"),
    Bad("pack_cells", "size", call(h=9), r"size must be multiples of patch \* merge \(4\), got 9 x 12"),
    Bad("pack_cells", "size-0", call(h=0), "height and width must be at least 1"),
    Bad("pack_cells", "patch", call(patch=0), r"patch \* merge must be from 1 to 1024, got 0 \* 2"),
    Bad("pack_cells", "large", call(merge=2**40), r"patch \* merge must be from 1 to 1024"),
    Bad("pack_cells", "temporal", call(temporal=0), "temporal must be from 1 to 1024, got 0"),
    Bad("pack_cells", "cells-rank", call(cells=cells[0]), r"cells must be \[B, K\] or \[B, K, 3\].*got \[2\]"),
    Bad("pack_cells", "cells-batch", call(cells=cells.expand(2, 2)), r"cells must be \[B, K\].*got \[2, 2\]"),
    Bad("pack_cells", "cells-pairs", call(cells=cells[..., None].expand(1, 2, 2)), r"cells must be \[B, K, 3\].*got \[1, 2, 2\]"),
    Bad("pack_cells", "cells-dtype", call(cells=cells.int()), "cells must be Long, got Int"),
    Bad("pack_cells", "cells-beyond", call(cells=cells + 6), r"cells must be below 6 \(2 x 3\), got 6"),
    Bad("pack_cells", "cells-level", call(cells=torch.tensor([[[3, 0, 0]]])), r"inside the level's grid.*got \(3, 0, 0\)"),
    Bad("pack_cells", "cells-column", call(cells=torch.tensor([[[1, 0, 2]]])), r"cells must be \(level, row, column\) inside"),
    Bad("pack_cells", "mean", call(mean=[0.5, 0.5]), r"mean must be one number or one for each channel \(3\), got 2 of them"),
    Bad("pack_cells", "mean-nan", call(mean=[float("nan")]), "mean must be finite, got nan"),
    Bad("pack_cells", "std", call(std=[0.5, 0.0, 0.5]), "std must be finite and positive, got 0"),
    Bad("pack_cells", "rescale", call(scale=float("inf")), "rescale must be finite, got inf"),
]
