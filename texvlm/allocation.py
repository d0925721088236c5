"""What a token of each place and level is worth, for tokens of mixed levels (the path "multiscale" of `select`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import acc_dtype
from texvlm.channel_sources import COLOURS
from texvlm.embedding import relevance
from texvlm.features import all_cells, cell_features
from texvlm.laplacian import laplacian_decompose
from texvlm.reading import text_values
from texvlm.texture import Texture

GAINS = {"detail": 1.0, "text": 3.0, "query": 3.0}
"""Default weights of what a token is worth. Detail is squared error, on values in [0, 1]; a cell of 16 x 16 pixels full of text of 20
pixels a line is worth 0.8, and one that is wholly relevant to the query 1, both over the squared error of one with much contrast."""

UNIT = 16
"""Pixels a side of the area that values are stated for."""

Worth = Callable[[Texture, int, int], tuple[list[Tensor], list[Tensor]]]
"""Texture, cell, levels -> what tokens are worth as detail and as text, each [B, rows_l, columns_l] of each level."""


def _pooled(plane: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """Means of a plane [B, h, w] over rows x columns blocks of side x side; what lies outside counts as 0."""
    height, width = plane.shape[1:]
    return F.avg_pool2d(F.pad(plane[:, None], (0, columns * side - width, 0, rows * side - height)), side)[:, 0]


def _over_nodes(cells: Tensor, level: int) -> Tensor:
    """Sums over the cells [B, rows, columns] of each node of a level."""
    side = 2**level
    rows, columns = (-(-n // side) for n in cells.shape[1:])
    return _pooled(cells, side, rows, columns) * (side * side)


def colours(texture: Texture) -> Tensor:
    """Red, green and blue of level 0, [B, 3, H, W]; a view, where they follow one another."""
    index = [texture.index(name) for name in COLOURS]
    first = index[0]
    return texture.level(0)[:, slice(first, first + 3) if index == [first, first + 1, first + 2] else index]


def detail_energy(texture: Texture, cell: int, levels: int) -> list[Tensor]:
    """The squared error that a token takes away: of each node [B, rows, columns], level by level.

    The picture (red, green, blue) is taken to be seen at the coarsest of the levels anyway. What a token of level l shows beyond it are
    the bands l .. levels - 2 of the Laplacian pyramid; their energy over the node, the mean over pixels of the sum over channels times
    the area in units of 16 x 16 pixels, is the squared error that it takes away (but for what bands share). Differentiable.
    """
    grid = (-(-texture.height // cell), -(-texture.width // cell))
    few = texture
    if texture.names != COLOURS:
        index = [texture.index(name) for name in COLOURS]
        reducer = [texture.reducer[i] if len(texture.reducer) > 1 else texture.reducer[0] for i in index]
        shape = (texture.height, texture.width, texture.levels)
        few = Texture.from_data(texture.data[..., index].contiguous(), *shape, reducer, COLOURS)
    bands = laplacian_decompose(few)
    cells = all_cells(texture, cell)
    total = torch.zeros(len(texture.data), *grid, dtype=acc_dtype(texture.data.dtype), device=texture.data.device)
    below = [total]  # the energy of the bands below each level
    for level in range(levels - 1):
        if level < texture.levels - 1:
            samples = max(1, cell >> level)  # one a texel of the band
            band = cell_features(bands, cells, [f"rms:{name}" for name in COLOURS], cell, samples).square().sum(-1)
            total = total + band.unflatten(1, grid) * (cell / UNIT) ** 2
        below.append(total)
    return [_over_nodes(total - less, level) for level, less in enumerate(below)]


def query_energy(texture: Texture, cell: int, levels: int, query: Tensor | None) -> list[Tensor]:
    """How relevant each node is to the query, beyond what says nothing, shown finer than at the coarsest level.

    Relevance over 0.5, in [0, 1], times the area in units of 16 x 16 pixels, times the share of the octaves between level 0 and the
    coarsest that the node's level shows.
    """
    grid = (-(-texture.height // cell), -(-texture.width // cell))
    if query is not None:
        plane = relevance(texture, query.reshape(-1))
    else:
        plane = texture.level(0)[:, texture.index("attention")].to(acc_dtype(texture.data.dtype))
    over = _pooled((2 * plane - 1).clamp(min=0), cell, *grid) * (cell / UNIT) ** 2
    return [_over_nodes(over, level) * (1 - level / max(1, levels - 1)) for level in range(levels)]


def node_values(
    texture: Texture,
    cell: int,
    levels: int,
    gains: Mapping[str, float] = GAINS,
    query: Tensor | None = None,
    worth: Worth | None = None,
) -> list[Tensor]:
    """What a token of each node of the quadtree over cells is worth, for `quadtree_cut`.

    A token of level l shows (cell 2^l)^2 pixels reduced by 2^l, over the whole picture at the coarsest of the levels, which is seen
    anyway. It is worth the squared error that it takes away, the text that becomes readable by it (`reading.text_values`), and the
    relevance to the query that it shows.

    Args:
        texture: with red, green, blue; and channel "attention" or the embedding where there is a query.
        cell: side of a cell in pixels.
        levels: of the quadtree.
        gains: weights of "detail", "text" and "query".
        query: [1, D], beside embedding channels.
        worth: who says what detail and text are worth (`learned.ValueNet`), instead of the squared error and `text_values`.

    Returns:
        [B, rows_l, columns_l] of each level, at least 0. No gradient by text.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.rand(3, 64, 96), names=["red", "green", "blue"])
        >>> [tuple(v.shape) for v in texvlm.allocation.node_values(texture, 16, 3)]
        [(1, 4, 6), (1, 2, 3), (1, 1, 2)]
    """
    if strangers := set(gains) - set(GAINS):
        raise ValueError(f"gains must be of {', '.join(GAINS)}, got {', '.join(sorted(strangers))}")
    if worth is not None:
        detail, text = worth(texture, cell, levels)
    else:
        detail = detail_energy(texture, cell, levels)
        text = text_values(colours(texture), cell, levels) if gains.get("text") else [torch.zeros_like(d) for d in detail]
    values = [gains.get("detail", 0.0) * d + gains.get("text", 0.0) * t.to(d.dtype) for d, t in zip(detail, text)]
    if gains.get("query") and (query is not None or "attention" in texture.names):
        found = query_energy(texture, cell, levels, query)
        values = [v + gains["query"] * q for v, q in zip(values, found)]
    return values
