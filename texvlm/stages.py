"""The stages of the cascade: one call of `select`, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._constants import constant
from texvlm._ext import ops, real_tensor
from texvlm.allocation import colours, node_values
from texvlm.features import all_cells, cell_features, node_features
from texvlm.footprint import sample_grad
from texvlm.fovea import line_axes
from texvlm.learned import shared_net
from texvlm.paths import (
    ADAPTIVE_SHARE,
    AUTO_CELLS,
    CLUSTERS,
    LINE_ASPECT,
    LINE_SHARE,
    NODE_SAMPLES,
    SCHEDULES,
    SCORERS,
    STAGE_CELLS,
    CascadeConfig,
)
from texvlm.prediction import predict_cells
from texvlm.quadtree import node_places, quadtree_cut, values_of_scores
from texvlm.reading import text_values
from texvlm.selection import Selection
from texvlm.texture import Texture


def kept_cells(k: int, total: int, schedule: int = 3) -> tuple[int, ...]:
    """How many of `total` cells each stage keeps; halves are rounded up."""
    kept = [(2 * n * total + STAGE_CELLS) // (2 * STAGE_CELLS) for _, n in SCHEDULES[schedule]]
    return (*(min(max(k, n), total) for n in kept), min(k, total))


def _finite(scores: Tensor) -> Tensor:
    return torch.where(scores.isfinite(), scores, 0)


class Run:
    """One call of `select`: what it was given, and the steps."""

    def __init__(
        self, texture: Texture, config: CascadeConfig, k: int, cell: int, query: Tensor | None, memory: Selection | None
    ) -> None:
        self.texture, self.config, self.k, self.cell, self.query = texture, config, k, cell, query
        self.grid = (-(-texture.height // cell), -(-texture.width // cell))
        self.total, self.batch = self.grid[0] * self.grid[1], texture.data.shape[0]
        chosen = config.value_net
        self.value_net = None if chosen is None else shared_net(chosen, texture.data.device)
        self.stayed: Tensor | None = None
        if memory is not None:
            if not isinstance(memory, Selection):
                raise TypeError(f"memory must be a texvlm.Selection, got {type(memory).__name__}")
            if memory.grid != self.grid or memory.cell != cell or len(memory.indices) != self.batch:
                raise ValueError(f"memory must be of {self.batch} x {self.grid} cells of {cell} px, got {memory}")
            self.stayed = memory.mask().flatten(1)

    # ---- scores ----

    def features(self, cells: Tensor, samples: int, terms: Sequence[str]) -> Tensor:
        """`cell_features` of this texture and query."""
        return cell_features(self.texture, cells, terms, self.cell, samples, self.query)

    def weighed(self, cells: Tensor, samples: int, terms: Mapping[str, float]) -> Tensor:
        """The features added up with their weights, in their order, [B, n]."""
        return cell_features(self.texture, cells, list(terms), self.cell, samples, self.query, list(terms.values()))

    def everything(self) -> Tensor:
        """All cells, [B, N]."""
        return all_cells(self.texture, self.cell)

    def score(self, cells: Tensor, samples: int, stage: int) -> Tensor:
        """Scores of these cells at a stage, counted from 1."""
        config = self.config
        terms: Mapping[str, float] = config.terms
        if config.query_stages is not None and stage not in config.query_stages and not hasattr(config.scorer, "terms"):
            terms = SCORERS["salience"]
        if self.value_net is not None:
            scores = self.values(1)[0].flatten(1).gather(1, cells.clamp(min=0))
        elif config.scorer is not None and not isinstance(config.scorer, str):
            features = self.features(cells, samples, list(terms))
            scores = config.scorer(features, self.query) if config.asks else config.scorer(features)
            if real_tensor("what scorer returns", scores).shape != cells.shape:
                raise ValueError(f"scorer must return scores {list(cells.shape)}, got {list(scores.shape)}")
        else:
            terms = {term: weight for term, weight in terms.items() if weight != 0}
            reading = terms.pop("reading", 0.0)
            scores = self.weighed(cells, samples, terms)
            if reading:
                scores = scores + reading * self.reading().gather(1, cells.clamp(min=0))
        if self.stayed is not None and config.memory:
            spread = _finite(scores).std(1, correction=0, keepdim=True)
            scores = scores + config.memory * spread * self.stayed.gather(1, cells.clamp(min=0))
        if config.contiguity:
            scores = scores + config.contiguity * self.neighbours(cells, scores)
        return scores

    def values(self, levels: int) -> list[Tensor]:
        """What tokens are worth, [B, rows_l, columns_l] of each level."""
        if self.config.scores_nodes:
            scorer = self.config.scorer
            nodes = node_features(self.texture, list(self.config.terms), self.cell, levels, NODE_SAMPLES, self.query)
            scores = scorer(nodes, self.query) if self.config.asks else scorer(nodes)  # type: ignore[operator,misc]
            return values_of_scores(scores, self.grid, levels)
        return node_values(self.texture, self.cell, levels, self.config.gains, self.query, self.value_net)

    def reading(self) -> Tensor:
        """The text that becomes readable by each cell, [B, N]."""
        return text_values(colours(self.texture), self.cell, 1, power=2.0)[0].flatten(1)

    def neighbours(self, cells: Tensor, scores: Tensor) -> Tensor:
        """The mean score of the up to eight cells around each that are scored too, and lie in its superpixel."""
        rows, columns = self.grid
        plane = scores.new_zeros(self.batch, self.total + 1)
        there = torch.zeros_like(plane)
        place = torch.where(cells >= 0, cells, self.total)
        plane = plane.scatter(1, place, _finite(scores))
        there = there.scatter(1, place, scores.isfinite().to(plane.dtype))
        planes = [plane[:, :-1].unflatten(1, self.grid), there[:, :-1].unflatten(1, self.grid)]
        if "cluster" in self.texture.names:
            planes.append(self.features(self.everything(), 1, ["max:cluster"])[..., 0].unflatten(1, self.grid))
        padded = F.pad(torch.stack(planes), (1, 1, 1, 1))
        total, count = torch.zeros_like(planes[0]), torch.zeros_like(planes[0])
        for dy in range(3):
            for dx in range(3):
                near = padded[:, :, dy : dy + rows, dx : dx + columns]
                if (dy, dx) != (1, 1):
                    same = near[1] if len(planes) < 3 else near[1] * (near[2] == planes[2])
                    total, count = total + near[0] * same, count + same
        mean = torch.where(count > 0, total / count.clamp(min=1), 0).flatten(1)
        return mean.gather(1, cells.clamp(min=0))

    def directions(self, strength: Tensor) -> Tensor:
        """The direction of the line that each cell belongs to, unit vectors [B, N, 2].

        It is the principal axis of `strength` [B, N] within two cells; along x where there is none.
        """
        reach = 2
        padded = F.pad(strength.unflatten(1, self.grid)[:, None], (reach,) * 4)
        around = F.unfold(padded, 2 * reach + 1)  # [B, 25, N]
        offset = torch.arange(-reach, reach + 1, device=strength.device, dtype=strength.dtype)
        y, x = (o.reshape(1, -1, 1) for o in torch.meshgrid(offset, offset, indexing="ij"))
        weight = torch.exp(-(x * x + y * y) / (2 * 1.5**2)) * around
        mass = weight.sum(1).clamp(min=1e-12)
        mx, my = (weight * x).sum(1) / mass, (weight * y).sum(1) / mass
        xx, yy = (weight * x * x).sum(1) / mass - mx * mx, (weight * y * y).sum(1) / mass - my * my
        xy = (weight * x * y).sum(1) / mass - mx * my
        angle = 0.5 * torch.atan2(2 * xy, xx - yy)
        return torch.stack([angle.cos(), angle.sin()], dim=-1)

    def along_lines(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, N] joined with their mean over a footprint of 4:1 along the line, and the axes [B, N, 2, 2] of these footprints."""
        rows, columns = self.grid
        strength = _finite(scores).clamp(min=0)
        along = self.directions(strength)
        across = torch.stack([-along[..., 1], along[..., 0]], dim=-1)
        plane = Texture.from_data(strength.unsqueeze(-1), rows, columns, 1, "mean")
        index = torch.arange(self.total, device=scores.device)
        centre = torch.stack(
            [(index % columns + 0.5) / columns, (index.div(columns, rounding_mode="floor") + 0.5) / rows], dim=-1
        )
        unit_x, unit_y = (torch.stack([v[..., 0] / columns, v[..., 1] / rows], dim=-1) for v in (LINE_ASPECT * along, across))
        line = sample_grad(plane, centre.expand(self.batch, -1, 2).to(strength.dtype), unit_x, unit_y)
        axes = line_axes(along, LINE_ASPECT)
        return torch.lerp(scores, line[..., 0], LINE_SHARE), axes

    # ---- one level ----

    def schedule(self) -> int | str:
        """The configured one, with "auto" decided."""
        wanted = self.config.schedule
        if wanted == "auto":
            return 3 if self.total >= AUTO_CELLS else 1
        return wanted

    def cells(self) -> Selection:
        """The best cells, all of one level."""
        config, total, cells = self.config, self.total, self.everything()
        dense = (
            config.footprint == "line" or self.value_net is not None or config.bound is not None or config.temperature is not None
        )
        schedule = 1 if dense else self.schedule()
        stages = () if schedule in (1, "clusters") else SCHEDULES[int(schedule)]
        coarse: Tensor | None = None
        if schedule == "clusters":
            cells = self.in_clusters(cells)
        known, stage = cells.shape[1], 0
        for (samples, _), keep in zip(stages, kept_cells(self.k, total, int(schedule)) if stages else ()):
            stage += 1
            if keep == known:  # nothing to drop: the next stage scores the same cells
                continue
            scores = self.score(cells, min(samples, self.cell), stage)
            coarse = scores if known == total else coarse
            # ascending between stages, so that ties go to the lowest cell
            cells = ops.keep_topk(scores, keep, None if known == total else cells)
            known = keep
        scores = self.score(cells, self.cell, stage + 1)
        if config.budget == "adaptive" and coarse is None:
            coarse = scores if known == total else self.score(self.everything(), 1, 1)
        axes = weights_all = limit = None
        if config.footprint == "line":
            scores, axes = self.along_lines(scores)
        if config.bound is not None:
            kept = self.unpredicted(config.bound)
            limit = kept.sum(1)
            scores = torch.where(kept, scores, -torch.inf)
        if config.temperature is not None:
            weights_all = ops.soft_topk(scores, self.k, config.temperature)[0]
        if config.budget == "adaptive" and coarse is not None:
            limit = self.complexity(coarse)
        values, best = ops.select_topk(scores, min(self.k, known))
        chosen = best if known == total else cells.gather(1, best)
        if schedule == "clusters":
            limit = (chosen >= 0).sum(1)
        weight = None if weights_all is None else weights_all.gather(1, best)
        if axes is not None:
            axes = axes.gather(1, best[..., None, None].expand(-1, -1, 2, 2))
        self.warn(values)
        return self.selection(chosen, values, limit, weight, weights_all, axes=axes)

    def unpredicted(self, bound: float) -> Tensor:
        """Which cells [B, N] no neighbour predicts."""
        return predict_cells(colours(self.texture), self.cell, bound) == self.everything()

    def in_clusters(self, cells: Tensor) -> Tensor:
        """Candidates [B, up to 500], ascending, -1 last: the best cells, by one sample, of the superpixels with the best mean."""
        many, tops, each = CLUSTERS
        scores = self.score(cells, 1, 1)
        label = self.features(cells, 1, ["max:cluster"])[..., 0].round().long().clamp(0, many - 1)
        finite = _finite(scores)
        total = finite.new_zeros(self.batch, many).scatter_add(1, label, finite)
        count = finite.new_zeros(self.batch, many).scatter_add(1, label, torch.ones_like(finite))
        best = ops.select_topk(torch.where(count > 0, total / count.clamp(min=1), -torch.inf), tops)[1]
        inside = label[:, None] == best[:, :, None]  # [B, tops, N]
        masked = torch.where(inside, finite[:, None], -torch.inf).flatten(0, 1)
        values, index = ops.select_topk(masked, min(max(each, -(-self.k // tops)), self.total))
        # Of equal size in all pictures; what a superpixel lacks is no cell.
        found = torch.where(values == -torch.inf, self.total, index).unflatten(0, (self.batch, tops)).flatten(1)
        found = found.sort(dim=1).values
        return torch.where(found == self.total, -1, found)

    def complexity(self, scores: Tensor) -> Tensor:
        """How many cells hold ADAPTIVE_SHARE of the energy of the picture's score [B, N], its square above the least; at most k."""
        finite = _finite(scores)
        above = (finite - finite.amin(1, keepdim=True)).square().sort(dim=1, descending=True).values.cumsum(1)
        needed = (above < ADAPTIVE_SHARE * above[:, -1:]).sum(1) + 1
        return needed.clamp(max=min(self.k, self.total))

    def warn(self, relevance_values: Tensor) -> None:
        """Says that nothing in the picture answers the query."""
        terms = {term for term, weight in self.config.terms.items() if weight != 0}
        if not terms <= {"mean:attention", "cosine"} or relevance_values.device.type != "cpu" or relevance_values.numel() == 0:
            return
        nothing = 0.5 if "mean:attention" in terms else 0.0
        if torch.compiler.is_compiling() or not bool((relevance_values[:, 0] <= nothing + 1e-4).any()):
            return
        warnings.warn(
            "nothing in this picture is more relevant to the query than what says nothing (0.5): the kept cells mean little",
            stacklevel=4,
        )

    # ---- levels ----

    def mixed(self) -> Selection:
        """The best tokens of mixed levels."""
        values = self.values(self.config.levels)
        taken = quadtree_cut(values, self.k).taken
        scores = torch.cat([torch.where(t, v, -torch.inf).flatten(1) for t, v in zip(taken, values)], dim=1)
        best_values, node = ops.select_topk(scores, min(self.k, self.total))
        cells, level = node_places(node, self.grid, len(values))
        return self.selection(cells, best_values, None, None, None, lod=level)

    def selection(
        self,
        cells: Tensor,
        score: Tensor,
        limit: Tensor | None,
        weight: Tensor | None,
        weights_all: Tensor | None,
        lod: Tensor | None = None,
        axes: Tensor | None = None,
    ) -> Selection:
        """A selection of these cells [B, up to k], the first `limit` [B] of each, filled up to k."""
        found, spare = cells.shape[1], self.k - cells.shape[1]
        count = torch.full((self.batch,), found, dtype=torch.int64, device=cells.device)
        plain = constant((1.0, 0.0), score.dtype, score.device).view(2, 1, 1).expand(2, *score.shape).clone()
        weight, lod = plain[0] if weight is None else weight, plain[1] if lod is None else lod.to(score.dtype)
        if spare:
            cells, score = F.pad(cells, (0, spare), value=-1), F.pad(score, (0, spare), value=-torch.inf)
            weight, lod = F.pad(weight, (0, spare)), F.pad(lod, (0, spare))
            axes = None if axes is None else F.pad(axes, (0, 0, 0, 0, 0, spare))
        if limit is not None:
            count = torch.minimum(count, limit)
            kept = torch.arange(self.k, device=cells.device) < count[:, None]
            cells, score = torch.where(kept, cells, -1), torch.where(kept, score, -torch.inf)
            weight, lod = torch.where(kept, weight, 0), torch.where(kept, lod, 0)
        size = (self.texture.height, self.texture.width)
        return Selection(cells, count, self.grid, self.cell, score, weight, weights_all, lod, axes, size)
