"""Stem `quadtree`: which places deserve a token, and at which level: the best k disjoint nodes of a quadtree over cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from texvlm._ext import fake, integer, ops


class QuadtreeCut(NamedTuple):
    """Disjoint nodes of a quadtree.

    Attributes:
        taken: bool [B, rows_l, columns_l] of each level.
        bound: [B], a sum of values that no k disjoint nodes exceed.
        price: [B], what a token must be worth to be taken.
    """

    taken: list[Tensor]
    bound: Tensor
    price: Tensor


def tree_shapes(rows: int, columns: int, levels: int) -> list[tuple[int, int]]:
    """Rows and columns of each level of a quadtree over a grid of cells: ceil(rows / 2^l) x ceil(columns / 2^l)."""
    return [(-(-rows // 2**level), -(-columns // 2**level)) for level in range(levels)]


def quadtree_cut(values: Sequence[Tensor], k: int) -> QuadtreeCut:
    """The best k disjoint nodes of a quadtree over a grid of cells: which places deserve a token, and at which level of detail.

    Node (y, x) of level l covers 2^l x 2^l cells and costs one token at any level. The set is the best of its size by Lagrangian
    relaxation (P. Chou, T. Lookabaugh, R. Gray, 1989): at a price, each node is worth taking or leaving to its children, and the lowest
    price at which at most k are taken is found exactly. What that leaves of the budget (nothing, where values do not grow towards the
    roots) goes to the best cells that are free; where every cell is covered, the node that gains most gives way to its children. `bound`
    tells how far the set can be from the best one.

    Args:
        values: of each level, [B, rows_l, columns_l] float32 or float64 (half types are computed in float32), the cells first: what it
            is worth to show this place at this level. Level l has ceil(rows / 2^l) x ceil(columns / 2^l) nodes. NaN is worth least.
        k: how many to take, at least 0: exactly k, or all cells where there are fewer.

    Returns:
        QuadtreeCut. No gradients: a differentiable call raises.

    Raises:
        ValueError: levels of other shapes, or k is negative.

    Example:
        >>> import torch, texvlm
        >>> cells, blocks = torch.tensor([[[9.0, 0, 0, 0], [0, 0, 0, 0]]]), torch.tensor([[[9.0, 3.0]]])
        >>> [level.int().tolist() for level in texvlm.quadtree_cut([cells, blocks], 2).taken]
        [[[[0, 0, 0, 0], [0, 0, 0, 0]]], [[[1, 1]]]]
    """
    k = integer("k", k, 0)
    if not values or values[0].dim() != 3:
        raise ValueError(f"values must be one or more levels [B, rows, columns], got {[list(v.shape) for v in values]}")
    batch, rows, columns = values[0].shape
    shapes = tree_shapes(rows, columns, len(values))
    if [tuple(v.shape) for v in values] != [(batch, *shape) for shape in shapes]:
        raise ValueError(
            f"values must be levels of {', '.join(f'{h} x {w}' for h, w in shapes)} nodes, each half of the one before, rounded up, "
            f"got {[list(v.shape) for v in values]}"
        )
    packed = torch.cat([v.flatten(1) for v in values], dim=1)
    if packed.dtype not in (torch.float32, torch.float64):
        packed = packed.float()
    taken, bound, price = ops.quadtree_cut(packed, rows, columns, len(values), k)
    levels = taken.split([h * w for h, w in shapes], dim=1)
    return QuadtreeCut([level.unflatten(1, shape) for level, shape in zip(levels, shapes)], bound, price)


@fake("quadtree_cut")
def _(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = values.shape[0]
    return values.new_empty(values.shape, dtype=torch.bool), values.new_empty(batch), values.new_empty(batch)
