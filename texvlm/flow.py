"""Stem `flow`: optical flow between two pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import fake, ops
from texvlm.salience import as_previous, as_rgb

if TYPE_CHECKING:
    from texvlm.texture import ImageLike


def optical_flow(previous: ImageLike, current: ImageLike, *, finest: int = 1, stride: int = 4) -> tuple[Tensor, Tensor]:
    picture = as_rgb(current)
    before = as_previous(previous, picture)
    return ops.optical_flow(before, picture, finest, stride)


@fake("optical_flow")
def _(previous: Tensor, current: Tensor, finest: int = 1, stride: int = 4) -> tuple[Tensor, Tensor]:
    batch, _, height, width = current.shape
    return (
        current.new_empty((batch, 2, height, width), dtype=torch.float32),
        current.new_empty((batch, height, width), dtype=torch.bool),
    )
