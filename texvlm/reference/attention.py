"""Hierarchical attention: queries that read near cells key by key, and the rest as means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .pyramid import compute_dtype

NEVER = float("-inf")
BOUND_SHARE = 2.0  # of the bound, beside the mass times the spread
BUDGET = 1 << 24  # elements of the largest intermediate tensor: tiles are taken in portions that stay near it


def _grid(height: int, width: int, level: int) -> tuple[int, int]:
    return -(-height >> level), -(-width >> level)


def _cells(height: int, width: int, level: int) -> int:
    rows, columns = _grid(height, width, level)
    return rows * columns


def _members(places: Tensor, height: int, width: int, level: int, fill: float) -> Tensor:
    """The places of each cell, `[..., N, D]` to `[..., cells, members, D]`; `fill` where a cell reaches over the border."""
    rows, columns = _grid(height, width, level)
    tall, wide = min(1 << level, height), min(1 << level, width)
    grid = places.unflatten(-2, (height, width))
    grid = F.pad(grid, (0, 0, 0, columns * wide - width, 0, rows * tall - height), value=fill)
    grid = grid.unflatten(-2, (columns, wide)).unflatten(-4, (rows, tall)).transpose(-4, -3)
    return grid.flatten(-5, -4).flatten(-3, -2)


def _pack_level(k: Tensor, v: Tensor, log_weight: Tensor, height: int, width: int, level: int) -> tuple[Tensor, ...]:
    log = _members(log_weight[:, None, :, None], height, width, level, NEVER)  # [B, 1, cells, members, 1]
    top = log.detach().amax(-2, keepdim=True)
    top = top.where(top > NEVER, 0.0)
    weight = (log - top).exp()
    total = weight.sum(-2, keepdim=True)
    none = total == 0
    share = weight / total.masked_fill(none, 1.0)
    log_count = (top + total.masked_fill(none, 1.0).log()).masked_fill(none, NEVER)[:, 0, :, 0, 0]

    results, spreads = [], []
    for value in (k, v):
        member = _members(value, height, width, level, 0.0)
        mean = (share * member).sum(-2, keepdim=True)
        far = (member - mean).detach().masked_fill(weight == 0, 0.0)  # what is not there is at no distance, be the mean infinite
        spreads.append((share.detach() * far.square()).sum((-2, -1)))
        results.append(mean.squeeze(-2))
    key, gone = _members(k.detach(), height, width, level, 0.0), weight == 0
    low = key.masked_fill(gone, float("inf")).amin(-2).masked_fill(none.squeeze(-2), 0.0)
    high = key.masked_fill(gone, NEVER).amax(-2).masked_fill(none.squeeze(-2), 0.0)
    return *results, log_count, torch.stack(spreads, -1), low, high


def attention_pack(
    k: Tensor, v: Tensor, height: int, width: int, levels: Sequence[int], log_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the cells of each level hold: mean keys and values, how many they are, how far they spread.

    Args:
        k: `[B, Hkv, N, D]` keys of a grid of N = `height` `width` places, row by row.
        v: alike, values.
        height: rows.
        width: columns.
        levels: one cell of level l is 2^l x 2^l places, cut at the border. M cells in all, level after level.
        log_weight: `[B, N]` in the dtype of the sums: w = exp(log_weight). A place of weight 0 is not there, whatever it holds.

    Returns:
        `keys` and `values` `[B, Hkv, M, D]`, weighted means; `log_count` `[B, M]` = ln n, n the sum of w; `spread` `[B, Hkv, M, 2]`, traces
        of the variances of keys and of values; `low` and `high` `[B, Hkv, M, D]`, least and largest key per coordinate. 0 in a cell where
        nothing is, log_count -inf. In float64 for float64, else float32. Spread, low and high are constants.
    """
    dtype = compute_dtype(k.dtype)
    log_weight = k.new_zeros(len(k), height * width, dtype=dtype) if log_weight is None else log_weight.to(dtype)
    gone = (log_weight == NEVER)[:, None, :, None]
    k, v = (t.to(dtype).masked_fill(gone, 0.0) for t in (k, v))
    packed = [_pack_level(k, v, log_weight, height, width, level) for level in levels]
    none, nothing = k[:, :, :0], k.detach()[:, :, :0]  # of no level: torch.cat wants one tensor at least
    empty = (none, v[:, :, :0], log_weight[:, :0], nothing[..., :1].expand(-1, -1, -1, 2), nothing, nothing)
    joined = [torch.cat(parts, 1 if parts[0].dim() == 2 else 2) for parts in zip(empty, *packed, strict=True)]
    keys, values, log_count, spread, low, high = joined
    return keys, values, log_count, spread, low, high


def _query_tiles(height: int, width: int, tile: Sequence[int], queries: int, device: torch.device) -> Tensor:
    """`[tiles, th tw]`: the queries of each tile, and `queries` in the place of one that lies over the border."""
    tall, wide = tile
    if tall * wide == 1:
        return torch.arange(queries, device=device)[:, None]
    grid = torch.arange(height * width, device=device).reshape(height, width)
    grid = F.pad(grid, (0, -width % wide, 0, -height % tall), value=queries)
    return grid.unflatten(1, (-1, wide)).unflatten(0, (-1, tall)).transpose(1, 2).flatten(0, 1).flatten(1)


def _parents(height: int, width: int, level: int, coarser: int, device: torch.device) -> Tensor:
    """`[cells of level]`: the cell of the coarser level in which each one lies."""
    rows, columns = _grid(height, width, level)
    y, x = torch.arange(rows, device=device) >> coarser - level, torch.arange(columns, device=device) >> coarser - level
    return (y[:, None] * _grid(height, width, coarser)[1] + x).flatten()


def _listed(mask: Tensor, length: int | None = None) -> Tensor:
    """What is set in each row of a mask `[..., E]`, ascending, then -1: `[..., length]`, by default as long as the longest."""
    at = mask.cumsum(-1).where(mask, 0)
    length = (int(at.max()) if at.numel() else 0) if length is None else length
    index = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    listed = index.new_full((*mask.shape[:-1], max(length, mask.shape[-1]) + 1), -1).scatter(-1, at, index.where(mask, -1))
    return listed[..., 1 : length + 1]


class _Portion(NamedTuple):
    """Some tiles and all cells, as choosing sees them: entries are the M cells of all stages, then the P prefix keys."""

    queries: Tensor  # [B, H, T, Q, D]
    is_query: Tensor  # [T, Q, 1]: not over the border
    scores: Tensor  # [B, H, T, Q, M + P]
    exists: Tensor  # [B, 1, 1, M + P]: not empty
    spread: Tensor  # [B, H, 1, M, 2]
    low: Tensor  # [B, H, 1, M, D]
    high: Tensor


def _bound(portion: _Portion, scale: float, stage: slice, has_say: Tensor) -> Tensor:
    """The largest score that the box of each cell of a stage allows, for the mean of the queries, `[B, H, T, cells]`.

    Not finite where the box is not, on whichever side.
    """
    mean = scale * portion.queries.where(has_say, 0.0).sum(-2) / has_say.sum(-2).clamp(min=1)
    low, high = (mean[..., None, :] * box[..., stage, :] for box in (portion.low, portion.high))
    whole = (low + high).isfinite().all(-1)
    return torch.maximum(low, high).sum(-1).where(whole, float("nan"))


def _importance(portion: _Portion, scale: float, stage: slice, entries: Tensor, importance: str) -> Tensor:
    """What splitting each cell of a stage is worth, `[B, H, T, cells]`; `entries` `[B, H, T, M + P]` are what would be read now."""
    scores = portion.scores.where(entries[..., None, :], NEVER)
    normaliser = scores.logsumexp(-1, keepdim=True)
    has_say = normaliser.isfinite() & portion.is_query
    amount = (scores[..., stage] - normaliser).exp().where(has_say, 0.0).sum(-2)
    if importance == "spread":
        spread = portion.spread[..., stage, :]
        amount = amount * spread[..., 0] * spread[..., 1].sqrt()

    bound = _bound(portion, scale, stage, has_say) if importance != "mass" else torch.zeros_like(amount)
    here = entries[..., stage]
    ranked = amount.where(here & amount.isfinite(), 0.0)
    total = ranked.sum(-1, keepdim=True)
    ranked = (ranked / total).where(total > 0, 0.0)
    bounded = bound.where(here & bound.isfinite(), NEVER).softmax(-1)
    value = {"spread": ranked + BOUND_SHARE * bounded, "mass": ranked, "bound": bounded}[importance]
    by = {"spread": amount + bound, "mass": amount, "bound": bound}[importance]
    return value.where(by.isfinite(), float("inf"))


def _choose(
    portion: _Portion, scale: float, importance: str, s: int, stage: slice, count: int, left: Tensor, present: Tensor
) -> Tensor:
    """Which cells of a stage are split, of those `present`, `[B, H, T, cells]`; `left` `[B, H, T, M + P]` is read if none are."""
    exists = portion.exists[..., stage]
    value = _importance(portion, scale, stage, left & portion.exists, importance).where(exists, -1.0).where(present, NEVER)
    best = value.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(present).scatter(-1, best, True) & present


def _given(choice: Tensor, counts: Sequence[int], s: int, stage: slice, count: int, left: Tensor, present: Tensor) -> Tensor:
    """The same from a list that is given."""
    of_stage = choice[..., sum(counts[:s]) : sum(counts[: s + 1])].long()
    return F.pad(torch.zeros_like(present), (1, 0)).scatter(-1, of_stage + 1, True)[..., 1:] & present


def _descend(
    ask: Callable[..., Tensor],
    left: Tensor,
    stages: Sequence[slice],
    counts: Sequence[int],
    children: Sequence[Tensor],
    places: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split stage after stage what `ask` says.

    Returns the cells that were split, listed; of all cells and the prefix, those that are read, `[B, H, T, M + P]`; the places that are.
    """
    left = left.clone()
    present = left.new_ones(*left.shape[:-1], stages[0].stop if stages else places)
    listed = [torch.zeros_like(left[..., :0], dtype=torch.long)]
    for s, stage in enumerate(stages):
        left[..., stage] = present
        split = ask(s, stage, counts[s], left, present)
        left[..., stage] &= ~split
        present = split[..., children[s]]
        listed.append(_listed(split, counts[s]))
    return torch.cat(listed, -1), left, present


def _attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the last dimension: probabilities, their sums of values `[..., K, D]`, and the logarithm of the normaliser.

    Where all scores are -inf: 0, 0 and -inf, and no gradient. Where one is +inf or NaN: NaN.
    """
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), NEVER)
    top = top.where(top != NEVER, 0.0)
    weight = (scores - top).exp()
    total = weight.sum(-1, keepdim=True)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    probability = weight / total
    lse = (top + total.log()).masked_fill(none, NEVER)
    return probability, probability @ values, lse.squeeze(-1)


def _mass_of_places(
    mass: Tensor, log_count: Tensor, log_weight: Tensor, height: int, width: int, levels: Sequence[int]
) -> Tensor:
    """What each place got, `[B, H, N]`, of the mass `[B, H, M + N]` of cells and places: of each cell its share by weight."""
    result = mass[..., log_count.shape[1] :]
    first = 0
    for level in levels:
        cell = first + _parents(height, width, 0, level, mass.device)
        share = (log_weight - log_count[:, cell]).exp()
        result = result + (mass[..., cell] * share[:, None]).masked_fill((log_weight == NEVER)[:, None], 0.0)
        first += _cells(height, width, level)
    return result


def hierarchical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    log_count: Tensor,
    spread: Tensor,
    low: Tensor,
    high: Tensor,
    height: int,
    width: int,
    levels: Sequence[int],
    counts: Sequence[int],
    scale: float,
    query_tile: Sequence[int],
    importance: str = "spread",
    with_mass: bool = False,
    log_weight: Tensor | None = None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    choice: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return attention in which each tile of queries reads some cells place by place, and of the others the means.

    Stage s has the cells of levels[s] inside the cells that stage s - 1 split, and splits counts[s] of them; what the last stage splits is
    read place by place. One softmax goes over all that is read: places by `scale q.k + log_weight`, cells by `scale q.keys + log_count`.

    Args:
        q: `[B, H, Nq, D]`, H a multiple of Hkv.
        k: `[B, Hkv, N, D]`, a grid of N = `height` `width` places, row by row.
        v: alike.
        keys: and the next five, what `attention_pack` returns.
        values: `[B, Hkv, M, D]`.
        log_count: `[B, M]`.
        spread: `[B, Hkv, M, 2]`.
        low: `[B, Hkv, M, D]`.
        high: `[B, Hkv, M, D]`.
        height: rows.
        width: columns.
        levels: strictly decreasing, at least 1; of none, attention is dense.
        counts: one per level.
        scale: of scores.
        query_tile: `[1, 1]`, and each query chooses alone, or the size of the tiles of the grid that choose together; then Nq = N.
        importance: "spread", by the probability of a cell and its deviations, and what its box may hold; "mass", by the probability alone;
            "bound", by the box alone.
        with_mass: whether `mass` is wanted.
        log_weight: `[B, N]`, as given to `attention_pack`.
        prefix_k: `[B, Hkv, P, D]`, keys outside the grid that all queries read.
        prefix_v: alike.
        choice: what `chosen` shall be, instead of choosing.

    Returns:
        `out` `[B, H, Nq, D]` in the dtype of q, 0 for a query that reads nothing. `lse` `[B, H, Nq]`, the logarithm of the sum of the
        exponentials of the scores. `chosen`, int32 `[B, H, tiles, sum(counts)]`: of each stage the cells that are split, ascending, -1
        beyond. `mass` `[B, H, N]`, what each place got of all queries together, a cell's share being divided by weight (`[B, H, 0]` if not
        wanted). The choice and the mass are constants. A query whose scores have no finite sum has no part in a choice; a cell that has no
        finite rank is split first, one in which nothing is, last; of equals the first one is.
    """
    dtype, places, cells = compute_dtype(q.dtype), height * width, keys.shape[2]
    batch, heads, many, depth = q.shape
    log_weight = k.new_zeros(batch, places, dtype=dtype) if log_weight is None else log_weight.to(dtype)
    prefix_k = k[:, :, :0] if prefix_k is None else prefix_k
    prefix_v = v[:, :, :0] if prefix_v is None else prefix_v
    prefix = prefix_k.shape[2]

    def per_head(t: Tensor) -> Tensor:
        return t.to(dtype).repeat_interleave(heads // k.shape[1], 1)

    # All that may be read, in one list: cells, places, prefix. Last there is nothing, which -1 finds.
    nothing = q.new_zeros(batch, heads, 1, depth, dtype=dtype)
    all_keys = torch.cat([*map(per_head, (keys, k, prefix_k)), nothing], 2)
    all_values = torch.cat([*map(per_head, (values, v, prefix_v)), nothing], 2)
    log = F.pad(F.pad(torch.cat([log_count, log_weight], 1), (0, prefix)), (0, 1), value=NEVER)
    exists = (log > NEVER)[:, None, None, :-1]
    cell_exists = torch.cat([exists[..., :cells], exists[..., cells + places :]], -1)
    cell_keys = torch.cat([all_keys[:, :, :cells], all_keys[:, :, cells + places : -1]], 2).detach()
    cell_log = F.pad(log_count, (0, prefix))[:, None, None, None].detach()
    boxes = [per_head(t)[:, :, None] for t in (spread, low, high)]

    sizes = [_cells(height, width, level) for level in levels]
    stages = [slice(sum(sizes[:s]), sum(sizes[: s + 1])) for s in range(len(sizes))]
    children = [_parents(height, width, fine, coarse, q.device) for coarse, fine in pairwise([*levels, 0])]
    table = _query_tiles(height, width, query_tile, many, q.device)
    tiles, size = table.shape
    asked = torch.cat([q.to(dtype), nothing], 2)
    read = min(places, counts[-1] << 2 * levels[-1]) + sum(counts) * 4 if levels else places
    work = batch * heads * max(size * (cells + prefix), (read + prefix) * max(depth, size), exists.shape[-1])
    step = max(1, BUDGET // max(1, work))

    outs, lses, chosen, mass = [], [], [], torch.zeros_like(all_keys[..., 0]).detach()
    for start in range(0, max(tiles, 1), step):
        index = table[start : start + step]
        queries, is_query = asked[:, :, index], (index < many)[..., None]
        with torch.no_grad():
            if choice is None:
                cell_scores = scale * torch.einsum("bhtqd,bhed->bhtqe", queries, cell_keys) + cell_log
                ask = partial(_choose, _Portion(queries, is_query, cell_scores, cell_exists, *boxes), scale, importance)
            else:
                ask = partial(_given, choice[:, :, start : start + step], counts)
            nothing_yet = torch.arange(cells + prefix, device=q.device).ge(cells).repeat(batch, heads, len(index), 1)
            listed, left, present = _descend(ask, nothing_yet, stages, counts, children, places)
            entries = _listed(torch.cat([left[..., :cells], present, left[..., cells:]], -1) & exists)
            entries = entries.where(entries >= 0, all_keys.shape[2] - 1)
        chosen.append(listed)

        at = entries.flatten(2)
        key, value = (
            t.gather(2, at[..., None].expand(-1, -1, -1, depth)).unflatten(2, entries.shape[2:]) for t in (all_keys, all_values)
        )
        bias = log[:, None].expand(-1, heads, -1).gather(2, at).unflatten(2, entries.shape[2:])[..., None, :]
        scores = scale * torch.einsum("bhtqd,bhted->bhtqe", queries, key) + bias
        probability, out, lse = _attend(scores.where((bias > NEVER) & is_query, NEVER), value)
        outs.append(out.flatten(2, 3))
        lses.append(lse.flatten(2))
        if with_mass:
            mass = mass.scatter_add(2, at, probability.detach().sum(-2).flatten(2))

    home = table.new_zeros(many + 1).scatter(0, table.flatten(), torch.arange(table.numel(), device=q.device))[:many]
    out, lse = torch.cat(outs, 2)[:, :, home].to(q.dtype), torch.cat(lses, 2)[:, :, home]
    mass = mass[..., : cells + places]
    mass = _mass_of_places(mass, log_count.detach(), log_weight.detach(), height, width, levels) if with_mass else mass[..., :0]
    return out, lse, torch.cat(chosen, 2).int() if choice is None else choice.clone(), mass
