"""Stem `features`: what cells of the picture's grid hold, as numbers that a scorer weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._constants import places
from texvlm._ext import acc_dtype, fake, fake_gradients, integer, ops, real, real_tensor, sequence
from texvlm.channel_sources import COLOURS

if TYPE_CHECKING:
    from texvlm.texture import Texture

STATISTICS = ("mean", "max", "min", "variance", "rms")
"""Terms of one channel, written "mean:saliency"."""

LIGHTS = ("entropy", "residual")
"""Terms of the channels red, green and blue."""


def parse_term(term: str) -> tuple[str, str]:
    """A term as a statistic and the name of the first channel that it reads."""
    if not isinstance(term, str):
        raise TypeError(f"terms must be strings, got {type(term).__name__}")
    what, _, channel = term.partition(":")
    if what in STATISTICS and channel:
        return what, channel
    if what in LIGHTS and not channel:
        return what, "red"
    if what == "cosine" and not channel:
        return what, "embedding_0"
    raise ValueError(
        f"terms must be {', '.join(f'{name}:CHANNEL' for name in STATISTICS)}, entropy, residual or cosine, got {term!r}"
    )


def term_channels(texture: Texture, terms: Sequence[str], width: int) -> tuple[list[str], list[int], list[int]]:
    """What the op is told of terms: the statistics, their first channels in the texture, and red, green and blue where one reads them."""
    parsed = [parse_term(term) for term in sequence("terms", terms)]
    lights = [texture.index(name) for name in COLOURS] if any(what in LIGHTS for what, _ in parsed) else []
    channels = [0 if what in LIGHTS else texture.index(channel) for what, channel in parsed]
    for (what, _), first in zip(parsed, channels):
        if what == "cosine" and any(texture.index(f"embedding_{i}") != first + i for i in range(width)):
            raise ValueError(f"texture must hold embedding_0 ... embedding_{width - 1} one after another")
    return [what for what, _ in parsed], channels, lights


def node_features(
    texture: Texture, terms: Sequence[str], cell: int, levels: int, samples: int | None = None, query: Tensor | None = None
) -> Tensor:
    """`cell_features` of all nodes of a quadtree over the cells, level by level, the cells first: [B, n, terms + 1], the level last."""
    parts = []
    for level in range(levels):
        side = cell << level
        found = cell_features(texture, all_cells(texture, side), terms, side, min(samples or side, side), query)
        parts.append(torch.cat([found, torch.full_like(found[..., :1], level)], dim=-1))
    return torch.cat(parts, dim=1)


def all_cells(texture: Texture, cell: int) -> Tensor:
    """The index of every cell of the grid, int64 [B, n]; not to be written into."""
    count = -(-texture.height // cell) * -(-texture.width // cell)
    return places(count, texture.data.device).expand(len(texture.data), -1)


def cell_features(
    texture: Texture,
    cells: Tensor,
    terms: Sequence[str],
    cell: int = 16,
    samples: int | None = None,
    query: Tensor | None = None,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """What cells of the picture's grid hold, as numbers: the features that the cascade weighs, and that a scorer can learn to.

    A cell is read at samples x samples places, trilinear at LOD log2(cell / samples), places beyond the picture repeating its border:
    samples = cell reads every pixel, 1 the cell's mip. A scorer's first pass over many cells needs few samples.

        mean:CHANNEL, max:, min:, variance:, rms:   of the samples of one channel (rms of an edge channel is edge energy)
        entropy     of a histogram of luma with 16 bins, over its largest possible value; of one sample, over the 3 x 3 cells around
        residual    root mean square difference of red, green, blue to the cell left, above or above left that is most alike (what no
                    neighbour predicts); of the first cell, its root mean square
        cosine      of the cell's mean embedding (channels embedding_0 ...) with the query

    Any channel gives a feature: "mean:eccentricity" the distance from the fixation, "mean:motion" the change since the previous frame,
    "min:edge_distance" whether an edge comes near.

    Args:
        texture: of batch B, or 1, shared by all, with the channels named (`build_channels`).
        cells: int64 [B, n], row-major in the grid of ceil(H / cell) x ceil(W / cell); an index outside of it gives NaN.
        terms: at most 32, as above.
        cell: side of a cell in pixels.
        samples: along a side; by default every pixel.
        query: [B, D] or [D], for "cosine": see `Embedding.query`.
        weights: one for each term, to have them added up, in their order, without a tensor of each.

    Returns:
        [B, n, terms], or with weights [B, n], float32 (float64 for double). Differentiable in the texels and the query, but for entropy
        and residual; max and min give theirs to the first sample that is one. Second derivatives raise.

    Raises:
        ValueError: an unknown term, a cosine without a query, or not as many weights as terms. KeyError: a channel that the texture lacks.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.build_channels(torch.rand(3, 64, 96), channels=["red", "green", "blue", "edge"])
        >>> texvlm.cell_features(texture, torch.arange(24)[None], ["rms:edge", "max:edge", "entropy"]).shape
        torch.Size([1, 24, 3])
    """
    if query is not None:
        query = real_tensor("query", query, acc_dtype(texture.data.dtype)).to(texture.data.device)
        query = query[None] if query.dim() == 1 else query
        if query.dim() != 2:
            raise ValueError(f"query must be [D], [B, D] or [1, D], got {list(query.shape)}")
    names, channels, lights = term_channels(texture, terms, 0 if query is None else query.shape[-1])
    cell = integer("cell", cell)
    weights = None if weights is None else [real("weights", weight) for weight in sequence("weights", weights)]
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"weights must be one for each of {len(names)} terms, got {len(weights)}")
    if weights is not None and not names:
        return texture.data.new_zeros(cells.shape, dtype=acc_dtype(texture.data.dtype))
    return ops.cell_features(
        texture.data,
        cells,
        texture.height,
        texture.width,
        texture.reducer,
        texture.levels,
        cell,
        cell if samples is None else integer("samples", samples),
        names,
        channels,
        query,
        lights,
        weights or [],
    )


@fake("cell_features")
def _(data: Tensor, cells: Tensor, terms: Sequence[str], weights: Sequence[float]) -> Tensor:
    return data.new_empty((*cells.shape, *([] if weights else [len(terms)])), dtype=acc_dtype(data.dtype))


fake_gradients("cell_features")
