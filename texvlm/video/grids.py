"""Which places of another grid a dirty tile reaches: cells that are read anew, places whose values are carried on."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _reach(tiles: int, tile: int, places: int, pitch: float, margin: float, device: torch.device) -> Tensor:
    """Which of `tiles` along an axis meet [i pitch - margin, (i + 1) pitch + margin): float32 [places, tiles]."""
    place, start = torch.arange(places, dtype=torch.float64), torch.arange(tiles, dtype=torch.float64) * tile
    meets = (start < ((place + 1) * pitch + margin)[:, None]) & (start + tile > (place * pitch - margin)[:, None])
    return meets.float().to(device)


def touched(dirty: Tensor, tile: int, grid: tuple[int, int], pitch: tuple[float, float], margin: float = 0.0) -> Tensor:
    """The places of a grid within `margin` pixels of a dirty tile.

    Args:
        dirty: bool [B, rows, columns], tiles of the picture.
        tile: their side in pixels.
        grid: (rows, columns) of places.
        pitch: of the places, in pixels, along y and x.
        margin: in pixels.

    Returns:
        bool [B, rows, columns] of the grid.
    """
    (rows, columns), (down, across) = dirty.shape[1:], pitch
    y = _reach(rows, tile, grid[0], down, margin, dirty.device)
    x = _reach(columns, tile, grid[1], across, margin, dirty.device)
    return (y @ dirty.float() @ x.T) > 0
