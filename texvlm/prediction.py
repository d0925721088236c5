"""Which cells their neighbours predict: duplicates cost nothing, and what is left out can be put back within a bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import integer
from texvlm.texture import as_float, as_rgb

if TYPE_CHECKING:
    from texvlm.texture import ImageLike


def predict_cells(image: ImageLike, cell: int = 16, bound: float = 0.0) -> Tensor:
    """From which cell each can be put back: its own, or one that is equal to it in every pixel within a bound.

    Cells are taken from the upper left on. One is left out if what its left, upper or upper left neighbour is put back from (in this
    order) differs from it by at most `bound` in every value: so errors do not add up along a chain of cells. This is the rule of
    PixelPrune (2026), after the predictors of JPEG-LS. It is decided along diagonals, each in a few operations, and nothing waits for
    the device.

    Args:
        image: see `Texture`; in [0, 1]. Partial cells at the edge are filled up by their border.
        cell: side of a cell in pixels.
        bound: largest difference; 0 leaves out exact duplicates only.

    Returns:
        int64 [B, rows * columns], row-major: cell i is put back as cell source[i], and kept where source[i] = i. A cell with values that
        are not finite is kept.

    Example:
        >>> import torch, texvlm
        >>> picture = torch.zeros(3, 32, 48)
        >>> picture[:, 16:, 16:32] = 1.0
        >>> texvlm.predict_cells(picture).view(2, 3)
        tensor([[0, 0, 0],
                [0, 4, 0]])
    """
    cell = integer("cell", cell, 1)
    if not (math.isfinite(bound) and bound >= 0):
        raise ValueError(f"bound must be at least 0, got {bound}")
    with torch.no_grad():
        picture = as_float(as_rgb(image))
        batch, _, height, width = picture.shape
        rows, columns = -(-height // cell), -(-width // cell)
        padded = F.pad(picture, (0, columns * cell - width, 0, rows * cell - height), mode="replicate")
        pixels = F.pixel_unshuffle(padded, cell).permute(0, 2, 3, 1).flatten(1, 2)  # [B, N, 3 cell^2]
        source = torch.arange(rows * columns, device=picture.device).repeat(batch, 1)
        every = torch.arange(batch, device=picture.device)[:, None]
        for diagonal in range(1, rows + columns - 1):
            first, last = max(0, diagonal - columns + 1), min(rows - 1, diagonal)
            y = torch.arange(first, last + 1, device=picture.device)
            x = diagonal - y
            at = y * columns + x
            own, found = pixels[:, at], at.expand(batch, -1)
            for dy, dx in ((1, 1), (1, 0), (0, 1)):  # the last that fits counts: left before upper before upper left
                there = (y >= dy) & (x >= dx)
                candidate = source[:, torch.where(there, at - dy * columns - dx, at)]
                near = ((pixels[every, candidate] - own).abs() <= bound).all(-1)
                found = torch.where(near & there, candidate, found)
            source[:, at] = found
        return source
