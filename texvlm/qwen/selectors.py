"""Which groups of a picture are kept: any path of `select`, an allocator, a module or function of one's own, random or even places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from texvlm.cascade import select
from texvlm.channels import build_channels
from texvlm.embedding import Embedding, EmbeddingProvider
from texvlm.features import all_cells, cell_features, node_features
from texvlm.paths import NODE_SAMPLES, CascadeConfig, channels_of
from texvlm.pictures import as_float
from texvlm.prediction import predict_cells
from texvlm.quadtree import log_soft_cut, node_numbers, node_places, quadtree_cut, values_of_scores
from texvlm.selection import Selection
from texvlm.soft_selection import gumbel_noise, log_soft_topk, noisy_topk, soft_topk

Selector = str | CascadeConfig | nn.Module | Callable[..., Any]

BUDGET, GROUPS = 273, 4096
"""The budget "auto" gives to so many groups: those of 2048 x 2048 pixels at 32 px."""


def auto_budget(groups: int) -> int:
    """A budget from the size of a picture alone: 273 for 4096 groups, twice as many for four times as many groups, in half octaves.

    With N groups, k = round(273 * 2^(j / 2)) for j = round(log2(N / 4096)), and no more than N. So equal sizes, and sizes that are alike,
    have equal budgets, and a server knows them before it has seen a pixel.

    Example:
        >>> from texvlm.qwen import auto_budget
        >>> [auto_budget(n) for n in (64, 256, 1024, 2048, 4096, 16384)]
        [34, 68, 136, 193, 273, 546]
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    octave = round(torch.tensor(groups / GROUPS, dtype=torch.float64).log2().item())
    return min(groups, round(BUDGET * 2 ** (octave / 2)))


@dataclass(frozen=True)
class Choice:
    """What one frame keeps.

    Attributes:
        cells: int64 [K], row-major groups; at mixed levels the first (upper left) group of each token.
        levels: int64 [K], 0 but at mixed levels.
        weights: [K] of the kept, or None where all count 1.
        weights_all: [N] of all groups, or None where the selector says no more than which it keeps.
        features: [N, terms] of all groups, where a scorer that brings its terms has read them (of all nodes, where it scores nodes).
    """

    cells: Tensor
    levels: Tensor
    weights: Tensor | None = None
    weights_all: Tensor | None = None
    features: Tensor | None = None

    def places(self, columns: int) -> tuple[Tensor, Tensor]:
        """Row and column [K] of each token in the grid of its own level, in a picture of so many columns of groups."""
        row, column = self.cells.div(columns, rounding_mode="floor"), self.cells % columns
        return row >> self.levels, column >> self.levels

    def cpu(self) -> Choice:
        """All but the features on the CPU, where prompts are put together."""
        weights, weights_all = (None if w is None else w.cpu() for w in (self.weights, self.weights_all))
        return replace(self, cells=self.cells.cpu(), levels=self.levels.cpu(), weights=weights, weights_all=weights_all)

    def raster(self) -> Choice:
        """In the order of the picture."""
        order = self.cells.argsort()
        weights = None if self.weights is None else self.weights[order]
        return replace(self, cells=self.cells[order], levels=self.levels[order], weights=weights)


class Kept(NamedTuple):
    """What one frame has kept, for `Selecting.gates`.

    Attributes:
        evidence: see `Selecting.evidence`.
        cells: [K] that were kept, by their `numbers`.
        grid: rows and columns of groups.
        vector: see `Selecting.vector`.
    """

    evidence: Tensor
    cells: Tensor
    grid: tuple[int, int]
    vector: Tensor | None = None


STRENGTHS = ("full", "random")


def trainable(selector: Selector) -> bool:
    """Whether a selector has weights that can learn."""
    return isinstance(selector, nn.Module) and any(p.requires_grad for p in selector.parameters())


def features_of(
    selector: nn.Module, image: Tensor, cell: int, query: str | Tensor | None = None, embedding: Embedding | None = None
) -> Tensor:
    """What a scorer that brings its terms (`Allocator`) reads of a picture [3, H, W]: [N, terms] of all groups, without gradients.

    Of one that scores nodes: [nodes, terms + 1], see `node_features`.
    """
    terms = list(selector.terms)  # type: ignore[arg-type]
    names = sorted({channel for term in terms for channel in channels_of(term)})
    given: dict[str, Tensor] = {}
    with torch.no_grad():
        if getattr(selector, "asks", False):
            if query is None or embedding is None:
                raise ValueError(
                    "query: this selector asks for one, and embedding=, which says what the places of a picture hold"
                )
            given = {"embedding": embedding.planes(image[None])}
        texture = build_channels(image[None], channels=names, given=given)
        levels = getattr(selector, "levels", 1)
        if levels > 1:
            return node_features(texture, terms, cell, levels, NODE_SAMPLES)[0]
        return cell_features(texture, all_cells(texture, cell), terms, cell, min(NODE_SAMPLES, cell))[0]


def whole_windows(ranked: Tensor, grid: tuple[int, int], side: int, k: int) -> Tensor:
    """Groups of the windows that are kept whole: those of the best groups, until the next does not fit the budget.

    Args:
        ranked: all groups, best first.
        grid: rows and columns of groups.
        side: groups along a side of a window.
        k: the budget, in groups.
    """
    total, across = grid[0] * grid[1], -(-grid[1] // side)
    if len(ranked) < total:
        raise ValueError("whole_windows needs a selector that can rank all groups")
    row, column = ranked.div(grid[1], rounding_mode="floor"), ranked % grid[1]
    window = row.div(side, rounding_mode="floor") * across + column.div(side, rounding_mode="floor")
    value = torch.zeros(int(window.max()) + 1, dtype=torch.float64)
    value.index_add_(0, window, 1 / torch.arange(1, total + 1, dtype=torch.float64))
    count = torch.bincount(window, minlength=len(value))
    keep, left = [], k
    for w in (value / count.clamp(min=1)).argsort(descending=True, stable=True).tolist():
        if 0 < int(count[w]) <= left:
            keep.append(w)
            left -= int(count[w])
    if not keep:
        raise ValueError(f"k must hold at least one window of {side} x {side} groups, got {k}")
    return ranked[torch.isin(window, torch.tensor(keep))]


class Selecting:
    """How pictures are chosen from: a selector, made callable as (image, k, query) -> `Choice`.

    Args:
        selector: a path of `select`, a `CascadeConfig`, an `Allocator` (or any module with `terms` that scores features), "random",
            "uniform", or a module or function (image, grid (rows, columns), k) -> indices [k], or (indices [k], weights [k] or
            [rows * columns]), or a `Selection` or `Choice`; the image is [3, H, W], floating point in [0, 1], on a module's device.
        cell: pixels along a side of a group.
        bound: where given, groups that their neighbours predict to within it are dropped first (`predict_cells`), whatever chooses among
            the rest: a path of tokens of one level, a scorer that brings its terms, "random", "uniform".
        temperature: of soft weights and of the gates of the kept.
        generator: of "random", and of the noise of a scorer in training.
        embedding: what reads texts given as `query`.
        strength: of the gates of a scorer in training, one of `STRENGTHS`, see `QwenVLAdapter`.
    """

    def __init__(
        self,
        selector: Selector,
        cell: int,
        bound: float | None = None,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        embedding: Embedding | EmbeddingProvider | None = None,
        strength: str = "full",
    ) -> None:
        if strength not in STRENGTHS:
            raise ValueError(f"strength must be one of {', '.join(STRENGTHS)}, got {strength!r}")
        self.strength = strength
        self.selector, self.cell, self.temperature, self.generator = selector, cell, temperature, generator
        self.embedding = Embedding(embedding) if embedding is not None and not isinstance(embedding, Embedding) else embedding
        self.config: CascadeConfig | None = None
        if isinstance(selector, str) and selector not in ("random", "uniform"):
            self.config = CascadeConfig.preset(selector)
        elif isinstance(selector, CascadeConfig):
            self.config = selector
        elif not isinstance(selector, str) and not callable(selector):
            raise TypeError(f"selector must be a path, a CascadeConfig, a module or a function, got {type(selector).__name__}")
        self.bound = bound
        if bound is not None:
            if self.mixed:
                raise ValueError("bound needs tokens of one level: at several, groups that neighbours predict are not looked for")
            if self.config is not None:
                self.config = replace(self.config, bound=bound)
            elif not (isinstance(selector, str) or self.scores):
                raise ValueError(
                    "bound needs a selector that can be told what to leave out: a path, a CascadeConfig, an Allocator"
                )

    @property
    def mixed(self) -> bool:
        """Whether tokens of several levels may come."""
        return self.levels > 1 if self.config is None else self.config.scale == "mixed"

    @property
    def levels(self) -> int:
        """Of the nodes that a scorer scores; 1: it scores groups."""
        return getattr(self.selector, "levels", 1) if self.scores else 1

    @property
    def keeps_all(self) -> bool:
        """Whether a budget of all groups keeps all: not where duplicates are dropped, fewer may be enough, or levels are mixed."""
        known = self.config is None or (self.config.bound is None and self.config.budget == "fixed")
        return self.bound is None and known and not self.mixed

    @property
    def looks(self) -> bool:
        """Whether it matters what the picture shows."""
        return not isinstance(self.selector, str) or self.config is not None or self.bound is not None

    @property
    def scores(self) -> bool:
        """Whether the selector is a scorer that brings its terms (`Allocator`)."""
        return self.config is None and hasattr(self.selector, "terms")

    @property
    def asks(self) -> bool:
        """Whether the selector takes a query."""
        if self.config is not None:
            return self.config.asks or "mean:attention" in self.config.terms or self.config.allocates
        return bool(getattr(self.selector, "asks", False))

    def __call__(self, image: Tensor, k: int, query: Any = None, prompt: tuple[Tensor, Tensor] | None = None) -> Choice:
        """Chooses k groups of a picture [3, H, W] whose sides are multiples of the cell; `prompt`: ids before and after it."""
        grid = (image.shape[-2] // self.cell, image.shape[-1] // self.cell)
        total = grid[0] * grid[1]
        k = min(k, total)
        if query is not None and not self.asks:
            raise ValueError("query: this selector takes none; 'query', 'learned', 'multiscale' and a scorer that asks do")
        if query is None and self.config is not None and (self.config.asks or "mean:attention" in self.config.terms):
            raise ValueError("query: this selector needs one, a text or a vector, and embedding=, which says what places hold")
        if self.config is None and isinstance(self.selector, str):
            candidates = torch.arange(total) if self.bound is None else (~self._predicted(image)).nonzero()[:, 0].cpu()
            count, k = len(candidates), min(k, len(candidates))
            if self.selector == "uniform":
                return _plain(candidates[((torch.arange(k, dtype=torch.float64) + 0.5) * count / k).long()])
            return _plain(candidates[torch.randperm(count, generator=self.generator)[:k]])
        if self.config is not None:
            return _of_selection(select(image, k, self.cell, self.config, query, embedding=self.embedding))
        if self.scores:
            return self._scored(image, k, query)
        assert callable(self.selector)
        asked = (as_float(self._at_home(image)), grid, k)
        given = self.selector(*asked, prompt) if getattr(self.selector, "needs_prompt", False) else self.selector(*asked)
        return _of_callable(given, grid, self.cell, k)

    def _scored(self, image: Tensor, k: int, query: Any) -> Choice:
        """By a scorer that brings its terms; with noise, where it is in training."""
        selector = self.selector
        assert isinstance(selector, nn.Module)
        features = self.evidence(image, query)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trainable(selector)):
            scores = self._scores(features, self.vector(query))
        noise = self.temperature * gumbel_noise(scores, self.generator) if selector.training and scores.requires_grad else None
        if self.levels > 1:
            return self._cut(scores, noise, k, features, image)
        indices, gate = noisy_topk(scores, k, self.temperature, noise)
        soft = soft_topk(scores, k, self.temperature, "gumbel")[0]
        there = gate[0] > 0  # fewer than k, where too many are predicted
        kept = indices[0][there]
        return Choice(kept, torch.zeros_like(kept), gate[0][there] if scores.requires_grad else None, soft, features)

    def _cut(self, scores: Tensor, noise: Tensor | None, k: int, features: Tensor, image: Tensor) -> Choice:
        """The disjoint nodes with the largest sum of scores [1, nodes]; their weights are 1 in value."""
        grid = (image.shape[-2] // self.cell, image.shape[-1] // self.cell)
        taken = quadtree_cut(values_of_scores(scores if noise is None else scores + noise, grid, self.levels), k).taken
        nodes = torch.cat([level.flatten() for level in taken]).nonzero()[:, 0]
        weights = torch.ones(len(nodes), device=nodes.device) if scores.requires_grad else None
        return Choice(*node_places(nodes, grid, self.levels), weights, None, features)

    def _predicted(self, image: Tensor) -> Tensor:
        """Groups that their neighbours predict to within the bound, bool [N]."""
        assert self.bound is not None
        source = predict_cells(image[None], self.cell, self.bound)[0]
        return source != torch.arange(len(source), device=source.device)

    def _scores(self, features: Tensor, vector: Tensor | None) -> Tensor:
        """[1, N] by a scorer that brings its terms, with gradients to its weights; -inf where features are not finite."""
        asked = [] if vector is None else [vector.reshape(1, -1).to(features.device)]
        there = features.isfinite().all(-1)
        found: Tensor = self.selector(features[there][None], *asked)  # type: ignore[operator]
        return found.new_full((1, len(features)), -torch.inf).masked_scatter(there[None], found)

    def _at_home(self, value: Tensor) -> Tensor:
        """Where a module's weights are; there it can look at it."""
        if not isinstance(self.selector, nn.Module):
            return value
        there = next(chain(self.selector.parameters(), self.selector.buffers()), value)
        return value.to(there.device)

    def evidence(self, image: Tensor, query: Any = None) -> Tensor:
        """What `gates` needs of a picture: its features [N, terms] for a scorer that brings its terms, else itself, [3, H, W]."""
        if not self.scores:
            return image
        features = features_of(self.selector, self._at_home(image), self.cell, query, self.embedding)  # type: ignore[arg-type]
        return (
            features
            if self.bound is None
            else features.masked_fill(self._predicted(image).to(features.device)[:, None], torch.nan)
        )

    def vector(self, query: Any) -> Tensor | None:
        """A query as a scorer that asks takes it, to go with a batch; None where none is asked for."""
        if query is None or self.embedding is None or not getattr(self.selector, "asks", False):
            return None
        return self.embedding.query(query).flatten()

    def numbers(self, cells: Tensor, levels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Of kept tokens among all that the selector scores: of nodes, where it scores nodes, else the groups themselves."""
        return cells if self.levels == 1 else node_numbers(cells, levels, grid, self.levels)

    def gates(self, frames: Sequence[Kept]) -> list[tuple[Tensor, Tensor | None]]:
        """Weights of groups that were kept earlier, with gradients to a trainable selector: where they are gates, 1 in value, or of chance.

        A batch may be prepared before the optimiser's last step, or in a worker: the choice then stands, and the gradient is that of
        the weights as they are now. Frames that are alike are scored together.

        Returns:
            Of each frame weights [K] of the kept, and of all groups [N] or None.
        """
        frames = self._here(frames)
        if not self.scores:
            return [self._gates_by_module(frame.evidence, frame.cells) for frame in frames]
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for numbers, alike in _alike(frames):
            logs = self._log_weights(alike)
            kept = logs.gather(1, torch.stack([frame.cells for frame in alike]))
            gates = (kept - kept.detach()).exp()
            if self.strength == "random" and self.selector.training:  # type: ignore[union-attr]
                gates = gates - 1 + torch.rand_like(gates)
            found |= zip(numbers, zip(gates, logs.exp() if self.levels == 1 else [None] * len(numbers)))
        return [found[i] for i in range(len(frames))]

    def entropy(self, frames: Sequence[Kept]) -> Tensor:
        """The mean entropy of where a scorer's first token goes while it explores, in nats, [], with gradients to the scorer."""
        found = []
        for _, alike in _alike(self._here(frames)):
            logs = (self._scores_of(alike) / self.temperature).log_softmax(1)
            found.append(-(logs.exp() * torch.where(logs.isfinite(), logs, 0)).sum(1))
        return torch.cat(found).mean()

    def _here(self, frames: Sequence[Kept]) -> list[Kept]:
        """Frames where the selector's weights are."""
        return [f._replace(evidence=as_float(self._at_home(f.evidence)), cells=self._at_home(f.cells)) for f in frames]

    def _scores_of(self, frames: Sequence[Kept]) -> Tensor:
        """By a scorer that brings its terms, of frames that are alike, [B, n]."""
        features = torch.stack([frame.evidence for frame in frames])
        if not bool(features.isfinite().all()):
            return torch.cat([self._scores(frame.evidence, frame.vector) for frame in frames])
        vectors = [frame.vector.flatten().to(features.device) for frame in frames if frame.vector is not None]
        scores: Tensor = self.selector(features, *([torch.stack(vectors)] if vectors else []))  # type: ignore[operator]
        return scores

    def _log_weights(self, frames: Sequence[Kept]) -> Tensor:
        """How likely a scorer was to keep each group, or node, of frames that are alike, [B, n]."""
        k, grid, scores = len(frames[0].cells), frames[0].grid, self._scores_of(frames)
        if self.levels > 1 and k < grid[0] * grid[1]:
            return log_soft_cut(scores, k, grid, self.levels, self.temperature)
        return log_soft_topk(scores, k, self.temperature, "gumbel")

    def _gates_by_module(self, image: Tensor, cells: Tensor) -> tuple[Tensor, Tensor | None]:
        """By a module of one's own, which looks at the frame again."""
        assert isinstance(self.selector, nn.Module)
        grid = (image.shape[-2] // self.cell, image.shape[-1] // self.cell)
        choice = _of_callable(self.selector(image, grid, len(cells)), grid, self.cell, len(cells))
        if choice.weights_all is not None:
            return choice.weights_all[cells], choice.weights_all
        if choice.weights is None:
            raise ValueError("a selector that is trained must return its weights beside the indices: (indices [k], weights)")
        if not torch.equal(choice.cells.sort()[0], cells.sort()[0]):
            raise ValueError(
                "a selector that is trained and chooses by chance must return weights of all groups, [rows * columns]"
            )
        return choice.raster().weights, None  # type: ignore[return-value]


def _alike(frames: Sequence[Kept]) -> Iterator[tuple[list[int], list[Kept]]]:
    """Frames of one size that keep as many, which can be scored together, and their numbers."""
    found: dict[Any, list[int]] = {}
    for i, frame in enumerate(frames):
        found.setdefault((frame.evidence.shape, len(frame.cells), frame.grid, frame.vector is None), []).append(i)
    for numbers in found.values():
        yield numbers, [frames[i] for i in numbers]


def _plain(cells: Tensor) -> Choice:
    return Choice(cells, torch.zeros_like(cells))


def _of_selection(found: Selection) -> Choice:
    count = int(found.count[0])
    cells, levels = found.indices[0, :count], found.lod[0, :count].round().long()
    if count == 0:  # a picture without anything: one group stands for it, for a tower has no empty segments
        return _plain(torch.zeros(1, dtype=torch.int64, device=cells.device))
    soft = found.weights_all
    return Choice(cells, levels, None, None if soft is None else soft[0])


def _of_callable(given: Any, grid: tuple[int, int], cell: int, k: int) -> Choice:
    """What a module or function returned, checked."""
    if isinstance(given, Selection):
        if given.grid != grid or given.cell != cell:
            raise ValueError(
                f"the selector's selection must be of {grid[0]} x {grid[1]} cells of {cell} px, "
                f"got {given.grid[0]} x {given.grid[1]} of {given.cell}"
            )
        given = _of_selection(given)
    total = grid[0] * grid[1]
    if isinstance(given, Choice):
        _check_indices(given.cells, total, k)
        return given
    indices, weights = given if isinstance(given, tuple) else (given, None)
    indices = torch.as_tensor(indices)
    if indices.dim() == 2 and len(indices) == 1:
        indices = indices[0]
    _check_indices(indices, total, k)
    indices = indices.long()
    if weights is None:
        return _plain(indices)
    weights = torch.as_tensor(weights).flatten()
    if len(weights) == total and (total != len(indices) or weights.requires_grad):
        return Choice(indices, torch.zeros_like(indices), weights[indices], weights)
    if len(weights) != len(indices):
        raise ValueError(f"the selector's weights must be {len(indices)} or {total}, got {len(weights)}")
    return Choice(indices, torch.zeros_like(indices), weights)


def _check_indices(indices: Tensor, total: int, k: int) -> None:
    if indices.dim() != 1 or indices.is_floating_point() or indices.dtype == torch.bool or not 1 <= len(indices) <= k:
        raise ValueError(f"the selector must return 1 to {k} whole numbers, got {list(indices.shape)} of {indices.dtype}")
    if int(indices.min()) < 0 or int(indices.max()) >= total:
        raise ValueError(
            f"the selector's indices must be from 0 to {total - 1}, got {int(indices.min())} to {int(indices.max())}"
        )
    if len(indices.unique()) != len(indices):
        raise ValueError("the selector's indices must differ from each other")
