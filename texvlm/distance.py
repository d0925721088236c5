"""Stem `distance`: the exact Euclidean distance transform."""

from __future__ import annotations

import torch
from torch import Tensor

from texvlm._ext import fake, ops


def distance_transform(mask: Tensor, method: str = "exact") -> tuple[Tensor, Tensor]:
    """For each pixel, the squared distance to the nearest True pixel and which one that is. Exact by default, in integers.

    Args:
        mask: bool [B, H, W] or [H, W], any strides.
        method: "exact", or "jfa": jump flooding with two more rounds of steps 2 and 1 (JFA+2), a fixed number of passes. Its error
            budget: at most 1 pixel in 5000 has a feature that is not the nearest, and that one is at most 4 pixels farther than the
            nearest (tested on scattered points and on contours, where it errs most). On the CPU it is slower than "exact".

    Returns:
        (squared, index), both int64 of the mask's shape: the squared Euclidean distance in pixels, and the row-major index
        y * W + x of the nearest True pixel, the lowest one on ties. A picture without a True pixel gives H^2 + W^2 and -1.
        Not differentiable in the mask; gathering values by `index` is differentiable in the values.

    Raises:
        TypeError: the mask is not a tensor of dtype bool.
        ValueError: it has another rank, or a side of length 0; or the method has another name.

    Source: the separable scheme of Meijster, Roerdink and Hesselink, "A general algorithm for computing distance transforms in
    linear time" (2000), with an early exit along the rows.

    Example:
        >>> import torch, texvlm
        >>> squared, index = texvlm.distance_transform(torch.tensor([[True, False, False, False, True]]))
        >>> squared.tolist(), index.tolist()
        ([[0, 1, 4, 1, 0]], [[0, 0, 0, 4, 4]])
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}; compare first: mask > threshold"
        )
    if mask.dim() not in (2, 3):
        raise ValueError(f"mask must be [B, H, W] or [H, W], got {list(mask.shape)}")
    squared, index = ops.distance_transform(mask if mask.dim() == 3 else mask[None], method)
    return (squared, index) if mask.dim() == 3 else (squared[0], index[0])


@fake("distance_transform")
def _(mask: Tensor, method: str = "exact") -> tuple[Tensor, Tensor]:
    return mask.new_empty(mask.shape, dtype=torch.int64), mask.new_empty(mask.shape, dtype=torch.int64)
