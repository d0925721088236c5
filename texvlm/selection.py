"""What a picture keeps under a budget: cells, or tokens at several levels, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from texvlm._ext import integer, real_tensor

if TYPE_CHECKING:
    from texvlm.texture import Texture


class Tokens(NamedTuple):
    """What a model is shown of a picture.

    Attributes:
        patches: [B, k, C, cell, cell]; 0 beyond the selection's count.
        uv: [B, k, 2], their centres.
        lod: [B, k], their levels of detail.
        rest: [B, C, h, w], the whole picture at a coarse level, which is under everything.
    """

    patches: Tensor
    uv: Tensor
    lod: Tensor
    rest: Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """The cells that a picture keeps under a budget of k. A pytree.

    Attributes:
        indices: int64 [B, k], row-major cells of `grid`: best first, ties by the lowest index, -1 beyond
            `count`. A token at several cells' scale is named by its first cell, the upper left one.
        count: int64 [B], how many are kept: k, or all cells where the picture has fewer, or fewer where the path decides so.
        grid: (rows, columns) of cells, ceil(H / cell) x ceil(W / cell); those at the edge may be partial.
        cell: the side of a cell in pixels.
        score: [B, k], of the kept cells; -inf beyond `count`.
        weight: [B, k], 1 for kept cells (the hard paths), 0 beyond `count`.
        weights_all: [B, N] over all cells on the soft paths, else None.
        lod: [B, k], the level of detail of each token, which covers (cell 2^lod)^2 pixels with cell^2 samples: 0 but on the path
            "multiscale".
        axes: [B, k, 2, 2] where a path turns or stretches cells, for `extract_patches(axes=)`, else None.
        size: (height, width) of the picture.
    """

    indices: Tensor
    count: Tensor
    grid: tuple[int, int]
    cell: int
    score: Tensor
    weight: Tensor
    weights_all: Tensor | None
    lod: Tensor
    axes: Tensor | None
    size: tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("grid", "size"):
            pair = getattr(self, name)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ValueError(f"{name} must be {'(rows, columns)' if name == 'grid' else '(height, width)'}, got {pair!r}")

    def _kept(self) -> Tensor:
        """Which entries there are, bool [B, k]."""
        if real_tensor("indices", self.indices).dim() != 2:
            raise ValueError(f"indices must be [B, k], got {list(self.indices.shape)}")
        if real_tensor("count", self.count).shape != self.indices.shape[:1]:
            raise ValueError(f"count must be {list(self.indices.shape[:1])} beside indices, got {list(self.count.shape)}")
        return torch.arange(self.indices.shape[1], device=self.indices.device) < self.count[:, None]

    def _corner(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row and column of the upper left cell, the side in pixels, and which entries there are."""
        kept = self._kept()
        integer("cell", self.cell, 1)
        if real_tensor("lod", self.lod).shape != kept.shape:
            raise ValueError(f"lod must be {list(kept.shape)} beside indices, got {list(self.lod.shape)}")
        row = self.indices.div(self.grid[1], rounding_mode="floor")
        return row, self.indices - row * self.grid[1], (self.lod.exp2() * self.cell).round().long(), kept

    def centres(self) -> Tensor:
        """The centres of the tokens, uv [B, k, 2]; of a partial cell the centre of the whole one. -1 beyond `count`.

        Example:
            >>> import torch, texvlm
            >>> texvlm.select(torch.rand(3, 32, 64), k=1, cell=32).centres().shape
            torch.Size([1, 1, 2])
        """
        row, column, side, kept = self._corner()
        half = 0.5 * side.to(self.score.dtype)
        x = (column * self.cell + half) / self.size[1]
        y = (row * self.cell + half) / self.size[0]
        return torch.where(kept[..., None], torch.stack([x, y], dim=-1), -1)

    def boxes(self) -> Tensor:
        """The pixels of the tokens, int64 [B, k, 4] as (y0, x0, y1, x1), half-open, cut off at the picture's border; -1 beyond `count`.

        Example:
            >>> import torch, texvlm
            >>> texvlm.select(torch.rand(3, 40, 20), k=3, cell=20).boxes()[0].amax(0).tolist()
            [20, 0, 40, 20]
        """
        row, column, side, kept = self._corner()
        y, x = row * self.cell, column * self.cell
        box = torch.stack([y, x, (y + side).clamp(max=self.size[0]), (x + side).clamp(max=self.size[1])], dim=-1)
        return torch.where(kept[..., None], box, -1)

    def mask(self) -> Tensor:
        """Which cells are covered, bool [B, rows, columns].

        Example:
            >>> import torch, texvlm
            >>> texvlm.select(torch.rand(3, 64, 64), k=5).mask().sum().item()
            5
        """
        rows, columns = self.grid
        row, column, side, kept = self._corner()
        span = side // self.cell
        # Corners of rectangles, summed up along both axes: each covered cell counts 1.
        steps = torch.zeros(len(kept), rows + 1, columns + 1, dtype=torch.int32, device=row.device)
        down, right = (row + span).clamp(max=rows), (column + span).clamp(max=columns)
        row, column = row.clamp(min=0), column.clamp(min=0)
        batch = torch.arange(len(kept), device=row.device)[:, None].expand_as(row)
        for y, x, sign in ((row, column, 1), (down, column, -1), (row, right, -1), (down, right, 1)):
            steps.index_put_((batch, y, x), sign * kept.to(torch.int32), accumulate=True)
        return steps.cumsum(1).cumsum(2)[:, :rows, :columns] > 0

    def tokens(self, texture: Texture, rest_level: int = 3, stretched: bool = False) -> Tokens:
        """What a model is shown: the kept tokens as patches, where they lie, their levels, and the coarse rest.

        Args:
            texture: of the picture (any channels), mipmapped.
            rest_level: of the coarse picture under everything; 3 is 8 x smaller.
            stretched: whether tokens with `axes` are read along these. By default all are square: what readers expect.

        Returns:
            Tokens. Differentiable in the texels.

        Example:
            >>> import torch, texvlm
            >>> picture = torch.rand(3, 64, 64)
            >>> tokens = texvlm.select(picture, k=4).tokens(texvlm.Texture(picture))
            >>> tokens.patches.shape, tokens.rest.shape
            (torch.Size([1, 4, 3, 16, 16]), torch.Size([1, 3, 8, 8]))
        """
        if (texture.height, texture.width) != self.size:
            raise ValueError(f"texture must be of {self.size[0]} x {self.size[1]} pixels, got {texture.height} x {texture.width}")
        uv, lod = self.centres(), self.lod.to(self.score.dtype)
        patches = texture.patches(uv, lod, size=self.cell, axes=self.axes if stretched else None)
        patches = torch.where(self._kept()[:, :, None, None, None], patches, torch.zeros_like(patches[:1, :1]))
        return Tokens(patches, uv, lod, texture.level(min(rest_level, texture.levels - 1)))

    def __repr__(self) -> str:
        batch, k = self.indices.shape
        rows, columns = self.grid
        return f"Selection({batch} x {k} of {rows} x {columns} cells of {self.cell} px, {self.indices.device})"


_TENSORS = ("indices", "count", "score", "weight", "weights_all", "lod", "axes")


def _flatten(s: Selection) -> tuple[list[Any], Any]:
    return [getattr(s, name) for name in _TENSORS], (s.grid, s.cell, s.size)


def _unflatten(children: Any, context: Any) -> Selection:
    values = dict(zip(_TENSORS, children), grid=context[0], cell=context[1], size=context[2])
    return Selection(**{f.name: values[f.name] for f in fields(Selection)})


pytree.register_pytree_node(Selection, _flatten, _unflatten, serialized_type_name="texvlm.Selection")
torch.serialization.add_safe_globals([Selection])
