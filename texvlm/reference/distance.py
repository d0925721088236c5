"""Exact Euclidean distance transform with the nearest feature's index."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Candidates compared at once."""


def distance_transform(mask: Tensor, method: str = "exact") -> tuple[Tensor, Tensor]:
    """Return for each pixel the squared distance to the nearest True pixel, and which one that is.

    Args:
        mask: bool `[B, H, W]`.
        method: "exact", or "jfa" for jump flooding with two more rounds (`jump_flooding`), which errs here and there.

    Returns:
        squared distance, int64 `[B, H, W]`, and the nearest True pixel's row-major index, int64 `[B, H, W]`,
        the lowest one on ties. A picture without a True pixel gives H^2 + W^2 and -1. Not differentiable.

    Source: the separable scheme of Meijster, Roerdink and Hesselink, "A general algorithm for computing
    distance transforms in linear time", 2000; here by comparing all columns.
    """
    if method == "jfa":
        return jump_flooding(mask)
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


def jump_flooding(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared distances and indices like `distance_transform`, by jump flooding (JFA+2).

    Convention: steps of the powers of two below the longer side, falling, then 2 and 1. In each, a pixel takes the
    nearest of the features that the nine pixels around it, that far apart, know of; the lowest index on ties.

    Source: G. Rong and T.-S. Tan, "Jump flooding in GPU with applications to Voronoi diagram and distance transform",
    2006.
    """
    batch, height, width = mask.shape
    y = torch.arange(height, device=mask.device)[:, None]
    x = torch.arange(width, device=mask.device)
    nearest = torch.where(mask, y * width + x, -1)
    nowhere = 4 * (height**2 + width**2)

    def distance(index: Tensor) -> Tensor:
        far = (index // width - y) ** 2 + (index % width - x) ** 2
        return torch.where(index < 0, nowhere, far)

    powers = [1 << k for k in range(max(height, width).bit_length()) if 1 << k < max(height, width)]
    for step in [*reversed(powers), 2, 1]:
        padded = torch.nn.functional.pad(nearest, (step, step, step, step), value=-1)
        best, least = torch.full_like(nearest, -1), torch.full_like(nearest, nowhere)
        for dy in (0, step, 2 * step):
            for dx in (0, step, 2 * step):
                index = padded[:, dy : dy + height, dx : dx + width]
                far = distance(index)
                wins = (index >= 0) & ((far < least) | ((far == least) & (index < best)))
                best, least = torch.where(wins, index, best), torch.where(wins, far, least)
        nearest = best
    return torch.where(nearest < 0, height**2 + width**2, distance(nearest)), nearest
