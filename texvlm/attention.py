"""Stem `attention`: attention over a grid of places which reads far or unimportant ones from coarse cells, inside one softmax.

Every place counts: those of a cell that is not split come in together, through their mean key and mean value, with the logarithm of
their number added to the logit. Which cells are split is chosen from coarse to fine, by the attention that a cell gets times the spread of
what it holds. Counting pooled keys by a logarithm is in Token Merging (Bolya et al., 2023), choosing in stages in Native Sparse
Attention (Yuan et al., 2025); choosing by spread, and one softmax over all levels, are this library's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from texvlm._ext import acc_dtype, fake, fake_gradients, integer, ops, real_tensor
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.towers import calibrate as calibrate
    from texvlm.towers import replace as replace

KEEP = 0.1
"""The share of the finest cells that is split, unless another is asked for."""

IMPORTANCE = ("spread", "mass", "bound")

MOST_COARSE = 256
"""Cells of the first stage at most, where `stages` are chosen: all of them are scored for every tile."""

DENSE = 16
"""Grids of so few places are read whole."""

QUERIES = 64
"""Of a tile: they choose together."""


class AttentionPlan(NamedTuple):
    """What of a grid is read."""

    levels: list[int]  # coarse levels, from coarse to fine; empty: everything is read
    counts: list[int]  # how many cells of each are split
    read: float  # entries that are scored for each query, over the places of the grid; at a grid's border up to so many


def plan(grid: tuple[int, int], keep: float = KEEP, stages: str | Sequence[int] = "auto", alone: bool = False) -> AttentionPlan:
    """Which levels of a grid `hierarchical_attention` reads, and how many of their cells it splits.

    Args:
        grid: (rows, columns) of the places.
        keep: the share of the finest cells that are read place by place; more of the coarser ones are split,
            (2.5 keep)^((s + 1) / S) in stage s of S. From 1 on everything is read.
        stages: "auto", or levels from coarse to fine, the last 0 (the places themselves): a cell of level l is 2^l x 2^l places. "auto"
            begins where the grid has at most 256 cells (at level 3 at least), and ends with 2 and 0.
        alone: whether queries choose alone; those begin at level 2 at least.

    Returns:
        AttentionPlan. It is dense, without levels, for small grids, and where so many cells would be read that reading every place costs
        no more.

    Raises:
        ValueError: a side or keep that is not positive, stages that do not decrease to 0.

    Example:
        >>> from texvlm import attention
        >>> attention.plan((64, 64), 0.1)
        AttentionPlan(levels=[3, 2], counts=[32, 26], read=0.1484375)
    """
    rows, columns = _grid(grid)
    if not (isinstance(keep, (int, float)) and keep > 0):
        raise ValueError(f"keep must be a number above 0 (from 1 on everything is read), got {keep!r}")
    levels, places = _levels(rows, columns, stages, alone), rows * columns
    if keep >= 1 or not levels:
        return AttentionPlan([], [], 1.0)
    cells: list[int] = [math.prod(_shape(rows, columns, level)) for level in levels]
    counts: list[int] = []
    present, scored = cells[0], 0
    for stage, level in enumerate(levels):
        scored += present
        last = stage == len(levels) - 1
        share = 1.0 if last else min(1.0, (2.5 * keep) ** ((stage + 1) / len(levels)))
        wanted = round(keep * cells[stage]) if last else math.ceil(cells[stage] * share)
        counts.append(min(max(1, wanted), present))
        finer = 0 if last else levels[stage + 1]
        grid_of_finer = _shape(rows, columns, finer)
        children = math.prod([min(1 << level - finer, side) for side in grid_of_finer])
        present = min(math.prod(grid_of_finer), counts[-1] * children)
    read = (scored + present) / places
    return AttentionPlan(levels, counts, read) if read < 1 else AttentionPlan([], [], 1.0)


def _shape(rows: int, columns: int, level: int) -> tuple[int, int]:
    return -(-rows >> level), -(-columns >> level)


def _levels(rows: int, columns: int, stages: str | Sequence[int], alone: bool) -> list[int]:
    """The coarse levels that `stages` says."""
    if stages != "auto":
        if isinstance(stages, str) or not isinstance(stages, Sequence):
            raise ValueError(f"stages must be 'auto' or levels that decrease to 0, as (3, 2, 0), got {stages!r}")
        levels = [integer("stages", level, 0) for level in stages]
        if not levels or levels[-1] != 0 or levels[0] > 30 or any(a <= b for a, b in itertools.pairwise(levels)):
            raise ValueError(f"stages must be levels that decrease to 0, as (3, 2, 0), the first at most 30, got {stages!r}")
        return levels[:-1]
    if rows * columns <= DENSE:
        return []
    first = 2 if alone else 3
    while math.prod(_shape(rows, columns, first)) > MOST_COARSE:
        first += 1
    while first > 1 and math.prod(_shape(rows, columns, first)) < 4:
        first -= 1
    return list(range(first, 1, -1)) or [1]


@dataclass(frozen=True)
class PackedKeys:
    """Keys and values with what is known of their cells: packed once by `pack_keys`, for many calls of `hierarchical_attention`. A pytree.

    Attributes:
        k, v: [B, Hkv, N, D], as they came.
        log_weight: [B, N] of the places, or None: all weigh 1.
        keys, values: [B, Hkv, M, D] of the cells of all levels, their weighted means, in float32 (float64 for float64).
        log_count: [B, M], the logarithm of the sum of their weights.
        spread: [B, Hkv, M, 2], the variance of their keys, and of their values.
        low, high: [B, Hkv, M, D], the least and the largest key in each coordinate.
        grid: (rows, columns).
        plan: what is read of it.
    """

    k: Tensor
    v: Tensor
    log_weight: Tensor | None
    keys: Tensor
    values: Tensor
    log_count: Tensor
    spread: Tensor
    low: Tensor
    high: Tensor
    grid: tuple[int, int]
    plan: AttentionPlan


_TENSORS = ("k", "v", "log_weight", "keys", "values", "log_count", "spread", "low", "high")


def _flatten(packed: PackedKeys) -> tuple[list[Any], Any]:
    names = [name for name in _TENSORS if getattr(packed, name) is not None]
    return [getattr(packed, name) for name in names], (names, packed.grid, packed.plan)


def _unflatten(tensors: Any, context: Any) -> PackedKeys:
    names, grid, what = context
    found: dict[str, Any] = {"log_weight": None, **dict(zip(names, tensors)), "grid": grid, "plan": what}
    return PackedKeys(**found)


pytree.register_pytree_node(PackedKeys, _flatten, _unflatten, serialized_type_name="texvlm.PackedKeys")
torch.serialization.add_safe_globals([PackedKeys, AttentionPlan])


def pack_keys(
    k: Tensor | Texture,
    v: Tensor | Texture,
    grid: tuple[int, int] | None = None,
    *,
    keep: float = KEEP,
    stages: str | Sequence[int] = "auto",
    alone: bool = False,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    heads: int | None = None,
) -> PackedKeys:
    """Packs keys and values once, for many calls of `hierarchical_attention`, as when one token after another asks of the same picture.

    Args:
        k: [B, Hkv, N, D], see `hierarchical_attention`; or a texture, with `heads`.
        v: alike.
        grid: (rows, columns) of the places.
        keep: see `plan`; a call may ask for another.
        stages: see `plan`.
        alone: see `plan`: True where queries will choose alone.
        weight: see `hierarchical_attention`.
        bias: see `hierarchical_attention`.
        mask: see `hierarchical_attention`.
        heads: Hkv, of textures.

    Returns:
        PackedKeys, to be handed in as `k`. Keys, values and counts are differentiable.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Example:
        >>> import torch, texvlm
        >>> from texvlm import attention
        >>> k, v = torch.randn(2, 1, 4, 4096, 32)
        >>> packed = attention.pack_keys(k, v, (64, 64), alone=True)
        >>> [texvlm.hierarchical_attention(q, packed).shape for q in torch.randn(2, 1, 4, 1, 32)]
        [torch.Size([1, 4, 1, 32]), torch.Size([1, 4, 1, 32])]
    """
    if isinstance(k, Texture) and (heads is None or k.channels % integer("heads", heads, 1)):
        raise ValueError(f"heads must say how many heads the {k.channels} channels of k are, got {heads}")
    width = k.channels // heads if isinstance(k, Texture) and heads is not None else None
    keys, values, grid = _keys_and_values(k, v, grid, width)
    weights = _log_weight(keys, weight, bias, mask)
    return _pack(keys, values, weights, grid, plan(grid, keep, stages, alone))


def _pack(k: Tensor, v: Tensor, log_weight: Tensor | None, grid: tuple[int, int], what: AttentionPlan) -> PackedKeys:
    cells = ops.attention_pack(k, v, *grid, what.levels, log_weight)
    return PackedKeys(k, v, log_weight, *cells, grid, what)  # type: ignore[call-arg, unused-ignore]


def hierarchical_attention(
    q: Tensor,
    k: Tensor | Texture | PackedKeys,
    v: Tensor | Texture | None = None,
    grid: tuple[int, int] | None = None,
    keep: float | None = None,
    *,
    stages: str | Sequence[int] = "auto",
    scale: float | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    exact: bool = False,
    queries: str = "auto",
    importance: str = "spread",
    choice: Tensor | None = None,
    return_lse: bool = False,
    return_mass: bool = False,
    return_chosen: bool = False,
) -> Any:
    """Attention over a grid of places, the important ones read one by one, the others through the means of cells, in ONE softmax.

    At 64 x 64 places and keep = 0.1 each query scores .15 as many entries as there are places. The error depends on the keys: some 11 % of
    the output's norm in a trained vision transformer, little where keys vary smoothly over the picture, most of it where they are noise.

    Args:
        q: [B, H, Nq, D], float32, float64, float16 or bfloat16; H a multiple of Hkv: query head h reads key head h // (H / Hkv).
        k: [B, Hkv, N, D] in the dtype of q, N = rows * columns places in row-major order; or a `Texture` of Hkv * D channels, head by
            head, of which level 0 is read; or `PackedKeys`, which hold v, grid, stages and weights too.
        v: like k.
        grid: (rows, columns); of textures their own.
        keep: share of the finest cells read place by place, see `plan`; 0.1 by default (of PackedKeys, what they were packed with). A
            schedule by layers is a number for each call.
        stages: see `plan`.
        scale: of the logits; 1 / sqrt(D) by default.
        weight: [N] or [B, N], a place counts as so many; 0 (or less): it is not there, whatever it holds.
        bias: [N] or [B, N], is added to the logits; -inf: the place is not there.
        mask: bool [N] or [B, N], True: attend.
        prefix: (keys, values) [B, Hkv, P, D] beside the grid, such as class tokens or text, each read for itself.
        exact: read every place, whatever `keep` is.
        queries: "grid": q lies on the grid of the keys, and tiles of 64 neighbours choose together; "alone": each chooses for itself.
            "auto": on the grid where Nq = N.
        importance: what cells are chosen by: "spread", their attention times the spread of their keys and the root of that of their
            values, and twice a bound of their largest logit, each as shares of the cells'; "mass", their attention alone; "bound", the
            bound alone.
        choice: int32 [B, H, tiles, sum(counts)] as `return_chosen` gives it: nothing is chosen then.
        return_lse: also the logarithm of the softmax's denominator.
        return_mass: also the attention of each place.
        return_chosen: also the cells that were split.

    Returns:
        [B, H, Nq, D] in the dtype of q. Where anything else is asked for, a tuple of it and, in this order: lse [B, H, Nq] and
        mass [B, H, N] in float32 (float64 for float64), the latter the mean over the queries, a cell's shared out among its places by
        their weights (with the prefix's it sums to 1); chosen int32 [B, H, tiles, sum(counts)], for each stage in turn the cells that
        are split, ascending indices in the stage's grid, -1 beyond. A query that finds no entry at all has output 0 and lse -inf.

        Differentiable in q, k, v, weight, bias and prefix, to the output and to lse, once: what is chosen is taken as constant, all else is
        exact. mass and chosen have no gradient.

    Raises:
        ValueError: shapes, dtypes or names that do not fit.
        TypeError: no tensors.

    Example:
        >>> import torch, texvlm
        >>> q, k, v = torch.randn(3, 1, 4, 32 * 48, 16)
        >>> texvlm.hierarchical_attention(q, k, v, (32, 48), keep=0.1).shape
        torch.Size([1, 4, 1536, 16])
        >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> torch.allclose(texvlm.hierarchical_attention(q, k, v, (32, 48), keep=1), exact, atol=1e-5)
        True
    """
    if importance not in IMPORTANCE:
        raise ValueError(f"importance must be one of {', '.join(IMPORTANCE)}, got {importance!r}")
    if real_tensor("q", q).dim() != 4 or not q.is_floating_point():
        raise ValueError(f"q must be floating point [B, H, Nq, D], got {q.dtype} {list(q.shape)}")
    if isinstance(k, PackedKeys):
        others = {
            "v": v,
            "grid": grid,
            "weight": weight,
            "bias": bias,
            "mask": mask,
            "stages": None if stages == "auto" else stages,
        }
        if given := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{given[0]} is in the PackedKeys already: leave it out")
        packed = _replanned(k, keep, exact)
        _check_heads(q, packed.k, packed.grid)
    else:
        keys, values, grid = _keys_and_values(k, v, grid, q.shape[3])
        _check_heads(q, keys, grid)
        weights = _log_weight(keys, weight, bias, mask)
        alone = not _on_grid(q, grid, queries)
        packed = _pack(keys, values, weights, grid, plan(grid, 1 if exact else KEEP if keep is None else keep, stages, alone))
    tile = _tile(*packed.grid) if _on_grid(q, packed.grid, queries) else (1, 1)
    prefix_k, prefix_v = (None, None) if prefix is None else _prefix(prefix, packed.k)
    cells = (packed.keys, packed.values, packed.log_count, packed.spread, packed.low, packed.high)
    out, lse, chosen, mass = ops.hierarchical_attention(
        q,
        packed.k,
        packed.v,
        *cells,
        *packed.grid,
        packed.plan.levels,
        packed.plan.counts,
        q.shape[3] ** -0.5 if scale is None else scale,
        tile,
        importance,
        return_mass,
        packed.log_weight,
        prefix_k,
        prefix_v,
        choice,
    )
    asked = [out]
    if return_lse:
        asked.append(lse)
    if return_mass:
        asked.append(mass / max(1, q.shape[2]))
    if return_chosen:
        asked.append(chosen)
    return out if len(asked) == 1 else tuple(asked)


def _replanned(packed: PackedKeys, keep: float | None, exact: bool) -> PackedKeys:
    """Packed keys of which another share is read."""
    if keep is None and not exact:
        return packed
    levels = packed.plan.levels
    what = plan(packed.grid, 1 if exact or keep is None else keep, (*levels, 0))
    cells: dict[str, Any] = {name: getattr(packed, name) for name in _TENSORS}
    if levels and not what.levels:
        cells |= {name: cells[name][:, :, :0] for name in ("keys", "values", "spread", "low", "high")}
        cells["log_count"] = cells["log_count"][:, :0]
    return PackedKeys(**cells, grid=packed.grid, plan=what)


def _grid(grid: Any) -> tuple[int, int]:
    if not isinstance(grid, Sequence) or len(grid) != 2:
        raise ValueError(f"grid must be (rows, columns), got {grid!r}")
    return integer("grid", grid[0], 1), integer("grid", grid[1], 1)


def _keys_and_values(k: Any, v: Any, grid: Any, width: int | None) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Both as [B, Hkv, N, D] of one shape and dtype, and their grid; `width` is that of a texture's heads."""
    if isinstance(k, Texture):
        if grid is not None and tuple(grid) != (k.height, k.width):
            raise ValueError(f"grid must be that of the texture k, {(k.height, k.width)}, or left out, got {tuple(grid)}")
        grid = k.height, k.width
    grid = _grid(grid)
    keys, values = (_places(name, value, grid, width) for name, value in (("k", k), ("v", v)))
    for name, found, wanted in (("shape", list(values.shape), list(keys.shape)), ("dtype", values.dtype, keys.dtype)):
        if found != wanted:
            raise ValueError(f"v must have the {name} of k, {wanted}, got {found}")
    return keys, values, grid


def _places(name: str, value: Any, grid: tuple[int, int], width: int | None) -> Tensor:
    places = grid[0] * grid[1]
    if isinstance(value, Texture):
        if (value.height, value.width) != grid:
            raise ValueError(f"{name} must be a texture of {grid[0]} x {grid[1]} texels, got {value.height} x {value.width}")
        if width is None or value.channels % max(1, width):
            raise ValueError(f"{name} must be a texture of heads * {width} channels, got {value.channels}")
        return value.data[:, :places].unflatten(2, (-1, width)).transpose(1, 2)
    tensor = real_tensor(name, value)
    if tensor.dim() != 4 or tensor.shape[2] != places or not tensor.is_floating_point():
        raise ValueError(
            f"{name} must be floating point [B, Hkv, N, D] with N = {places} places of the grid {grid[0]} x {grid[1]}, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor


def _check_heads(q: Tensor, k: Tensor, grid: tuple[int, int]) -> None:
    if q.dtype != k.dtype:
        raise ValueError(f"q must have the dtype of k, {k.dtype}, got {q.dtype}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q must be [B, H, Nq, D] with B = {k.shape[0]}, H a multiple of {k.shape[1]} and D = {k.shape[3]} "
            f"beside k {list(k.shape)}, got {list(q.shape)}"
        )


def _on_grid(q: Tensor, grid: tuple[int, int], queries: str) -> bool:
    """Whether the queries lie on the grid."""
    if queries not in ("auto", "grid", "alone"):
        raise ValueError(f"queries must be 'auto', 'grid' or 'alone', got {queries!r}")
    fits = q.shape[2] == grid[0] * grid[1]
    if queries == "grid" and not fits:
        raise ValueError(f"q must have the {grid[0] * grid[1]} queries of the grid {grid[0]} x {grid[1]}, got {q.shape[2]}")
    return fits and queries != "alone"


def _tile(rows: int, columns: int) -> tuple[int, int]:
    """Sides of a tile of at most 64 queries, as square as the grid allows."""
    tall, wide = (1 << (side - 1).bit_length() for side in (rows, columns))
    height = min(8, tall)
    width = min(QUERIES // height, wide)
    return min(QUERIES // width, tall), width


def _prefix(prefix: Any, k: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(prefix, Sequence) or len(prefix) != 2:
        raise ValueError(f"prefix must be (keys, values), got {type(prefix).__name__}")
    batch, heads, _, width = k.shape
    for name, tensor in zip(("keys", "values"), prefix):
        shape = real_tensor(f"prefix {name}", tensor).shape
        if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (batch, heads, width) or tensor.dtype != k.dtype:
            raise ValueError(
                f"prefix {name} must be {k.dtype} [{batch}, {heads}, P, {width}] as k is, got {tensor.dtype} {list(shape)}"
            )
    if prefix[0].shape != prefix[1].shape:
        raise ValueError(f"prefix values must have the shape of its keys, {list(prefix[0].shape)}, got {list(prefix[1].shape)}")
    return prefix[0], prefix[1]


def _log_weight(k: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """[B, N] of the places of k, or None where nothing says that any weighs other than 1. What weighs nothing has no gradient."""
    acc, total = acc_dtype(k.dtype), None

    def spread_out(name: str, value: Tensor) -> Tensor:
        batch, places = k.shape[0], k.shape[2]
        if list(value.shape) not in ([places], [1, places], [batch, places]):
            raise ValueError(f"{name} must be [N] or [B, N] = [{batch}, {places}], got {list(value.shape)}")
        return value.expand(batch, places)

    if weight is not None:
        value = spread_out("weight", real_tensor("weight", weight, acc))
        gone = value <= 0
        total = torch.where(gone, 1, value).log().masked_fill(gone, -math.inf)
    if bias is not None:
        value = spread_out("bias", real_tensor("bias", bias, acc))
        total = value if total is None else total + value
    if mask is not None:
        if real_tensor("mask", mask).dtype != torch.bool:
            raise ValueError(f"mask must be bool, got {mask.dtype} (what is added to logits is a bias)")
        gone = ~spread_out("mask", mask)
        total = torch.zeros(gone.shape, dtype=acc, device=k.device) if total is None else total
        total = total.masked_fill(gone, -math.inf)
    return total


def __getattr__(name: str) -> Any:
    """`replace` and `calibrate` are in `texvlm.towers`, and imported when they are asked for."""
    if name in ("calibrate", "replace"):
        from texvlm import towers

        return getattr(towers, name)
    raise AttributeError(f"module 'texvlm.attention' has no attribute {name!r}")


@fake("attention_pack")
def _(k: Tensor, height: int, width: int, levels: list[int]) -> tuple[Tensor, ...]:
    batch, heads, _, channels = k.shape
    cells, acc = sum(math.prod(_shape(height, width, level)) for level in levels), acc_dtype(k.dtype)

    def each(*last: int) -> Tensor:
        return k.new_empty((batch, heads, cells, *last), dtype=acc)

    means = each(channels), each(channels), k.new_empty((batch, cells), dtype=acc)
    return *means, each(2), each(channels), each(channels)


fake_gradients("attention_pack")


@fake("hierarchical_attention")
def _(
    q: Tensor, k: Tensor, height: int, width: int, counts: list[int], query_tile: list[int], with_mass: bool
) -> tuple[Tensor, ...]:
    batch, heads, count, _ = q.shape
    tall, wide = query_tile
    tiles = count if tall * wide == 1 else -(-height // tall) * -(-width // wide)
    acc = acc_dtype(q.dtype)
    return (
        q.new_empty(q.shape),
        q.new_empty((batch, heads, count), dtype=acc),
        q.new_empty((batch, heads, tiles, sum(counts)), dtype=torch.int32),
        q.new_empty((batch, heads, k.shape[2] if with_mass else 0), dtype=acc),
    )


fake_gradients("hierarchical_attention")
