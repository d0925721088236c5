"""Foveation: from a fixation to sampling positions and levels of detail that coarsen with eccentricity."""

from __future__ import annotations

import torch
from torch import Tensor

from .pyramid import compute_dtype


def fovea_tokens(
    fixation: Tensor, offsets: Tensor, m0: Tensor, e0: Tensor, height: int, width: int, levels: int
) -> tuple[Tensor, Tensor]:
    """Place the tokens of a layout around fixations and give each its level of detail.

    Args:
        fixation: `[B, F, 2]` in uv.
        offsets: `[N, 2]`, (x, y) in level-0 pixels.
        m0: 0-d, positive: the magnification is M(e) = m0 / (e + e0).
        e0: 0-d, positive, in level-0 pixels as e is.
        height: of level 0.
        width: of level 0.
        levels: of the texture.

    Returns:
        uv `[B, F, N, 2]` and lod `[B, F, N]` in the dtype of `fixation`.

    Convention: position = clamp(fixation * (W, H) + offset, 0, (W, H)); e is the distance of that position
    from the fixation; lod = log2((e + e0) / m0) clamped to [0, levels - 1]. Gradients: to all four tensors; a
    clamp passes them on its own bounds (so lod = 0 at the default m0 = e0 has those of log2), the distance
    has gradient 0 at 0. A fixation or offset that is not finite gives NaN and gets no gradient.

    Source: inverse-linear cortical magnification, e.g. Rovamo and Virsu, Experimental Brain Research 37,
    1979.
    """
    dtype = compute_dtype(fixation.dtype)
    size = torch.tensor([width, height], dtype=dtype, device=fixation.device)
    fixation, offsets = fixation.to(dtype)[:, :, None], offsets.to(dtype)
    m0, e0 = m0.to(dtype), e0.to(dtype)
    finite = fixation.isfinite().all(-1) & offsets.isfinite().all(-1)  # [B, F, N]
    origin = torch.where(finite[..., None], fixation, 0.5) * size
    position = origin + torch.where(finite[..., None], offsets, 0)
    position = _clamp(position, size)
    step = position - origin
    centre = (step == 0).all(-1)
    distance = torch.hypot(torch.where(centre, 1, step[..., 0]), step[..., 1])
    eccentricity = torch.where(centre, 0, distance)
    lod = ((eccentricity + e0) / m0).log2().clamp(0, levels - 1)
    return torch.where(finite[..., None], position / size, torch.nan), torch.where(finite, lod, torch.nan)


def _clamp(position: Tensor, size: Tensor) -> Tensor:
    """Clamp to [0, size], passing the gradient on both bounds."""
    inside = (position >= 0) & (position <= size)
    return torch.where(inside, position, torch.minimum(position.detach().clamp(min=0), size))
