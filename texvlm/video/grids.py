"""Which places of another grid a dirty tile reaches: cells that are read anew, places whose values are carried on."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def _reach(tiles: int, tile: int, places: int, pitch: float, margin: float) -> Tensor:
    """Which of `tiles` along an axis meet [i pitch - margin, (i + 1) pitch + margin): float32 [places, tiles]."""
    place, start = torch.arange(places, dtype=torch.float64), torch.arange(tiles, dtype=torch.float64) * tile
    meets = (start < ((place + 1) * pitch + margin)[:, None]) & (start + tile > (place * pitch - margin)[:, None])
    return meets.float()


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
    return touched_within(dirty, tile, grid, pitch, (margin,))[0]


def touched_within(
    dirty: Tensor, tile: int, grid: tuple[int, int], pitch: tuple[float, float], margins: tuple[float, ...]
) -> Tensor:
    """`touched` for several margins: bool [margins, B, rows, columns]."""
    y, x = _reaches(tuple(dirty.shape[1:]), tile, grid, pitch, margins, dirty.device)
    return (y @ dirty.float() @ x) > 0


@lru_cache(maxsize=64)
def _reaches(
    tiles: tuple[int, int],
    tile: int,
    grid: tuple[int, int],
    pitch: tuple[float, float],
    margins: tuple[float, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Of rows [margins, 1, rows, tile rows], and of columns, transposed."""
    y, x = (
        torch.stack([_reach(t, tile, g, p, margin) for margin in margins])[:, None].to(device)
        for t, g, p in zip(tiles, grid, pitch)
    )
    return y, x.mT.contiguous()
