"""Stem `cascade`: the exact best k, and `select`: which places of a picture deserve a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import acc_dtype, fake, integer, ops, real_tensor
from texvlm.allocation import GAINS, node_values
from texvlm.channels import CHANNELS, build_channels
from texvlm.embedding import relevance
from texvlm.features import LIGHTS, parse_term, term_channels
from texvlm.footprint import sample_grad
from texvlm.quadtree import quadtree_cut, tree_shapes
from texvlm.reading import text_values
from texvlm.selection import Selection
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.embedding import Embedding, EmbeddingProvider
    from texvlm.texture import ImageLike

_CHANNEL_NAMES = {channel.name for channel in CHANNELS}

SCORERS: dict[str, dict[str, float]] = {
    "salience": {"rms:edge": 1.0, "entropy": 0.5, "mean:saliency": 1.0},
    "query": {"mean:attention": 1.0},
    "text": {"reading": 1.0},
    "predictive": {"residual": 1.0},
}
"""The terms that each scorer adds up, with their weights: of `cell_features`, or "reading", the text that becomes readable by a cell
(`reading.text_values`)."""

SCORE_CHANNELS = ("red", "green", "blue", "edge", "saliency")
"""What the scorer "salience" reads of a texture, by name."""

TERM_NAMES = {"edge": "rms:edge", **{name: name for name in ("entropy", "residual", "cosine", "reading")}}
"""What a short name in `weights` stands for; the name of another channel stands for its mean."""

STAGE_CELLS = 4096
"""The grid (64 x 64) that the stages' numbers are stated for; they scale with the number of cells."""

SCHEDULES: dict[int, tuple[tuple[int, int], ...]] = {
    1: (),
    3: ((1, 2000), (4, 500)),
    5: ((1, 3000), (2, 2000), (4, 1000), (8, 500)),
}
"""By the number of stages: for those before the last, the samples along a cell's side and the cells that they keep of STAGE_CELLS. The
last stage reads every pixel and keeps k."""

AUTO_CELLS = 1024
"""The schedule "auto" is 3 stages from this many cells on, else 1."""

CLUSTERS = (50, 10, 50)
"""The schedule "clusters": superpixels, those that are looked into, and the cells that each of these hands on."""

MAX_CELL = 4096
"""The longest side of a cell; one that is larger than the picture covers it all."""

LINE_ASPECT = 4.0
"""How much longer than high the footprint along a line of text is."""

LINE_SHARE = 0.1
"""What the mean over that footprint counts in a score, beside the cell itself."""

ADAPTIVE_SHARE = 0.9
"""An adaptive budget ends where the kept cells hold this share of the picture's score."""


def _channels_of(term: str) -> set[str]:
    """The channels that a term reads."""
    if term == "reading" or parse_term(term)[0] in LIGHTS:
        return {"red", "green", "blue"}
    return {parse_term(term)[1]}


Scorer = Callable[[Tensor], Tensor]
"""A scorer of one's own: features [B, n, terms] -> scores [B, n]."""


@dataclass(frozen=True)
class CascadeConfig:
    """How cells are chosen, in independent parts. The paths of `select` are presets of it: `CascadeConfig.preset("five_stage")`.

    Attributes:
        terms: what is read of a cell (`cell_features`) and with what weight it counts.
        scorer: instead of the weighted sum, a function or module of one's own, features [B, n, terms] -> scores [B, n].
        schedule: stages: 1 (every pixel of every cell), 3, 5, "clusters" (about 50 superpixels first, then 50 cells in each of the best
            10), or "auto" (3 where a picture has at least AUTO_CELLS cells, else 1).
        query_stages: at which stages (from 1) a query counts; at others the terms of the scorer "salience" do. None: at all of them.
        footprint: "cell", or "line": 4:1 along the direction that text has here, which also goes into `Selection.axes`.
        scale: "one" level, or "mixed": tokens are nodes of a quadtree over the cells (`quadtree_cut`).
        levels: of that quadtree; a token of level l covers (cell 2^l)^2 pixels. The whole picture at the coarsest of them is taken to be
            seen anyway: what a token is worth, it is worth over that.
        gains: what a token of that quadtree is worth: detail, text, query, with their weights (`node_values`).
        budget: "fixed" (k), or "adaptive": as many, up to k, as hold ADAPTIVE_SHARE of the picture's score.
        memory: what a cell that the previous frame kept is worth more, in standard deviations of the scores.
        contiguity: weight of the mean score of the neighbours (in the same superpixel, where the texture has channel "cluster").
        temperature: of the soft path, in units of the score; None is hard.
        bound: "predictive": a cell that its left, upper or upper left neighbour predicts up to this root mean square is not kept.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: SCORERS["salience"])
    scorer: Scorer | None = None
    schedule: int | str = "auto"
    query_stages: tuple[int, ...] | None = None
    footprint: str = "cell"
    scale: str = "one"
    levels: int = 4
    gains: Mapping[str, float] = field(default_factory=lambda: GAINS)
    budget: str = "fixed"
    memory: float = 0.0
    contiguity: float = 0.0
    temperature: float | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        if self.schedule not in (*SCHEDULES, "clusters", "auto"):
            raise ValueError(f"schedule must be {', '.join(map(str, SCHEDULES))}, clusters or auto, got {self.schedule!r}")
        for name, known in (("footprint", ("cell", "line")), ("scale", ("one", "mixed")), ("budget", ("fixed", "adaptive"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")
        if not 1 <= self.levels <= 8:
            raise ValueError(f"levels must be from 1 to 8, got {self.levels}")
        for term in self.terms:
            _channels_of(term)

    @classmethod
    def preset(cls, path: str) -> CascadeConfig:
        """The configuration behind a path's name.

        Example:
            >>> import texvlm
            >>> texvlm.CascadeConfig.preset("five_stage").schedule
            5
        """
        if path not in PRESETS:
            raise ValueError(f"path must be one of {', '.join(PRESETS)}, got {path!r}")
        return cls(**PRESETS[path])

    def weighed(self, weights: Mapping[str, float] | None) -> CascadeConfig:
        """With these weights over its own: of terms, of channels by name ("text": their mean), of "contiguity"."""
        terms, gains, contiguity = dict(self.terms), dict(self.gains), self.contiguity
        for name, weight in (weights or {}).items():
            if not math.isfinite(weight):
                raise ValueError(f"weights must be finite, got {name} = {weight}")
            if name == "contiguity":
                contiguity = float(weight)
                continue
            if self.scale == "mixed":
                if name not in self.gains:
                    raise ValueError(f"weights must be of {', '.join(self.gains)} on mixed scales, got {name!r}")
                gains[name] = float(weight)
                continue
            term = name if ":" in name else TERM_NAMES.get(name, f"mean:{name}")
            if not _channels_of(term) <= _CHANNEL_NAMES:
                known = ", ".join((*TERM_NAMES, "contiguity"))
                raise ValueError(f"weights must be of {known}, channels or terms such as max:motion, got {name!r}")
            terms[term] = float(weight)
        return replace(self, terms=terms, gains=gains, contiguity=contiguity)


PRESETS: dict[str, dict[str, Any]] = {
    "salience": {},
    "query": {"terms": SCORERS["query"]},
    "anisotropic_text": {"terms": SCORERS["text"], "footprint": "line", "schedule": 1},
    "five_stage": {"schedule": 5},
    "adaptive": {"budget": "adaptive"},
    "video": {"terms": {**SCORERS["salience"], "max:motion": 1.0}, "memory": 0.25},
    "soft": {"schedule": 1, "temperature": 0.05},
    "learned": {"schedule": 1},
    "predictive": {"terms": SCORERS["predictive"], "schedule": 1, "bound": 0.0},
    "multiscale": {"scale": "mixed"},
}
"""What each path of `select` is, as arguments of `CascadeConfig`."""

PATHS = tuple(PRESETS)


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


def kept_cells(k: int, total: int, schedule: int = 3) -> tuple[int, ...]:
    """How many of `total` cells each stage keeps; halves are rounded up."""
    kept = [(2 * n * total + STAGE_CELLS) // (2 * STAGE_CELLS) for _, n in SCHEDULES[schedule]]
    return (*(min(max(k, n), total) for n in kept), min(k, total))


def select(
    image_or_texture: ImageLike | Texture,
    k: int = 273,
    cell: int = 16,
    path: str | CascadeConfig = "salience",
    query: str | Tensor | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    embedding: Embedding | EmbeddingProvider | None = None,
    scorer: Scorer | None = None,
    previous: ImageLike | Texture | None = None,
    memory: Selection | None = None,
) -> Selection:
    """Keeps the k cells of a picture that deserve to be seen sharply, or the k tokens of mixed levels.

    A cell's score is a weighted sum of its features (`cell_features`); on the path "salience"

        1.0 * sqrt(mean(edge^2)) + 0.5 * entropy of luma + 1.0 * mean(saliency)

    over its samples. In three stages, all cells are read once at LOD log2(cell) and 2000 of 4096 stay, of these 4 x 4 samples and 500
    stay, of these every pixel and k stay; other grids keep the same shares, and no stage fewer than k. Samples beyond the picture
    repeat its border.

        salience          what stands out, has edges and varied light
        query             what answers the query: relevance over the cell
        anisotropic_text  writing that becomes readable, over a footprint of 4:1 along the line that it belongs to; `axes` are along it
        five_stage        salience in five stages, at LOD 4, 3, 2, 1, 0 for cells of 16 pixels
        adaptive          salience, with as many cells as hold 0.9 of the picture's score, at most k: `count` varies
        video             salience and motion, and what the last frame kept (`memory`) is a little more likely to stay
        soft              salience of all cells, with weights in [0, 1] that sum to k and carry gradients, in `weights_all`
        learned           by `scorer`, of the features of "salience"
        predictive        cells that no neighbour predicts, those that differ most first: duplicates cost nothing, `count` varies
        multiscale        tokens of the level that each place deserves: detail, text that is too small to be read at a coarser level,
                          relevance to the query, allotted by `quadtree_cut`

    Args:
        image_or_texture: a picture (see `Texture`), or a texture with the channels that the path reads, by name (`build_channels`).
        k: the budget, at least 0.
        cell: the side of a cell in pixels, 1 to 4096; partial cells at the edges count as cells.
        path: one of these, or a `CascadeConfig`.
        query: a text or a vector (see `Embedding.query`), for "query" and "multiscale"; a text needs `embedding`, and so does a vector
            where the texture has no embedding channels. Where nothing in the picture is more relevant than what says nothing (0.5), a
            warning says so (on the CPU: on a GPU that would wait for the device).
        weights: over the path's: of "edge", "entropy", "saliency", of any channel by its name ("text": its mean), of any term
            ("max:motion"), of "contiguity" (the mean score of the neighbours); on "multiscale" of "detail", "text" and "query".
        embedding: what reads the query and the picture.
        scorer: for "learned", features [B, n, terms] -> scores [B, n].
        previous: the frame before, for motion.
        memory: what was selected in the frame before.

    Returns:
        Selection; its first `count` entries are the kept cells, best first. Hard, without gradients, but for "soft".

    Raises:
        ValueError: an unknown path or weight, k or cell out of range, a path without what it needs.
        TypeError: k or cell is not an integer.
        KeyError: the texture lacks a channel.

    Example:
        >>> import torch, texvlm
        >>> picture = torch.zeros(3, 64, 64)
        >>> picture[:, 20:28, 36:44] = torch.rand(3, 8, 8)
        >>> selection = texvlm.select(picture, k=1)
        >>> selection.indices, selection.grid
        (tensor([[6]]), (4, 4))
    """
    config = (path if isinstance(path, CascadeConfig) else CascadeConfig.preset(path)).weighed(weights)
    k, cell = integer("k", k, 0), integer("cell", cell)
    if not 1 <= cell <= MAX_CELL:
        raise ValueError(f"cell must be from 1 to {MAX_CELL} pixels, got {cell}")
    if scorer is not None:
        config = replace(config, scorer=scorer)
    if path == "learned" and config.scorer is None:
        raise ValueError("path='learned' needs scorer=, a function or module: features [B, n, terms] -> scores [B, n]")
    asks = "mean:attention" in config.terms or config.scale == "mixed"
    if query is not None and not asks:
        raise ValueError(f"path={path!r} takes no query; 'query' and 'multiscale' do")
    if query is None and "mean:attention" in config.terms and not _has_attention(image_or_texture):
        raise ValueError(f"path={path!r} needs query=, or a texture with attention or embedding channels built for one")
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.temperature is not None):
        texture, config, vector = _prepared(image_or_texture, config, query, embedding, previous)
        run = _Run(texture, config, k, cell, vector, memory)
        return run.mixed() if config.scale == "mixed" else run.cells()


def _has_attention(source: ImageLike | Texture) -> bool:
    return isinstance(source, Texture) and ("attention" in source.names or "query_vector" in source.meta)


def _prepared(
    source: ImageLike | Texture,
    config: CascadeConfig,
    query: str | Tensor | None,
    embedding: Embedding | EmbeddingProvider | None,
    previous: ImageLike | Texture | None,
) -> tuple[Texture, CascadeConfig, Tensor | None]:
    """A texture with what the terms read, and the query as a vector where the texture holds embeddings."""
    from texvlm.embedding import Embedding

    if embedding is not None and not isinstance(embedding, Embedding):
        embedding = Embedding(embedding)
    if isinstance(query, str) and embedding is None:
        raise ValueError("query: a text needs embedding=, which reads it (DigitsEmbedding, ClipEmbedding), or pass its vector")
    vector = None if query is None else embedding.query(query) if embedding is not None else real_tensor("query", query)
    if isinstance(source, Texture):
        if vector is None and "attention" not in source.names and "query_vector" in source.meta:
            vector = torch.tensor(source.meta["query_vector"])
        if vector is None or "embedding_0" not in source.names:
            return source, config, None
        terms = {("cosine" if t == "mean:attention" else t): w for t, w in config.terms.items()}
        return source, replace(config, terms=terms), vector.reshape(1, -1).to(source.data.device)
    given = {}
    if vector is not None:
        if embedding is None:
            raise ValueError("query: a picture needs embedding=, which says what its places hold")
        given["attention"] = relevance(embedding.planes(source), vector.reshape(-1))
    if config.scale == "mixed":
        wanted = {"red", "green", "blue"} | set(given)
    else:
        active = _stage_terms(config)
        wanted = set().union(*map(_channels_of, active))
        if config.schedule == "clusters":
            wanted.add("cluster")
    names = [channel.name for channel in CHANNELS if channel.name in wanted] or ["red"]
    return build_channels(source, previous, channels=names, given=given), config, None


def _stage_terms(config: CascadeConfig) -> dict[str, float]:
    """The terms that some stage counts."""
    terms = dict(config.terms)
    if config.query_stages is not None:
        terms = {**SCORERS["salience"], **terms}
    return {term: weight for term, weight in terms.items() if weight != 0 or config.scorer is not None}


def soft_weights(scores: Tensor, k: int, temperature: float) -> Tensor:
    """Weights in [0, 1] that sum to k: sigmoid((score - t) / temperature), t found by bisection. Differentiable in the scores."""
    total = scores.shape[1]
    if k == 0 or total == 0:
        return scores * 0
    if k >= total:
        return scores * 0 + 1
    scaled = scores / temperature
    with torch.no_grad():
        spread = -math.log(1 / total) + 50
        low, high = scaled.amin(1, keepdim=True) - spread, scaled.amax(1, keepdim=True) + spread
        for _ in range(60):
            middle = (low + high) / 2
            above = (scaled - middle).sigmoid().sum(1, keepdim=True) > k
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        found = (low + high) / 2
    # One step of Newton's from there: it changes nothing but brings the threshold's own derivative.
    weight = (scaled - found).sigmoid()
    slope = (weight * (1 - weight)).sum(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny).detach()
    return (scaled - (found + (weight.sum(1, keepdim=True) - k) / slope)).sigmoid()


class _Run:
    """One call of `select`: what it was given, and the steps."""

    def __init__(
        self, texture: Texture, config: CascadeConfig, k: int, cell: int, query: Tensor | None, memory: Selection | None
    ) -> None:
        self.texture, self.config, self.k, self.cell, self.query = texture, config, k, cell, query
        self.grid = (-(-texture.height // cell), -(-texture.width // cell))
        self.total, self.batch = self.grid[0] * self.grid[1], texture.data.shape[0]
        self.stayed: Tensor | None = None
        if memory is not None:
            if memory.grid != self.grid or memory.cell != cell or len(memory.indices) != self.batch:
                raise ValueError(f"memory must be of {self.batch} x {self.grid} cells of {cell} px, got {memory}")
            self.stayed = memory.mask().flatten(1)

    # ---- scores ----

    def features(self, cells: Tensor, samples: int, terms: Sequence[str]) -> Tensor:
        texture = self.texture
        names, channels, lights = term_channels(texture, terms, 0 if self.query is None else self.query.shape[1])
        args = (texture.data, cells, texture.height, texture.width, texture.reducer, texture.levels, self.cell, samples)
        return ops.cell_features(*args, names, channels, self.query, lights)

    def score(self, cells: Tensor, samples: int, stage: int) -> Tensor:
        """Scores of these cells at a stage, counted from 1."""
        config = self.config
        terms: Mapping[str, float] = config.terms
        if config.query_stages is not None and stage not in config.query_stages:
            terms = SCORERS["salience"]
        if config.scorer is not None:
            scores = config.scorer(self.features(cells, samples, list(terms)))
            if scores.shape != cells.shape:
                raise ValueError(f"scorer must return scores {list(cells.shape)}, got {list(scores.shape)}")
        else:
            terms = {term: weight for term, weight in terms.items() if weight != 0}
            reading = terms.pop("reading", 0.0)
            scores = torch.zeros(cells.shape, dtype=acc_dtype(self.texture.data.dtype), device=cells.device)
            if terms:
                features = self.features(cells, samples, list(terms))
                weight = torch.tensor(list(terms.values()), dtype=features.dtype)
                scores = features @ (weight if cells.device.type == "cpu" else weight.to(cells.device, non_blocking=True))
            if reading:
                scores = scores + reading * self.reading().gather(1, cells.clamp(min=0))
        if self.stayed is not None and config.memory:
            finite = torch.where(scores.isfinite(), scores, 0)
            spread = finite.std(1, correction=0, keepdim=True)
            scores = scores + config.memory * spread * self.stayed.gather(1, cells.clamp(min=0))
        if config.contiguity:
            scores = scores + config.contiguity * self.neighbours(cells, scores)
        return scores

    def reading(self) -> Tensor:
        """The text that becomes readable by each cell, [B, N]."""
        rgb = [self.texture.index(name) for name in ("red", "green", "blue")]
        return text_values(self.texture.level(0)[:, rgb], self.cell, 1)[0].flatten(1)

    def neighbours(self, cells: Tensor, scores: Tensor) -> Tensor:
        """The mean score of the up to eight cells around each that are scored too, and lie in its superpixel."""
        rows, columns = self.grid
        plane = scores.new_zeros(self.batch, self.total + 1)
        there = torch.zeros_like(plane)
        place = torch.where(cells >= 0, cells, self.total)
        plane = plane.scatter(1, place, torch.where(scores.isfinite(), scores, 0))
        there = there.scatter(1, place, scores.isfinite().to(plane.dtype))
        planes = [plane[:, :-1].unflatten(1, self.grid), there[:, :-1].unflatten(1, self.grid)]
        if "cluster" in self.texture.names:
            everything = torch.arange(self.total, device=cells.device).expand(self.batch, -1)
            planes.append(self.features(everything, 1, ["max:cluster"])[..., 0].unflatten(1, self.grid))
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
        strength = torch.where(scores.isfinite(), scores, 0).clamp(min=0)
        along = self.directions(strength)
        across = torch.stack([-along[..., 1], along[..., 0]], dim=-1)
        plane = Texture.from_data(strength.unsqueeze(-1), rows, columns, 1, "mean")
        index = torch.arange(self.total, device=scores.device)
        centre = torch.stack(
            [(index % columns + 0.5) / columns, (index.div(columns, rounding_mode="floor") + 0.5) / rows], dim=-1
        )
        cells = strength.new_tensor([columns, rows]) if scores.device.type == "cpu" else None
        size = (
            cells
            if cells is not None
            else torch.tensor([columns, rows], dtype=strength.dtype).to(scores.device, non_blocking=True)
        )
        line = sample_grad(plane, centre.expand(self.batch, -1, 2).to(strength.dtype), LINE_ASPECT * along / size, across / size)
        stretch = math.sqrt(LINE_ASPECT)
        axes = torch.stack([along * stretch, across / stretch], dim=-1)
        return torch.lerp(scores, line[..., 0], LINE_SHARE), axes

    # ---- one level ----

    def schedule(self) -> int | str:
        wanted = self.config.schedule
        if wanted == "auto":
            return 3 if self.total >= AUTO_CELLS else 1
        return wanted

    def cells(self) -> Selection:
        config, batch, total = self.config, self.batch, self.total
        device = self.texture.data.device
        cells = torch.arange(total, device=device).expand(batch, total)
        dense = config.footprint == "line" or config.bound is not None or config.temperature is not None
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
            best = ops.select_topk(scores, keep)[1]
            # ascending between stages, so that ties go to the lowest cell
            cells = (best if known == total else cells.gather(1, best)).sort(dim=1).values
            known = keep
        scores = self.score(cells, self.cell, stage + 1)
        if config.budget == "adaptive" and coarse is None:
            coarse = scores if known == total else self.score(torch.arange(total, device=device).expand(batch, total), 1, 1)
        axes = weights_all = limit = None
        if config.footprint == "line":
            scores, axes = self.along_lines(scores)
        if config.bound is not None:
            limit = (scores > config.bound).sum(1)
            scores = torch.where(scores > config.bound, scores, -torch.inf)
        if config.temperature is not None:
            weights_all = soft_weights(scores, min(self.k, total), config.temperature)
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

    def in_clusters(self, cells: Tensor) -> Tensor:
        """Candidates [B, up to 500], ascending, -1 last: the best cells, by one sample, of the superpixels with the best mean."""
        many, tops, each = CLUSTERS
        scores = self.score(cells, 1, 1)
        label = self.features(cells, 1, ["max:cluster"])[..., 0].round().long().clamp(0, many - 1)
        finite = torch.where(scores.isfinite(), scores, 0)
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
        """How many cells hold ADAPTIVE_SHARE of the picture's score [B, N], above its least, at most k."""
        finite = torch.where(scores.isfinite(), scores, scores.new_tensor(0.0))
        above = (finite - finite.amin(1, keepdim=True)).sort(dim=1, descending=True).values.cumsum(1)
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
        config, texture = self.config, self.texture
        values = node_values(texture, self.cell, config.levels, config.gains, self.query)
        taken = quadtree_cut(values, self.k).taken
        shapes = tree_shapes(*self.grid, len(values))
        scores = torch.cat([torch.where(t, v, -torch.inf).flatten(1) for t, v in zip(taken, values)], dim=1)
        best_values, node = ops.select_topk(scores, min(self.k, self.total))
        level = torch.zeros_like(node)
        first = 0
        cells = torch.zeros_like(node)
        for lod, (rows, columns) in enumerate(shapes):
            inside = (node >= first) & (node < first + rows * columns)
            y = (node - first).div(columns, rounding_mode="floor")
            x = (node - first) - y * columns
            cells = torch.where(inside, (y * self.grid[1] + x) << lod, cells)
            level = torch.where(inside, lod, level)
            first += rows * columns
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
        weight = torch.ones_like(score) if weight is None else weight
        lod = torch.zeros_like(score) if lod is None else lod.to(score.dtype)
        if limit is not None:
            count = torch.minimum(count, limit)
        if spare or limit is not None:
            cells, score, weight, lod = (F.pad(t, (0, spare)) for t in (cells, score, weight, lod))
            kept = torch.arange(self.k, device=cells.device) < count[:, None]
            cells, score = torch.where(kept, cells, -1), torch.where(kept, score, -torch.inf)
            weight, lod = torch.where(kept, weight, 0), torch.where(kept, lod, 0)
            if axes is not None:
                axes = F.pad(axes, (0, 0, 0, 0, 0, spare))
        size = (self.texture.height, self.texture.width)
        return Selection(cells, count, self.grid, self.cell, score, weight, weights_all, lod, axes, size)


@fake("select_topk")
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    batch, count = scores.shape
    size = (batch, torch.sym_min(k, count))
    return scores.new_empty(size), scores.new_empty(size, dtype=torch.int64)


@fake("select_topk_backward")
def _(grad: Tensor, indices: Tensor, count: int) -> Tensor:
    return grad.new_empty((grad.shape[0], count))


@fake("compact")
def _(mask: Tensor) -> tuple[Tensor, Tensor]:
    return mask.new_empty(mask.shape, dtype=torch.int64), mask.new_empty(mask.shape[:1], dtype=torch.int64)
