"""A learned scorer of cells: what a cell holds, where it lies and what is asked for, weighed against each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from texvlm.channel_sources import EMBEDDING
from texvlm.channels import CHANNELS
from texvlm.paths import channels_of
from texvlm.pretrained import Pretrained

FORMS = ("linear", "mlp")

INFORMATION = ("entropy", "rms:edge", "mean:saliency", "variance:saliency", "residual", "mean:text")
PERSPECTIVE = ("mean:x", "mean:y", "mean:eccentricity", "mean:edge_distance", "lod")
PARTICIPATION = tuple(f"mean:{name}" for name in EMBEDDING)

LOD = "lod"
"""No term of `cell_features`: the level that an eye at the fixation would see a cell at, log2(1 + e / e0), made of mean:eccentricity."""

LEVEL = "level"
"""No term of `cell_features` either: the level of the node that is scored, where nodes of several levels are (`node_features`)."""

HALF_RESOLUTION = 0.1
"""That e0: the eccentricity, in the channel's units (1 at the farthest corner), where the resolution has fallen to half."""


def _head(inputs: int, form: str, hidden: int) -> nn.Module:
    if form == "linear":
        return nn.Linear(inputs, 1)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, 1))


class Information(nn.Module):
    """What a cell holds: entropy, edges, saliency, residual, text. Features [B, n, inputs] -> scores [B, n].

    Args:
        inputs: features.
        form: "linear", a weight each, or "mlp" with one hidden layer.
        hidden: its width.

    Example:
        >>> import torch, texvlm
        >>> texvlm.Information(6, "mlp")(torch.rand(2, 256, 6)).shape
        torch.Size([2, 256])
    """

    def __init__(self, inputs: int, form: str = "linear", hidden: int = 32) -> None:
        super().__init__()
        self.head = _head(inputs, form, hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Scores of features that are about standard normal."""
        return self.head(features).squeeze(-1)


class Perspective(Information):
    """Where a cell lies: position, distance from the fixation and from edges, the level it is seen at. As `Information`.

    Example:
        >>> import torch, texvlm
        >>> texvlm.Perspective(5)(torch.rand(2, 256, 5)).shape
        torch.Size([2, 256])
    """


class Participation(nn.Module):
    """How well a cell answers the query: the cosine of its mean embedding with it, and what a learned alignment finds.

    With the embedding e, standardised as e', and the query q, both unit:

        linear   a cos(e, q) + q^T M e'        M starts at 0: at first the two spaces are taken to be one
        mlp      a cos(e, q) + MLP(U q * V e')   * elementwise, `hidden` wide

    Args:
        inputs: dimensions of the embedding.
        query: dimensions of the query; where they differ there is no cosine.
        form: "linear" or "mlp".
        hidden: width of the MLP and of what query and embedding meet in.

    Example:
        >>> import torch, texvlm
        >>> embedding = torch.randn(2, 256, 16)
        >>> texvlm.Participation(16, 16)(embedding, embedding, torch.randn(2, 16)).shape
        torch.Size([2, 256])
    """

    def __init__(self, inputs: int, query: int = 16, form: str = "linear", hidden: int = 32) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(())) if inputs == query else None
        if form == "linear":
            self.align = nn.Linear(query, inputs, bias=False)
            nn.init.zeros_(self.align.weight)
        else:
            self.asked, self.seen = nn.Linear(query, hidden), nn.Linear(inputs, hidden)
            self.head = _head(hidden, form, hidden)

    def forward(self, embedding: Tensor, features: Tensor, query: Tensor) -> Tensor:
        """Scores of embeddings [B, n, inputs], and of the same standardised, for queries [B, query]."""
        if query.dim() != 2:
            raise ValueError(f"query must be [B, query], got {list(query.shape)}")
        query = F.normalize(query, dim=-1)[:, None]
        if hasattr(self, "align"):
            score = (self.align(query) * features).sum(-1)
        else:
            score = self.head(self.asked(query) * self.seen(features)).squeeze(-1)
        return score if self.gain is None else score + self.gain * F.cosine_similarity(embedding, query, dim=-1)


class TensionBalancer(nn.Module):
    """How much each scorer counts in a picture: softmax of tensions that are linear in its mean features and their deviations.

    It starts with equal shares.

    Args:
        inputs: features.
        scorers: what is weighed against each other.

    Example:
        >>> import torch, texvlm
        >>> texvlm.TensionBalancer(6, 2)(torch.rand(1, 256, 6))
        tensor([[0.5000, 0.5000]], grad_fn=<SoftmaxBackward0>)
    """

    def __init__(self, inputs: int, scorers: int = 3) -> None:
        super().__init__()
        self.tension = nn.Linear(2 * inputs, scorers)
        nn.init.zeros_(self.tension.weight)
        nn.init.zeros_(self.tension.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Shares [B, scorers] for features [B, n, inputs]; cells with one that is not finite do not count."""
        if features.dim() != 3:
            raise ValueError(f"features must be [B, n, inputs], got {list(features.shape)}")
        there = features.isfinite().all(-1, keepdim=True)
        features, count = torch.where(there, features, 0), there.sum(1).clamp(min=1)
        mean = features.sum(1) / count
        spread = (torch.where(there, features - mean[:, None], 0).square().sum(1) / count + 1e-6).sqrt()
        return self.tension(torch.cat([mean, spread], dim=-1)).softmax(-1)


class Allocator(Pretrained):
    """Scores of cells, or of the nodes of a quadtree over them, learned.

    Information, perspective and participation have a scorer each, and there is a balance between them.

    It is a `scorer` for `select`: `texvlm.select(picture, 273, path="learned", scorer=allocator)` reads its terms, and with
    participation takes `query=` too. `texvlm.training` trains it. With several levels it goes with path="multiscale": nodes are scored,
    and the disjoint k with the largest sum are kept.

    Args:
        form: of the three scorers, "linear" (a weight each) or "mlp" (one hidden layer).
        information, perspective, participation: the terms of `cell_features` that each reads; "lod" among those of perspective is made
            of "mean:eccentricity", and "level" is the node's, where there are several. Without terms there is no such scorer, and without
            participation no query.
        query: dimensions of the query.
        hidden: width of the MLPs.
        cell: the side of the cells that it was trained for, in pixels.
        normalisation: "standard" (`fit_normalisation`) or "none".
        channels: those that the terms read, as saved configurations name them; only compared.
        levels: of the quadtree: 1 scores cells.

    Attributes:
        terms: what `forward` wants, in its order, as `cell_features` takes them; with several levels as `node_features` does.
        channels: what a texture must hold for them.
        asks: whether a query is needed.

    Raises:
        ValueError: unknown forms, terms or normalisations, "lod" without mean:eccentricity, "level" without levels, no terms at all, other
            channels.

    Example:
        >>> import torch, texvlm
        >>> allocator = texvlm.Allocator(information=["entropy", "rms:edge"], perspective=["mean:eccentricity"], participation=[])
        >>> texvlm.select(torch.rand(3, 64, 64), 4, path="learned", scorer=allocator).count
        tensor([4])
    """

    version = 1
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        form: str = "linear",
        information: Sequence[str] = INFORMATION,
        perspective: Sequence[str] = PERSPECTIVE,
        participation: Sequence[str] = PARTICIPATION,
        query: int = 16,
        hidden: int = 32,
        cell: int = 16,
        normalisation: str = "standard",
        channels: Sequence[str] | None = None,
        levels: int = 1,
    ) -> None:
        super().__init__()
        for name, value, known in (("form", form, FORMS), ("normalisation", normalisation, ("standard", "none"))):
            if value not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {value!r}")
        groups = {"information": list(information), "perspective": list(perspective), "participation": list(participation)}
        columns = list(dict.fromkeys(term for group in groups.values() for term in group))
        if not columns:
            raise ValueError("at least one of information, perspective and participation must have terms")
        if not 1 <= levels <= 8:
            raise ValueError(f"levels must be from 1 to 8, got {levels}")
        if LEVEL in columns and levels == 1:
            raise ValueError(f"{LEVEL!r} is that of a node of a quadtree, and levels is 1")
        self.terms = tuple(term for term in columns if term not in (LOD, LEVEL))
        if LOD in columns and "mean:eccentricity" not in self.terms:
            raise ValueError(f"{LOD!r} is made of 'mean:eccentricity', which must be among the terms too")
        read = set().union(*map(channels_of, self.terms))
        self.channels = tuple(channel.name for channel in CHANNELS if channel.name in read)
        if channels is not None and set(channels) != set(self.channels):
            raise ValueError(f"channels must be those that the terms read, {', '.join(self.channels)}, got {', '.join(channels)}")
        self.asks, self.cell, self.levels, self.normalised = bool(participation), cell, levels, normalisation == "standard"
        self.config = {
            "form": form,
            **groups,
            "query": query,
            "hidden": hidden,
            "cell": cell,
            "normalisation": normalisation,
            "channels": list(self.channels),
            **({"levels": levels} if levels > 1 else {}),
        }
        self._lod = self.terms.index("mean:eccentricity") if LOD in columns else None
        self._level = LEVEL in columns
        order = [*self.terms, *(extra for extra in (LOD, LEVEL) if extra in columns)]
        self._columns = {name: [order.index(term) for term in group] for name, group in groups.items() if group}
        self.register_buffer("mean", torch.zeros(len(order)))
        self.register_buffer("deviation", torch.ones(len(order)))
        self.information = Information(len(information), form, hidden) if information else None
        self.perspective = Perspective(len(perspective), form, hidden) if perspective else None
        self.participation = Participation(len(participation), query, form, hidden) if participation else None
        self.balancer = TensionBalancer(len(order), len(self._columns))

    def fit_normalisation(self, features: Tensor) -> Allocator:
        """Takes mean and deviation of each term from features [..., terms]; rows that are not finite do not count. Returns itself."""
        if not self.normalised:
            raise ValueError("normalisation is 'none': there is nothing to fit")
        if features.dim() < 2:
            raise ValueError(f"features must be [..., terms], of at least two rows, got {list(features.shape)}")
        rows = self._inputs(features.detach().flatten(0, -2).double())
        rows = rows[rows.isfinite().all(-1)]
        if len(rows) < 2:
            raise ValueError(f"features must hold at least two finite rows, got {len(rows)}")
        deviation, mean = torch.std_mean(rows, dim=0, correction=0)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-6 * mean.abs().clamp(min=1e-6), deviation, 1))
        return self

    def forward(self, features: Tensor, query: Tensor | None = None) -> Tensor:
        """Scores [B, n], float32, of features [B, n, terms] (and queries [B, D], [1, D] or [D]). Differentiable in both.

        With several levels, features are [B, n, terms + 1], and end with the level of each node.
        """
        standard, scores = self._scores(features, query)
        return (self.balancer(standard)[:, None] * scores).sum(-1).float()

    def parts(self, features: Tensor, query: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """By scorer: its share [B] in the balance, and its scores [B, n]. Their products add up to what `forward` returns."""
        standard, scores = self._scores(features, query)
        return dict(zip(self._columns, zip(self.balancer(standard).unbind(-1), scores.unbind(-1))))

    def _inputs(self, features: Tensor) -> Tensor:
        """The features of terms, then what is no term."""
        known, wanted = len(self.terms), len(self.terms) + (self.levels > 1)
        if features.shape[-1] != wanted:
            of_each = "one of each term" if self.levels == 1 else "one of each term, and the level"
            raise ValueError(f"features must be [B, n, {wanted}], {of_each}, got {list(features.shape)}")
        columns = [features[..., :known]]
        if self._lod is not None:
            columns.append((1 + features[..., self._lod, None].clamp(min=0) / HALF_RESOLUTION).log2())
        if self._level:
            columns.append(features[..., known:])
        return torch.cat(columns, dim=-1) if len(columns) > 1 else columns[0]

    def _scores(self, features: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor]:
        """All columns standardised, [B, n, F], and each scorer's scores, [B, n, scorers]."""
        if features.dim() != 3:
            raise ValueError(f"features must be [B, n, {len(self.terms) + (self.levels > 1)}], got {list(features.shape)}")
        columns = self._inputs(features.to(self.mean.dtype))
        standard = (columns - self.mean) / self.deviation
        scores = []
        if self.information is not None:
            scores.append(self.information(standard[..., self._columns["information"]]))
        if self.perspective is not None:
            scores.append(self.perspective(standard[..., self._columns["perspective"]]))
        if self.participation is not None:
            if query is None:
                raise ValueError("query: this allocator asks for one, [B, D]; without participation it would not")
            query = query.to(self.mean.dtype).reshape(-1, query.shape[-1])
            if query.shape[-1] != self.config["query"] or len(query) not in (1, len(features)):
                raise ValueError(f"query must be [{len(features)}, {self.config['query']}], got {list(query.shape)}")
            index = self._columns["participation"]
            scores.append(self.participation(columns[..., index], standard[..., index], query))
        return standard, torch.stack(scores, dim=-1)

    def extra_repr(self) -> str:
        """What it reads."""
        return f"form={self.config['form']}, terms={len(self.terms)}, cell={self.cell}, asks={self.asks}, levels={self.levels}"
