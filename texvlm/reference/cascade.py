"""The cascade: score cells on samples of rising density, keep the best, stop at the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .channels import CHANNEL_REDUCERS, build_channels
from .pyramid import compute_dtype, level_count
from .salience import LUMA_WEIGHTS, sqrt0
from .sample import sample_lod

ENTROPY_BINS = 16
"""Bins of the histogram of luma over [0, 1]."""

STAGE_CELLS = 4096
"""The grid (64 x 64) that the kept numbers are stated for; they scale with the number of cells."""

STAGE_KEPT = (2000, 500)
"""Cells kept after the first and the second stage of a grid of STAGE_CELLS."""

STAGE_SAMPLES = (1, 4)
"""Samples along a cell's side in the first and the second stage; the third takes one per pixel."""

SCORE_WEIGHTS = {"edge": 1.0, "entropy": 0.5, "saliency": 1.0}
"""Default weights of the score's terms."""

SCORE_CHANNELS = (0, 1, 2, 3, 8)
"""The channels a score reads: red, green, blue, edge, saliency."""


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


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return where `mask` `[B, N]` is set, in order, then -1, int64; and how many places are set, `[B]`."""
    first = mask.long().sort(dim=1, descending=True, stable=True)
    return torch.where(first.values.bool(), first.indices, -1), mask.sum(1)


def _centres(cells: Tensor, columns: int, cell: int, steps: Tensor) -> Tensor:
    """Return pixels `[B, n, S * S, 2]`: `steps[S]` in cells from the corner, down and across, row-major."""
    corner = torch.stack([cells % columns, cells.div(columns, rounding_mode="floor")], dim=-1)
    offset = torch.stack([steps.repeat(len(steps)), steps.repeat_interleave(len(steps))], dim=-1)
    return (corner[:, :, None] + offset) * cell


def entropy(light: Tensor) -> Tensor:
    """Return the Shannon entropy, in [0, 1], of the histogram of `light[..., S]`.

    It is divided by its largest possible value, log2(min(ENTROPY_BINS, S)). A single sample has
    entropy 0. No gradient.
    """
    samples = light.shape[-1]
    if samples == 1:
        return torch.zeros_like(light[..., 0])
    bins = (light.detach() * ENTROPY_BINS).nan_to_num().floor().clamp(0, ENTROPY_BINS - 1)
    result = torch.zeros_like(light[..., 0])
    for value in range(ENTROPY_BINS):
        share = (bins == value).sum(-1).to(light.dtype) / samples
        result = result - torch.where(share > 0, share * torch.where(share > 0, share, 1).log2(), 0)
    return result / math.log2(min(ENTROPY_BINS, samples))


def score_cells(
    data: Tensor,
    cells: Tensor,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    cell: int,
    samples: int,
    channels: Sequence[int],
    weights: Sequence[float],
) -> Tensor:
    """Score cells of the picture's grid by edge, entropy and saliency.

    Args:
        data: `[Bt, T, C]` texels; Bt is B or 1.
        cells: int64 `[B, n]`, row-major in the grid of ceil(H / cell) x ceil(W / cell).
        height: of level 0.
        width: of level 0.
        reducer: the texture's.
        levels: the texture's.
        cell: the side of a cell in pixels.
        samples: s, samples along the side.
        channels: where red, green, blue, edge and saliency are in `data`.
        weights: of edge, entropy and saliency.

    Returns:
        `[B, n]` in float32 (float64 for double). Differentiable in `data` through edge and saliency.

    Convention: sample (i, j) of cell (cy, cx) at pixel ((cx + (j + 0.5)/s) * cell, (cy + (i + 0.5)/s) *
    cell), trilinear with clamp at LOD log2(cell/s). Score: w0 * sqrt(mean(edge^2)) + w1 * entropy + w2 *
    mean(saliency). For s = 1 the entropy, and only it, is over the centres of the 3 x 3 cells around.
    """
    red, green, blue, edge, saliency = channels
    dtype = compute_dtype(data.dtype)
    columns = -(-width // cell)
    size = torch.tensor([width, height], dtype=dtype, device=data.device)
    lod = math.log2(cell / samples)

    def read(steps: Tensor, wanted: list[int]) -> Tensor:
        uv = (_centres(cells, columns, cell, steps) / size).flatten(1, 2)
        names = [list(reducer)[c if len(reducer) > 1 else 0] for c in wanted]
        value = sample_lod(data[..., wanted].to(dtype), uv, lod, height, width, names, levels)
        return value.reshape(*cells.shape, len(steps) ** 2, len(wanted))

    own = (torch.arange(samples, dtype=dtype, device=data.device) + 0.5) / samples
    around = torch.tensor([-0.5, 0.5, 1.5], dtype=dtype, device=data.device) if samples == 1 else own
    rgb = read(around, [red, green, blue])
    light = LUMA_WEIGHTS[0] * rgb[..., 0] + LUMA_WEIGHTS[1] * rgb[..., 1] + LUMA_WEIGHTS[2] * rgb[..., 2]
    strength, stands_out = read(own, [edge, saliency]).unbind(-1)
    score = weights[0] * sqrt0((strength * strength).mean(-1)) + weights[1] * entropy(light)
    return score + weights[2] * stands_out.mean(-1)


def kept_cells(k: int, total: int) -> tuple[int, int, int]:
    """Return how many of `total` cells each stage keeps; halves are rounded up."""
    first, second = ((2 * kept * total + STAGE_CELLS) // (2 * STAGE_CELLS) for kept in STAGE_KEPT)
    return min(max(k, first), total), min(max(k, second), total), min(k, total)


def select(image: Tensor, k: int = 273, cell: int = 16, weights: Mapping[str, float] | None = None) -> Selection:
    """Select the cells of a picture that deserve to be seen sharply (the salience path).

    Args:
        image: `[B, C, H, W]` (or `[C, H, W]`), float or uint8.
        k: the budget, at least 0.
        cell: the side of a cell in pixels.
        weights: overrides of SCORE_WEIGHTS by name.

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
    for kept, samples in zip(kept_cells(k, grid[0] * grid[1]), (*STAGE_SAMPLES, cell)):
        cells = cells.sort(dim=1).values  # ties then go to the lowest cell
        score = score_cells(data, cells, height, width, reducer, levels, cell, samples, range(5), scale)
        score, best = select_topk(score, kept)
        cells = cells.gather(1, best)
    count = cells.shape[1]
    indices = cells.new_full((batch, k), -1)
    indices[:, :count] = cells
    score = torch.cat([score, score.new_zeros(batch, k - count)], dim=1)
    return Selection(indices, torch.full((batch,), count, device=image.device), score, grid)
