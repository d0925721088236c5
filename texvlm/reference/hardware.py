"""What texture hardware computes: sampling with fixed-point weights.

A texture unit rounds the position between two texels to 8 fractional bits, and the LOD likewise; texels and sums stay in floating
point. Sources: CUDA C++ Programming Guide, "Linear Filtering" (9-bit fixed point with 8 bits of fraction, so that 1.0 is exact);
Direct3D 11.3 functional specification, 7.18. Gradients are those of the exact interpolant: values are rounded, derivatives are not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from . import footprint, sample

_BITS, ROUNDING = os.environ.get("TEXVLM_TEXTURE_ROUNDING", "8 nearest").split()
FRACTION_BITS = int(_BITS)
"""Fractional bits of the weights between texels and between levels. What a card is seen to do, `make gpu-verify` says by
TEXVLM_TEXTURE_ROUNDING="8 nearest", or "down", so that it is compared with what it is."""


def fixed_point(value: Tensor) -> Tensor:
    """Return `value` as a multiple of 2^-FRACTION_BITS: the nearest, halves up, or with ROUNDING "down" the one below."""
    return torch.floor(value * 2**FRACTION_BITS + (0.5 if ROUNDING == "nearest" else 0.0)) / 2**FRACTION_BITS


class HardwareSampler(sample.Sampler):
    """A `Sampler` whose fractions are rounded as hardware does."""

    def bilinear(self, level: Tensor, uv: Tensor) -> Tensor:
        """Return the blend of the four texels around `uv` with weights of 8 bits, `[B, N, C]`."""
        limit = sample.COORDINATE_LIMIT
        at = (uv * self.size(level) - 0.5).clamp(-limit, limit)
        x, y = at.floor().long().unbind(-1)
        fx, fy = fixed_point(at - at.floor())[..., None].unbind(2)
        upper, lower = (sample.mix(fx, self.fetch(level, x, y + dy), self.fetch(level, x + 1, y + dy)) for dy in (0, 1))
        return sample.mix(fy, upper, lower)

    def trilinear(self, lod: Tensor, uv: Tensor) -> Tensor:
        """Return the blend of two levels with a LOD of 8 fractional bits, `[B, N, C]`."""
        return super().trilinear(fixed_point(lod.clamp(0, self.levels - 1)), uv)


def _with_gradients_of(exact: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradients of `exact`."""
    return value.detach() + (exact - exact.detach()) if exact.requires_grad else value


def sample_lod_hardware(
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
    """Sample a texture at `uv` with an explicit LOD, as texture hardware does.

    Args:
        data: `[Bt, T, C]` texels; Bt is B or 1.
        uv: `[B, N, 2]`.
        lod: `[B, N]` or a number.
        height: of level 0.
        width: of level 0.
        reducer: one name for all channels or one per channel.
        levels: of the texture.
        filter: "nearest" and the choice of the level under "bilinear" are exact.
        address: one of `ADDRESS_MODES`.

    Returns:
        `[B, N, C]` in the dtype of `data`, with the gradients of `sample_lod`.
    """
    exact = sample.sample_lod(data, uv, lod, height, width, reducer, levels, filter, address)
    if filter == "nearest":
        return exact
    level = lod.detach() if isinstance(lod, Tensor) else lod
    args = (data.detach(), uv.detach(), level, height, width, reducer, levels, filter, address)
    return _with_gradients_of(exact, sample.sample_with(HardwareSampler, *args))


def sample_grad_hardware(
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
    """Sample a texture over footprints with the weights of texture hardware.

    Args:
        data: `[Bt, T, C]` texels; Bt is B or 1.
        uv: `[B, N, 2]`, the centres.
        ddx: `[B, N, 2]`, a side of the footprint.
        ddy: `[B, N, 2]`, the other one.
        height: of level 0.
        width: of level 0.
        reducer: one name for all channels or one per channel.
        levels: of the texture.
        max_anisotropy: from 1 to 16.
        address: one of `ADDRESS_MODES`.

    Returns:
        `[B, N, C]` in the dtype of `data`: the taps of `sample_grad`, each with weights of 8 bits. How many taps hardware takes, and
        where, is not documented. Gradients are those of `sample_grad`.
    """
    exact = footprint.sample_grad(data, uv, ddx, ddy, height, width, reducer, levels, max_anisotropy, address)
    args = (data.detach(), uv.detach(), ddx.detach(), ddy.detach(), height, width, reducer, levels, max_anisotropy, address)
    return _with_gradients_of(exact, footprint.sample_grad_with(HardwareSampler, *args))
