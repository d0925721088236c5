"""Canvases with handwritten digits of many sizes among clutter: what the dual encoder is trained and measured on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HELD_OUT = 500  # the last digits of scikit-learn's set, never trained on
SIZES = (14.0, 96.0)  # pixels of the 8 x 8 frame's height on the canvas


class Canvas(NamedTuple):
    """A picture and the digits in it."""

    image: Tensor  # [3, side, side] in [0, 1]
    boxes: Tensor  # [n, 4] float: x0, y0, x1, y1 of the ink, in pixels
    labels: Tensor  # [n] int64: which digit


def load_digits(held_out: bool) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, [n, 8, 8] in [0, 1], and their classes [n]: the last 500 (`held_out`), or the 1297 before them.

    Raises:
        ImportError: scikit-learn, which ships the digits, is not installed. Only training and measuring need it.
    """
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn") from None
    data = bundled()
    images, labels = torch.from_numpy(data.images).float() / 16, torch.from_numpy(data.target).long()
    return (images[-HELD_OUT:], labels[-HELD_OUT:]) if held_out else (images[:-HELD_OUT], labels[:-HELD_OUT])


def digit_canvas(
    digits: Tensor,
    labels: Tensor,
    side: int = 1024,
    count: int = 60,
    sizes: tuple[float, float] = SIZES,
    clutter: float = 1.0,
    seed: int | torch.Generator = 0,
    heights: Sequence[float] | None = None,
    stamps: float | None = None,
) -> Canvas:
    """A square canvas with `count` digits drawn from `digits` at random places that do not overlap, over and among clutter.

    Digits differ in size (log-uniform), slant, rotation (up to 15 degrees), aspect, crispness, colour and polarity. Clutter is uneven
    ground (noise at several octaves, gratings, ramps), strokes, boxes, and digits whose quarters are shuffled.

    Args:
        digits: [n, 8, 8] in [0, 1].
        labels: [n].
        side: pixels of the canvas.
        count: digits on it; fewer where there is no room left.
        sizes: least and largest height of a digit's frame in pixels.
        clutter: how much; 0 is plain ground.
        seed: an integer or a generator; the same seed gives the same canvas.
        heights: of the digits one by one, instead of `count` and `sizes`.
        stamps: how many strokes, boxes and shuffled digits; by default 140 times `clutter` on 1024 x 1024.
    """
    g = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    canvas = _ground(side, clutter, g)
    taken = torch.zeros(0, 4)
    stamps = clutter * (side / 1024) ** 2 * 140 if stamps is None else stamps
    for _ in range(int(stamps + _uniform(g))):
        canvas = _clutter(canvas, digits, sizes, g)
    boxes, classes = [], []
    for height in (None,) * count if heights is None else heights:
        place = int(torch.randint(len(digits), (1,), generator=g))
        alpha = _stamp(digits[place], _size(sizes, g) if height is None else height, g)
        at = _room(alpha, taken, side, g)
        if at is None:
            continue
        y, x = at
        canvas = _paint(canvas, alpha, y, x, g)
        rows, columns = (alpha > 0.3).any(1).nonzero()[:, 0], (alpha > 0.3).any(0).nonzero()[:, 0]
        box = [x + int(columns[0]), y + int(rows[0]), x + int(columns[-1]) + 1, y + int(rows[-1]) + 1]
        boxes.append(box)
        classes.append(int(labels[place]))
        taken = torch.cat([taken, torch.tensor([box], dtype=torch.float32)])
    canvas = canvas + clutter * 0.02 * _uniform(g) * torch.randn(canvas.shape, generator=g)
    return Canvas(
        canvas.clamp(0, 1), torch.tensor(boxes, dtype=torch.float32).view(-1, 4), torch.tensor(classes, dtype=torch.int64)
    )


def cell_labels(boxes: Tensor, labels: Tensor, rows: int, columns: int, cell: int = 8) -> Tensor:
    """What each cell of the grid shows, [rows, columns]: a digit, 10 for none, -1 on the rim of a digit, where both are right.

    A cell shows a digit if its centre is in the middle 80 % of the ink's box each way; the rim reaches to 125 %. The cell nearest to
    the centre of a box always shows its digit.
    """
    y, x = torch.meshgrid((torch.arange(rows) + 0.5) * cell, (torch.arange(columns) + 0.5) * cell, indexing="ij")
    target = torch.full((rows, columns), 10)
    for (x0, y0, x1, y1), label in zip(boxes.tolist(), labels.tolist()):
        far = torch.maximum((x - (x0 + x1) / 2).abs() / max(x1 - x0, 1), (y - (y0 + y1) / 2).abs() / max(y1 - y0, 1))
        target[(far < 0.625) & (target == 10)] = -1
        target[far < 0.4] = label
        target.view(-1)[((x - (x0 + x1) / 2) ** 2 + (y - (y0 + y1) / 2) ** 2).argmin()] = label
    return target


def _uniform(g: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * float(torch.rand((), generator=g))


def _size(sizes: tuple[float, float], g: torch.Generator) -> float:
    return math.exp(_uniform(g, math.log(sizes[0]), math.log(sizes[1])))


def _ground(side: int, clutter: float, g: torch.Generator) -> Tensor:
    """Uneven ground [3, side, side]."""
    colour = torch.rand(3, 1, 1, generator=g)
    grey = colour.mean() + 0.3 * (colour - colour.mean())
    ground = grey.expand(3, side, side).clone()
    if clutter == 0:
        return ground
    v, u = torch.meshgrid(torch.linspace(-1, 1, side), torch.linspace(-1, 1, side), indexing="ij")
    ground += 0.15 * clutter * (_uniform(g, -1) * u + _uniform(g, -1) * v)
    if _uniform(g) < 0.7:
        for octave in range(2, 8):
            cells = max(2, side >> octave)
            noise = torch.randn(1, 1, cells, cells, generator=g)
            ground += clutter * _uniform(g, 0, 0.06) * F.interpolate(noise, (side, side), mode="bilinear")[0]
    if _uniform(g) < 0.3:
        angle, period = _uniform(g, 0, math.pi), _uniform(g, 5, 40)
        phase = (u * math.cos(angle) + v * math.sin(angle)) * side / 2
        ground += clutter * _uniform(g, 0.02, 0.1) * torch.sin(2 * math.pi * phase / period)
    return ground.clamp(0, 1)


def _stamp(digit: Tensor, size: float, g: torch.Generator) -> Tensor:
    """The digit's ink [h, w] in [0, 1], enlarged to about `size` pixels, slanted, turned and made more or less crisp."""
    fine = int(size) * 2 if size < 24 else int(size)
    mode = ("nearest", "bilinear", "bicubic", "bicubic")[int(_uniform(g, 0, 4) % 4)]
    ink = F.interpolate(
        F.pad(digit[None, None], (3, 3, 3, 3)),
        scale_factor=max(2, fine // 8),
        mode=mode,
        **({} if mode == "nearest" else {"align_corners": False}),
    ).clamp(0, 1)
    angle, slant, aspect = math.radians(_uniform(g, -15, 15)), _uniform(g, -0.2, 0.2), _uniform(g, 0.8, 1.2)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    turn = turn @ torch.tensor([[aspect, slant], [0.0, 1.0]])
    pixels = max(9, round(size * 14 / 8))
    grid = F.affine_grid(torch.cat([turn, torch.zeros(2, 1)], 1)[None], [1, 1, pixels, pixels], align_corners=False)
    alpha = F.grid_sample(ink, grid, align_corners=False)[0, 0]
    if _uniform(g) < 0.5:  # crisp strokes, thin or thick
        alpha = torch.sigmoid((alpha - _uniform(g, 0.3, 0.6)) * _uniform(g, 8, 25))
    rows, columns = (alpha > 0.05).any(1).nonzero()[:, 0], (alpha > 0.05).any(0).nonzero()[:, 0]
    if len(rows) == 0:
        return alpha.clamp(min=0.5)
    return alpha[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _room(alpha: Tensor, taken: Tensor, side: int, g: torch.Generator) -> tuple[int, int] | None:
    """A place for a stamp that overlaps no box yet, or None."""
    height, width = alpha.shape
    if height >= side or width >= side:
        return None
    for _ in range(30):
        y, x = int(_uniform(g, 0, side - height)), int(_uniform(g, 0, side - width))
        gap = 2 + height / 8
        apart = (
            (taken[:, 0] > x + width + gap) | (taken[:, 2] < x - gap) | (taken[:, 1] > y + height + gap) | (taken[:, 3] < y - gap)
        )
        if bool(apart.all()):
            return y, x
    return None


def _paint(canvas: Tensor, alpha: Tensor, y: int, x: int, g: torch.Generator) -> Tensor:
    """Lays a stamp over the canvas in a colour that differs from what is there, lighter or darker."""
    height, width = alpha.shape
    there = canvas[:, y : y + height, x : x + width]
    around = float(there.mean())
    contrast = _uniform(g, 0.2, 1.0)
    lighter = _uniform(g) < 0.5 if 0.2 < around < 0.8 else around <= 0.2
    level = around + contrast * (1 - around) if lighter else around - contrast * around
    level = max(level, around + 0.15) if lighter else min(level, around - 0.15)
    tint = torch.randn(3, 1, 1, generator=g) * 0.1
    canvas[:, y : y + height, x : x + width] = torch.lerp(there, (level + tint - tint.mean()).clamp(0, 1).expand_as(there), alpha)
    return canvas


def _clutter(canvas: Tensor, digits: Tensor, sizes: tuple[float, float], g: torch.Generator) -> Tensor:
    """One thing that is no digit: strokes, a box, or a digit whose quarters are shuffled."""
    side = canvas.shape[-1]
    size = min(_size(sizes, g), side / 2)
    pixels = max(8, int(size))
    kind = _uniform(g)
    if kind < 0.45:
        v, u = torch.meshgrid(torch.arange(pixels) + 0.5, torch.arange(pixels) + 0.5, indexing="ij")
        alpha = torch.zeros(pixels, pixels)
        for _ in range(int(_uniform(g, 2, 5))):
            ends = torch.rand(2, 2, generator=g) * pixels
            along = ends[1] - ends[0]
            t = (((u - ends[0, 0]) * along[0] + (v - ends[0, 1]) * along[1]) / along.square().sum().clamp(min=1)).clamp(0, 1)
            away = ((u - ends[0, 0] - t * along[0]) ** 2 + (v - ends[0, 1] - t * along[1]) ** 2).sqrt()
            alpha = torch.maximum(alpha, (_uniform(g, 0.03, 0.09) * pixels - away + 0.5).clamp(0, 1))
    elif kind < 0.6:
        alpha = torch.full((pixels, max(2, int(pixels * _uniform(g, 0.3, 2)))), _uniform(g, 0.3, 1))[:, : side - 1]
    else:
        digit = digits[int(torch.randint(len(digits), (1,), generator=g))].clone()
        quarters = [digit[:4, :4], digit[:4, 4:], digit[4:, :4], digit[4:, 4:]]
        order = torch.tensor([[1, 0, 3, 2], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]])[int(_uniform(g, 0, 4) % 4)].tolist()
        turned = [quarters[i].flip(0) if _uniform(g) < 0.5 else quarters[i] for i in order]
        alpha = _stamp(torch.cat([torch.cat(turned[:2], 1), torch.cat(turned[2:], 1)], 0), size, g)
    height, width = alpha.shape
    if height >= side or width >= side:
        return canvas
    return _paint(canvas, alpha, int(_uniform(g, 0, side - height)), int(_uniform(g, 0, side - width)), g)
