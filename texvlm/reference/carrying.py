"""Values of cells moved whole from frame to frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _contrast(now: Tensor) -> Tensor:
    windows = F.pad(now, (1, 1, 1, 1), mode="replicate").unfold(2, 3, 1).unfold(3, 3, 1).flatten(4)
    return (windows - windows.mean(4, keepdim=True)).square().mean(4).mean(1).sqrt()


def _gather(planes: Tensor, source: Tensor) -> Tensor:
    return planes.flatten(2).gather(2, source.flatten(1)[:, None].expand(-1, planes.shape[1], -1)).reshape(planes.shape)


def _nearest(shift: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Of the 3 x 3 cells around the place that each cell came from, (y, x), the one whose value lies nearest, and its new offset."""
    rows, columns = shift.shape[2:]
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).to(shift)
    place = shift + grid
    middle = (place + 0.5).floor()
    sources, offsets, distances = [], [], []
    for i, j in sorted(
        ((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)), key=lambda step: (step != (0, 0) and step < (0, 0), step)
    ):
        near_y, near_x = (middle[:, 0] + i).clamp(0, rows - 1), (middle[:, 1] + j).clamp(0, columns - 1)
        source = (near_y * columns + near_x).long()
        beside = _gather(offset, source) + torch.stack([near_y, near_x], 1) - place
        sources.append(source)
        offsets.append(beside)
        distances.append(beside.square().sum(1))
    best = torch.stack(distances).argmin(0, keepdim=True)
    chosen = torch.stack(offsets).gather(0, best[:, :, None].expand(1, -1, 2, -1, -1))[0]
    return torch.stack(sources).gather(0, best)[0], chosen


def carry(
    now: Tensor,
    before: Tensor,
    held: Tensor,
    offset: Tensor,
    still: Tensor,
    flow: Tensor | None = None,
    occlusion: Tensor | None = None,
    floor: float = 4 / 255,
    quiet: float = 1 / 64,
    occluded: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return source, offset, held and residual; see `texvlm.carry`.

    Args:
        now: `[B, A, rows, columns]`, appearance of cells; `before`, `held` likewise.
        before: of the frame before.
        held: of the values that are held.
        offset: `[B, 2, rows, columns]` of the values, (y, x) in cells.
        still: bool `[B, rows, columns]`.
        flow: `[B, 2, h, w]`, (x, y) in pixels of its own grid.
        occlusion: bool `[B, h, w]`.
        floor: added to the contrast.
        quiet: a change by less than this share of contrast + floor is no movement.
        occluded: a share; more of a moving cell occluded, and it is lost.
    """
    rows, columns = now.shape[2:]
    scale = _contrast(now.double()) + floor
    here = torch.arange(rows * columns).reshape(1, rows, columns).expand(still.shape)
    source, beside, lost = here, offset, torch.zeros_like(still)
    if flow is not None and now.numel():
        size = (rows, columns)
        mean = F.adaptive_avg_pool2d(flow, size)
        height, width = flow.shape[2:]
        known = mean.isfinite().all(1)
        shift = torch.stack(
            [mean[:, 1].clamp(-height, height) * rows / height, mean[:, 0].clamp(-width, width) * columns / width], 1
        )
        shift = torch.where(known[:, None], shift, torch.zeros_like(shift))
        hidden = torch.zeros_like(known)
        if occlusion is not None:
            hidden = F.adaptive_avg_pool2d(occlusion[:, None].double(), size)[:, 0] > occluded
        stays = still | ((now - before).abs().double().mean(1) <= quiet * scale)
        source, beside = _nearest(shift, offset)
        source, beside = torch.where(stays, here, source), torch.where(stays[:, None], offset, beside)
        lost = (hidden | ~known) & ~stays
    moved = _gather(held, source)
    differs = (now - moved).abs().double().mean(1)
    seen = torch.where(lost, torch.full_like(differs, torch.inf), differs / scale)
    return source.contiguous(), beside.clone(), moved, torch.stack([differs, seen]).float()
