"""Stem `prediction`: which cells their neighbours predict. Duplicates cost nothing, and what is left out can be put back within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import fake, integer, ops
from texvlm.pictures import as_rgb

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def predict_cells(image: ImageLike, cell: int = 16, bound: float = 0.0) -> Tensor:
    """From which cell each can be put back: its own, or one that is equal to it in every pixel within a bound.

    Cells are taken from the upper left on. One is left out if what its left, upper or upper left neighbour is put back from (in this
    order) differs from it by at most `bound` in every value: so errors do not add up along a chain of cells. This is the rule of
    PixelPrune (2026), after the predictors of JPEG-LS. Nothing waits for the device.

    Args:
        image: see `Texture`; in [0, 1]. Partial cells at the edge are filled up by their border. Half types are compared in float32,
            uint8 exactly: what differs by n of 255 steps is within a bound of n / 255.
        cell: side of a cell in pixels.
        bound: largest difference, finite; 0 leaves out exact duplicates only.

    Returns:
        int64 [B, rows * columns], row-major: cell i is put back as cell source[i], and kept where source[i] = i. A cell with values that
        are not finite is kept. No gradient.

    Raises:
        ValueError: image is no picture, cell is below 1, or bound is negative or not finite.

    Example:
        >>> import torch, texvlm
        >>> picture = torch.zeros(3, 32, 48)
        >>> picture[:, 16:, 16:32] = 1.0
        >>> texvlm.predict_cells(picture).view(2, 3)
        tensor([[0, 0, 0],
                [0, 4, 0]])
    """
    return ops.predict_cells(as_rgb(image), integer("cell", cell, 1), bound)


@fake("predict_cells")
def _(image: Tensor, cell: int) -> Tensor:
    batch, _, height, width = image.shape
    cell = integer("cell", cell, 1)
    return image.new_empty((batch, -(-height // cell) * -(-width // cell)), dtype=torch.int64)
