"""How high lines of text are, and what tokens of mixed levels are worth to who reads: small print fine cells, large print coarse ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.pictures import as_rgb
from texvlm.text import text_regions

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

GRID = 16
"""Pixels a side of the cells in which text and the height of its lines are known."""

OCTAVES = 4
"""Lines are looked for in bands of 4 and 6 rows of as many halved pictures: bands of 8 to 96 pixels."""

BANDS = (4, 6)

WIDE = 4
"""A band is looked at over a part of its line this many times as wide as high."""

LINE = 1.33
"""The height of a line, ascender to descender, over that of the band in which most of its strokes lie."""

ALONG = (3, 7)
"""Rows and columns of grid cells over which bands are averaged: more along a line than across."""

SHARPNESS = 4
"""The power of a band's response with which it counts in the mean over bands."""

HALF_READ = 7.0
"""The height of a line, in pixels, at which half of it is read."""

STEEPNESS = 6
"""How fast reading sets in: the estimate of the height errs by a third of an octave, so slower than with known heights."""

COARSE = 3
"""The level of the picture that is seen anyway: values are what a token shows beyond it."""

LUMA = (0.2126, 0.7152, 0.0722)

TRACE = (0.2, 0.5)
"""Shares of text below the one count nothing, above the other fully: photographs without writing have traces of it."""

STRIP = 64
"""Rows of a picture that a CPU looks at together: what lies between stays in the cache."""


def _band(plane: Tensor, rows: int) -> Tensor:
    """Means over so many rows, borders repeated."""
    above = (rows - 1) // 2
    return F.avg_pool2d(F.pad(plane, (0, 0, above, rows - 1 - above), mode="replicate"), (rows, 1), stride=1)


def _strokes(picture: Tensor) -> Tensor:
    """Mean differences along rows in blocks of 2 x 8 pixels, [B, 1, rows, columns], filled up with 0 to whole grids of all octaves."""
    parts = []
    for strip in picture.split(STRIP if picture.is_cpu else picture.shape[2], dim=2):
        if strip.stride(3) != 1:  # texels, channels last: reading them three times over costs more
            strip = strip.contiguous()
        red, green, blue = (strip[:, c : c + 1].float() for c in range(3))
        luma = (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2]).nan_to_num_(0.0, 0.0, 0.0)
        steps = F.pad((luma[..., 1:] - luma[..., :-1]).abs_(), (0, 1))
        parts.append(F.avg_pool2d(steps, (2, 8), ceil_mode=True))
    blocks = torch.cat(parts, dim=2)
    return F.pad(blocks, (0, -blocks.shape[3] % 8, 0, -blocks.shape[2] % 8))


def line_heights(image: ImageLike, text: Tensor | None = None) -> Tensor:
    """How high the lines of text are, in pixels, in cells of 16.

    A line is a band that is full of vertical strokes between two that have fewer. For bands of 8, 12, 16, 24 ... 96 pixels, the mean
    difference of neighbours along rows in the band exceeds that in the halves of a band above and below it by the most where the
    band has the height of the letters. These excesses are averaged over the text of the cells around, and of the bands' heights the
    mean in octaves is taken, weighted by them to the fourth power.

    Args:
        image: see `Texture`. The text is upright or slightly rotated.
        text: how much of each cell is text, [B, ceil(H / 16), ceil(W / 16)], found by `text_regions` by default.

    Returns:
        float32 [B, ceil(H / 16), ceil(W / 16)], 10.6 to 128; meaningless where there is no text. No gradient.
    """
    with torch.no_grad():
        picture = as_rgb(image)
        return _heights(_strokes(picture), _text(picture) if text is None else text)


def _heights(strokes: Tensor, text: Tensor) -> Tensor:
    """`line_heights` from `_strokes` and the share of text."""
    rows, columns = text.shape[1:]
    found, heights = [], []
    for octave in range(OCTAVES):
        if octave:
            strokes = F.avg_pool2d(strokes, 2)
        for band in BANDS:
            wide = WIDE * band // 4  # a block is four times as wide as high
            left = (wide - 1) // 2
            along = F.avg_pool2d(F.pad(strokes, (left, wide - 1 - left, 0, 0), mode="replicate"), (1, wide), stride=1)
            excess = (_band(along, band) - _band(along, 2 * band)).clamp_(min=0)
            excess = F.max_pool2d(excess, (8 >> octave, 2 if octave == 0 else 1))
            found.append(excess.repeat_interleave(1 << max(0, octave - 1), dim=3)[:, 0, :rows, :columns])
            heights.append(math.log2(band << (octave + 1)))
    around = F.avg_pool2d(torch.stack(found, dim=1) * text[:, None], ALONG, 1, (ALONG[0] // 2, ALONG[1] // 2))
    weight = (around / around.amax(dim=1, keepdim=True).clamp(min=1e-30)) ** SHARPNESS
    total = sum(part * octave for part, octave in zip(weight.unbind(1), heights))  # no copy of them to the device
    mean = total / weight.sum(1).clamp(min=1e-30)
    return LINE * torch.exp2(mean.clamp(min=heights[0]))


def _text(picture: Tensor) -> Tensor:
    """The share of each cell of GRID pixels that is text."""
    return F.avg_pool2d(text_regions(picture).float()[:, None], GRID, ceil_mode=True)[:, 0]


def readable(height: Tensor) -> Tensor:
    """How much of a line that is so many pixels high can be read, in [0, 1]: 1 / (1 + (HALF_READ / height)^STEEPNESS)."""
    return 1 / (1 + (HALF_READ / height) ** STEEPNESS)


def sums(plane: Tensor, cell: int, rows: int, columns: int) -> Tensor:
    """Of values per grid cell, those of cells of so many pixels: a grid cell counts for each by the share that lies in it."""
    unit = math.gcd(cell, GRID)
    parts = plane.repeat_interleave(GRID // unit, dim=1).repeat_interleave(GRID // unit, dim=2) * (unit / GRID) ** 2
    side = cell // unit
    parts = parts[:, : rows * side, : columns * side]
    parts = F.pad(parts, (0, columns * side - parts.shape[2], 0, rows * side - parts.shape[1]))
    return F.avg_pool2d(parts[:, None], side)[:, 0] * side**2


def text_values(image: ImageLike, cell: int, levels: int = 4, power: float = 1.0) -> list[Tensor]:
    """What a token is worth that shows a part of a picture at a level: the text that becomes readable by it.

    A token at level l covers (cell 2^l)^2 pixels, reduced by 2^l. Its value is the sum, over the cells of 16 pixels in it, of

        text * sure / height^power * (readable(height / 2^l) - readable(height / 2^COARSE))

    with the share of the cell that is text, by `text_regions`, how sure it is to be any (`TRACE`), and the height of its lines, by
    `line_heights`. `readable` is .12 at 5 pixels, .5 at 7, .9 at 10 and goes on rising, so that a large budget goes on refining. Text
    over height is between counting area and counting characters, which is text over height squared and takes errors in the height
    harder. Level 3 and coarser are worth 0, as a picture that is reduced so is seen anyway.

    Args:
        image: see `Texture`.
        cell: pixels a side of a token at level 0, and samples a side of all of them.
        levels: how many.
        power: 1 between area and characters, or 2 for characters, where all tokens are of one level.

    Returns:
        per level float32 [B, rows_l, columns_l], >= 0, with rows_0 = ceil(H / cell) and rows_l = ceil(rows_0 / 2^l). No gradient.

    Example:
        >>> import torch, texvlm
        >>> [tuple(v.shape) for v in texvlm.reading.text_values(torch.rand(3, 96, 160), 16, 3)]
        [(1, 6, 10), (1, 3, 5), (1, 2, 3)]
    """
    with torch.no_grad():
        lines = Lines.of(as_rgb(image))
        return lines.values(cell, levels, power)


class Lines(NamedTuple):
    """What is known of the writing in pictures, in cells of GRID pixels; without gradients.

    Attributes:
        text: [B, rows, columns], the share that is text.
        height: [B, rows, columns], of the lines, in pixels (`line_heights`).
        strokes: [B, 1, more, more], mean differences along rows in blocks of 2 x 8 pixels, filled up with 0.
        size: (height, width) of the pictures.
    """

    text: Tensor
    height: Tensor
    strokes: Tensor
    size: tuple[int, int]

    @classmethod
    def of(cls, picture: Tensor) -> Lines:
        """Of pictures [B, 3, H, W]."""
        text, strokes = _text(picture), _strokes(picture)
        return cls(text, _heights(strokes, text), strokes, (picture.shape[2], picture.shape[3]))

    def sure(self) -> Tensor:
        """How sure it is that there is any text, in [0, 1]."""
        return ((self.text - TRACE[0]) / (TRACE[1] - TRACE[0])).clamp(0, 1)

    def values(self, cell: int, levels: int, power: float) -> list[Tensor]:
        """See `text_values`."""
        worth = self.text * self.sure() * (GRID / self.height) ** power
        seen = readable(self.height / 2**COARSE)
        values = []
        rows, columns = (-(-n // cell) for n in self.size)
        for level in range(levels):
            gain = worth * (readable(self.height / 2**level) - seen).clamp(min=0)
            values.append(sums(gain, cell << level, rows, columns))
            rows, columns = -(-rows // 2), -(-columns // 2)
        return values
