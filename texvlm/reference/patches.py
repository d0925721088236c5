"""Square patches around given centres: neighbouring samples lie 2^lod level-0 texels apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pyramid import compute_dtype
from .sample import sample_lod


def patch_offsets(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return where a patch's samples lie: (x, y) from its centre in samples, row-major, `[S * S, 2]`."""
    line = torch.arange(size, dtype=dtype, device=device) - (size - 1) / 2
    return torch.stack([line.repeat(size), line.repeat_interleave(size)], dim=-1)


def extract_patches(
    data: Tensor,
    center: Tensor,
    lod: Tensor | float,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    size: int = 16,
    address: str = "clamp",
    axes: Tensor | None = None,
) -> Tensor:
    """Cut square patches out of a texture.

    Args:
        data: `[Bt, T, C]` texels; Bt is B or 1.
        center: `[B, N, 2]` in uv.
        lod: `[B, N]` or a number, clamped to [0, levels - 1] for the samples and for their spacing.
        height: of level 0.
        width: of level 0.
        reducer: one name for all channels or one per channel.
        levels: of the texture.
        size: S, samples along a side, at least 1.
        address: one of `ADDRESS_MODES`.
        axes: `[B, N, 2, 2]`, maps offsets in pixels; its columns are the images of the x and y unit vectors.
            The LOD of the samples does not depend on it.

    Returns:
        `[B, N, C, S, S]` in the dtype of `data`.

    Convention: sample (i, j), row i and column j, lies (j - (S-1)/2, i - (S-1)/2) * 2^lod level-0 pixels off
    the centre, and is trilinear at `lod`. Gradients: to texels, `center`, `axes`, and to `lod` through blend
    and spacing.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    dtype = compute_dtype(data.dtype)
    center = center.to(dtype)
    batch, count = center.shape[:2]
    lod = torch.as_tensor(lod, dtype=dtype, device=center.device).expand(batch, count)
    finite = center.isfinite().all(-1) & lod.isfinite()
    if axes is not None:
        axes = axes.to(dtype)
        finite = finite & axes.flatten(2).isfinite().all(-1)
        axes = torch.where(finite[..., None, None], axes, 0)
    center, lod = torch.where(finite[..., None], center, 0.5), torch.where(finite, lod, 0)
    lod = lod.clamp(0, levels - 1)

    offset = patch_offsets(size, dtype, center.device) * torch.exp2(lod)[..., None, None]  # [B, N, S*S, 2] pixels
    if axes is not None:
        offset = (axes[:, :, None] * offset[..., None, :]).sum(-1)
    uv = center[:, :, None] + offset / torch.tensor([width, height], dtype=dtype, device=center.device)
    lod = lod[..., None].expand(uv.shape[:3])
    value = sample_lod(data, uv.flatten(1, 2), lod.flatten(1, 2), height, width, reducer, levels, address=address)
    value = value.reshape(batch, count, size, size, data.shape[2])
    return torch.where(finite[..., None, None, None], value, torch.nan).permute(0, 1, 4, 2, 3)
