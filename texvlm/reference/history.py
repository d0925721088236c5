"""Gaussians at points over a plane that decays, and planes enlarged to the picture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def gaussian_splat(
    points: Tensor,
    weights: Tensor,
    sigma: float,
    height: int,
    width: int,
    keep: float = 1.0,
    base: Tensor | None = None,
) -> Tensor:
    """Return min(1, keep base + sum_p max(w_p, 0) exp(-d_p^2 / (2 s^2))), `[B, height, width]`.

    Args:
        points: `[B, P, 2]` uv; those that are not finite count nothing.
        weights: `[B, P]`, likewise.
        sigma: over the longer side; d and s are in pixels.
        height: of the result.
        width: of the result.
        keep: what is left of `base`.
        base: `[B, height, width]`.
    """
    good = points.isfinite().all(-1) & weights.isfinite()
    points, weights = torch.where(good[..., None], points, 0), torch.where(good, weights, 0).clamp(min=0)
    s = sigma * max(height, width)
    x = torch.arange(width, dtype=points.dtype) + 0.5 - points[..., :1] * width
    y = torch.arange(height, dtype=points.dtype) + 0.5 - points[..., 1:] * height
    bells = torch.exp(-(x[:, :, None] ** 2 + y[..., None] ** 2) / (2 * s * s))
    total = (weights[..., None, None] * bells).sum(1)
    if base is not None:
        total = total + keep * torch.where(base.isfinite(), base, 0)
    return torch.where(total < 1, total, 1)


def enlarge(planes: Tensor, height: int, width: int) -> Tensor:
    """Return planes `[B, h, w]` read bilinearly at the pixels of height x width, borders replicated."""
    wide = planes if planes.dtype == torch.float64 else planes.float()
    if planes.shape[0] == 0:
        return planes.new_zeros(0, height, width)
    return interpolate(wide[:, None], (height, width), mode="bilinear", align_corners=False)[:, 0].to(planes.dtype)
