"""What queries find in features at full width and on their principal axes, and how much of it the axes keep."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from texvlm.pca import PCA, as_rows, unit

WANTED = 0.95  # of the retrieval result at full width
SHARE = 0.02  # of the cells count as retrieved where nothing says what is right


class Retrieval(NamedTuple):
    """What queries find at full width and on the axes.

    `kept` is what the axes keep of the retrieval result: `axes` / `full`.
    """

    kept: float
    full: float  # mean average precision with `truth`; 1 without
    axes: float  # mean average precision with `truth`; without, the share of the cells found at full width that is found on the axes
    spearman: float  # mean rank correlation of the two relevances
    explained: float  # share of the features' variance


def average_precision(scores: Tensor, right: Tensor) -> float:
    """Area under precision over recall as the cells are taken best first: scores [n], right [n] bool. 0 if nothing is right.

    Example:
        >>> import torch, texvlm
        >>> texvlm.retrieval.average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]))
        0.833...
    """
    hits = right.flatten()[scores.flatten().argsort(descending=True, stable=True)].double()
    if not hits.any():
        return 0.0
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1, device=hits.device)
    return float((precision * hits).sum() / hits.sum())


def _ranks(values: Tensor) -> Tensor:
    return values.argsort(dim=-1).argsort(dim=-1).double()


def retrieval_kept(features: Tensor, queries: Tensor, pca: PCA, truth: Tensor | None = None, share: float = SHARE) -> Retrieval:
    """What the axes keep of what queries find at full width.

    Each query orders all cells by cosine, once at full width and once on the axes. With `truth`, the results are compared by mean
    average precision; without, by the share of the best `share` of the cells at full width that are among the best on the axes.

    Args:
        features: [n, D] or [B, D, h, w].
        queries: [Q, D] at full width.
        pca: the axes.
        truth: [Q, n] bool, or [Q, B, h, w]: what each query shall find. Queries that shall find nothing do not count.
        share: of the cells.

    Returns:
        Retrieval. `kept` of at least 0.95 is what 16 axes should reach.
    """
    rows = as_rows(features)
    full = unit(queries.detach().double()) @ unit(rows).T
    laid = pca.transform_text(queries.detach().double()) @ pca.transform(rows).T
    a, b = _ranks(full), _ranks(laid)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    spearman = float(((a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt().clamp(min=1e-300)).mean())
    if truth is None:
        k = max(1, math.ceil(share * full.shape[1]))
        found = torch.zeros_like(full, dtype=torch.bool).scatter_(1, full.topk(k).indices, True)
        return Retrieval(kept := float(found.gather(1, laid.topk(k).indices).double().mean()), 1.0, kept, spearman, pca.explained)
    truth = truth.reshape(len(full), -1)
    asked = truth.any(1).nonzero()[:, 0].tolist()
    if not asked:
        raise ValueError("truth must name at least one cell for at least one query")
    best = sum(average_precision(full[q], truth[q]) for q in asked) / len(asked)
    here = sum(average_precision(laid[q], truth[q]) for q in asked) / len(asked)
    return Retrieval(here / best, best, here, spearman, pca.explained)
