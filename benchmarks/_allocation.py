"""A slow allocator of tokens at mixed levels: the best antichain of a quadtree by a Lagrange multiplier, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks._reading import Block

ROUNDS = 40


def _children(plane: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Sums over the up to four children, [rows, columns]."""
    padded = F.pad(plane, (0, 2 * columns - plane.shape[1], 0, 2 * rows - plane.shape[0]))
    return padded.view(rows, 2, columns, 2).sum((1, 3))


def _taken(values: list[torch.Tensor], price: float) -> list[torch.Tensor]:
    """Which nodes the best antichain has when each costs `price`, a bool plane per level."""
    own = [value - price for value in values]
    best, chosen = own[0].clamp(min=0), [own[0] > 0]
    for plane in own[1:]:
        below = _children(best, *plane.shape)
        chosen.append((plane > 0) & (plane >= below))
        best = torch.where(chosen[-1], plane, below)
    free = torch.ones_like(chosen[-1])
    for level in reversed(range(len(values))):
        rows, columns = values[level].shape
        if level + 1 < len(values):
            free = (free & ~chosen[level + 1]).repeat_interleave(2, 0).repeat_interleave(2, 1)[:rows, :columns]
        chosen[level] = chosen[level] & free
    return chosen


def allocate(values: list[torch.Tensor], k: int, cell: int) -> list[Block]:
    """At most k disjoint blocks of the largest sum of values that one price for all tokens gives, and the best free cells up to k.

    Args:
        values: per level [rows_l, columns_l] (or [1, rows_l, columns_l]), >= 0: what a node is worth over the coarse picture.
        k: the budget.
        cell: pixels a side of a node of level 0.
    """
    values = [value.double().reshape(value.shape[-2:]) for value in values]
    low, high = 0.0, max(float(value.max()) for value in values) + 1e-9
    for _ in range(ROUNDS):
        price = (low + high) / 2
        if sum(int(plane.sum()) for plane in _taken(values, price)) <= k:
            high = price
        else:
            low = price
    chosen = _taken(values, high)
    covered = torch.zeros_like(chosen[0])
    for level, plane in enumerate(chosen):
        side = 1 << level
        covered |= plane.repeat_interleave(side, 0).repeat_interleave(side, 1)[: covered.shape[0], : covered.shape[1]]
    left = k - sum(int(plane.sum()) for plane in chosen)
    order = values[0].masked_fill(covered, -1).flatten().sort(descending=True, stable=True).indices
    fill = order[: max(0, min(left, int((~covered).sum())))]
    chosen[0].view(-1)[fill] = True
    places = [(level, y, x) for level, plane in enumerate(chosen) for y, x in plane.nonzero().tolist()]
    return [(y * (cell << level), x * (cell << level), cell << level, level) for level, y, x in places]
