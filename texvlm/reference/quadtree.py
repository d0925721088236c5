"""The best k disjoint nodes of a quadtree over a grid of cells."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _children(plane: Tensor) -> Tensor:
    """Return what the up to four children of each node hold, `[rows, columns, 4]`, 0 where there is none."""
    rows, columns = plane.shape
    padded = F.pad(plane, (0, columns % 2, 0, rows % 2))
    return torch.stack([padded[0::2, 0::2], padded[0::2, 1::2], padded[1::2, 0::2], padded[1::2, 1::2]], dim=-1)


def _weigh(values: list[Tensor], price: Tensor) -> tuple[list[Tensor], Tensor, int]:
    """Return which nodes would be taken at a price, were none above them, what the roots are worth, and how many tokens that takes."""
    own = values[0] - price
    themselves = [own > 0]
    worth, count = torch.where(own > 0, own, 0), (own > 0).long()
    for value in values[1:]:
        parts, own = _children(worth), value - price
        below = ((parts[..., 0] + parts[..., 1]) + parts[..., 2]) + parts[..., 3]
        itself = (own > 0) & (own >= below)
        themselves.append(itself)
        worth, count = torch.where(itself, own, below), torch.where(itself, 1, _children(count).sum(-1))
    return themselves, worth, int(count.sum())


def _number(key: int, dtype: torch.dtype) -> Tensor:
    """Return the float whose bits, read as an ordered integer, are `key`."""
    whole, top = (torch.int32, 31) if dtype == torch.float32 else (torch.int64, 63)
    bits = key if key >= 0 else key ^ ((1 << top) - 1)
    return torch.tensor(bits, dtype=whole).view(dtype)


def _key(value: float, dtype: torch.dtype) -> int:
    whole, top = (torch.int32, 31) if dtype == torch.float32 else (torch.int64, 63)
    bits = int((torch.tensor(value, dtype=dtype) + 0).view(whole))
    return bits if bits >= 0 else bits ^ ((1 << top) - 1)


def _cut(values: list[Tensor], k: int) -> tuple[list[Tensor], Tensor, Tensor]:
    dtype, cells = values[0].dtype, values[0].numel()
    values = [v.nan_to_num(nan=-1e30).clamp(-1e30, 1e30) for v in values]
    price = torch.zeros((), dtype=dtype)
    if k < cells:
        low, high = _key(-8e30, dtype), _key(1e30, dtype)
        while high - low > 1:
            middle = (low + high) // 2
            count = _weigh(values, _number(middle, dtype))[2]
            low, high = (low, middle) if count <= k else (middle, high)
            if count == k:
                break
        price = _number(high, dtype)
    taken, worth, _ = _weigh(values, price)
    bound = worth.sum() + price * min(k, cells)
    if k >= cells:
        return [torch.full_like(t, level == 0) for level, t in enumerate(taken)], bound, price
    covered = torch.zeros_like(taken[-1])
    for level in reversed(range(len(taken))):
        taken[level] = taken[level] & ~covered
        if level:
            rows, columns = taken[level - 1].shape
            covered = (covered | taken[level]).repeat_interleave(2, 0).repeat_interleave(2, 1)[:rows, :columns]
    left = k - sum(int(t.sum()) for t in taken)
    free = torch.where(covered | taken[0], -torch.inf, values[0]).flatten()
    best = free.sort(descending=True, stable=True).indices[: min(left, int(free.isfinite().sum()))]
    taken[0].view(-1)[best] = True
    left -= len(best)
    while left > 0:  # every cell is covered
        moves = []
        for level in range(1, len(values)):
            for y, x in taken[level].nonzero().tolist():
                below = values[level - 1][2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
                order = below.flatten().sort(descending=True, stable=True).indices[: left + 1]
                gain = -values[level][y, x]
                for child in order:
                    gain = gain + below.flatten()[child]
                rate = gain / (len(order) - 1) if len(order) > 1 else gain - 16e30
                moves.append(
                    (
                        float(rate),
                        level,
                        y,
                        x,
                        [(2 * y + int(i) // below.shape[1], 2 * x + int(i) % below.shape[1]) for i in order],
                    )
                )
        _, level, y, x, children = max(moves, key=lambda move: move[0])  # the first of equals
        taken[level][y, x] = False
        for cy, cx in children:
            taken[level - 1][cy, cx] = True
        left -= len(children) - 1
    return taken, bound, price


def quadtree_cut(values: Tensor, rows: int, columns: int, levels: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take the best k disjoint nodes, or all cells where there are fewer.

    Args:
        values: `[B, nodes]`: what each node is worth, the cells first, then level by level ceil(rows / 2^l) x ceil(columns / 2^l). NaN
            is the least, and infinities are 1e30.
        rows: of cells.
        columns: of cells.
        levels: of the tree; a node of level l covers 2^l x 2^l cells.
        k: tokens; each node costs one.

    Returns:
        taken, bool `[B, nodes]`; bound `[B]`, which no k disjoint nodes exceed; price `[B]` of a token.

    The set of the smallest price at which at most k are taken, filled up with the best cells that are free; where none is, the node
    that gains most per token gives way to its best children.
    """
    shapes = [(-(-rows // 2**level), -(-columns // 2**level)) for level in range(levels)]
    results = []
    for row in values:
        planes = [part.reshape(shape) for part, shape in zip(row.split([h * w for h, w in shapes]), shapes)]
        taken, bound, price = _cut(planes, k)
        results.append((torch.cat([t.flatten() for t in taken]), bound, price))
    if not results:
        return values.new_empty(values.shape, dtype=torch.bool), values.new_empty(0), values.new_empty(0)
    taken_all, bounds, prices = zip(*results)
    return torch.stack(taken_all), torch.stack(bounds), torch.stack(prices)
