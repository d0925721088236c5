"""The cascade over a stream: cells that nothing touched keep their features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, ops
from texvlm.channel_sources import COLOURS, EMBEDDING
from texvlm.features import LIGHTS, cell_features, parse_term
from texvlm.paths import CascadeConfig
from texvlm.pyramid import level_count
from texvlm.selection import Selection
from texvlm.stages import Run
from texvlm.texture import Texture
from texvlm.video.grids import touched_within


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

        A sample of level l blends texels at most 1.5 texels away, which are at most 2^(l + 1) pixels apart, odd sizes included, and made
        of as many pixels: together less than 2^(l + 3). The residual, and the entropy of one sample, look at the cells beside.
        """
        lod = max(0, math.ceil(math.log2(self.cell / samples)))
        beside = self.cell if not {"residual", "entropy"}.isdisjoint(terms) else 0
        return halo + beside + (2 if lod == 0 else 2 << (lod + 2))

    def touch(self, dirty: Tensor, tile: int, halo: int) -> None:
        """What is near a dirty tile is no longer known; `halo`: how far a texel of level 0 looks."""
        if not self.known:
            return
        margins = tuple(self.margin(samples, terms, halo) for samples, terms in self.known)
        near = touched_within(dirty, tile, self.grid, (self.cell, self.cell), margins).flatten(2)
        for known, reached in zip(self.known.values(), near):
            known.valid.masked_fill_(reached, False)

    def read(self, texture: Texture, cells: Tensor, terms: Sequence[str], samples: int) -> Tensor:
        """`cell_features` of a texture [B, n, terms], computed only where they are not known."""
        if texture.data.is_cuda:  # it would have to say how many are missing
            return cell_features(texture, cells, terms, self.cell, samples)
        key, (batch, count) = (samples, tuple(terms)), (len(texture.data), self.grid[0] * self.grid[1])
        if key not in self.known:
            fresh = texture.data.new_empty((batch, count, len(terms)), dtype=acc_dtype(texture.data.dtype))
            self.known[key] = Known(fresh, torch.zeros(batch, count, dtype=torch.bool))
        found = []
        for b, (values, valid) in enumerate(zip(*self.known[key])):
            lacking = ~valid.index_select(0, cells[b])
            if missing := int(lacking.sum()):
                # where many are missing, picking them out costs more than reading some again
                todo = cells[b] if 2 * missing > len(lacking) else cells[b].masked_select(lacking)
                one = texture.replace(texture.data[b : b + 1]) if batch > 1 else texture
                values.index_copy_(0, todo, cell_features(one, todo[None], terms, self.cell, samples)[0])
                valid.index_fill_(0, todo, True)
            found.append(values.index_select(0, cells[b]))
        return torch.stack(found)


class MapMeans:
    """The term "mean:saliency" of all cells from the small map of saliency, without the plane that is enlarged from it, and its mips.

    Enlarging, mips and the mean over a cell's samples are linear, and each is a product of one axis's weights and the other's: so the
    means are rows @ map @ columns. The weights are found by sending unit vectors through the very ops. Up to rounding in float32 the
    result is that of `cell_features`.

    Args:
        shape: (h, w) of the map.
        size: (height, width) of the picture.
        cell: side of a cell in pixels.
        levels: of the texture that a full recompute would have.
    """

    def __init__(self, shape: tuple[int, int], size: tuple[int, int], cell: int, levels: int) -> None:
        self.shape, self.size, self.cell, self.levels = shape, size, cell, levels
        self.samples: tuple[int, ...] = ()
        self.axes: tuple[Tensor, Tensor] | None = None  # [samples, 1, rows, h] and [samples, 1, w, columns]
        self.found: tuple[Tensor, Tensor] | None = None  # the last map, and the means of its cells by samples

    def knows(self, samples: int) -> bool:
        """Whether the samples lie on one level: blending two is no product."""
        lod = math.log2(self.cell / samples)
        return lod == int(lod) and lod < self.levels

    def _weights(self, axis: int, samples: int) -> Tensor:
        units = torch.eye(self.shape[axis])
        plane = ops.enlarge(units[..., None], self.size[axis], 1)
        texture = Texture(plane[:, None], levels=min(self.levels, level_count(self.size[axis], 1)), names=["saliency"])
        cells = torch.arange(-(-self.size[axis] // self.cell)).expand(len(units), -1)
        lod = min(math.log2(self.cell / samples), texture.levels - 1)
        assert lod == int(lod)
        return cell_features(texture, cells, ["mean:saliency"], self.cell, samples)[..., 0]

    def read(self, plane: Tensor, samples: int) -> Tensor:
        """The means [B, N] of the cells of a map [B, h, w]. All stages' are found together."""
        if samples not in self.samples:
            self.samples, self.found = (*self.samples, samples), None
            rows, columns = (torch.stack([self._weights(axis, s) for s in self.samples])[:, None] for axis in (0, 1))
            self.axes = (rows.mT.contiguous().to(plane.device), columns.contiguous().to(plane.device))
        if self.found is None or self.found[0] is not plane:
            assert self.axes is not None
            rows, columns = self.axes
            self.found = (plane, (rows @ plane.float() @ columns).flatten(2))
        return self.found[1][self.samples.index(samples)]


class StreamRun(Run):
    """One selection from a stream.

    Args:
        local: the channels that are kept up to date texel by texel.
        others: a function that gives a texture of the other channels that are named.
        saliency: the map of saliency [B, h, w] and what reads it, where it may be read directly, or None.
        cache: features of `local`.
        config, k, cell, query, memory: as in `Run`.
    """

    def __init__(
        self,
        local: Texture,
        others: Callable[[Sequence[str]], Texture],
        saliency: tuple[Tensor, MapMeans] | None,
        cache: CellCache,
        config: CascadeConfig,
        k: int,
        cell: int,
        query: Tensor | None,
        memory: Selection | None,
    ) -> None:
        super().__init__(local, config, k, cell, query, memory)
        self.others, self.saliency, self.cache = others, saliency, cache
        self.here = set(local.names)

    def features(self, cells: Tensor, samples: int, terms: Sequence[str]) -> Tensor:
        """As of `Run`, from where each channel is kept."""
        return torch.stack(self._each(cells, samples, terms), dim=-1)

    def weighed(self, cells: Tensor, samples: int, terms: Mapping[str, float]) -> Tensor:
        """As of `Run`, from where each channel is kept, by the same arithmetic."""
        if not terms:
            return super().weighed(cells, samples, terms)
        # rounded after each product, as in the op: torch's add with an alpha is not
        (first, *others) = (weight * part for weight, part in zip(terms.values(), self._each(cells, samples, list(terms))))
        return sum(others, start=first)

    def _each(self, cells: Tensor, samples: int, terms: Sequence[str]) -> list[Tensor]:
        """The features one by one, [B, n] each."""
        here = [term for term in terms if _reads(term) <= self.here]
        parts: dict[str, Tensor] = {}
        if self.saliency is not None and "mean:saliency" in terms and self.saliency[1].knows(samples):
            means = self.saliency[1].read(self.saliency[0], samples)
            parts["mean:saliency"] = means.gather(1, cells.clamp(min=0)) if cells.shape[1] < self.total else means
        there = [term for term in terms if term not in here and term not in parts]
        if here:
            parts |= zip(here, self.cache.read(self.texture, cells, here, samples).unbind(-1))
        if there:
            texture = self.others([name for term in there for name in sorted(_reads(term))])
            parts |= zip(there, cell_features(texture, cells, there, self.cell, samples, self.query).unbind(-1))
        return [parts[term] for term in terms]


def _reads(term: str) -> set[str]:
    what, channel = parse_term(term)
    return set(COLOURS) if what in LIGHTS else set(EMBEDDING) if what == "cosine" else {channel}
