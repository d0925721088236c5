"""Stem `quadtree`: which places deserve a token, and at which level: the best k disjoint nodes of a quadtree over cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._constants import constant
from texvlm._ext import fake, integer, ops, real_tensor


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
    for level in values:
        real_tensor("values", level)
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


def node_places(nodes: Tensor, grid: tuple[int, int], levels: int) -> tuple[Tensor, Tensor]:
    """The first cell (upper left, row-major) and the level of nodes, which are numbered level by level, the cells first.

    Args:
        nodes: int64, any shape.
        grid: rows and columns of cells.
        levels: of the quadtree.

    Returns:
        cells, levels: int64, of the shape of `nodes`.

    Example:
        >>> import torch
        >>> from texvlm.quadtree import node_places
        >>> node_places(torch.tensor([5, 8, 9]), (2, 4), 2)
        (tensor([5, 0, 2]), tensor([0, 1, 1]))
    """
    first, columns = _numbering(grid, levels, nodes)
    level = torch.bucketize(nodes, first[1:], right=True)
    place, wide = nodes - first[level], columns[level]
    row = place.div(wide, rounding_mode="floor")
    return (row << level) * grid[1] + ((place - row * wide) << level), level


def node_numbers(cells: Tensor, level: Tensor, grid: tuple[int, int], levels: int) -> Tensor:
    """The inverse of `node_places`: the number of the node of that level that covers a cell."""
    first, columns = _numbering(grid, levels, cells)
    row, column = cells.div(grid[1], rounding_mode="floor"), cells % grid[1]
    return first[level] + (row >> level) * columns[level] + (column >> level)


def _numbering(grid: tuple[int, int], levels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The first node of each level, and its columns."""
    shapes = tree_shapes(*grid, levels)
    first = [0, *itertools.accumulate(rows * columns for rows, columns in shapes)][:-1]
    numbers = (tuple(first), tuple(columns for _, columns in shapes))
    return constant(numbers[0], like.dtype, like.device), constant(numbers[1], like.dtype, like.device)


def values_of_scores(scores: Tensor, grid: tuple[int, int], levels: int) -> list[Tensor]:
    """Scores of nodes [B, n], level by level, as what `quadtree_cut` takes: above those of the least node, which is worth nothing.

    A constant that is added to all scores changes nothing, since the size of the set is given. So with Gumbel noise on the scores the cut
    is a perturbed maximum (G. Papandreou, A. Yuille, "Perturb-and-MAP random fields", 2011), and at one level the k best. Scores that
    are not finite are worth least.
    """
    scores = scores.detach()
    there = scores.isfinite()
    least = torch.where(there, scores, torch.inf).amin(1, keepdim=True)
    worth = torch.where(there, scores - least, torch.nan)
    shapes = tree_shapes(*grid, levels)
    return [level.unflatten(1, shape) for level, shape in zip(worth.split([h * w for h, w in shapes], dim=1), shapes)]


def log_soft_cut(scores: Tensor, k: int, grid: tuple[int, int], levels: int, temperature: float = 1.0) -> Tensor:
    """The logarithm of how likely each node is to be taken, where sets of disjoint nodes are as likely as their scores say.

    A set has the weight exp(sum of (score - price) / temperature), and the price is such that k nodes are taken in the mean: the soft
    counterpart of `quadtree_cut`. Sums over all sets come from one pass from the leaves to the roots, and what each node gets of them from
    one back (the sum-product algorithm on a tree: J. Pearl, "Probabilistic reasoning in intelligent systems", 1988). That a node is taken
    makes all that it holds, and all that hold it, less likely.

    Args:
        scores: [B, n] of all nodes, level by level, the cells first; those that are not finite are never taken.
        k: nodes in the mean, more than 0 and less than there are cells.
        grid: rows and columns of cells.
        levels: of the quadtree.
        temperature: more than 0; towards 0 the sets are those of `quadtree_cut`.

    Returns:
        [B, n]. Gradients to scores, those of the price included.

    Example:
        >>> import torch
        >>> from texvlm.quadtree import log_soft_cut
        >>> weight = log_soft_cut(torch.zeros(1, 4 + 1), 2, (2, 2), 2).exp()
        >>> [round(w, 3) for w in weight[0].tolist()], round(float(weight.sum()), 3)
        ([0.486, 0.486, 0.486, 0.486, 0.056], 2.0)
    """
    there = scores.isfinite()
    known = torch.where(there, scores, 0).double() / temperature  # sums over sets of many sizes

    def taken(price: Tensor) -> Tensor:
        found, below = [], None
        for level, shape in zip(torch.where(there, known - price, -torch.inf).split(sizes, dim=1), shapes):
            level = level.unflatten(1, shape)
            if below is not None:
                level = level - _over_children(below)
                below = _over_children(below) + F.softplus(level)
            else:
                below = F.softplus(level)
            found.append(level)
        reached, out = torch.zeros_like(found[-1]), []
        for level, below_shape in zip(reversed(found), [*shapes[-2::-1], None]):
            out.append((reached + F.logsigmoid(level)).flatten(1))
            if below_shape is not None:
                left = reached + F.logsigmoid(-level)
                reached = left.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, : below_shape[0], : below_shape[1]]
        return torch.cat(out[::-1], dim=1)

    shapes = tree_shapes(*grid, levels)
    sizes = [h * w for h, w in shapes]
    with torch.no_grad():
        price = _root(lambda price: taken(price).exp().sum(1, keepdim=True).log() - math.log(k), *_bracket(known, there, k))
        slope = (taken(price + 1e-4).exp().sum(1, keepdim=True) - taken(price - 1e-4).exp().sum(1, keepdim=True)) / 2e-4
    if scores.requires_grad:
        # Nothing is added, but the derivative of the root: that of the count by the scores over that by the price.
        count = taken(price).exp().sum(1, keepdim=True)
        price = price - (count - count.detach()) / slope.clamp(max=-1e-12)
    return taken(price).to(scores.dtype)


def _bracket(scores: Tensor, there: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Prices between which the price is, for scores that are divided by the temperature."""
    low = torch.where(there, scores, torch.inf).amin(1, keepdim=True) - 30
    high = torch.where(there, scores, -torch.inf).amax(1, keepdim=True) + math.log(max(1, scores.shape[1] / k)) + 1
    return low, high


def _root(falling: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Where a falling function is 0, by false position in the form of Illinois: fixed work, so that nothing waits for a device."""
    above, below = falling(low), falling(high)
    last = torch.zeros_like(low)
    for _ in range(20):
        middle = (low * below - high * above) / (below - above)
        found = falling(middle)
        up = found > 0
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
        side = torch.where(up, 1.0, -1.0).to(low.dtype)
        # An end that has stayed twice counts half, so that it moves.
        again = torch.where(side == last, 0.5, 1.0).to(low.dtype)
        above, below = torch.where(up, found, above * again), torch.where(up, below * again, found)
        last = side
    return middle


def _over_children(cells: Tensor) -> Tensor:
    """Sums over the up to four children of each node."""
    rows, columns = cells.shape[1:]
    return 4 * F.avg_pool2d(F.pad(cells[:, None], (0, columns % 2, 0, rows % 2)), 2)[:, 0]


@fake("quadtree_cut")
def _(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = values.shape[0]
    return values.new_empty(values.shape, dtype=torch.bool), values.new_empty(batch), values.new_empty(batch)
