"""Anisotropic sampling: a footprint in the picture becomes a row of trilinear taps along its major axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pyramid import compute_dtype
from .sample import Sampler, smooth_or_mode

TAP_SLACK = 1e-5
"""The ratio of the axes is shrunk by this much before the ceil, so that rounding cannot add a tap."""


def _length(x: Tensor, y: Tensor) -> Tensor:
    """Return sqrt(x^2 + y^2) without overflow, with gradient 0 at 0."""
    zero = (x == 0) & (y == 0)
    return torch.where(zero, 0, torch.hypot(torch.where(zero, 1, x), y))


def _angle(y: Tensor, x: Tensor) -> Tensor:
    """Return atan2(y, x), 0 with gradient 0 at the origin."""
    zero = (x == 0) & (y == 0)
    return torch.where(zero, 0, torch.atan2(y, torch.where(zero, 1, x)))


def ellipse_axes(dx: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular values Pmax >= Pmin of the matrix [dx dy] and its major axis.

    Args:
        dx: `[..., 2]`, the first column: a side of the footprint in level-0 pixels.
        dy: `[..., 2]`, the second column.

    Returns:
        Pmax `[...]`, Pmin `[...]` and the vector of length Pmax along the major axis `[..., 2]`; its sign has
        no meaning.

    Convention: a circle (Pmax = Pmin) has its axis along dx and no gradient for the axis' rotation; that of a
    zero footprint is zero.

    Source: J. Blinn, "Consider the lowly 2x2 matrix", IEEE CG&A 16(2), 1996: M = R(phi) diag(Q + R, Q - R)
    R(theta).
    """
    (a, c), (b, d) = dx.unbind(-1), dy.unbind(-1)
    e, f, g, h = (a + d) / 2, (a - d) / 2, (c + b) / 2, (c - b) / 2
    q, r = _length(e, h), _length(f, g)
    # Without reflection (R = 0) the angle of dx is atan2(h, e), with a pure one (Q = 0) it is atan2(g, f).
    turn, mirror = _angle(h, e), _angle(g, f)
    circle = (q == 0) | (r == 0)
    phi = torch.where(circle, (turn + mirror).detach(), (turn + mirror) / 2)
    major = q + r
    return major, (q - r).abs(), major[..., None] * torch.stack([phi.cos(), phi.sin()], dim=-1)


def footprint_taps(
    ddx: Tensor, ddy: Tensor, height: int, width: int, levels: int, max_anisotropy: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LOD, the number of taps (int64), each `[B, N]`, and the major axis in pixels `[B, N, 2]`.

    Args:
        ddx: `[B, N, 2]`, finite, in units of uv.
        ddy: `[B, N, 2]`, finite, in units of uv.
        height: of level 0.
        width: of level 0.
        levels: of the texture.
        max_anisotropy: A, at least 1.

    Convention: LOD = clip(log2 max(Pmin, Pmax/A), 0, levels - 1), of Pmin where both are equal;
    N = clip(ceil(Pmax 2^-LOD (1 - TAP_SLACK)), 1, A), piecewise constant. A zero footprint has LOD 0, one tap
    and no gradient of the LOD.
    """
    size = torch.tensor([width, height], dtype=ddx.dtype, device=ddx.device)
    major, minor, axis = ellipse_axes(ddx * size, ddy * size)
    limited = major / max_anisotropy
    radius = torch.where(minor >= limited, minor, limited)
    positive = radius > 0
    lod = torch.where(positive, torch.where(positive, radius, 1).log2().clamp(0, levels - 1), 0)
    ratio = (major * torch.exp2(-lod) * (1 - TAP_SLACK)).detach()
    return lod, ratio.ceil().clamp(1, max_anisotropy).long(), axis


def sample_grad(
    data: Tensor,
    uv: Tensor,
    ddx: Tensor,
    ddy: Tensor,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    max_anisotropy: int = 16,
    address: str = "clamp",
) -> Tensor:
    """Sample a texture over footprints.

    Args:
        data: `[Bt, T, C]` texels; Bt is B or 1.
        uv: `[B, N, 2]`, the centres.
        ddx: `[B, N, 2]`, a side of the footprint: the change of uv for one step in x.
        ddy: `[B, N, 2]`, the other one: the change of uv for one step in y.
        height: of level 0.
        width: of level 0.
        reducer: one name for all channels or one per channel.
        levels: of the texture.
        max_anisotropy: A, the most taps for one footprint, at least 1.
        address: one of `ADDRESS_MODES`.

    Returns:
        `[B, N, C]` in the dtype of `data`.

    Convention: N taps of equal weight at (i + 0.5)/N - 0.5 along the major axis, each trilinear at the
    footprint's LOD and addressed by itself; mode channels at the centre, in the level nearest to the LOD.
    Gradients: to texels, `uv`, and through the taps' positions and the LOD to `ddx` and `ddy`.

    Source: Direct3D 11.3 functional specification, section 7.18.11 (LOD calculations), with singular vectors
    in place of its ellipse transform.
    """
    return sample_grad_with(Sampler, data, uv, ddx, ddy, height, width, reducer, levels, max_anisotropy, address)


def sample_grad_with(
    kind: type[Sampler],
    data: Tensor,
    uv: Tensor,
    ddx: Tensor,
    ddy: Tensor,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    max_anisotropy: int,
    address: str,
) -> Tensor:
    """Return what `sample_grad` does, by a sampler of this kind."""
    if max_anisotropy < 1:
        raise ValueError(f"max_anisotropy must be at least 1, got {max_anisotropy}")
    dtype = compute_dtype(data.dtype)
    uv, ddx, ddy = uv.to(dtype), ddx.to(dtype), ddy.to(dtype)
    finite = torch.cat([uv, ddx, ddy], dim=-1).isfinite().all(-1, keepdim=True)
    uv, ddx, ddy = torch.where(finite, uv, 0.5), torch.where(finite, ddx, 0), torch.where(finite, ddy, 0)
    lod, taps, axis = footprint_taps(ddx, ddy, height, width, levels, max_anisotropy)
    axis = axis / torch.tensor([width, height], dtype=dtype, device=uv.device)

    def smooth(texels: Tensor) -> Tensor:
        sampler = kind(texels, height, width, levels, address)
        total = torch.zeros((), dtype=dtype, device=uv.device)
        for i in range(int(taps.max()) if taps.numel() else 1):
            along = torch.where(i < taps, (i + 0.5) / taps.to(dtype) - 0.5, 0)
            value = sampler.trilinear(lod, uv + along[..., None] * axis)
            total = total + torch.where((i < taps)[..., None], value, 0)
        return total / taps.to(dtype)[..., None]

    def mode(texels: Tensor) -> Tensor:
        sampler = kind(texels, height, width, levels, address)
        return sampler.nearest(sampler.nearest_level(lod), uv)

    value = smooth_or_mode(data, reducer, smooth, mode)
    return torch.where(finite, value, torch.nan).to(data.dtype)
