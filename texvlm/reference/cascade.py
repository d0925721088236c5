"""The cascade: score cells on samples of rising density, keep the best, stop at the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .channels import CHANNEL_REDUCERS, build_channels
from .features import cell_features
from .pyramid import level_count

STAGE_CELLS = 4096
"""The grid (64 x 64) that the kept numbers are stated for; they scale with the number of cells."""

SCHEDULES = {1: (), 3: ((1, 2000), (4, 500)), 5: ((1, 3000), (2, 2000), (4, 1000), (8, 500))}
"""By the number of stages: samples along a cell's side in those before the last, and the cells they keep of a grid of STAGE_CELLS."""

AUTO_CELLS = 1024
"""From this many cells on three stages are taken, else one."""

SCORE_WEIGHTS = {"edge": 1.0, "entropy": 0.5, "saliency": 1.0}
"""Default weights of the score's terms."""

SCORE_CHANNELS = (0, 1, 2, 3, 8)
"""The channels a score reads: red, green, blue, edge, saliency."""

SCORE_TERMS = {"edge": ("rms", 3), "entropy": ("entropy", 0), "saliency": ("mean", 4)}
"""What a weight weighs: a term, and its first channel among SCORE_CHANNELS."""


class Selection(NamedTuple):
    """The chosen cells.

    `indices` int64 `[B, k]`, row-major, best first, -1 beyond `count` `[B]`; `score` `[B, k]`, 0 beyond;
    `grid`, the numbers of rows and columns.
    """

    indices: Tensor
    count: Tensor  # type: ignore[assignment]
    score: Tensor
    grid: tuple[int, int]


def select_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the best scores, exactly and in order.

    Args:
        scores: `[B, N]`.
        k: at least 0.

    Returns:
        values `[B, min(k, N)]` and indices, int64: best first, ties by the lowest index, NaN last.
        Differentiable in the scores.
    """
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    lost = scores.isnan()
    order = torch.where(lost, -torch.inf, scores.detach()).sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, lost.gather(1, order).long().sort(dim=1, stable=True).indices)[:, :k]
    return scores.gather(1, order), order


def keep_topk(scores: Tensor, k: int, cells: Tensor | None = None) -> Tensor:
    """Return the indices that `select_topk` finds, ascending, or what `cells` `[B, N]` holds there."""
    kept = select_topk(scores, k)[1].sort(dim=1).values
    return kept if cells is None else cells.gather(1, kept)


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return where `mask` `[B, N]` is set, in order, then -1, int64; and how many places are set, `[B]`."""
    first = mask.long().sort(dim=1, descending=True, stable=True)
    return torch.where(first.values.bool(), first.indices, -1), mask.sum(1)


def kept_cells(k: int, total: int, schedule: int = 3) -> tuple[int, ...]:
    """Return how many of `total` cells each stage keeps; halves are rounded up."""
    kept = [(2 * n * total + STAGE_CELLS) // (2 * STAGE_CELLS) for _, n in SCHEDULES[schedule]]
    return (*(min(max(k, n), total) for n in kept), min(k, total))


def select(
    image: Tensor, k: int = 273, cell: int = 16, weights: Mapping[str, float] | None = None, schedule: int | None = None
) -> Selection:
    """Select the cells of a picture that deserve to be seen sharply (the salience path).

    Args:
        image: `[B, C, H, W]` (or `[C, H, W]`), float or uint8.
        k: the budget, at least 0.
        cell: the side of a cell in pixels.
        weights: overrides of SCORE_WEIGHTS by name.
        schedule: how many stages; by default 3 from AUTO_CELLS cells on, else 1.

    Returns:
        A `Selection` by the scores of the last stage. Hard: without gradient in the indices; the scores carry
        one.
    """
    image = image[None] if image.dim() == 3 else image
    unknown = set(weights or {}) - set(SCORE_WEIGHTS)
    if unknown:
        raise ValueError(f"weights must be among {', '.join(SCORE_WEIGHTS)}, got {', '.join(sorted(unknown))}")
    scale = list({**SCORE_WEIGHTS, **(weights or {})}.values())
    batch, _, height, width = image.shape
    levels = level_count(height, width)
    data = build_channels(image, SCORE_CHANNELS, levels)
    reducer = [CHANNEL_REDUCERS[channel] for channel in SCORE_CHANNELS]
    grid = (-(-height // cell), -(-width // cell))
    cells = torch.arange(grid[0] * grid[1], device=image.device).expand(batch, -1)
    total = grid[0] * grid[1]
    schedule = schedule or (3 if total >= AUTO_CELLS else 1)
    for kept, samples in zip(kept_cells(k, total, schedule), (*(min(n, cell) for n, _ in SCHEDULES[schedule]), cell)):
        cells = cells.sort(dim=1).values  # ties then go to the lowest cell
        terms, channels = zip(*SCORE_TERMS.values())
        features = cell_features(data, cells, height, width, reducer, levels, cell, samples, terms, channels)
        score = (features * features.new_tensor(scale)).sum(-1)
        score, best = select_topk(score, kept)
        cells = cells.gather(1, best)
    count = cells.shape[1]
    indices = cells.new_full((batch, k), -1)
    indices[:, :count] = cells
    score = torch.cat([score, score.new_zeros(batch, k - count)], dim=1)
    return Selection(indices, torch.full((batch,), count, device=image.device), score, grid)
