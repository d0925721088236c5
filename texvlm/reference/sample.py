"""Sampling a texture at given places and an explicit level of detail.

Coordinates: `uv` in [0, 1], (u, v) = (x, y), texel centres at (i + 0.5)/n (`align_corners=False`). LOD 0 is
full size, continuous, clamped to [0, levels - 1]. Mode channels are always the nearest texel of the nearest
level, without gradient. A query that is not finite gives NaN in all its channels and takes no part in any
gradient. A texel of weight 0 does not count, whatever it holds (NaN, infinity), and receives no gradient;
texels outside the picture under "border" are zeros that do not count either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .pyramid import by_channels, channel_reducers, compute_dtype, level_table, texel_count

FILTERS = ("nearest", "bilinear", "trilinear")
"""nearest texel of the nearest level; bilinear in the nearest level; bilinear in two levels, blended."""

ADDRESS_MODES = ("clamp", "wrap", "mirror", "border")
"""What a tap outside the level reads: the edge texel; periodic; reflected, edge texel repeated; zero."""

COORDINATE_LIMIT = 2.0**62
"""Texel coordinates are clamped to +- this before they become integers."""


def address_index(index: Tensor, size: Tensor, address: str) -> tuple[Tensor, Tensor]:
    """Return the texel that `index` stands for, and whether it is inside (only ever False for border).

    Args:
        index: int64, any value.
        size: int64, broadcastable, the number of texels along the axis.
        address: one of `ADDRESS_MODES`.
    """
    if address not in ADDRESS_MODES:
        raise ValueError(f"address must be one of {', '.join(ADDRESS_MODES)}, got {address!r}")
    inside = torch.ones_like(index, dtype=torch.bool)
    if address == "wrap":
        return index.remainder(size), inside
    if address == "mirror":
        index = index.remainder(2 * size)
        return torch.minimum(index, 2 * size - 1 - index), inside
    if address == "border":
        inside = (index >= 0) & (index < size)
    return torch.minimum(index.clamp(min=0), size - 1), inside


class _Mix(torch.autograd.Function):
    """(1 - w) a + w b, where a value of weight 0 does not count. The derivative by w is b - a, also at w = 0."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, a: Tensor, b: Tensor, in_a: Tensor, in_b: Tensor) -> Tensor:
        ctx.save_for_backward(w, a, b, in_a, in_b)
        return torch.where(w == 1, 0, (1 - w) * a) + torch.where(w == 0, 0, w * b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, a, b, in_a, in_b = ctx.saved_tensors
        return (
            (torch.where(in_b, grad * b, 0) - torch.where(in_a, grad * a, 0)).sum_to_size(w.shape),
            torch.where(w == 1, 0, (1 - w) * grad).sum_to_size(a.shape),
            torch.where(w == 0, 0, w * grad).sum_to_size(b.shape),
            None,
            None,
        )


def mix(w: Tensor, a: Tensor, b: Tensor, in_a: Tensor | None = None, in_b: Tensor | None = None) -> Tensor:
    """Return (1 - w) a + w b, where a value of weight 0 does not count, whatever it holds.

    Args:
        w: weights in [0, 1].
        a: values that broadcast with `w`.
        b: values that broadcast with `w`.
        in_a: whether `a` lies inside the picture; where it does not, it is zero, and the derivative by `w` ignores it.
        in_b: whether `b` does.

    Differentiable; the derivative by w at w = 0 is b - a, as to the right of it.
    """
    inside = torch.ones_like(w, dtype=torch.bool)
    return _Mix.apply(w, a, b, inside if in_a is None else in_a, inside if in_b is None else in_b)


def only_where(counts: Tensor, value: Tensor) -> Tensor:
    """Return `value`, whose gradient is dropped (a NaN, too) where it does not count."""
    return torch.where(counts, value, value.detach())


def some_inside(f: Tensor, inside: Sequence[Tensor]) -> Tensor:
    """Return whether one of two texels, of weights 1 - f and f, has a weight other than 0 and is inside."""
    return (inside[0] & (f != 1)) | (inside[1] & (f != 0))


def bilinear_mix(fx: Tensor, fy: Tensor, texels: Sequence[Tensor], in_x: Sequence[Tensor], in_y: Sequence[Tensor]) -> Tensor:
    """Return the blend of the texels (x0, y0), (x1, y0), (x0, y1), (x1, y1), by the rule of `mix`.

    Args:
        fx: weights of the second column.
        fy: weights of the second row.
        texels: values; zero outside.
        in_x: whether the first and the second column lie inside the picture.
        in_y: the same of the rows.
    """
    some = some_inside(fx, in_x)
    top = mix(only_where((fy != 1) & in_y[0], fx), texels[0], texels[1], *in_x)
    bottom = mix(only_where((fy != 0) & in_y[1], fx), texels[2], texels[3], *in_x)
    return mix(fy, top, bottom, in_y[0] & some, in_y[1] & some)


class Sampler:
    """The texels of one texture with the level table as tensors: fetches at per-query levels.

    Args:
        texels: `[Bt, T, C]` in the compute dtype; Bt is the queries' batch or 1.
        height: of level 0.
        width: of level 0.
        levels: of the texture.
        address: one of `ADDRESS_MODES`.
    """

    def __init__(self, texels: Tensor, height: int, width: int, levels: int, address: str):
        if texels.shape[1] != texel_count(height, width, levels):
            wanted = texel_count(height, width, levels)
            raise ValueError(f"data must have {wanted} texels, got {texels.shape[1]}")
        table = torch.tensor(level_table(height, width, levels), device=texels.device)
        self.offset, self.height, self.width = table.unbind(1)
        self.texels, self.levels, self.address = texels, levels, address

    def size(self, level: Tensor) -> Tensor:
        """Return (width, height) of the levels as int64 `[B, N, 2]`."""
        return torch.stack([self.width[level], self.height[level]], dim=-1)

    def fetch(self, level: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return texels `[B, N, C]` at int64 `level`, `x`, `y`, each `[B, N]`, through the address mode."""
        column, in_x = address_index(x, self.width[level], self.address)
        row, in_y = address_index(y, self.height[level], self.address)
        index = self.offset[level] + row * self.width[level] + column
        batch, channels = level.shape[0], self.texels.shape[2]
        texels = self.texels.expand(batch, -1, -1)
        value = texels.gather(1, index[..., None].expand(-1, -1, channels))
        return torch.where((in_x & in_y)[..., None], value, 0) if self.address == "border" else value

    def nearest_level(self, lod: Tensor) -> Tensor:
        """Return floor(clamp(lod) + 0.5) as int64."""
        return (lod.detach().clamp(0, self.levels - 1) + 0.5).floor().long().clamp(max=self.levels - 1)

    def nearest(self, level: Tensor, uv: Tensor) -> Tensor:
        """Return the texel floor(u * W), floor(v * H) of the level, `[B, N, C]`."""
        at = (uv.detach() * self.size(level)).clamp(-COORDINATE_LIMIT, COORDINATE_LIMIT).floor().long()
        return self.fetch(level, at[..., 0], at[..., 1])

    def around(self, level: Tensor, uv: Tensor) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, tuple[Tensor, Tensor]]]]:
        """Return the texels before `uv`, int64 (x, y), and for x and y the weight of the next and whether both are inside."""
        at = (uv * self.size(level) - 0.5).clamp(-COORDINATE_LIMIT, COORDINATE_LIMIT)
        first = at.detach().floor()
        index, axes = first.long().unbind(2), []
        for i, size, f in zip(index, (self.width, self.height), (at - first)[..., None].unbind(2), strict=True):
            (low, in_low), (high, in_high) = (address_index(i + k, size[level], self.address) for k in (0, 1))
            # Beyond the edge both texels of an axis are the same one: nothing depends on where between them.
            moves = (low != high) | (in_low != in_high)
            axes.append((only_where(moves[..., None], f), (in_low[..., None], in_high[..., None])))
        return index, axes

    def inside(self, level: Tensor, uv: Tensor) -> Tensor:
        """Return whether some texel of weight other than 0 lies inside the picture, `[B, N, 1]`."""
        x, y = (some_inside(f, inside) for f, inside in self.around(level, uv.detach())[1])
        return x & y

    def bilinear(self, level: Tensor, uv: Tensor) -> Tensor:
        """Return the bilinear blend of the four texels around `uv` in `level`, `[B, N, C]`."""
        (x, y), ((fx, in_x), (fy, in_y)) = self.around(level, uv)
        texels = [self.fetch(level, x + i, y + j) for j in (0, 1) for i in (0, 1)]
        return bilinear_mix(fx, fy, texels, in_x, in_y)

    def trilinear(self, lod: Tensor, uv: Tensor) -> Tensor:
        """Return the blend of the bilinear values of the two levels around `lod`, `[B, N, C]`."""
        lod = lod.clamp(0, self.levels - 1)
        level = lod.detach().floor().long()
        blend = only_where((level < self.levels - 1)[..., None], (lod - level)[..., None])
        next_level = (level + 1).clamp(max=self.levels - 1)
        coarser = self.bilinear(next_level, only_where(blend != 0, uv))
        return mix(blend, self.bilinear(level, uv), coarser, self.inside(level, uv), self.inside(next_level, uv))


def smooth_or_mode(
    data: Tensor,
    reducer: Sequence[str],
    smooth: Callable[[Tensor], Tensor],
    mode: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sample the mode channels of `data[Bt, T, C]` by `mode`, without gradient, the others by `smooth`."""

    def detached(texels: Tensor) -> Tensor:
        return mode(texels.detach())

    names = ["mode" if name == "mode" else "smooth" for name in channel_reducers(reducer, data.shape[2])]
    texels = data.to(compute_dtype(data.dtype))
    return by_channels(texels, names, {"smooth": smooth, "mode": detached})


def sample_lod(
    data: Tensor,
    uv: Tensor,
    lod: Tensor | float,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    filter: str = "trilinear",
    address: str = "clamp",
) -> Tensor:
    """Sample a texture at `uv` with an explicit level of detail.

    Args:
        data: `[Bt, T, C]` texels; Bt is B or 1 (shared by all queries, its gradient summed).
        uv: `[B, N, 2]`, (u, v) in [0, 1]; outside of it the address mode decides.
        lod: `[B, N]` or a number, clamped to [0, levels - 1].
        height: of level 0.
        width: of level 0.
        reducer: one name for all channels or one per channel.
        levels: of the texture.
        filter: one of `FILTERS`.
        address: one of `ADDRESS_MODES`.

    Returns:
        `[B, N, C]` in the dtype of `data`.

    Convention: x = u * W_l - 0.5, taps floor(x) and floor(x) + 1, each through the address mode; nearest
    texel floor(u * W_l), nearest level floor(clamp(lod) + 0.5). Gradients: to texels, `uv` (bilinear,
    trilinear) and `lod` (trilinear; zero outside [0, levels - 1]), at cell edges and integer LODs those of
    the right side.

    Source: OpenGL 4.6 specification, section 8.14 (texture minification).
    """
    return sample_with(Sampler, data, uv, lod, height, width, reducer, levels, filter, address)


def sample_with(
    kind: type[Sampler],
    data: Tensor,
    uv: Tensor,
    lod: Tensor | float,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    filter: str,
    address: str,
) -> Tensor:
    """Return what `sample_lod` does, by a sampler of this kind."""
    if filter not in FILTERS:
        raise ValueError(f"filter must be one of {', '.join(FILTERS)}, got {filter!r}")
    dtype = compute_dtype(data.dtype)
    uv = uv.to(dtype)
    lod = torch.as_tensor(lod, dtype=dtype, device=uv.device).expand(uv.shape[:2])
    finite = uv.isfinite().all(-1) & lod.isfinite()
    uv, lod = torch.where(finite[..., None], uv, 0.5), torch.where(finite, lod, 0)

    def smooth(texels: Tensor) -> Tensor:
        sampler = kind(texels, height, width, levels, address)
        if filter == "trilinear":
            return sampler.trilinear(lod, uv)
        fetch = sampler.bilinear if filter == "bilinear" else sampler.nearest
        return fetch(sampler.nearest_level(lod), uv)

    def mode(texels: Tensor) -> Tensor:
        sampler = kind(texels, height, width, levels, address)
        return sampler.nearest(sampler.nearest_level(lod), uv)

    value = smooth_or_mode(data, reducer, smooth, mode)
    return torch.where(finite[..., None], value, torch.nan).to(data.dtype)
