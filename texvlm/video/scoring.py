"""The cascade over a stream: cells that nothing touched keep their features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from texvlm.features import cell_features, parse_term, term_channels
from texvlm.paths import CascadeConfig
from texvlm.selection import Selection
from texvlm.stages import Run
from texvlm.texture import Texture
from texvlm.video.grids import touched

FINE_LOD = 2.0
"""Features at coarser levels than this are read anew: a sample there reaches far, and there is one of each cell."""


class Known(NamedTuple):
    """Features of one stage: [B, N, terms], and of which cells they are up to date."""

    values: Tensor
    valid: Tensor


class CellCache:
    """Features of cells by stage, for as long as nothing touches what they were read from.

    Args:
        cell: side of a cell in pixels.
        grid: (rows, columns) of cells.
    """

    def __init__(self, cell: int, grid: tuple[int, int]) -> None:
        self.cell, self.grid = cell, grid
        self.known: dict[tuple[int, tuple[str, ...]], Known] = {}

    def margin(self, samples: int, terms: Sequence[str], halo: int) -> float:
        """How far from a cell, in pixels, lies what its features are made of.

        A texel of level l is made of less than 2^(l + 2) pixels along an axis, odd sizes included, and a sample blends its neighbours;
        the residual compares with the cells beside.
        """
        lod = max(0.0, torch.tensor(self.cell / samples).log2().ceil().item())
        beside = self.cell if "residual" in terms else 0
        return halo + beside + (2 if lod == 0 else 2.0 ** (lod + 3))

    def touch(self, dirty: Tensor, tile: int, halo: int) -> None:
        """What is near a dirty tile is no longer known; `halo`: how far a texel of level 0 looks."""
        for (samples, terms), known in self.known.items():
            margin = self.margin(samples, terms, halo)
            near = touched(dirty, tile, self.grid, (self.cell, self.cell), margin)
            known.valid.logical_and_(~near.flatten(1))

    def read(self, texture: Texture, cells: Tensor, terms: Sequence[str], samples: int) -> Tensor:
        """`cell_features` of a texture [B, n, terms], computed only where they are not known."""
        if texture.data.is_cuda or self.cell / samples > 2**FINE_LOD:  # a GPU would have to say how many are missing
            return cell_features(texture, cells, terms, self.cell, samples)
        key, (batch, count) = (samples, tuple(terms)), (len(texture.data), self.grid[0] * self.grid[1])
        if key not in self.known:
            fresh = texture.data.new_empty((batch, count, len(terms)), dtype=_feature_dtype(texture))
            self.known[key] = Known(fresh, torch.zeros(batch, count, dtype=torch.bool))
        values, valid = self.known[key]
        inside = cells.clamp(min=0)
        missing = (cells >= 0) & ~valid.gather(1, inside)
        for b in range(batch):
            todo = cells[b][missing[b]]
            if len(todo):
                one = texture.replace(texture.data[b : b + 1]) if batch > 1 else texture
                values[b, todo] = cell_features(one, todo[None], terms, self.cell, samples)[0]
                valid[b, todo] = True
        found = values.gather(1, inside[..., None].expand(-1, -1, len(terms)))
        return torch.where((cells >= 0)[..., None], found, torch.nan)


def _feature_dtype(texture: Texture) -> torch.dtype:
    return torch.float64 if texture.data.dtype == torch.float64 else torch.float32


class StreamRun(Run):
    """One selection from a stream.

    Args:
        local: the channels that are kept up to date texel by texel.
        others: a function that gives a texture of the other channels that are named.
        cache: features of `local`.
        config, k, cell, query, memory: as in `Run`.
    """

    def __init__(
        self,
        local: Texture,
        others: Callable[[Sequence[str]], Texture],
        cache: CellCache,
        config: CascadeConfig,
        k: int,
        cell: int,
        query: Tensor | None,
        memory: Selection | None,
    ) -> None:
        super().__init__(local, config, k, cell, query, memory)
        self.others, self.cache = others, cache

    def features(self, cells: Tensor, samples: int, terms: Sequence[str]) -> Tensor:
        """As of `Run`, from where each channel is kept."""
        here = [term for term in terms if _reads(term) <= set(self.texture.names)]
        there = [term for term in terms if term not in here]
        parts = {}
        if here:
            parts |= zip(here, self.cache.read(self.texture, cells, here, samples).unbind(-1))
        if there:
            texture = self.others([name for term in there for name in sorted(_reads(term))])
            parts |= zip(there, cell_features(texture, cells, there, self.cell, samples, self.query).unbind(-1))
        return torch.stack([parts[term] for term in terms], dim=-1)


def _reads(term: str) -> set[str]:
    from texvlm.channel_sources import COLOURS, EMBEDDING
    from texvlm.features import LIGHTS

    what, channel = parse_term(term)
    return set(COLOURS) if what in LIGHTS else set(EMBEDDING) if what == "cosine" else {channel}


__all__ = ["CellCache", "StreamRun", "term_channels"]
