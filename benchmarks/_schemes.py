"""Ways to read a grid of keys in part, with a class token before it, and what they lose."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import texvlm
from texvlm import attention

Scheme = Callable[[Tensor, Tensor, Tensor, tuple[int, int]], Tensor]
"""Queries, keys, values [B, H, P + N, D], the grid of the last N; to the same shape."""


def hierarchical(keep: float, stages: str | tuple[int, ...] = "auto", importance: str = "spread") -> Scheme:
    """This library's."""

    def attend(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        first = q.shape[2] - grid[0] * grid[1]
        packed = attention.pack_keys(k[:, :, first:], v[:, :, first:], grid, keep=keep, stages=stages)
        prefix = (k[:, :, :first], v[:, :, :first]) if first else None
        ask = functools.partial(texvlm.hierarchical_attention, k=packed, prefix=prefix, importance=importance)
        places = ask(q[:, :, first:], queries="grid")
        return torch.cat([ask(q[:, :, :first], queries="alone"), places], 2) if first else places

    return attend


def by_mass(keep: float) -> Scheme:
    """As usual: cells of 4 x 4 chosen by the attention they get, the others as their means (2 -> 0)."""
    return hierarchical(keep, (2, 0), "mass")


def tiles(x: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """[B, H, N, D] as [B, H, tiles, side^2, D]; the grid's sides are multiples of side."""
    rows, columns = grid
    return x.unflatten(2, (rows // side, side, columns // side, side)).transpose(3, 4).flatten(4, 5).flatten(2, 3)


def untiled(x: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """The inverse."""
    rows, columns = grid
    return x.unflatten(3, (side, side)).unflatten(2, (rows // side, columns // side)).transpose(3, 4).flatten(2, 5)


def blocks(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], count: int) -> Tensor:
    """int64 [B, H, tiles, count]: the cells of 4 x 4 that tiles of 8 x 8 queries give most attention to, by the cells' means."""
    share = count / (grid[0] * grid[1] // 16)
    packed = attention.pack_keys(k, v, grid, keep=share, stages=(2, 0))
    _, chosen = texvlm.hierarchical_attention(q, packed, importance="mass", return_chosen=True)
    return chosen.long()


def blocks_read(read: float, grid: tuple[int, int]) -> int:
    """How many blocks of 4 x 4 a block-sparse kernel may read for as many entries, the means that it chooses by included."""
    return round((read * grid[0] * grid[1] - grid[0] * grid[1] / 16) / 16)


def block_sparse(read: float, chosen: Tensor | None = None) -> Scheme:
    """The best blocks alone, the rest dropped, in plain torch: of the entries, `read` are read; blocks may be chosen before."""

    def attend(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        first = q.shape[2] - grid[0] * grid[1]
        count = blocks_read(read, grid)
        places = [t[:, :, first:] for t in (q, k, v)]
        best = blocks(*places, grid, count) if chosen is None else chosen
        index = best.flatten(2)[..., None, None]
        kept = []
        for t in places[1:]:
            cells = tiles(t, grid, 4)
            kept.append(cells.take_along_dim(index, 2).unflatten(2, best.shape[2:]).flatten(3, 4))
        asked = tiles(places[0], grid, 8)
        if first:
            kept = [torch.cat([t[:, :, None, :first].expand(-1, -1, k2.shape[2], -1, -1), k2], 3) for t, k2 in zip((k, v), kept)]
        out = untiled(torch.nn.functional.scaled_dot_product_attention(asked, *kept), grid, 8)
        if not first:
            return out
        return torch.cat([torch.nn.functional.scaled_dot_product_attention(q[:, :, :first], k, v), out], 2)

    return attend


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, L2."""
    return float((found - exact).norm() / exact.norm())


def keep_for(grid: tuple[int, int], read: float, alone: bool = False) -> float:
    """The largest keep by which no more than `read` of the entries are scored."""
    low, high = 1e-4, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if attention.plan(grid, middle, alone=alone).read <= read else (low, middle)
    return low


def smooth(grid: tuple[int, int], heads: int, width: int, generator: torch.Generator, pitch: int = 8) -> Tensor:
    """A field [1, heads, N, width] that varies over `pitch` places, of variance 1."""
    coarse = torch.randn(1, heads * width, grid[0] // pitch + 1, grid[1] // pitch + 1, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, grid, mode="bicubic", align_corners=True)
    return (fine / fine.std()).flatten(2).unflatten(1, (heads, width)).mT.contiguous()
