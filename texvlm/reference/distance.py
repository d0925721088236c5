"""Exact Euclidean distance transform with the nearest feature's index."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Candidates compared at once."""


def distance_transform(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each pixel the squared distance to the nearest True pixel, and which one that is.

    Args:
        mask: bool `[B, H, W]`.

    Returns:
        squared distance, int64 `[B, H, W]`, and the nearest True pixel's row-major index, int64 `[B, H, W]`,
        the lowest one on ties. A picture without a True pixel gives H^2 + W^2 and -1. Not differentiable.

    Source: the separable scheme of Meijster, Roerdink and Hesselink, "A general algorithm for computing
    distance transforms in linear time", 2000; here by comparing all columns.
    """
    batch, height, width = mask.shape
    squared = torch.full(mask.shape, height**2 + width**2, dtype=torch.int64, device=mask.device)
    index = torch.full_like(squared, -1)
    if mask.numel() == 0:
        return squared, index
    # The nearest True pixel of each column, the upper one on ties. Row `far` stands for none.
    far = 2 * (height + width)
    rows = torch.arange(height, device=mask.device)[:, None].expand(height, width)
    above = torch.where(mask, rows, -far).cummax(1).values
    below = torch.where(mask, rows, far).flip(1).cummin(1).values.flip(1)
    nearest = torch.where(rows - above <= below - rows, above, below)
    columns = torch.arange(width, device=mask.device)
    across = (columns[:, None] - columns) ** 2  # [W, W'] from column W' to column W
    step = max(1, CHUNK // (batch * width * width))
    for top in range(0, height, step):
        part = slice(top, top + step)
        down = (nearest[:, part] - rows[part]) ** 2
        candidates = across + down[:, :, None]  # [B, rows, W, W']
        squared[:, part] = candidates.amin(-1)
        place = (nearest[:, part] * width + columns)[:, :, None]
        ties = candidates == squared[:, part, :, None]
        index[:, part] = torch.where(ties, place, height * width).amin(-1)
    empty = ~mask.flatten(1).any(1)
    squared[empty], index[empty] = height**2 + width**2, -1
    return squared, index
