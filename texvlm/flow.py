"""Stem `flow`: optical flow between two pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import fake, ops, real_tensor
from texvlm.pictures import as_previous, as_rgb

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def optical_flow(
    previous: ImageLike, current: ImageLike, *, finest: int | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Dense optical flow from the current picture to the previous one, and where the current one shows something new.

    Coarse to fine over the mips of luma: patches of 8 x 8 pixels search by inverse Gauss-Newton steps, differences from the patch's
    mean being compared, at the contrast of the picture that is searched (up to 4 times more or less), so that neither a change of
    brightness nor another exposure is motion. They begin at the flow of the coarser level, or at that of a
    neighbour where it fits better. The nodes' flows are then made smooth, each held by its own normal matrix over its residual, so that
    nodes without texture follow their neighbours; between the nodes the flow is bilinear. Both directions are searched.

    Args:
        previous: see `Texture`; values in [0, 1] (uint8 is divided by 255). Grey, RGB or RGBA; values that are not finite count as 0.
        current: alike, of its shape and dtype.
        finest: the mip level down to which is searched. By default 0 for pictures up to 1280 pixels long and 1 for larger ones.
        initial: [B, 2, h, w], (x, y), of any resolution, in pixels of its own grid, as in `warp`: what the search begins with instead of
            nothing, as the flow of the frame before; backwards, its opposite. Levels shorter than 100 pixels are left out then, which
            saves a quarter to a half on small pictures. It may be wrong by some pixels, and that nothing moves is tried too, but what
            moves far and otherwise than before may be missed. What is not finite counts as 0.

    Returns:
        (flow, occlusion). flow float32 [B, 2, H, W], (x, y) in pixels: previous sampled at p + flow(p) looks like current at p; in a
        picture too small for a match, or without texture, it is near 0. occlusion bool [B, H, W]: True where the flow leads outside of
        the previous picture or does not lead back, |f + b|^2 > 0.01 (|f|^2 + |b|^2) + 0.5, tested for blocks of 2 x 2
        pixels (4 x 4 where level 0 is not searched).
        Both are deterministic and have no gradient: the search is made of comparisons. (`warp` is differentiable in the flow.)

    Raises:
        ValueError: shapes or dtypes that differ, channel counts other than 1, 3 and 4, a negative level.

    Source: Kroeger, Timofte, Dai and Van Gool, "Fast optical flow using dense inverse search" (2016); the constants of the
    forward-backward test are those of Meister, Hur and Roth, "UnFlow" (2018).

    Example:
        >>> import torch, texvlm
        >>> texture = torch.nn.functional.interpolate(torch.rand(1, 3, 16, 16), (128, 128), mode="bicubic").clamp(0, 1)
        >>> flow, occlusion = texvlm.optical_flow(texture, texture.roll(3, dims=3))  # everything moved right by 3
        >>> flow[0, :, 64, 64].round().int().tolist()
        [-3, 0]
    """
    picture = as_rgb(current, "current")
    field = None if initial is None else real_tensor("initial", initial, torch.float32)
    return ops.optical_flow(as_previous(previous, picture), picture, finest, field)


@fake("optical_flow")
def _(previous: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, height, width = current.shape
    return (
        current.new_empty((batch, 2, height, width), dtype=torch.float32),
        current.new_empty((batch, height, width), dtype=torch.bool),
    )
