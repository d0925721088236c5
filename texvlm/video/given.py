"""What callers hand a stream with a frame, checked, and in memory that they may not write to later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import coordinates
from texvlm.pictures import as_rgb

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


POINTS = {"fixation_history": "fixations", "gaze_history": "gaze"}
"""What `update` calls the points of a history."""


def checked_frame(frame: ImageLike, known: Tensor | None) -> tuple[Tensor, str | None]:
    """The frame as [B, 3, H, W], not copied, and why a stream starts anew with it, or None.

    Args:
        frame: of the caller.
        known: the picture that the stream is of, [B, 3, H, W], or None.
    """
    picture = as_rgb(frame, "frame").detach()
    if not all(picture.shape):
        raise ValueError(f"frame must have at least one pixel, got {list(picture.shape)}")
    if known is None:
        return picture, "first"
    for what, got, was in (
        ("dtype", picture.dtype, known.dtype),
        ("device", picture.device, known.device),
        ("number of pictures", len(picture), len(known)),
    ):
        if got != was:
            raise ValueError(f"frame must have the {what} of the frames before, {was}, got {got}; reset() starts anew")
    (height, width), (h, w) = picture.shape[2:], known.shape[2:]
    return picture, None if (height, width) == (h, w) else f"size {height} x {width} after {h} x {w}"


def checked_points(name: str, points: Tensor, picture: Tensor) -> Tensor:
    """Points [B, P, 2] in uv, from [B, P, 2], [1, P, 2], [P, 2] or [2]."""
    points = _own(name, points, picture)
    points = points.reshape(1, -1, 2) if points.dim() < 3 and points.shape[-1:] == (2,) else points
    points = points.expand(len(picture), -1, -1) if points.dim() == 3 and len(points) == 1 else points
    if points.dim() != 3 or len(points) != len(picture) or points.shape[2] != 2:
        raise ValueError(f"{name} must be [B, P, 2] with B = {len(picture)}, got {list(points.shape)}")
    return points


def checked_fixation(fixation: Tensor, picture: Tensor) -> Tensor:
    """Where the eye is, uv [B, 2], from [B, 2], [1, 2] or [2]."""
    at = _own("fixation", fixation, picture)
    if tuple(at.shape) not in ((2,), (1, 2), (len(picture), 2)):
        raise ValueError(f"fixation must be [B, 2] with B = {len(picture)}, or [2], got {list(at.shape)}")
    return at.expand(len(picture), 2)


def _own(name: str, points: Tensor, picture: Tensor) -> Tensor:
    return coordinates(name, points, picture).detach().to(picture.device, torch.float32, copy=True)
