"""Principal axes, projection and relevance from their definitions: a singular value decomposition of all rows at once, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def principal_axes(features: Tensor, axes: int = 16, centre: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [D], axes [k, D] and variance [k] of features [n, D]; k is at most D and n. The largest entry of each axis is positive."""
    rows = features.double()
    mean = rows.mean(0) if centre else torch.zeros(rows.shape[1], dtype=torch.float64)
    _, singular, right = torch.linalg.svd(rows - mean, full_matrices=False)
    for axis in right:
        axis *= axis[axis.abs().argmax()].sign()
    return mean, right[:axes], singular[:axes].square() / (len(rows) - 1)


def project(vectors: Tensor, mean: Tensor, axes: Tensor) -> Tensor:
    """Vectors [n, D] on the axes, [n, k], unit length; those of no length stay zero."""
    laid = (vectors.double() - mean.double()) @ axes.double().T
    length = laid.norm(dim=1, keepdim=True)
    return torch.where(length > 0, laid / length.clamp(min=torch.finfo(torch.float64).tiny), torch.zeros_like(laid))


def relevance(planes: Tensor, query: Tensor) -> Tensor:
    """(1 + cosine) / 2 of planes [B, K, h, w] and a query [K], [B, h, w]; 0.5 where either has no length."""
    vectors = planes.double().permute(0, 2, 3, 1)
    lengths = vectors.norm(dim=-1) * query.double().norm()
    cosine = (vectors * query.double()).sum(-1) / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return 0.5 + 0.5 * cosine
