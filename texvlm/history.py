"""Stem `history`: where the eye has been, and attention brought to the picture."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, fake, fake_gradients, ops, real, real_tensor
from texvlm.warping import warp

FIXATION_SIGMA = 0.05
"""Of a fixation's Gaussian, over the picture's longer side: the fovea's 2 degrees in a picture of 40."""

FIXATION_DECAY = 0.9
"""What is left of a fixation when the next one is made."""

GAZE_SIGMA = 0.1
"""Of a fovea's Gaussian: twice a fixation's, since a fovea samples sharply around the point too."""

GAZE_DECAY = 0.98
"""What is left of the gaze from frame to frame: half after 34 frames."""


def gaussian_splat(
    points: Tensor, weights: Tensor, sigma: float, height: int, width: int, *, base: Tensor | None = None, keep: float = 1.0
) -> Tensor:
    """Gaussians at points, added to a plane: min(1, keep * base + sum_p max(w_p, 0) exp(-d_p^2 / (2 s^2))).

    Args:
        points: [B, P, 2] uv in [0, 1] (outside is allowed), float32 or float64; half types are converted to float32.
        weights: [B, P]; negative ones count as 0. A point or weight that is not finite counts nothing and has no gradient.
        sigma: of the Gaussians, over the longer side of the plane; d and s are in pixels, so that the Gaussians are round.
        height: of the plane, in pixels.
        width: of the plane.
        base: [B, H, W] not negative, what was there before; values that are not finite count as 0.
        keep: what is left of it.

    Returns:
        [B, H, W] in [0, 1], in the points' dtype. Differentiable in points, weights and base; where the plane is cut off at 1 the
        gradient is 0. Gaussians are cut off where they add less than 1e-9 (1e-18 in float64). Second derivatives raise.

    Raises:
        ValueError: shapes or dtypes that do not fit, a sigma that is not positive.

    Example:
        >>> import torch, texvlm
        >>> plane = texvlm.gaussian_splat(torch.tensor([[[0.5, 0.5]]]), torch.ones(1, 1), 0.1, 5, 5)
        >>> plane[0, 2].mul(100).round().tolist()
        [0.0, 14.0, 100.0, 14.0, 0.0]
    """
    keep = real("keep", keep)
    if not math.isfinite(keep):
        raise ValueError(f"keep must be finite, got {keep}")
    acc = acc_dtype(real_tensor("points", points).dtype)
    weights, base = real_tensor("weights", weights, acc), None if base is None else real_tensor("base", base, acc)
    return ops.gaussian_splat(points.to(acc), weights, sigma, height, width, keep, base)


def _history(
    points: Tensor, weights: Tensor, height: int, width: int, sigma: float, keep: float, carried: tuple[Tensor | None, ...]
) -> Tensor:
    previous, flow, occlusion = carried
    if previous is not None and flow is not None:
        previous = warp(real_tensor("previous", previous), flow, occlusion)
    return gaussian_splat(points, weights, sigma, height, width, base=previous, keep=keep)


def fixation_history(
    fixations: Tensor,
    height: int,
    width: int,
    *,
    decay: float = FIXATION_DECAY,
    sigma: float = FIXATION_SIGMA,
    previous: Tensor | None = None,
    flow: Tensor | None = None,
    occlusion: Tensor | None = None,
) -> Tensor:
    """The decayed sum of Gaussians at past fixations (channel 17).

    Args:
        fixations: [B, P, 2] (or [P, 2]) uv, the oldest first; those since `previous`. The last one weighs 1, each one before `decay`
            times as much. P = 0 is allowed.
        height: of the plane, in pixels; it need not be the picture's.
        width: of the plane.
        decay: from fixation to fixation, in [0, 1].
        sigma: of the Gaussians, over the longer side.
        previous: the history [B, H, W] so far: multiplied by decay^P, so that one call for all fixations and one call for each give
            the same, as long as nothing is cut off at 1.
        flow: from the current picture to that of `previous`, see `warp`: the history moves with what was looked at.
        occlusion: where the history is forgotten, see `warp`.

    Returns:
        [B, H, W] in [0, 1]; differentiable in fixations, previous and flow.

    Example:
        >>> import torch, texvlm
        >>> plane = texvlm.fixation_history(torch.tensor([[0.25, 0.5], [0.75, 0.5]]), 8, 16, decay=0.5)
        >>> bool(plane[0, 4, 11] > plane[0, 4, 3] > plane[0, 4, 7])
        True
    """
    points = fixations if real_tensor("fixations", fixations).dim() == 3 else fixations[None]
    if points.dim() != 3:
        raise ValueError(f"fixations must be [B, P, 2] or [P, 2], got {list(fixations.shape)}")
    count = points.shape[1]
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    ages = torch.arange(count - 1, -1, -1, device=points.device, dtype=acc_dtype(points.dtype))
    weights = torch.pow(decay, ages).expand(points.shape[0], count)
    return _history(points, weights, height, width, sigma, decay**count, (previous, flow, occlusion))


def gaze_history(
    gaze: Tensor,
    height: int,
    width: int,
    *,
    decay: float = GAZE_DECAY,
    sigma: float = GAZE_SIGMA,
    previous: Tensor | None = None,
    flow: Tensor | None = None,
    occlusion: Tensor | None = None,
) -> Tensor:
    """Where the foveas have been (channel 37): all foveas of this frame with weight 1, over what is left of the frames before.

    Args:
        gaze: [B, F, 2] (or [F, 2]) uv, the centres of this frame's foveas.
        height: see `fixation_history`.
        width: see `fixation_history`.
        sigma: see `fixation_history`.
        decay: from frame to frame, in [0, 1]; `previous` is multiplied by it.
        previous: the history [B, H, W] so far.
        flow: see `fixation_history`.
        occlusion: see `fixation_history`.

    Returns:
        [B, H, W] in [0, 1]; differentiable in gaze, previous and flow.

    Example:
        >>> import torch, texvlm
        >>> plane = texvlm.gaze_history(torch.tensor([[0.25, 0.5]]), 8, 16)
        >>> plane = texvlm.gaze_history(torch.tensor([[0.75, 0.5]]), 8, 16, previous=plane, decay=0.5)
        >>> bool(plane[0, 4, 11] > plane[0, 4, 3] > plane[0, 4, 7])
        True
    """
    points = gaze if real_tensor("gaze", gaze).dim() == 3 else gaze[None]
    if points.dim() != 3:
        raise ValueError(f"gaze must be [B, P, 2] or [P, 2], got {list(gaze.shape)}")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    weights = torch.ones(points.shape[:2], device=points.device, dtype=acc_dtype(points.dtype))
    return _history(points, weights, height, width, sigma, decay, (previous, flow, occlusion))


def attention_map(attention: Tensor, height: int, width: int) -> Tensor:
    """Attention of a grid of tokens, read bilinearly at the pixels of a picture (channels 35 and 36).

    Args:
        attention: [B, h, w] or [h, w], in [0, 1], one value for each token, row-major; float32, float64, float16 or bfloat16.
        height: of the result, in pixels.
        width: of the result.

    Returns:
        [B, height, width] in the tokens' dtype and range. Values are kept, not shared out among pixels: each pixel has the attention of
        the place it lies on. Where height and width are multiples of h and w the mean is kept exactly. Differentiable, in all orders.

    Raises:
        ValueError: another rank, or a side of length 0.

    Example:
        >>> import torch, texvlm
        >>> texvlm.attention_map(torch.tensor([[0.0, 1.0]]), 1, 4)
        tensor([[[0.0000, 0.2500, 0.7500, 1.0000]]])
    """
    return ops.enlarge(attention if real_tensor("attention", attention).dim() == 3 else attention[None], height, width)


@fake("gaussian_splat")
def _(
    points: Tensor, weights: Tensor, sigma: float, height: int, width: int, keep: float = 1.0, base: Tensor | None = None
) -> Tensor:
    return points.new_empty((points.shape[0], height, width))


fake_gradients("gaussian_splat", base="out")


@fake("enlarge")
def _(planes: Tensor, height: int, width: int) -> Tensor:
    return planes.new_empty((planes.shape[0], height, width))


@fake("enlarge_backward")
def _(grad: Tensor, height: int, width: int) -> Tensor:
    return grad.new_empty((grad.shape[0], height, width))
