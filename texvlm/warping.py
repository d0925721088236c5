"""Stem `warping`: planes moved by optical flow, and motion that flow does not explain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, fake, fake_gradients, ops, real_tensor, texel_dtype
from texvlm.pictures import as_previous, as_rgb, warn_caller

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def warp(planes: Tensor, flow: Tensor, occlusion: Tensor | None = None, fill: float | None = 0.0) -> Tensor:
    """Last frame's planes as they lie in the current frame: out(p) = planes(p + flow(p)), bilinear. A backward warp leaves no holes.

    Args:
        planes: [B, C, H, W] or [B, H, W], any strides; float32, float64, float16 or bfloat16.
        flow: [B, 2, h, w], (x, y), of any resolution, in pixels of its own grid; read bilinearly at the pixels of the planes. From
            current to previous, as `optical_flow` gives it. Converted to float32 (float64 beside float64 planes).
        occlusion: bool [B, h, w] of the flow's resolution, read at the nearest: pixels there get `fill`.
        fill: of occluded pixels, and of those whose flow is not finite. None: they stay where they are.

    Returns:
        The planes' shape and dtype; arithmetic in float32 (float64). A place outside reads the nearest border pixel; pixels of
        weight 0 do not count, whatever they hold (see `sample_lod`), in the flow too. Differentiable in planes and flow: at a pixel
        boundary the derivative by the flow is that of the side to the right and below, outside it is 0. Second derivatives raise. On
        CUDA the gradient of the planes is summed in no fixed order.

    Raises:
        ValueError: a shape or dtype that does not fit.

    Example:
        >>> import torch, texvlm
        >>> flow = torch.zeros(1, 2, 1, 4)
        >>> flow[:, 0] = -1  # everything moved right by one pixel
        >>> texvlm.warp(torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]), flow)
        tensor([[[0., 0., 1., 2.]]])
    """
    field = real_tensor("flow", flow, acc_dtype(real_tensor("planes", planes).dtype))
    if planes.dim() == 3:
        return ops.warp(planes[:, None], field, fill, occlusion)[:, 0]
    return ops.warp(planes, field, fill, occlusion)


P = ParamSpec("P")
R = TypeVar("R")


def _of_one_order(motion: Callable[P, R]) -> Callable[P, R]:
    """With a flow it matters which picture comes first: where neither is named, a warning says which that is now."""

    @functools.wraps(motion)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        followed = len(args) > 2 or kwargs.get("flow") is not None
        if len(args) > 1 and followed and not torch.compiler.is_compiling():
            warn_caller(
                "motion takes the previous picture first, as optical_flow does (before, it took it second): "
                "with a flow, name them, motion(previous=..., current=..., flow=...)"
            )
        return motion(*args, **kwargs)

    return checked


@_of_one_order
def motion(
    previous: ImageLike,
    current: ImageLike | None = None,
    flow: Tensor | None = None,
    occlusion: Tensor | None = None,
    *,
    image: ImageLike | None = None,
) -> Tensor:
    """The magnitude of the change of luma against the previous picture, compensated by flow where there is one (channel 7).

    Args:
        previous: the picture before, of the shape and dtype of `current`.
        current: see `Texture`; values in [0, 1] (uint8 is divided by 255), those that are not finite count as 0.
        flow: from current to previous, as in `warp`. Where it is occluded or not finite, and without flow, a pixel is compared with the
            one at its own place. With a flow, name the pictures: without names a warning says in which order they are taken (without
            flow both orders are the same).
        occlusion: as in `warp`.
        image: `current` by its former name.

    Returns:
        [B, H, W] in [0, 1], in the picture's dtype (float32 for uint8): channel 7 of `build_channels`.
        Differentiable in both pictures and in the flow; |x| has gradient 0 at 0. Second derivatives raise.

    Example:
        >>> import torch, texvlm
        >>> before, now = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
        >>> now[0, 1, 2] = 0.5
        >>> texvlm.motion(before, now)[0, 1]
        tensor([0.0000, 0.0000, 0.5000, 0.0000])
    """
    now = image if current is None else current
    if now is None or (current is not None and image is not None):
        raise TypeError("motion takes two pictures: previous and current (or image, its former name)")
    picture = as_rgb(now, "image" if current is None else "current")
    field = None if flow is None else real_tensor("flow", flow, acc_dtype(picture.dtype)).to(picture.device)
    return ops.motion(picture, as_previous(previous, picture), field, occlusion)


@fake("warp")
def _(planes: Tensor, flow: Tensor, fill: float | None = 0.0, occlusion: Tensor | None = None) -> Tensor:
    return planes.new_empty(planes.shape)


fake_gradients("warp")


@fake("motion")
def _(image: Tensor, previous: Tensor, flow: Tensor | None = None, occlusion: Tensor | None = None) -> Tensor:
    batch, _, height, width = image.shape
    return image.new_empty((batch, height, width), dtype=texel_dtype(image))


fake_gradients("motion", dtype=acc_dtype)
