"""Regions of text: a small network over statistics of strokes in cells of 16 pixels."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .laplacian import upsample
from .pyramid import generate_mipmaps, level_count, split_levels
from .salience import luma, replicate, rgb_planes

CELL = 16
"""Pixels a side of a cell of the grid on which text is scored."""

TEXT_LEVELS = 4
"""Mip levels whose strokes are measured: level l sees strokes of about 2^l to 3 * 2^l pixels. Beyond the last
level of a small picture the last one stands in."""

REACH = 2
"""A stroke is darker (or lighter) than what lies this many texels to both sides of it."""

LEVEL_FEATURES = 11
"""Statistics per level, see `text_features`."""

FEATURES = TEXT_LEVELS * LEVEL_FEATURES + 2
"""Statistics of a cell."""

GAIN = 512.0
"""Statistics enter the network as log2(1 + GAIN * value) / 8: half an 8-bit step becomes 1 / 8, nothing becomes 0."""

HIDDEN = 24
"""Channels of the hidden layers."""

SHAPES = ((HIDDEN, FEATURES, 1, 1), (HIDDEN, HIDDEN, 3, 3), (HIDDEN, HIDDEN, 3, 3), (1, HIDDEN, 1, 1))
"""Weights of the layers, [out, in, rows, columns]; each is followed by its biases [out]."""

DILATION = (1, 1, 2, 1)
"""Cells between the taps of each layer."""

WEIGHTS = sum(out * (rows * columns * width + 1) for out, width, rows, columns in SHAPES)
"""Numbers in the weights of the network."""

QUIET = 1 / 512
"""Cells whose own and whose neighbours' mean gradient is below this are faded out, to exactly 0 where it is 0."""


def trained_weights() -> Tensor:
    """Return the weights that come with the package, float32 `[WEIGHTS]`: benchmarks/_train_text.py makes them."""
    data = (Path(__file__).parent.parent / "text_weights.f16").read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.float16).float()


def _cells(planes: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """Return the texels of `[B, N, h, w]` in cells of `side` texels, `[B, N, rows, columns, texels]`.

    Cells that would reach beyond the last texel are the last ones inside; no cell is larger than the level.
    """
    for count in (rows, columns):  # the dimension that is next leaves its place, the cells and their texels come last
        size = planes.shape[2]
        part = min(side, size)
        first = (torch.arange(count, device=planes.device) * part).clamp(max=size - part)
        places = first[:, None] + torch.arange(part, device=planes.device)
        planes = planes.movedim(2, -1)[..., places]
    return planes.transpose(3, 4).flatten(4)


def text_features(image: Tensor) -> Tensor:
    """Return the statistics of cells of 16 pixels that the network reads, `[B, FEATURES, h, w]`, all >= 0.

    Args:
        image: `[B, C, H, W]`, C of 1, 3 or 4, float or uint8.

    Convention: of luma, cut off to [0, 1], and its mips (mean), borders replicated. With (gx, gy) the central
    difference, per level: mean |gx|, |gy|, |gx + gy|, |gx - gy| (how the edges are oriented), the root of the
    mean of gx^2 + gy^2 (large against the means where edges are sparse), |mean gx|, |mean gy| (0 where each
    edge has its opposite nearby), then how much darker, along x and along y, texels are than both texels
    REACH beside them, and how much lighter. At last, of level 0: the mean's height above the smallest and
    below the largest value.
    """
    light = luma(rgb_planes(image)).clamp(0, 1)
    height, width = light.shape[1:]
    rows, columns = -(-height // CELL), -(-width // CELL)
    last = level_count(height, width) - 1
    data = generate_mipmaps(light[:, None], ["mean"], min(last + 1, TEXT_LEVELS))
    levels = [level[..., 0] for level in split_levels(data, height, width, min(last + 1, TEXT_LEVELS))]
    found = []
    for wanted in range(TEXT_LEVELS):
        level = min(wanted, last)
        value = levels[level]
        p = replicate(value, REACH)
        h, w = value.shape[1:]

        def at(dy: int, dx: int, p: Tensor = p, h: int = h, w: int = w) -> Tensor:
            return p[:, REACH + dy : REACH + dy + h, REACH + dx : REACH + dx + w]

        gx, gy = (at(0, 1) - at(0, -1)) / 2, (at(1, 0) - at(-1, 0)) / 2
        sides_x, sides_y = (at(0, -REACH), at(0, REACH)), (at(-REACH, 0), at(REACH, 0))
        planes = [gx.abs(), gy.abs(), (gx + gy).abs(), (gx - gy).abs(), gx * gx + gy * gy, gx, gy]
        planes += [(torch.minimum(*sides) - value).clamp(min=0) for sides in (sides_x, sides_y)]
        planes += [(value - torch.maximum(*sides)).clamp(min=0) for sides in (sides_x, sides_y)]
        means = _cells(torch.stack(planes, dim=1), CELL >> level, rows, columns).mean(-1)
        found += [means[:, :4], means[:, 4:5].sqrt(), means[:, 5:7].abs(), means[:, 7:]]
    cells = _cells(levels[0][:, None], CELL, rows, columns)
    found += [cells.mean(-1) - cells.amin(-1), cells.amax(-1) - cells.mean(-1)]
    return torch.cat(found, dim=1).clamp(min=0)


def compressed(features: Tensor) -> Tensor:
    """Return the statistics as the network reads them: log2(1 + GAIN * value) / 8."""
    return torch.log2(1 + GAIN * features) / 8


def text_logits(inputs: Tensor, weights: Tensor) -> Tensor:
    """Return the last layer of the network, `[B, h, w]`, of compressed statistics `[B, FEATURES, h, w]`.

    Four convolutions (SHAPES, DILATION) with borders replicated; all but the last are followed by max(0, .).
    """
    value, at = inputs, 0
    for shape, dilation in zip(SHAPES, DILATION, strict=True):
        count = shape[0] * shape[1] * shape[2] * shape[3]
        kernel, bias = weights[at : at + count].reshape(shape), weights[at + count : at + count + shape[0]]
        at += count + shape[0]
        border = dilation * (shape[2] // 2)
        if at > count + shape[0]:
            value = value.clamp(min=0)
        value = F.conv2d(F.pad(value, [border] * 4, mode="replicate"), kernel, bias, dilation=dilation)
    return value[:, 0]


def text_regions(image: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return how likely each place is text, `[B, H, W]` in [0, 1], in the image's dtype (float32 for uint8).

    Args:
        image: `[B, C, H, W]`, C of 1, 3 or 4, float or uint8; values that are not finite count as 0.
        weights: `[WEIGHTS]`, those of `trained_weights` by default.

    Convention: the logistic function of `text_logits` per cell, times m / (m + QUIET) with m the largest mean
    |gx| + |gy| of level 0 among the cell and its eight neighbours; read bilinearly, with clamp, at the pixels'
    centres, cell (i, j) having its centre at (16 j + 8, 16 i + 8). Arithmetic in float32 (float64 for double).
    No gradient.
    """
    dtype = image.dtype if image.is_floating_point() else torch.float32
    features = text_features(image.detach())
    weights = trained_weights() if weights is None else weights
    score = torch.sigmoid(text_logits(compressed(features), weights.to(features)))
    edge = F.max_pool2d(features[:, :1] + features[:, 1:2], 3, stride=1, padding=1)[:, 0]
    score = score * (edge / (edge + QUIET))
    height, width = image.shape[2:]
    full = upsample(score[..., None], CELL * score.shape[1], CELL * score.shape[2])[..., 0]
    return full[:, :height, :width].to(dtype)
