"""Stem `tiles`: where a frame differs from what is stored of it. A film is computed where it changes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from texvlm._ext import fake, integer, ops, real, real_tensor

MEASURES = ("largest", "mean")


class DirtyTiles(NamedTuple):
    """Tiles of a frame that differ from what was stored.

    Attributes:
        dirty: bool [B, rows, columns].
        tiles: int64 [B, rows * columns], those that are dirty, row-major and ascending; -1 beyond.
        count: int64 [B], how many are.
    """

    dirty: Tensor
    tiles: Tensor
    count: Tensor  # type: ignore[assignment]


def dirty_tiles(frame: Tensor, reference: Tensor, tile: int = 32, threshold: float = 0.0, measure: str = "largest") -> DirtyTiles:
    """Which tiles of a frame differ from the stored one; these are stored, in the same pass.

    A tile is compared with what was stored of it when it last differed, not with the frame before: else a fade of 1/255 a frame would
    never be seen at a threshold of 2/255, and the picture would become stale without end. Nothing waits for the device.

    Args:
        frame: [B, C, H, W] (or [C, H, W]), any strides; uint8, or float32, float64, float16, bfloat16 in [0, 1]. Values that are not
            finite count as 0.
        reference: what is stored, of the frame's shape, dtype and device, in memory of its own. In dirty tiles it gets the frame's
            values, as they are; elsewhere it stays. Fastest where its strides are the frame's.
        tile: side of a tile in pixels, at least 8; tiles at the border may be smaller.
        threshold: what a difference must be above, finite and not negative; uint8 is compared in integers, n of 255 steps being within
            n / 255.
        measure: "largest": of the differences of values. "mean": of the differences between means of blocks of 8 x 8 pixels, for each
            colour, aligned to the tile and smaller at its border: noise of a sensor is no change then, and what moves is.

    Returns:
        DirtyTiles. No gradient: neither tensor may require one.

    Raises:
        ValueError: frames that do not fit, a tile below 8, a threshold that is negative or not finite, another measure.
        NotImplementedError: a gradient is asked for.

    Example:
        >>> import torch, texvlm
        >>> stored, frame = torch.zeros(2, 1, 3, 64, 96, dtype=torch.uint8)
        >>> frame[..., 40, 50] = 7
        >>> texvlm.dirty_tiles(frame, stored, 32).tiles
        tensor([[ 4, -1, -1, -1, -1, -1]])
        >>> texvlm.dirty_tiles(frame, stored, 32).count
        tensor([0])
    """
    tile = integer("tile", tile, 8)
    threshold = real("threshold", threshold)
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ValueError(f"threshold must be finite and at least 0, got {threshold}")
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    if real_tensor("frame", frame).dim() == 3 and real_tensor("reference", reference).dim() == 3:
        frame, reference = frame[None], reference[None]
    return DirtyTiles(*ops.dirty_tiles(frame, reference, tile, threshold, measure))


@fake("dirty_tiles")
def _(frame: Tensor, reference: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, height, width = frame.shape
    tile = integer("tile", tile, 1)
    rows, columns = -(-height // tile), -(-width // tile)
    return (
        frame.new_empty((batch, rows, columns), dtype=torch.bool),
        frame.new_empty((batch, rows * columns), dtype=torch.int64),
        frame.new_empty((batch,), dtype=torch.int64),
    )
