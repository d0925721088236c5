"""Tiles of a frame that differ from what is stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN_BLOCK = 8


def _exceeds(sums: Tensor, count: Tensor | int, threshold: float, is_bytes: bool) -> Tensor:
    """Whether the mean of `count` differences, given their sum, is above the threshold."""
    mean = sums.double().abs() / (count * (255.0 if is_bytes else 1.0))
    return ~(mean <= threshold)


def dirty_tiles(
    frame: Tensor, reference: Tensor, tile: int, threshold: float = 0.0, measure: str = "largest"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare, and store what differs.

    Args:
        frame: `[B, C, H, W]`, uint8 or floating point; what is not finite counts as 0.
        reference: the same shape and dtype; it is not written into.
        tile: side of a tile.
        threshold: in `[0, 1]`; uint8 is divided by 255.
        measure: largest, or mean (of blocks of 8 x 8 pixels of one colour, aligned to the tile).

    Returns:
        dirty bool `[B, rows, columns]`; their indices `[B, rows * columns]`, row-major, -1 beyond; how many, `[B]`; and the
        reference with the frame's values in dirty tiles.
    """
    batch, _, height, width = frame.shape
    is_bytes = frame.dtype == torch.uint8
    rows, columns = -(-height // tile), -(-width // tile)
    compute = torch.float64 if frame.dtype in (torch.uint8, torch.float64) else torch.float32
    a, b = (t.to(compute) for t in (frame, reference))
    difference = torch.where(a.isfinite(), a, 0.0) - torch.where(b.isfinite(), b, 0.0)
    dirty = torch.zeros(batch, rows, columns, dtype=torch.bool, device=frame.device)
    stored = reference.clone()
    for y in range(rows):
        for x in range(columns):
            area = (..., slice(y * tile, (y + 1) * tile), slice(x * tile, (x + 1) * tile))
            part = difference[area]
            if measure == "mean":
                pad = (0, -part.shape[-1] % MEAN_BLOCK, 0, -part.shape[-2] % MEAN_BLOCK)
                blocks = F.pad(torch.stack([part, torch.ones_like(part)]), pad)
                blocks = blocks.unflatten(-1, (-1, MEAN_BLOCK)).unflatten(-3, (-1, MEAN_BLOCK)).sum((-1, -3))
                above = _exceeds(blocks[0], blocks[1].double(), threshold, is_bytes)
            else:
                above = _exceeds(part, 1, threshold, is_bytes)
            dirty[:, y, x] = above.flatten(1).any(1)
            stored[area] = torch.where(dirty[:, y, x, None, None, None], frame[area], stored[area])
    flat = dirty.flatten(1)
    order = torch.argsort((~flat).to(torch.uint8), dim=1, stable=True)
    count = flat.sum(1)
    beyond = torch.arange(rows * columns, device=frame.device) >= count[:, None]
    return dirty, order.masked_fill(beyond, -1), count, stored
