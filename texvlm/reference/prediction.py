"""Cells that their neighbours predict, diagonal by diagonal: a cell needs those left, above and above left only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .pyramid import compute_dtype

NEIGHBOURS = ((0, 1), (1, 0), (1, 1))
"""Rows up and columns left, in the order of preference."""


def predict_cells(image: Tensor, cell: int, bound: float = 0.0) -> Tensor:
    """Return the cell that each is put back as, int64 `[B, rows * columns]`, its own where it is kept.

    Args:
        image: `[B, C, H, W]`, float or uint8 (whose values stand for 255ths).
        cell: side of a cell in pixels; partial cells are filled up by their border.
        bound: a cell is put back as what a neighbour is put back as where they differ by at most this in every value, never
            where a value is not finite.
    """
    steps = 255 if image.dtype == torch.uint8 else 1
    picture = image.detach().to(torch.float32 if image.dtype == torch.uint8 else compute_dtype(image.dtype))
    batch, _, height, width = picture.shape
    rows, columns = -(-height // cell), -(-width // cell)
    if batch == 0:
        return torch.empty(0, rows * columns, dtype=torch.int64, device=image.device)
    padded = F.pad(picture, (0, columns * cell - width, 0, rows * cell - height), mode="replicate")
    pixels = F.pixel_unshuffle(padded, cell).flatten(2).transpose(1, 2).contiguous()  # [B, N, C cell^2]
    source = torch.arange(rows * columns, device=picture.device).repeat(batch, 1)
    every = torch.arange(batch, device=picture.device)[:, None]
    for diagonal in range(1, rows + columns - 1):
        y = torch.arange(max(0, diagonal - columns + 1), min(rows - 1, diagonal) + 1, device=picture.device)
        x = diagonal - y
        own = y * columns + x
        found = own.expand(batch, -1)
        for up, left in reversed(NEIGHBOURS):  # the last that fits counts
            there = (y >= up) & (x >= left)
            candidate = source[:, torch.where(there, own - up * columns - left, own)]
            farthest = (pixels[every, candidate] - pixels[:, own]).abs().amax(-1)
            found = torch.where((farthest.double() / steps <= bound) & there, candidate, found)
        source[:, own] = found
    return source
