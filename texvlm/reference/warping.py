"""Planes moved by optical flow, and motion that flow does not explain."""

from __future__ import annotations

import torch
from torch import Tensor

from .salience import luma, rgb_planes
from .sample import bilinear_mix, only_where


def _read(planes: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return planes `[B, C, H, W]` at pixels (x, y), each `[B, h, w]`, bilinear, borders replicated."""
    batch, channels, height, width = planes.shape
    left, top = (at.detach().clamp(-2, n + 1).floor() for at, n in ((x, width), (y, height)))
    columns = [(left.long() + i).clamp(0, width - 1) for i in (0, 1)]
    rows = [(top.long() + i).clamp(0, height - 1) for i in (0, 1)]
    fx, fy = ((at.clamp(-2, n + 1) - first)[:, None] for at, first, n in ((x, left, width), (y, top, height)))
    fx, fy = (only_where((a != b)[:, None], f) for f, (a, b) in ((fx, columns), (fy, rows)))
    flat = planes.flatten(2)
    texels = [
        flat.gather(2, (row * width + column).flatten(1)[:, None].expand(-1, channels, -1)).reshape(batch, channels, *x.shape[1:])
        for row in rows
        for column in columns
    ]
    inside = (torch.ones_like(fx, dtype=torch.bool),) * 2
    return bilinear_mix(fx, fy, texels, inside, inside)


def _moved(planes: Tensor, flow: Tensor, occlusion: Tensor | None, otherwise: Tensor) -> Tensor:
    """Return `[B, C, H, W]` planes moved; `otherwise` where the flow is occluded or not finite."""
    height, width = planes.shape[2:]
    if 0 in planes.shape:
        return planes.clone()
    h, w = flow.shape[2:]
    scale = torch.tensor([width / w, height / h], dtype=flow.dtype)[:, None, None]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    at = [
        ((i.double() + 0.5) * m / n - 0.5).to(flow.dtype).expand(flow.shape[0], -1, -1)
        for i, m, n in ((x, w, width), (y, h, height))
    ]
    field = (flow if (h, w) == (height, width) else _read(flow, *at)) * scale
    hidden = ~field.isfinite().all(1, keepdim=True)
    if occlusion is not None:
        rows, columns = (((2 * torch.arange(n) + 1) * m) // (2 * n) for n, m in ((height, h), (width, w)))
        hidden = hidden | occlusion[:, None, rows[:, None], columns]
    field = torch.where(hidden, 0, field)
    return torch.where(hidden, otherwise, _read(planes, x + field[:, 0], y + field[:, 1]))


def warp(planes: Tensor, flow: Tensor, fill: float | None = 0.0, occlusion: Tensor | None = None) -> Tensor:
    """Return planes(p + flow(p)).

    Args:
        planes: `[B, C, H, W]`.
        flow: `[B, 2, h, w]` (x, y) in pixels of its own grid, bilinearly enlarged.
        fill: where occluded, or where the flow is not finite; None leaves the planes as they are there.
        occlusion: bool `[B, h, w]`, read at the nearest.

    Returns:
        planes' shape and dtype, borders replicated. Differentiable in planes and flow.
    """
    wide = planes if planes.dtype == torch.float64 else planes.float()
    otherwise = wide if fill is None else torch.full((), fill, dtype=wide.dtype)
    return _moved(wide, flow.to(wide.dtype), occlusion, otherwise).to(planes.dtype)


def motion(image: Tensor, previous: Tensor, flow: Tensor | None = None, occlusion: Tensor | None = None) -> Tensor:
    """Return |luma - luma of the previous picture moved by flow|, `[B, H, W]` in the image's dtype (float32 for uint8).

    Args:
        image: `[B, C, H, W]`, C of 1, 3 or 4.
        previous: of the same shape.
        flow: as in `warp`; where it is occluded or not finite, a pixel is compared with the one at its place.
        occlusion: as in `warp`.
    """
    light, before = (luma(rgb_planes(p)) for p in (image, previous))
    if flow is not None:
        before = _moved(before[:, None], flow.to(before.dtype), occlusion, before[:, None])[:, 0]
    return (light - before).abs().to(image.dtype if image.is_floating_point() else torch.float32)
