"""Mipmaps as Mesa's software driver makes them: every level is a bilinear picture of the one above.

OpenGL leaves the filter of glGenerateMipmap to the driver. Mesa draws each level with a linear filter, so a texel is the level
above at the texel's centre: for even sides the 2 x 2 box; for odd ones two of the three texels underneath, which loses texels and
moves the mean (5 -> 2 takes 1/4 and 3/4 of the first two and of the last two; the middle one is gone).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pyramid import UINT8_SCALE, level_table, pack_levels


def bilinear_axis(value: Tensor, dim: int) -> Tensor:
    """Halve one axis: n -> max(1, n // 2), read bilinearly at the centres of the new texels."""
    size = value.shape[dim]
    n = max(1, size // 2)
    at = (torch.arange(n, device=value.device, dtype=torch.float64) + 0.5) * (size / n) - 0.5
    first = at.floor().long()
    weight = (at - first).to(value.dtype).reshape([n if d == dim else 1 for d in range(value.dim())])
    below = value.index_select(dim, first.clamp(0, size - 1))
    above = value.index_select(dim, (first + 1).clamp(0, size - 1))
    return (1 - weight) * below + weight * above


def toward_zero(value: Tensor) -> Tensor:
    """Round float32 to float16 by cutting digits off, as Mesa writes RGBA16F."""
    half = value.half()
    larger = half.float().abs() > value.abs()
    return torch.where(larger, half.view(torch.int16) - 1, half.view(torch.int16)).view(torch.float16)  # sign and magnitude


def generate_mipmaps_gl(image: Tensor, levels: int, dtype: torch.dtype | None = None) -> Tensor:
    """Build the pyramid of a picture with Mesa's filter.

    Args:
        image: [B, C, H, W], float32, float16 or uint8 (divided by 255).
        levels: how many.
        dtype: of the texels; float16 is rounded to nearest on level 0, toward zero above it.

    Returns:
        data [B, T, C].
    """
    if image.dtype == torch.uint8:
        image, dtype = image.float() / UINT8_SCALE, dtype or torch.float32
    texels = dtype or image.dtype
    chain = [image.permute(0, 2, 3, 1).to(texels)]
    for _ in level_table(image.shape[2], image.shape[3], levels)[1:]:
        below = bilinear_axis(bilinear_axis(chain[-1].to(torch.promote_types(texels, torch.float32)), 1), 2)
        chain.append(toward_zero(below) if texels == torch.float16 else below.to(texels))
    return pack_levels(chain)
