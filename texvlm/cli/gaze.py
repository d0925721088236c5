"""What a fovea sees: its tokens as a picture, and the homunculus, the picture as large as each place is sharp."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.fovea import DEFAULT_E0, FoveaLayout, sample_foveated

FLAT = 2.0**16  # pixels: an e0 at which a fovea is as good as evenly sharp
ENLARGED = 720  # pixels of the longer side of a homunculus
RINGS = (8, 9)  # of the default layout

Fixation = tuple[float, float]


def half_resolution(steps: float, reach: float) -> float:
    """The e0 with which so many steps of one pixel's sharpness reach so many pixels: e0 (exp(steps / e0) - 1) = reach, by bisection.

    FLAT where the steps reach that far by themselves.
    """
    low, high = steps / 64, FLAT
    if steps >= reach:
        return FLAT
    for _ in range(64):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * math.expm1(steps / middle) > reach else (low, middle)
    return high


def layout_for(budget: int, patch: int, size: tuple[int, int]) -> FoveaLayout:
    """At most so many tokens, on a grid and two rings where there is room: the outer one ends at the border of a picture (height, width).

    The default layout's 273 for 273 tokens of 16 pixels and a picture of 1024 x 1024.
    """
    rings = RINGS if budget > sum(RINGS) else ()
    grid = math.isqrt(budget - sum(rings))
    steps = (grid / 2 + len(rings)) * patch
    return FoveaLayout(grid, rings, patch, half_resolution(steps, max(size) / 2))


def seen_by(colours: Any, fixation: Fixation, layout: FoveaLayout, coarse: Tensor) -> Tensor:
    """The picture [3, H, W] as a fovea's tokens show it, the sharper over the coarser, over `coarse` [3, H, W] where there is none."""
    tokens = sample_foveated(colours, torch.tensor(fixation), layout)
    height, width = coarse.shape[1:]
    canvas = coarse.clone()
    sides = (layout.patch * tokens.lod.exp2()).round().long().tolist()
    for token in tokens.lod.argsort(descending=True, stable=True).tolist():
        side = sides[token]
        x, y = (round(float(place) * n - side / 2) for place, n in zip(tokens.uv[token], (width, height)))
        left, top, right, bottom = max(x, 0), max(y, 0), min(x + side, width), min(y + side, height)
        if left < right and top < bottom:
            patch = tokens.patches[token]
            shown = patch if side == layout.patch else F.interpolate(patch[None], (side, side), mode="bilinear")[0]
            canvas[:, top:bottom, left:right] = shown[:, top - y : bottom - y, left - x : right - x]
    return canvas.clamp(0, 1)


def homunculus(colours: Any, fixation: Fixation) -> tuple[Tensor, int]:
    """The picture [3, h, w] as a fovea magnifies it, and how many samples that takes: a place is as large as it is sharp.

    Named after W. Penfield's drawing of the body in proportion to its share of the cortex. The law is that of `FoveaLayout`, whose e0
    shrinks with the picture; black beyond its border, where that lies in the square of the samples, enlarged to be looked at.
    """
    size = colours.width, colours.height
    x, y = (place * n for place, n in zip(fixation, size))
    e0 = max(DEFAULT_E0 * max(size) / 1024, 1.0)
    reach = max(x, size[0] - x, y, size[1] - y)
    side = 2 * math.ceil(e0 * math.log1p(reach / e0))
    layout = _samples(side, e0)
    samples = sample_foveated(colours, torch.tensor(fixation), layout)
    at = layout.offsets + torch.tensor((x, y))
    inside = ((at >= 0) & (at < torch.tensor(size))).all(-1)
    shown = (samples.patches[:, :, 0, 0].clamp(0, 1) * inside[:, None]).T.reshape(3, side, side)
    rows, columns = (inside.view(side, side).any(axis).nonzero()[:, 0].tolist() for axis in (1, 0))
    cut = shown[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    times = max(1.0, ENLARGED / max(cut.shape[1:]))
    return F.interpolate(cut[None], scale_factor=times, mode="bilinear")[0], int(inside.sum())


@functools.lru_cache(maxsize=8)
def _samples(side: int, e0: float) -> FoveaLayout:
    """A grid of single samples."""
    return FoveaLayout(side, (), 1, e0)
