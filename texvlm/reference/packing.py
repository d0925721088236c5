"""Kept cells as the rows of patches of Qwen-VL: the whole picture is resized, averaged and cut, then cells are taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .pyramid import compute_dtype

PRECISION = 22
"""Bits behind the point of Pillow's weights for 8-bit pictures."""


def cubic_matrix(size: int, out: int) -> Tensor:
    """Return the weights `[out, size]`, float64, of an antialiased cubic resize (a = -1/2) of one axis."""
    scale = size / out
    wide = max(scale, 1.0)
    centre = (torch.arange(out, dtype=torch.float64)[:, None] + 0.5) * scale
    place = torch.arange(size, dtype=torch.float64)[None]
    x = ((place + 0.5 - centre) / wide).abs()
    inner, outer = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    weight = torch.where(x < 1, inner, torch.where(x < 2, outer, 0))
    first = (centre - 2 * wide + 0.5).trunc().clamp(min=0)
    weight = weight * ((place >= first) & (place < (centre + 2 * wide + 0.5).trunc()))
    return weight / weight.sum(1, keepdim=True)


def resize_bytes(image: Tensor, height: int, width: int) -> Tensor:
    """Return uint8 `[B, C, H, W]` at another size, as Pillow resizes it, each pass rounded to bytes.

    The rows are made narrower (or wider) first, but where many more rows go than columns (Pillow from version 13 on).
    """
    pixels = image.long()
    passes = [(3, width), (2, height)]
    gone = image.shape[2] - height
    if gone > 0 and gone > 2 * (image.shape[3] - width):
        passes.reverse()
    for axis, out in passes:
        if out == pixels.shape[axis]:
            continue
        weight = cubic_matrix(pixels.shape[axis], out) * (1 << PRECISION)
        fixed = (weight + torch.where(weight < 0, -0.5, 0.5)).trunc().long().to(image.device)
        summed = (pixels.movedim(axis, -1)[..., None, :] * fixed).sum(-1) + (1 << (PRECISION - 1))
        pixels = (summed >> PRECISION).clamp(0, 255).movedim(-1, axis)
    return pixels.to(torch.uint8)


def pack_cells(
    image: Tensor,
    cells: Tensor,
    height: int,
    width: int,
    patch: int = 16,
    merge: int = 2,
    temporal: int = 2,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    scale: float = 1.0,
) -> Tensor:
    """Return the rows `[B, K merge^2, C temporal patch^2]` of cells, float32 for uint8, else in the picture's dtype.

    Args:
        image: `[B, C, H, W]`, uint8 or float.
        cells: `[B, K]` indices in the grid of level 0, or `[B, K, 3]` (level, row, column); rows of zeros where one is negative.
        height: that the picture is resized to, a multiple of patch * merge; width likewise.
        width: see height.
        patch: side of a patch; merge: patches along a cell's side; temporal: how often the picture is repeated.
        merge: see patch.
        temporal: see patch.
        mean: per channel, or one for all; values are (x * scale - mean) / std.
        std: see mean.
        scale: see mean.
    """
    side = patch * merge
    dtype = torch.float32 if image.dtype == torch.uint8 else image.dtype
    compute = compute_dtype(dtype)
    if (height, width) == tuple(image.shape[2:]):
        picture = image.to(compute)
    elif image.dtype == torch.uint8:
        picture = resize_bytes(image, height, width).to(compute)
    else:
        down, across = (
            cubic_matrix(size, out).to(image.device, compute) for size, out in zip(image.shape[2:], (height, width), strict=True)
        )
        picture = down @ image.to(compute) @ across.T
    batch, channels = image.shape[:2]
    if cells.dim() == 2:
        columns = width // side
        triples = torch.stack([torch.where(cells < 0, -1, 0), cells // columns, cells % columns], -1)
    else:
        triples = torch.where((cells < 0).any(-1, keepdim=True), -1, cells)
    shift, divide = (torch.tensor(list(v), dtype=compute, device=image.device).view(-1, 1, 1) for v in (mean, std))
    rows = picture.new_zeros(batch, cells.shape[1], merge * merge, channels * temporal * patch * patch)
    for level in sorted(set(triples[..., 0].flatten().tolist()) - {-1}):
        samples = F.avg_pool2d(picture, 1 << level, ceil_mode=True, count_include_pad=False) if level else picture
        samples = F.pad(samples, (0, -samples.shape[3] % side, 0, -samples.shape[2] % side), mode="replicate")
        grid = (samples.shape[2] // side, samples.shape[3] // side)
        patches = ((samples * scale - shift) / divide).view(batch, channels, grid[0], merge, patch, grid[1], merge, patch)
        patches = patches.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, grid[0] * grid[1], merge * merge, channels, 1, -1)
        patches = patches.expand(-1, -1, -1, -1, temporal, -1).flatten(3)
        here = triples[..., 0] == level
        index = torch.where(here, triples[..., 1] * grid[1] + triples[..., 2], 0)
        taken = patches.gather(1, index[:, :, None, None].expand(-1, -1, *patches.shape[2:]))
        rows = torch.where(here[:, :, None, None], taken, rows)
    return rows.flatten(1, 2).to(dtype)
