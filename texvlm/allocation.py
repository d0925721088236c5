"""What a token of each place and level is worth, for tokens of mixed levels (the path "multiscale" of `select`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import acc_dtype
from texvlm.quadtree import tree_shapes

if TYPE_CHECKING:
    from texvlm.texture import Texture

GAINS = {"detail": 1.0, "text": 1.0, "query": 1.0}
"""Default weights of what a token is worth."""


def _pooled(plane: Tensor, side: float, rows: int, columns: int) -> Tensor:
    """Means of a plane [B, h, w] over rows x columns blocks of side x side texels; blocks at the edge are partial."""
    whole = int(side)
    if whole == side and whole >= 1:
        height, width = plane.shape[1:]
        padded = F.pad(plane[:, None], (0, columns * whole - width, 0, rows * whole - height))
        return F.avg_pool2d(padded, whole)[:, 0]
    return F.interpolate(plane[:, None], (rows, columns), mode="area")[:, 0]


def detail_energy(texture: Texture, cell: int, levels: int) -> list[Tensor]:
    """The squared error that a token takes away: of each node [B, rows, columns], level by level.

    The picture (red, green, blue) is taken to be seen at the coarsest of the levels anyway. A token of level l shows it at level l; as
    each mip is the mean of those below it, the squared error between the two is the energy of the mips' Haar bands l .. levels - 2
    over the node, in sums over pixels and channels.
    """
    rgb = [texture.index(name) for name in ("red", "green", "blue")]
    grid = (-(-texture.height // cell), -(-texture.width // cell))
    dtype = acc_dtype(texture.data.dtype)
    energy = []  # mean square of each mip over each cell
    for level in range(min(levels, texture.levels)):
        mip = texture.level(level)[:, rgb].to(dtype)
        centre = texture.level(texture.levels - 1)[:, rgb].to(dtype).mean((2, 3), keepdim=True)
        energy.append(_pooled((mip - centre).square().sum(1), cell / 2**level, *grid))
    while len(energy) < levels:
        energy.append(energy[-1])
    results = []
    for level, (rows, columns) in enumerate(tree_shapes(*grid, levels)):
        gain = (energy[level] - energy[levels - 1]).clamp(min=0) * float(cell * cell)
        side = 2**level
        results.append(_pooled(gain, side, rows, columns) * (side * side))
    return results


def node_values(
    texture: Texture, cell: int, levels: int, gains: Mapping[str, float] = GAINS, query: Tensor | None = None
) -> list[Tensor]:
    """What a token of each node of the quadtree over cells is worth, for `quadtree_cut`: [B, rows_l, columns_l] of each level.

    Args:
        texture: with red, green, blue; and channel "attention" or the embedding where there is a query.
        cell: side of a cell in pixels.
        levels: of the quadtree.
        gains: weights of "detail", "text" and "query".
        query: [1, D], beside embedding channels.
    """
    return [gains["detail"] * level for level in detail_energy(texture, cell, levels)]
