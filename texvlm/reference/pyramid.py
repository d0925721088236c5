"""Mipmap pyramids: one buffer, odd sizes kept whole, one reducer per channel.

A texture is `data[B, T, C]`: its levels lie one after another, channels last, row-major, finest first; level
l measures `max(1, H >> l) x max(1, W >> l)`. Every level is computed from the *stored* level above it, in
float32 (float64 for double), and rounded once when it is stored, so that half pyramids agree on every path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

REDUCERS = ("mean", "max", "min", "mode")
"""What a channel may be reduced by on its way up the pyramid."""

UINT8_SCALE = 255.0
"""8-bit pictures are divided by this; float pictures are left alone."""


def level_count(height: int, width: int) -> int:
    """Return the number of levels of a full pyramid: 1 + floor(log2(max(height, width)))."""
    return max(height, width).bit_length()


def level_table(height: int, width: int, levels: int) -> list[tuple[int, int, int]]:
    """Return (offset, height, width) of each level; offset counts texels from the start of the buffer.

    Args:
        height: of level 0, at least 1.
        width: of level 0, at least 1.
        levels: 1 to `level_count(height, width)`.
    """
    if min(height, width) < 1 or not 1 <= levels <= level_count(height, width):
        most = level_count(height, width)
        raise ValueError(f"levels must be 1 to {most} for {height} x {width}, got {levels}")
    table, offset = [], 0
    for level in range(levels):
        h, w = max(1, height >> level), max(1, width >> level)
        table.append((offset, h, w))
        offset += h * w
    return table


def texel_count(height: int, width: int, levels: int) -> int:
    """Return T, the number of texels of all levels together."""
    offset, h, w = level_table(height, width, levels)[-1]
    return offset + h * w


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic on texels of `dtype`: float64 for double, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def channel_reducers(reducer: Sequence[str], channels: int) -> list[str]:
    """Return one reducer per channel from a list of length 1 (for all channels) or `channels`."""
    names = list(reducer) * channels if len(reducer) == 1 else list(reducer)
    if len(names) != channels:
        raise ValueError(f"reducer must have length 1 or {channels}, got {len(names)}")
    for name in names:
        if name not in REDUCERS:
            raise ValueError(f"reducer must be one of {', '.join(REDUCERS)}, got {name!r}")
    return names


def split_levels(data: Tensor, height: int, width: int, levels: int) -> list[Tensor]:
    """Return the levels of `data[B, T, C]` as views `[B, h, w, C]`, finest first."""
    if data.shape[1] != texel_count(height, width, levels):
        raise ValueError(f"data must have {texel_count(height, width, levels)} texels, got {data.shape[1]}")
    batch, _, channels = data.shape
    table = level_table(height, width, levels)
    return [data[:, at : at + h * w].reshape(batch, h, w, channels) for at, h, w in table]


def pack_levels(levels: Sequence[Tensor]) -> Tensor:
    """Return levels `[B, h, w, C]`, finest first, as one buffer `[B, T, C]`."""
    return torch.cat([level.flatten(1, 2) for level in levels], dim=1)


class _Store(torch.autograd.Function):
    """Round to a storage dtype and come back; the gradient passes unrounded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def store(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` rounded as a store in `dtype` would, still in its own dtype, gradient unrounded."""
    return value if value.dtype == dtype else _Store.apply(value, dtype)


def by_channels(value: Tensor, names: Sequence[str], functions: Mapping[str, Callable[[Tensor], Tensor]]) -> Tensor:
    """Apply to each channel (last dimension) the function its name stands for; one call per distinct name."""
    groups = {f: [c for c, name in enumerate(names) if functions[name] is f] for f in functions.values()}
    groups = {f: members for f, members in groups.items() if members}
    if len(groups) == 1:
        return next(iter(groups))(value)
    parts = [f(value[..., members]) for f, members in groups.items()]
    order = torch.tensor([c for members in groups.values() for c in members], device=value.device)
    return torch.cat(parts, dim=-1)[..., order.argsort()]


def _mean_axis(value: Tensor, dim: int) -> Tensor:
    """Halve one axis by the polyphase box filter: 2n -> n by (1, 1)/2; 2n+1 -> n by (n-i, n, i+1)/(2n+1)."""
    size = value.shape[dim]
    n = size // 2
    if size == 1:
        return value
    i = torch.arange(n, device=value.device)
    first, second = value.index_select(dim, 2 * i), value.index_select(dim, 2 * i + 1)
    if size % 2 == 0:
        return 0.5 * first + 0.5 * second
    third = value.index_select(dim, 2 * i + 2)
    i = i.to(value.dtype).reshape([n if d == dim else 1 for d in range(value.dim())])
    return ((n - i) * first + n * second + (i + 1) * third) / size


def _window(value: Tensor) -> Tensor:
    """Return the texels `[K, B, h, w, C]` under each texel of the next level, row-major in K."""
    starts, reach = [], []
    for size in value.shape[1:3]:
        starts.append(2 * torch.arange(max(1, size // 2), device=value.device))
        reach.append(1 if size == 1 else 2 + size % 2)
    taps = [value[:, (starts[0] + dy)[:, None], starts[1] + dx] for dy in range(reach[0]) for dx in range(reach[1])]
    return torch.stack(taps)


def _mean(level: Tensor) -> Tensor:
    return _mean_axis(_mean_axis(level, 1), 2)


def _max(level: Tensor) -> Tensor:
    window = _window(level)
    return window.gather(0, window.detach().argmax(0, keepdim=True))[0]  # argmax: the first; NaN above all


def _min(level: Tensor) -> Tensor:
    window = _window(level)
    return window.gather(0, window.detach().argmin(0, keepdim=True))[0]


def _mode(level: Tensor) -> Tensor:
    window = _window(level.detach())
    votes = torch.stack([(window == value).sum(0) for value in window])  # a NaN equals nothing: no vote
    return torch.where(votes == votes.amax(0), window, torch.inf).amin(0)


_REDUCE = {"mean": _mean, "max": _max, "min": _min, "mode": _mode}


def reduce_level(level: Tensor, reducer: Sequence[str]) -> Tensor:
    """Return the next coarser level.

    Args:
        level: `[B, h, w, C]`, float32 or float64.
        reducer: one name per channel.

    Convention: mean is the polyphase box (no texel lost, the mean kept); max, min and mode look at texels 2i,
    2i+1 and, on an odd axis, 2i+2. Max and min propagate NaN and send the gradient wholly to the first
    extremal texel, row-major. Mode takes the most frequent value, the lowest on ties, NaN only where all are
    NaN; it has no gradient.

    Source: polyphase box filter for odd extents, after Guthe and Heckbert, "Non-power-of-two mipmapping"
    (NVIDIA, 2005).
    """
    return by_channels(level, reducer, _REDUCE)


def generate_mipmaps(
    image: Tensor,
    reducer: Sequence[str] = ("mean",),
    levels: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Build the pyramid of a picture.

    Args:
        image: `[B, C, H, W]`, float (kept as it is) or uint8 (divided by 255).
        reducer: one name for all channels or one per channel.
        levels: 1 to `level_count(H, W)`, all of them by default.
        dtype: of the result; the image's by default, float32 for uint8.

    Returns:
        `[B, T, C]`, levels one after another. Differentiable in the image; see `reduce_level`.
    """
    height, width = image.shape[-2:]
    levels = level_count(height, width) if levels is None else levels
    names = channel_reducers(reducer, image.shape[1])
    if image.dtype == torch.uint8:
        image = image.to(compute_dtype(dtype or torch.float32)) / UINT8_SCALE
    dtype = dtype or image.dtype
    result = [store(image.permute(0, 2, 3, 1).to(compute_dtype(dtype)), dtype)]
    for _ in level_table(height, width, levels)[1:]:
        result.append(store(reduce_level(result[-1], names), dtype))
    return pack_levels(result).to(dtype)


def _touched(begin: int, end: int, size: int) -> tuple[int, int]:
    """Return the half-open range of texels of the next level that read texels [begin, end) of an axis."""
    first = begin // 2 if size % 2 == 0 else max(0, (begin - 1) // 2)
    return (first, min((end - 1) // 2 + 1, max(1, size // 2))) if end > begin else (0, 0)


@torch.no_grad()
def update_mipmaps(
    data: Tensor,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    rects: Tensor | None = None,
    tiles: Tensor | None = None,
    tile: int = 0,
) -> None:
    """Rebuild in place the levels above a level 0 that is already in the buffer.

    Args:
        data: `[B, T, C]`; level 0 is read, the others are written. Not differentiable.
        height: of level 0.
        width: of level 0.
        reducer: one name for all channels or one per channel.
        levels: of the texture.
        rects: int64 `[R, 4]` of (y0, x0, y1, x1), half-open, in texels of level 0 and inside it; only texels
            that depend on one of them are written. None: all.
        tiles: instead of rects, bool `[B, ceil(H / tile), ceil(W / tile)]`.
        tile: side of a tile.
    """
    if tiles is not None:
        for b, rows in enumerate(tiles):
            places = rows.nonzero() * tile
            ends = torch.minimum(places + tile, places.new_tensor([height, width]))
            update_mipmaps(data[b : b + 1], height, width, reducer, levels, torch.cat([places, ends], 1))
        return
    names = channel_reducers(reducer, data.shape[2])
    views = split_levels(data, height, width, levels)
    boxes = [(0, 0, height, width)] if rects is None else [tuple(r) for r in rects.tolist()]
    for y0, x0, y1, x1 in boxes:
        if not (0 <= y0 <= y1 <= height and 0 <= x0 <= x1 <= width):
            raise ValueError(f"rects must lie inside {height} x {width}, got {(y0, x0, y1, x1)}")
    for above, level in pairwise(views):
        fresh = reduce_level(above.to(compute_dtype(data.dtype)), names).to(data.dtype)
        for n, (y0, x0, y1, x1) in enumerate(boxes):
            y0, y1 = _touched(y0, y1, above.shape[1])
            x0, x1 = _touched(x0, x1, above.shape[2])
            level[:, y0:y1, x0:x1] = fresh[:, y0:y1, x0:x1]
            boxes[n] = (y0, x0, y1, x1)
