"""Stem `cascade`: the exact best k, scores of cells, and `select`: a picture's best cells under a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from texvlm._ext import acc_dtype, fake, integer, ops, real_tensor
from texvlm.channels import build_channels
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.texture import ImageLike

PATHS = (
    "salience",
    "query",
    "anisotropic_text",
    "five_stage",
    "adaptive",
    "video",
    "soft",
    "learned",
    "predictive",
)
BUILT_PATHS = ("salience",)

SCORE_CHANNELS = ("red", "green", "blue", "edge", "saliency")
"""What a cell's score reads of a texture, by name."""

SCORE_WEIGHTS = {"edge": 1.0, "entropy": 0.5, "saliency": 1.0}
"""Default weights of the score's terms."""

STAGE_CELLS = 4096
"""The grid (64 x 64) that STAGE_KEPT is stated for; the numbers scale with the number of cells."""

STAGE_KEPT = (2000, 500)
"""Cells that the coarse and the middle stage keep of STAGE_CELLS."""

STAGE_SAMPLES = (1, 4)
"""Samples along a cell's side in the coarse and the middle stage; the fine stage takes one per pixel."""

MAX_CELL = 4096
"""The longest side of a cell; one that is larger than the picture covers it all."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The cells that a picture keeps under a budget of k. A pytree.

    Attributes:
        indices: int64 [B, k], row-major cells of `grid`: best first, ties by the lowest index, -1 beyond
            `count`.
        count: int64 [B], how many are kept: k, or all cells where the picture has fewer.
        grid: (rows, columns) of cells, ceil(H / cell) x ceil(W / cell); those at the edge may be partial.
        cell: the side of a cell in pixels.
        score: [B, k], of the kept cells; -inf beyond `count`.
        weight: [B, k], 1 for kept cells (the hard paths), 0 beyond `count`.
        weights_all: [B, N] over all cells on the soft paths, else None.
        lod: [B, k], the level of detail that each kept cell deserves: 0 here, full size.
        axes: [B, k, 2, 2] where a path turns or stretches cells, else None.
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

    def __repr__(self) -> str:
        batch, k = self.indices.shape
        rows, columns = self.grid
        return f"Selection({batch} x {k} of {rows} x {columns} cells of {self.cell} px, {self.indices.device})"


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The exact k best scores of each row, in a defined order.

    Args:
        scores: [B, N] or [N], float32, float64, float16 or bfloat16. NaN ranks last, below -inf; -0 equals 0.
        k: at least 0; 0 gives empty results, more than N gives N.

    Returns:
        values and int64 indices, [B, min(k, N)] (or [min(k, N)]): best first, ties by the lowest index. The
        gradient of the values goes to the places they came from.

    Raises:
        ValueError: k is negative, or the scores have another rank or dtype.

    Example:
        >>> import torch, texvlm
        >>> texvlm.topk(torch.tensor([[1.0, 3.0, float("nan"), 3.0]]), 3)[1]
        tensor([[1, 3, 0]])
    """
    real_tensor("scores", scores)
    k = integer("k", k, 0)
    if scores.dim() == 1:
        values, indices = ops.select_topk(scores[None], k)
        return values[0], indices[0]
    return ops.select_topk(scores, k)


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The places that are set in each row, in their order: what remains to be done, without asking how many there are.

    The results have a fixed shape, so nothing waits for the device, and it can be captured in a CUDA graph.

    Args:
        mask: bool [B, N] or [N], any strides.

    Returns:
        indices: int64 [B, N] (or [N]), the places that are set in rising order, then -1.
        count: int64 [B] (or []), how many are set.

    Raises:
        ValueError: the mask has another rank or dtype.

    Example:
        >>> import torch, texvlm
        >>> indices, count = texvlm.compact(torch.tensor([False, True, False, True]))
        >>> indices.tolist(), int(count)
        ([1, 3, -1, -1], 2)
    """
    if mask.dim() == 1:
        indices, count = ops.compact(mask[None])
        return indices[0], count[0]
    return ops.compact(mask)


def kept_cells(k: int, total: int) -> tuple[int, int, int]:
    """How many of `total` cells the coarse, the middle and the fine stage keep; halves are rounded up."""
    coarse, middle = ((2 * kept * total + STAGE_CELLS) // (2 * STAGE_CELLS) for kept in STAGE_KEPT)
    return min(max(k, coarse), total), min(max(k, middle), total), min(k, total)


def select(
    image_or_texture: ImageLike | Texture,
    k: int = 273,
    cell: int = 16,
    path: str = "salience",
    query: Any = None,
    *,
    weights: Mapping[str, float] | None = None,
) -> Selection:
    """Keeps the k cells of a picture that deserve to be seen sharply.

    The path "salience": the coarse stage reads every cell once at LOD log2(cell) and keeps 2000 of 4096, the
    middle one reads 4 x 4 samples of each and keeps 500, the fine one reads every pixel and keeps k. Other
    grids keep the same shares, and no stage fewer than k. The score of a cell is

        w["edge"] * sqrt(mean(edge^2)) + w["entropy"] * entropy + w["saliency"] * mean(saliency)

    over its samples; the entropy is that of a histogram of luma with 16 bins, over its largest possible
    value, in the coarse stage over the centres of the 3 x 3 cells around. Samples beyond the picture repeat
    its border.

    Args:
        image_or_texture: a picture (see `Texture`), or a texture with channels named red, green, blue, edge
            and saliency (as `build_channels` makes it).
        k: the budget, at least 0.
        cell: the side of a cell in pixels, 1 to 4096; partial cells at the edges count as cells.
        path: "salience" is the one this version has.
        query: for paths that search for something; not used by "salience", so it must be None.
        weights: of the score's terms, overriding the defaults edge 1, entropy 0.5, saliency 1.

    Returns:
        Selection; its first `count` entries are the kept cells, best first. Hard: no gradients.

    Raises:
        ValueError: an unknown path or weight, k or cell out of range.
        TypeError: k or cell is not an integer.
        KeyError: the texture lacks a channel.
        NotImplementedError: a path of a later version.

    Example:
        >>> import torch, texvlm
        >>> picture = torch.zeros(3, 64, 64)
        >>> picture[:, 20:28, 36:44] = torch.rand(3, 8, 8)
        >>> selection = texvlm.select(picture, k=1)
        >>> selection.indices, selection.grid
        (tensor([[6]]), (4, 4))
    """
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")
    if path not in BUILT_PATHS:
        raise NotImplementedError(f"path={path!r} is not part of this version; it has {', '.join(BUILT_PATHS)}")
    if query is not None:
        raise ValueError("path='salience' takes no query")
    k, cell = integer("k", k, 0), integer("cell", cell)
    if not 1 <= cell <= MAX_CELL:
        raise ValueError(f"cell must be from 1 to {MAX_CELL} pixels, got {cell}")
    if unknown := set(weights or {}) - set(SCORE_WEIGHTS):
        raise ValueError(f"weights must be among {', '.join(SCORE_WEIGHTS)}, got {', '.join(sorted(unknown))}")
    for name, weight in (weights or {}).items():
        if not math.isfinite(weight):
            raise ValueError(f"weights must be finite, got {name} = {weight}")
    with torch.no_grad():
        return _salience(_scored(image_or_texture), k, cell, {**SCORE_WEIGHTS, **(weights or {})})


def _scored(image_or_texture: ImageLike | Texture) -> Texture:
    """A texture with the channels that a score reads; of a picture nothing else is computed."""
    if isinstance(image_or_texture, Texture):
        return image_or_texture
    return build_channels(image_or_texture, channels=SCORE_CHANNELS)


def _salience(texture: Texture, k: int, cell: int, weights: Mapping[str, float]) -> Selection:
    data, height, width, levels = texture.data, texture.height, texture.width, texture.levels
    channels = [texture.index(name) for name in SCORE_CHANNELS]
    scale = [float(weights[name]) for name in SCORE_WEIGHTS]
    rows, columns = -(-height // cell), -(-width // cell)
    total, batch = rows * columns, data.shape[0]
    cells = torch.arange(total, device=data.device).expand(batch, total)
    kept, known = kept_cells(k, total), total
    score = data.new_empty((batch, 0), dtype=acc_dtype(data.dtype))
    for stage, samples in enumerate((*STAGE_SAMPLES, cell)):
        if stage < 2 and kept[stage] == known:  # nothing to drop: the next stage scores the same cells
            continue
        score = ops.score_cells(data, cells, height, width, texture.reducer, levels, cell, samples, channels, scale)
        score, best = ops.select_topk(score, kept[stage])
        # ascending between stages, so that ties go to the lowest cell
        cells = best if known == total else cells.gather(1, best)
        if stage < 2:
            cells = cells.sort(dim=1).values
        known = kept[stage]
    return _padded(cells, score, k, (rows, columns), cell)


def _padded(cells: Tensor, score: Tensor, k: int, grid: tuple[int, int], cell: int) -> Selection:
    """A hard selection of these cells, filled up to k."""
    batch, count = cells.shape
    weight = torch.ones_like(score)
    if count < k:
        cells = torch.nn.functional.pad(cells, (0, k - count), value=-1)
        score = torch.nn.functional.pad(score, (0, k - count), value=-torch.inf)
        weight = torch.nn.functional.pad(weight, (0, k - count))
    counts = torch.full((batch,), count, dtype=torch.int64, device=cells.device)
    return Selection(cells, counts, grid, cell, score, weight, None, torch.zeros_like(weight), None)


_TENSORS = ("indices", "count", "score", "weight", "weights_all", "lod", "axes")


def _flatten(s: Selection) -> tuple[list[Any], Any]:
    return [getattr(s, name) for name in _TENSORS], (s.grid, s.cell)


def _unflatten(children: Any, context: Any) -> Selection:
    values = dict(zip(_TENSORS, children), grid=context[0], cell=context[1])
    return Selection(**{f.name: values[f.name] for f in fields(Selection)})


pytree.register_pytree_node(Selection, _flatten, _unflatten, serialized_type_name="texvlm.Selection")
torch.serialization.add_safe_globals([Selection])


@fake("select_topk")
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    batch, count = scores.shape
    size = (batch, torch.sym_min(k, count))
    return scores.new_empty(size), scores.new_empty(size, dtype=torch.int64)


@fake("select_topk_backward")
def _(grad: Tensor, indices: Tensor, count: int) -> Tensor:
    return grad.new_empty((grad.shape[0], count))


@fake("score_cells")
def _(data: Tensor, cells: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return cells.new_empty(cells.shape, dtype=acc_dtype(data.dtype))


@fake("compact")
def _(mask: Tensor) -> tuple[Tensor, Tensor]:
    return mask.new_empty(mask.shape, dtype=torch.int64), mask.new_empty(mask.shape[:1], dtype=torch.int64)
