"""Features of cells: what a cell of the picture's grid holds, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .pyramid import compute_dtype
from .salience import LUMA_WEIGHTS, sqrt0
from .sample import sample_lod

ENTROPY_BINS = 16
"""Bins of the histogram of luma over [0, 1]."""

LIGHTS = ("entropy", "residual")
"""Terms that read three channels, red, green and blue, and have no gradient."""


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


def cell_features(
    data: Tensor,
    cells: Tensor,
    height: int,
    width: int,
    reducer: Sequence[str],
    levels: int,
    cell: int,
    samples: int,
    terms: Sequence[str],
    channels: Sequence[int],
    query: Tensor | None = None,
    lights: Sequence[int] = (0, 1, 2),
    weights: Sequence[float] = (),
) -> Tensor:
    """Describe cells of the picture's grid.

    Args:
        data: `[Bt, T, C]` texels; Bt is B or 1.
        cells: int64 `[B, n]`, row-major in the grid of ceil(H / cell) x ceil(W / cell).
        height: of level 0.
        width: of level 0.
        reducer: the texture's.
        levels: the texture's.
        cell: the side of a cell in pixels.
        samples: s, samples along the side.
        terms: "mean", "max", "min", "variance", "rms" of a channel's samples; "entropy" of luma; "cosine" of the mean of the channels
            with the query; "residual", the root mean square difference to the cell left, above or above left that is most alike.
        channels: of each term; of cosine the first of D. Entropy and residual have none.
        query: `[B or 1, D]`.
        lights: the channels red, green and blue, which entropy and residual read.
        weights: of each term; none for the terms one by one.

    Returns:
        `[B, n, terms]`, or with weights their sum `[B, n]`, in float32 (float64 for double). Differentiable in `data` and `query`
        but for entropy and residual.

    Convention: sample (i, j) of cell (cy, cx) at pixel ((cx + (j + 0.5)/s) * cell, (cy + (i + 0.5)/s) *
    cell), trilinear with clamp at LOD log2(cell/s). For s = 1 the entropy, and only it, is over the centres of the 3 x 3 cells around.
    A cell that is not in the grid is NaN; the first one has the root mean square of its samples for a residual.
    """
    dtype = compute_dtype(data.dtype)
    rows, columns = -(-height // cell), -(-width // cell)
    size = torch.tensor([width, height], dtype=dtype, device=data.device)
    own = (torch.arange(samples, dtype=dtype, device=data.device) + 0.5) / samples
    around = torch.tensor([-0.5, 0.5, 1.5], dtype=dtype, device=data.device) if samples == 1 else own
    known = (cells >= 0) & (cells < rows * columns)
    at = torch.where(known, cells, 0)

    def read(y: Tensor, x: Tensor, steps: Tensor, wanted: list[int]) -> Tensor:
        corner = torch.stack([x, y], dim=-1)
        offset = torch.stack([steps.repeat(len(steps)), steps.repeat_interleave(len(steps))], dim=-1)
        uv = ((corner[:, :, None] + offset) * cell / size).flatten(1, 2)
        names = [list(reducer)[c if len(reducer) > 1 else 0] for c in wanted]
        value = sample_lod(data[..., wanted].to(dtype), uv, math.log2(cell / samples), height, width, names, levels)
        return value.reshape(*cells.shape, len(steps) ** 2, len(wanted))

    y, x = at.div(columns, rounding_mode="floor"), at % columns
    results = []
    for term, channel in zip(terms, channels):
        if term == "entropy":
            rgb = read(y, x, around, list(lights))
            light = LUMA_WEIGHTS[0] * rgb[..., 0] + LUMA_WEIGHTS[1] * rgb[..., 1] + LUMA_WEIGHTS[2] * rgb[..., 2]
            results.append(entropy(light))
        elif term == "residual":
            rgb = read(y, x, own, list(lights)).detach()
            ways = []
            for dy, dx in ((0, 1), (1, 0), (1, 1)):
                inside = (y >= dy) & (x >= dx)
                other = read((y - dy).clamp(min=0), (x - dx).clamp(min=0), own, list(lights)).detach()
                ways.append(torch.where(inside, (rgb - other).square().mean((-1, -2)), torch.inf))
            nearest = torch.where(at == 0, rgb.square().mean((-1, -2)), torch.stack(ways).amin(0))
            results.append(nearest.sqrt())
        elif term == "cosine":
            assert query is not None
            mean = read(y, x, own, list(range(channel, channel + query.shape[1]))).mean(2)
            wanted = query[:, None].expand_as(mean)
            length = sqrt0((mean * mean).sum(-1)) * sqrt0((wanted * wanted).sum(-1))
            results.append(torch.where(length > 0, (mean * wanted).sum(-1) / torch.where(length > 0, length, 1), 0))
        else:
            value = read(y, x, own, [channel])[..., 0]
            if term == "mean":
                results.append(value.mean(-1))
            elif term in ("max", "min"):
                extremum = (value if term == "max" else -value).detach()
                first = (extremum == extremum.amax(-1, keepdim=True)).long().argmax(-1, keepdim=True)
                results.append(value.gather(-1, first)[..., 0])
            elif term == "variance":
                results.append((value - value.mean(-1, keepdim=True)).square().mean(-1))
            else:
                results.append(sqrt0(value.square().mean(-1)))
    if not results:
        return torch.zeros(*cells.shape, 0, dtype=dtype, device=data.device)
    found = torch.where(known[..., None], torch.stack(results, -1), torch.nan)
    return (found * found.new_tensor(list(weights))).sum(-1) if weights else found
