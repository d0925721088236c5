"""Stem `embedding`: channels 18-33, dense image-text features on 16 principal axes, and what a query finds in them.

A provider turns pictures and texts into vectors of one space; `PCA` keeps 16 axes of it; `Embedding` is both, which is what
`build_channels(embedding=)` takes; `relevance` compares a query with every place.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from texvlm.digits import DigitsEmbedding
from texvlm.providers.clip import ClipEmbedding
from texvlm.salience import as_rgb
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.texture import ImageLike

__all__ = [
    "AXES",
    "PCA",
    "ClipEmbedding",
    "DigitsEmbedding",
    "Embedding",
    "EmbeddingProvider",
    "Moments",
    "Retrieval",
    "average_precision",
    "embedding_planes",
    "relevance",
    "retrieval_kept",
]

AXES = 16  # channels 18-33
WANTED = 0.95  # of the retrieval result at full width
SHARE = 0.02  # of the cells count as retrieved where nothing says what is right
_RANK = 1e-12  # an axis with less variance than this share of the largest is no axis


@runtime_checkable
class EmbeddingProvider(Protocol):
    """What turns pictures and texts into vectors of one space. Any object with these three members will do.

    Attributes:
        name: for the metadata of textures.

    Example:
        >>> import torch, texvlm
        >>> class Colours:  # a picture's cells and the colour words of a text, in one space
        ...     name = "colours"
        ...
        ...     def encode_image(self, pictures):
        ...         return torch.nn.functional.avg_pool2d(pictures, 8, ceil_mode=True) - 0.5
        ...
        ...     def encode_text(self, texts):
        ...         words = ("red", "green", "blue")
        ...         return torch.tensor([[float(word in text) - 0.5 for word in words] for text in texts])
        >>> isinstance(Colours(), texvlm.EmbeddingProvider)
        True
    """

    name: str

    def encode_image(self, pictures: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1] -> dense features [B, D, h, w], floating point, on any grid that covers the picture."""
        ...

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Texts -> [Q, D] in the same space."""
        ...


def _unit(vectors: Tensor, dim: int = -1) -> Tensor:
    """Unit length along `dim`; vectors of no length stay zero, with no gradient."""
    squared = vectors.square().sum(dim, keepdim=True)
    there = squared > torch.finfo(vectors.dtype).tiny
    return vectors * torch.where(there, squared, torch.ones_like(squared)).rsqrt() * there


def _rows(features: Tensor) -> Tensor:
    """[n, D] or [B, D, h, w] as float64 rows [n, D]."""
    if features.dim() == 4:
        features = features.permute(0, 2, 3, 1).flatten(0, 2)
    if features.dim() != 2 or not features.is_floating_point():
        raise ValueError(f"features must be floating point, [n, D] or [B, D, h, w], got {features.dtype} {list(features.shape)}")
    return features.detach().double()


class Moments:
    """Count, mean and scatter of vectors, in float64: batch by batch, in any order, on many machines (`merge` what each has seen).

    Means and scatters are combined pairwise (Chan, Golub and LeVeque 1983), so a large common mean costs no digits.

    Example:
        >>> import torch, texvlm
        >>> seen = texvlm.embedding.Moments()
        >>> for batch in torch.rand(10, 100, 32).unbind():
        ...     _ = seen.update(batch)
        >>> seen.count, texvlm.PCA.from_moments(seen).axes.shape
        (1000, torch.Size([16, 32]))
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, 0, dtype=torch.float64)  # sum of outer products of differences from the mean

    def update(self, features: Tensor) -> Moments:
        """Adds vectors [n, D] or [B, D, h, w]; those that are not finite are left out."""
        rows = _rows(features)
        rows = rows[rows.isfinite().all(1)]
        other = Moments()
        other.count = len(rows)
        if other.count:
            mean = rows.mean(0)
            rows = rows - mean
            other.mean, other.scatter = mean.cpu(), (rows.T @ rows).cpu()
        return self.merge(other)

    def merge(self, other: Moments) -> Moments:
        """Adds what `other` has seen."""
        if not other.count:
            return self
        if not self.count:
            self.count, self.mean, self.scatter = other.count, other.mean.clone(), other.scatter.clone()
            return self
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"features must have {len(self.mean)} dimensions like those before, got {len(other.mean)}")
        count = self.count + other.count
        apart = other.mean - self.mean
        self.scatter += other.scatter + torch.outer(apart, apart) * (self.count * other.count / count)
        self.mean += apart * (other.count / count)
        self.count = count
        return self


@dataclass(frozen=True)
class PCA:
    """The axes along which features differ most, and how features and texts are laid on them.

    Fitted exactly: mean and D x D scatter in float64, one eigendecomposition; the result does not depend on the batches. The sign of
    each axis is such that its largest entry is positive, as in scikit-learn.

    A feature f becomes unit(axes (f - mean)), a text q unit(axes (q - text_mean)). The text_mean is the mean of the *texts* that the axes
    were fitted with (texts and pictures fill different parts of the joint space: the modality gap), else that of the features; with
    `centre=False` both means are zero, which keeps most of the result at full width (benchmarks/embedding.py measures all ways).

    Attributes:
        mean: [D] float64.
        axes: [16, D] float64, orthonormal rows, largest variance first; rows of zeros where the features have fewer dimensions.
        variance: [16] float64, of the features along each axis.
        total: variance of the features in all directions.
        text_mean: [D] float64.
        count: features seen.

    Example:
        >>> import torch, texvlm
        >>> pca = texvlm.PCA.fit(torch.rand(1000, 64))
        >>> pca.transform(torch.rand(2, 64, 5, 7)).shape, bool(pca.explained < 1)
        (torch.Size([2, 16, 5, 7]), True)
    """

    mean: Tensor
    axes: Tensor
    variance: Tensor
    total: float
    text_mean: Tensor
    count: int

    @classmethod
    def fit(cls, features: Tensor | Iterable[Tensor], texts: Tensor | None = None, axes: int = AXES, centre: bool = True) -> PCA:
        """Fits the axes.

        Args:
            features: [n, D] or [B, D, h, w], or batches of them (a generator will do: each batch is seen once).
            texts: [Q, D], texts like the queries to come. The axes then follow the sum of both covariances, each scaled to the same
                total, so that directions are kept along which queries differ.
            axes: how many.
            centre: features and texts each about their own mean, as principal components are defined. False leaves the means in (the
                axes are then those of the second moments): unit vectors on the axes are then compared almost as unit vectors at full
                width are, since no common part is missing from their lengths, and order places alike.

        Raises:
            ValueError: fewer than two finite features, or batches of different widths.
        """
        seen = Moments()
        for batch in (features,) if isinstance(features, Tensor) else features:
            seen.update(batch)
        return cls.from_moments(seen, None if texts is None else Moments().update(texts), axes, centre)

    @classmethod
    def from_moments(cls, features: Moments, texts: Moments | None = None, axes: int = AXES, centre: bool = True) -> PCA:
        """The same from what has been accumulated."""
        if features.count < 2:
            raise ValueError(f"principal axes need at least two finite features, got {features.count}")
        width = len(features.mean)
        mean = features.mean if centre else torch.zeros_like(features.mean)
        covariance = features.scatter / (features.count - 1)
        if not centre:
            covariance = covariance + torch.outer(features.mean, features.mean) * (features.count / (features.count - 1))
        total = float(covariance.trace())
        wanted, text_mean = covariance, mean
        if texts is not None and texts.count:
            if texts.mean.shape != features.mean.shape:
                raise ValueError(f"texts must have {width} dimensions like the features, got {len(texts.mean)}")
            spread = texts.scatter if centre else texts.scatter + texts.count * torch.outer(texts.mean, texts.mean)
            wanted = covariance / max(total, 1e-300) + spread / spread.trace().clamp(min=1e-300)
            text_mean = texts.mean if centre else text_mean
        strength, vectors = torch.linalg.eigh(wanted)
        kept = min(axes, width)
        strength, found = strength.flip(0)[:kept], vectors.T.flip(0)[:kept]
        found = found * found.gather(1, found.abs().argmax(1, keepdim=True)).sign()
        found = found * (strength > _RANK * strength[0].clamp(min=0))[:, None]
        rows = torch.zeros(axes, width, dtype=torch.float64)
        rows[:kept] = found
        return cls(mean, rows, ((rows @ covariance) * rows).sum(1), total, text_mean, features.count)

    @property
    def explained(self) -> float:
        """The share of the features' variance that lies along the axes."""
        return float(self.variance.sum()) / self.total if self.total > 0 else 1.0

    def transform(self, features: Tensor) -> Tensor:
        """Features [n, D] or [B, D, h, w] on the axes, [n, 16] or [B, 16, h, w], unit length; zero where they are not finite.

        In float32 (float64 for float64 features). Differentiable.
        """
        return self._lay(features, self.mean)

    def transform_text(self, texts: Tensor) -> Tensor:
        """Texts [D] or [Q, D] on the same axes, [16] or [Q, 16], unit length. Differentiable."""
        return self._lay(texts, self.text_mean)

    def _lay(self, vectors: Tensor, mean: Tensor) -> Tensor:
        dense = vectors.dim() == 4
        if vectors.shape[1 if dense else -1] != self.axes.shape[1]:
            raise ValueError(f"features must have {self.axes.shape[1]} dimensions like the axes, got {list(vectors.shape)}")
        work = torch.float64 if vectors.dtype == torch.float64 else torch.float32
        axes = self.axes.to(vectors.device, work)
        offset = (self.axes @ mean).to(vectors.device, work)
        vectors = vectors.to(work)
        if dense:
            laid = torch.einsum("kd,bdhw->bkhw", axes, vectors) - offset[:, None, None]
        else:
            laid = vectors @ axes.T - offset
        dim = 1 if dense else -1
        finite = laid.isfinite().all(dim, keepdim=True)
        return _unit(torch.where(finite, laid, torch.zeros_like(laid)), dim)

    def arrays(self) -> dict[str, Any]:
        """All of it as NumPy arrays, for `numpy.savez`."""
        import numpy as np

        return {
            "mean": self.mean.numpy(),
            "axes": self.axes.numpy(),
            "variance": self.variance.numpy(),
            "total": np.float64(self.total),
            "text_mean": self.text_mean.numpy(),
            "count": np.int64(self.count),
        }

    @classmethod
    def from_arrays(cls, arrays: Any) -> PCA:
        """The inverse of `arrays`."""
        tensors = {name: torch.from_numpy(arrays[name]).double() for name in ("mean", "axes", "variance", "text_mean")}
        return cls(total=float(arrays["total"]), count=int(arrays["count"]), **tensors)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz file (no pickle in it)."""
        import numpy as np

        with open(path, "wb") as file:
            np.savez(file, **self.arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PCA:
        """Reads what `save` wrote, bit for bit."""
        import numpy as np

        with np.load(path, allow_pickle=False) as arrays:
            return cls.from_arrays(arrays)


class Retrieval(NamedTuple):
    """What queries find at full width and on the axes.

    `kept` is what the axes keep of the retrieval result: `axes` / `full`.
    """

    kept: float
    full: float  # mean average precision with `truth`; 1 without
    axes: float  # mean average precision with `truth`; without, the share of the cells found at full width that is found on the axes
    spearman: float  # mean rank correlation of the two relevances
    explained: float  # share of the features' variance


def average_precision(scores: Tensor, right: Tensor) -> float:
    """Area under precision over recall as the cells are taken best first: scores [n], right [n] bool. 0 if nothing is right.

    Example:
        >>> import torch, texvlm
        >>> texvlm.embedding.average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]))
        0.833...
    """
    hits = right.flatten()[scores.flatten().argsort(descending=True, stable=True)].double()
    if not hits.any():
        return 0.0
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1, device=hits.device)
    return float((precision * hits).sum() / hits.sum())


def _ranks(values: Tensor) -> Tensor:
    return values.argsort(dim=-1).argsort(dim=-1).double()


def retrieval_kept(features: Tensor, queries: Tensor, pca: PCA, truth: Tensor | None = None, share: float = SHARE) -> Retrieval:
    """What the axes keep of what queries find at full width.

    Each query orders all cells by cosine, once at full width and once on the axes. With `truth`, the results are compared by mean
    average precision; without, by the share of the best `share` of the cells at full width that are among the best on the axes.

    Args:
        features: [n, D] or [B, D, h, w].
        queries: [Q, D] at full width.
        pca: the axes.
        truth: [Q, n] bool, or [Q, B, h, w]: what each query shall find. Queries that shall find nothing do not count.
        share: of the cells.

    Returns:
        Retrieval. `kept` of at least 0.95 is what 16 axes should reach.
    """
    rows = _rows(features)
    full = _unit(queries.detach().double()) @ _unit(rows).T
    laid = pca.transform_text(queries.detach().double()) @ pca.transform(rows).T
    a, b = _ranks(full), _ranks(laid)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    spearman = float(((a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt().clamp(min=1e-300)).mean())
    if truth is None:
        k = max(1, math.ceil(share * full.shape[1]))
        found = torch.zeros_like(full, dtype=torch.bool).scatter_(1, full.topk(k).indices, True)
        return Retrieval(kept := float(found.gather(1, laid.topk(k).indices).double().mean()), 1.0, kept, spearman, pca.explained)
    truth = truth.reshape(len(full), -1)
    asked = truth.any(1).nonzero()[:, 0].tolist()
    if not asked:
        raise ValueError("truth must name at least one cell for at least one query")
    best = sum(average_precision(full[q], truth[q]) for q in asked) / len(asked)
    here = sum(average_precision(laid[q], truth[q]) for q in asked) / len(asked)
    return Retrieval(here / best, best, here, spearman, pca.explained)


class Embedding:
    """A provider and the axes its features are laid on: what `build_channels(embedding=)` takes.

    Args:
        provider: see `EmbeddingProvider`.
        pca: the axes; by default the provider's own `pca`, where it has one. `Embedding.fit` finds them.
        kept: what the axes keep of the retrieval result, for the metadata; None if it has not been measured.

    Example:
        >>> import torch, texvlm
        >>> embedding = texvlm.Embedding(texvlm.DigitsEmbedding())
        >>> image = torch.rand(3, 64, 96)
        >>> embedding.planes(image).shape, embedding.query("seven").shape, embedding.relevance(image, "seven").shape
        (torch.Size([1, 16, 8, 12]), torch.Size([16]), torch.Size([1, 8, 12]))
    """

    def __init__(self, provider: EmbeddingProvider, pca: PCA | None = None, kept: float | None = None) -> None:
        if not isinstance(provider, EmbeddingProvider):
            raise TypeError(f"provider must have name, encode_image and encode_text, got {type(provider).__name__}")
        pca = getattr(provider, "pca", None) if pca is None else pca
        if pca is None:
            raise ValueError(
                f"{provider.name} brings no principal axes: find them with Embedding.fit(provider, pictures) or pass pca="
            )
        self.provider, self.pca = provider, pca
        self.kept = getattr(provider, "kept", None) if kept is None else kept

    @classmethod
    def fit(
        cls,
        provider: EmbeddingProvider,
        pictures: ImageLike | Iterable[ImageLike],
        texts: Sequence[str] | None = None,
        axes: int = AXES,
        centre: bool = False,
    ) -> Embedding:
        """Finds the axes on pictures (a batch, or an iterable of pictures or batches), as `PCA.fit` does; the means stay in by default.

        With `texts`, what the axes keep of the result of these queries on the last of the pictures is measured too; less than 95 %
        is a warning, and `kept` says how much.
        """
        several = (
            isinstance(pictures, Iterable) and not isinstance(pictures, Tensor) and not hasattr(pictures, "__array_interface__")
        )
        seen, features = Moments(), None
        for picture in pictures if several else (pictures,):  # type: ignore[union-attr]
            features = _features(provider, picture)  # type: ignore[arg-type]
            seen.update(features)
        if features is None:
            raise ValueError("pictures must hold at least one picture")
        if texts is None:
            return cls(provider, PCA.from_moments(seen, None, axes, centre))
        queries = provider.encode_text(list(texts)).detach()
        pca = PCA.from_moments(seen, Moments().update(queries), axes, centre)
        kept = retrieval_kept(features, queries, pca).kept
        if kept < WANTED:
            warnings.warn(
                f"{axes} axes keep {kept:.0%} of what these queries find with the {queries.shape[1]} dimensions of {provider.name}, "
                f"less than {WANTED:.0%}: rank places inside a picture by them, no more",
                stacklevel=2,
            )
        return cls(provider, pca, kept)

    @property
    def name(self) -> str:
        """For the metadata: the provider, and how much of its retrieval result the axes keep, where that was measured."""
        note = "" if self.kept is None else f", {self.kept:.0%} of its retrieval kept"
        return f"{self.provider.name} on {len(self.pca.axes)} axes{note}"

    def planes(self, image: ImageLike) -> Tensor:
        """Unit vectors [B, 16, h, w]; see `embedding_planes`."""
        return embedding_planes(image, self)

    def query(self, query: str | Sequence[str] | Tensor) -> Tensor:
        """A query on the axes, unit length: a text [16], texts [Q, 16], or vectors [..., D] (laid on the axes) or [..., 16] (kept)."""
        if isinstance(query, Tensor):
            if query.shape[-1] == self.pca.axes.shape[1]:
                return self.pca.transform_text(query)
            if query.shape[-1] != len(self.pca.axes):
                raise ValueError(
                    f"query must have {self.pca.axes.shape[1]} dimensions, or {len(self.pca.axes)} on the axes, got {list(query.shape)}"
                )
            return _unit(query if query.dtype == torch.float64 else query.float())
        if isinstance(query, str):
            return self.pca.transform_text(self.provider.encode_text([query]))[0]
        return self.pca.transform_text(self.provider.encode_text(list(query)))

    def relevance(self, source: ImageLike | Texture, query: str | Sequence[str] | Tensor) -> Tensor:
        """How well each place of a picture, or of a texture with channels 18-33, answers the query. See `relevance`."""
        return relevance(source if isinstance(source, Texture) else self.planes(source), self.query(query))


def _features(provider: EmbeddingProvider, image: ImageLike) -> Tensor:
    picture = as_rgb(image)
    picture = picture.float() / 255 if picture.dtype == torch.uint8 else picture
    features = provider.encode_image(torch.where(picture.isfinite(), picture, torch.zeros_like(picture)))
    if features.dim() != 4 or len(features) != len(picture) or not features.is_floating_point():
        raise ValueError(
            f"{provider.name}.encode_image must return floating point [B, D, h, w] for {list(picture.shape)}, "
            f"got {features.dtype} {list(features.shape)}"
        )
    return features


def embedding_planes(image: ImageLike, provider: EmbeddingProvider | Embedding, pca: PCA | None = None) -> Tensor:
    """Channels 18-33 on the provider's own grid: dense features on 16 principal axes, unit length.

    Cell (i, j) of the grid is centred at uv = ((j + 0.5) / w, (i + 0.5) / h): enlarge bilinearly, with `align_corners=False`, or let
    `Texture.sample` do it.

    Args:
        image: see `Texture`; grey is repeated to RGB, alpha dropped, values that are not finite count as 0.
        provider: see `EmbeddingProvider`, or an `Embedding`.
        pca: the axes; by default the provider's own.

    Returns:
        [B, 16, h, w] float32 (float64 from float64 features), unit length or zero. Differentiable as far as the provider is.

    Example:
        >>> import torch, texvlm
        >>> texvlm.embedding_planes(torch.rand(3, 64, 96), texvlm.DigitsEmbedding()).shape
        torch.Size([1, 16, 8, 12])
    """
    if not isinstance(provider, Embedding):
        return Embedding(provider, pca).planes(image)
    return (provider.pca if pca is None else pca).transform(_features(provider.provider, image))


def relevance(source: Tensor | Texture, query: Tensor | Sequence[float] | None = None, level: int = 0) -> Tensor:
    """How well each place answers a query: (1 + cosine) / 2 of the place's embedding and the query, both renormalised.

    1 is the same direction, 0.5 says nothing (and is what a place without embedding gets), 0 the opposite. Mips average vectors, so
    the coarser the level, the shorter they are: only directions are compared.

    Args:
        source: planes [B, K, h, w], or a texture with the channels embedding_0 ... embedding_15.
        query: [K] or [Q, K], from `Embedding.query`; of a texture by default the one it was built with.
        level: of the texture.

    Returns:
        [B, h, w], or [B, Q, h, w] for several queries, in [0, 1]; float32 (float64 from float64). Differentiable in both.

    Raises:
        ValueError: a texture without embedding or query, or a query of another length.

    Example:
        >>> import torch, texvlm
        >>> texvlm.relevance(torch.eye(16).view(1, 16, 4, 4), torch.eye(16)[5]).flatten()[4:7]
        tensor([0.5000, 1.0000, 0.5000])
    """
    if isinstance(source, Texture):
        if query is None and (query := source.meta.get("query_vector")) is None:
            raise ValueError("query: this texture was built without one, so pass the vector (see Embedding.query)")
        if str(source.meta.get("embedding_0", "")).startswith("absent"):
            raise ValueError(f"this texture has no embedding ({source.meta['embedding_0']})")
        channels = torch.tensor([source.index(f"embedding_{i}") for i in range(AXES)], device=source.data.device)
        source = source.level(level).index_select(1, channels)
    if source.dim() != 4:
        raise ValueError(f"planes must be [B, K, h, w], got {list(source.shape)}")
    work = torch.float64 if source.dtype == torch.float64 else torch.float32
    asked = torch.as_tensor(query, dtype=work, device=source.device)
    if asked.dim() not in (1, 2) or asked.shape[-1] != source.shape[1]:
        raise ValueError(f"query must be [{source.shape[1]}] or [Q, {source.shape[1]}], got {list(asked.shape)}")
    cosine = torch.einsum("...k,bkhw->b...hw", _unit(asked), _unit(source.to(work), 1))
    return (0.5 + 0.5 * cosine).clamp(0, 1)
