"""How cells are chosen: one configuration of independent parts, and the paths of `select` as presets of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

from torch import Tensor

from texvlm._ext import real
from texvlm.allocation import GAINS
from texvlm.channel_sources import COLOURS
from texvlm.channels import CHANNELS
from texvlm.features import LIGHTS, parse_term
from texvlm.learned import ValueNet

CHANNEL_NAMES = {channel.name for channel in CHANNELS}

SCORERS: dict[str, dict[str, float]] = {
    "salience": {"rms:edge": 1.0, "entropy": 0.5, "mean:saliency": 1.0},
    "query": {"mean:attention": 1.0},
    "text": {"reading": 1.0, "rms:edge": 0.01},  # where no text is left, edges
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
"""An adaptive budget ends where the kept cells hold this share of the energy (the square) of the picture's score."""


def channels_of(term: str) -> set[str]:
    """The channels that a term reads."""
    if term == "reading":
        return set(COLOURS)
    what, channel = parse_term(term)
    return set(COLOURS) if what in LIGHTS else {channel}


NODE_SAMPLES = 16
"""How many places along the side of a node a scorer of mixed levels reads."""

Scorer = Callable[..., Tensor]
"""A scorer of one's own: features [B, n, terms] -> scores [B, n]. With an attribute `terms` it says what it reads, and with an
attribute `asks` that is true it is called with the query too: features, query [B, D] (`Allocator`)."""


@dataclass(frozen=True)
class CascadeConfig:
    """How cells are chosen, in independent parts. The paths of `select` are presets of it: `CascadeConfig.preset("five_stage")`.

    Attributes:
        terms: what is read of a cell (`cell_features`) and with what weight it counts.
        scorer: instead of the weighted sum, a function or module of one's own, features [B, n, terms] -> scores [B, n]; one with an
            attribute `terms` reads these instead (`Allocator`). Or a `ValueNet`, or the folder or name of one ("default" comes with the
            package), which reads the picture itself and knows what tokens are worth at one level and at mixed ones.
        schedule: stages: 1 (every pixel of every cell), 3, 5, "clusters" (about 50 superpixels first, then 50 cells in each of the best
            10), or "auto" (3 where a picture has at least AUTO_CELLS cells, else 1).
        query_stages: at which stages (from 1) a query counts; at others the terms of the scorer "salience" do. None: at all of them.
        footprint: "cell", or "line": 4:1 along the direction that text has here, which also goes into `Selection.axes`.
        scale: "one" level, or "mixed": tokens are nodes of a quadtree over the cells (`quadtree_cut`).
        levels: of that quadtree; a token of level l covers (cell 2^l)^2 pixels. The whole picture at the coarsest of them is taken to be
            seen anyway: what a token is worth, it is worth over that.
        gains: what a token is worth, of that quadtree or by a `ValueNet`: detail, text, query, with their weights (`node_values`).
        budget: "fixed" (k), or "adaptive": as many, up to k, as hold ADAPTIVE_SHARE of the energy of the picture's score.
        memory: what a cell that the previous frame kept is worth more, in standard deviations of the scores.
        contiguity: weight of the mean score of the neighbours (in the same superpixel, where the texture has channel "cluster").
        temperature: of the soft path, in units of the score; None is hard.
        bound: "predictive": a cell is not kept if a neighbour predicts it up to this in every value (`predict_cells`); None: all may be.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: SCORERS["salience"])
    scorer: Scorer | ValueNet | str | None = None
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
        if (own := getattr(self.scorer, "terms", None)) is not None:
            object.__setattr__(self, "terms", dict.fromkeys(own, 1.0))
        if not isinstance(self.terms, Mapping):
            raise TypeError(f"terms must be a mapping from terms to weights, got {type(self.terms).__name__}")
        for term in self.terms:
            channels_of(term)
        if isinstance(self.scorer, str) or not hasattr(self.scorer, "terms"):
            return
        if (self.scale == "mixed") != self.scores_nodes:
            levels = getattr(self.scorer, "levels", 1)
            raise ValueError(
                f"scorer must score nodes of several levels where scale is 'mixed' (path 'multiscale'), and cells where it is 'one' "
                f"(path 'learned'), got one of {levels} level{'s' * (levels > 1)} for scale={self.scale!r}"
            )
        if self.scores_nodes:
            object.__setattr__(self, "levels", self.scorer.levels)  # type: ignore[union-attr]

    @property
    def asks(self) -> bool:
        """Whether the scorer is called with the query."""
        return bool(getattr(self.scorer, "asks", False))

    @property
    def scores_nodes(self) -> bool:
        """Whether the scorer knows levels (`Allocator(levels=3)`)."""
        return hasattr(self.scorer, "terms") and getattr(self.scorer, "levels", 1) > 1

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

    @property
    def value_net(self) -> ValueNet | str | None:
        """The scorer, if it is a network that knows what tokens are worth, or the name of one."""
        return self.scorer if isinstance(self.scorer, (ValueNet, str)) else None

    @property
    def allocates(self) -> bool:
        """Whether tokens have a worth (`node_values`), rather than cells a sum of terms."""
        return (self.scale == "mixed" and not self.scores_nodes) or self.value_net is not None

    def weighed(self, weights: Mapping[str, float] | None) -> CascadeConfig:
        """With these weights over its own: of terms, of channels by name ("text": their mean), of "contiguity"."""
        terms, gains, contiguity = dict(self.terms), dict(self.gains), self.contiguity
        if not isinstance(weights, Mapping | None):
            raise TypeError(f"weights must be a mapping, got {type(weights).__name__}")
        for name, weight in (weights or {}).items():
            if not (isinstance(weight, SupportsFloat) and (isinstance(weight, bool) or math.isfinite(real(name, weight)))):
                raise ValueError(f"weights must be finite, got {name} = {weight!r}")
            if name == "contiguity":
                contiguity = float(weight)
                continue
            if self.allocates:
                if name not in self.gains:
                    raise ValueError(f"weights must be of {', '.join(self.gains)} where tokens have a worth, got {name!r}")
                gains[name] = float(weight)
                continue
            term = name if ":" in name else TERM_NAMES.get(name, f"mean:{name}")
            if not channels_of(term) <= CHANNEL_NAMES:
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
    "learned": {"schedule": 1, "scorer": "default"},
    "predictive": {"terms": SCORERS["predictive"], "schedule": 1, "bound": 0.0},
    "multiscale": {"scale": "mixed"},
}
"""What each path of `select` is, as arguments of `CascadeConfig`."""

PATHS = tuple(PRESETS)
