"""Stem `carrying`: values of cells moved whole from frame to frame, and how much the picture differs from what they were computed from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from texvlm._ext import fake, ops, real_tensor


class Carried(NamedTuple):
    """Where the values of the next frame come from."""

    source: Tensor  # int64 [B, rows, columns]: row * columns + column of the cell whose value each takes over
    offset: Tensor  # [B, 2, rows, columns], (y, x): by how much of a cell the value now lies beside the cell
    held: Tensor  # [B, A, rows, columns]: the appearance that the values were computed from
    residual: Tensor  # [2, B, rows, columns]: its difference from what is there now, and that over the contrast; inf where lost


def carry(
    now: Tensor,
    before: Tensor,
    held: Tensor,
    offset: Tensor,
    still: Tensor,
    flow: Tensor | None = None,
    occlusion: Tensor | None = None,
    *,
    floor: float = 4 / 255,
    quiet: float = 1 / 64,
    occluded: float = 0.5,
) -> Carried:
    """Which cell's value each cell of a grid takes over from the frame before.

    That of the value that lies nearest to where the flow leads. Values are never blended, so they do not blur however long they are
    carried, and any number of channels is one gather by `source`; how far each lies beside the cell that holds it is kept as `offset`, so
    that slow movements add up until a value moves on. Cells that are still, or whose colour hardly changed, keep theirs.

    Args:
        now: [B, A, rows, columns] float32, finite: the cells' appearance (mean colours, in [0, 1]) in the next frame.
        before: in the frame before.
        held: when the values that are held were computed.
        offset: [B, 2, rows, columns] float32 of the values, (y, x) in cells.
        still: bool [B, rows, columns], cells in which nothing changed.
        flow: [B, 2, h, w] float32, (x, y), of any resolution, in pixels of its own grid, from the next frame to the one before, as
            `optical_flow` gives it. A cell moves by the mean over its pixels. None: everything stays.
        occlusion: bool [B, h, w], as `optical_flow` gives it.
        floor: is added to the contrast, the standard deviation of the colours in the 3 x 3 cells around.
        quiet: a change of appearance by less than this share of contrast + floor is no movement.
        occluded: a cell that moves is lost where more than this share of it is occluded, or its flow is not finite.

    Returns:
        Carried. No gradient.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Example:
        >>> import torch, texvlm
        >>> look, still = torch.rand(1, 3, 1, 4), torch.zeros(1, 1, 4, dtype=torch.bool)
        >>> flow = torch.zeros(1, 2, 1, 4)
        >>> flow[:, 0] = -1  # everything moved right by one cell
        >>> texvlm.carry(look.roll(1, 3), look, look, torch.zeros(1, 2, 1, 4), still, flow).source
        tensor([[[0, 0, 1, 2]]])
    """
    planes = [real_tensor(n, t) for n, t in (("now", now), ("before", before), ("held", held), ("offset", offset))]
    return Carried(*ops.carry(*planes, still, flow, occlusion, floor, quiet, occluded))


@fake("carry")
def _(now: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, _, rows, columns = now.shape
    return (
        now.new_empty((batch, rows, columns), dtype=torch.int64),
        now.new_empty(offset.shape),
        now.new_empty(now.shape),
        now.new_empty((2, batch, rows, columns)),
    )
