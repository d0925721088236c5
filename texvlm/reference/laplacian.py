"""Laplacian pyramids: each level as its difference from the next coarser one, and back."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .pyramid import compute_dtype, pack_levels, split_levels, store
from .sample import mix


def _lerp_axis(value: Tensor, fine: int, dim: int) -> Tensor:
    coarse = value.shape[dim]
    at = (torch.arange(fine, dtype=torch.float64, device=value.device) + 0.5) * coarse / fine - 0.5
    first = at.floor()
    weight = (at - first).to(value.dtype).reshape([fine if d == dim else 1 for d in range(value.dim())])
    low, high = (i.long().clamp(0, coarse - 1) for i in (first, first + 1))
    return mix(weight, value.index_select(dim, low), value.index_select(dim, high))


def upsample(level: Tensor, height: int, width: int) -> Tensor:
    """Sample a level `[B, h, w, C]` bilinearly, with clamp, at the texel centres of a finer one."""
    return _lerp_axis(_lerp_axis(level, height, 1), width, 2)


def laplacian_decompose(data: Tensor, height: int, width: int, levels: int) -> Tensor:
    """Return the bands of a pyramid: level l minus level l + 1 upsampled; the last level as it is.

    Args:
        data: `[B, T, C]`, a pyramid.
        height: of level 0.
        width: of level 0.
        levels: of the texture.

    Returns:
        `[B, T, C]` in the dtype of `data`. Linear, so differentiable everywhere.

    Source: Burt and Adelson, "The Laplacian pyramid as a compact image code", 1983, with bilinear expansion.
    """
    stored = split_levels(data.to(compute_dtype(data.dtype)), height, width, levels)
    bands = [fine - upsample(coarse, *fine.shape[1:3]) for fine, coarse in pairwise(stored)]
    return pack_levels([*bands, stored[-1]]).to(data.dtype)


def laplacian_reconstruct(bands: Tensor, height: int, width: int, levels: int) -> Tensor:
    """Return the pyramid whose bands these are: the inverse of `laplacian_decompose`.

    Args:
        bands: `[B, T, C]`.
        height: of level 0.
        width: of level 0.
        levels: of the texture.

    Returns:
        `[B, T, C]` in the dtype of `bands`; each level is made from the stored level below it. Linear.
    """
    stored = split_levels(bands.to(compute_dtype(bands.dtype)), height, width, levels)
    result = [stored[-1]]
    for band in reversed(stored[:-1]):
        result.append(store(band + upsample(result[-1], *band.shape[1:3]), bands.dtype))
    return pack_levels(result[::-1]).to(bands.dtype)
