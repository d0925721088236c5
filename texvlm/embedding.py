"""Stem `embedding`: channels 18-33, dense image-text features on 16 principal axes, and what a query finds in them.

A provider turns pictures and texts into vectors of one space; `PCA` (texvlm.pca) keeps 16 axes of it; `Embedding` is both, which is
what `build_channels(embedding=)` takes; `relevance` compares a query with every place. What the axes keep is measured in
texvlm.retrieval.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from texvlm._constants import constant
from texvlm._ext import real_tensor
from texvlm.digits import DigitsEmbedding
from texvlm.pca import AXES, PCA, Moments, steady_einsum, unit
from texvlm.pictures import as_float, as_rgb
from texvlm.providers.clip import ClipEmbedding
from texvlm.retrieval import WANTED, Retrieval, average_precision, retrieval_kept
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

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
        if not isinstance(pca, PCA):
            raise TypeError(f"pca must be a texvlm.PCA, got {type(pca).__name__}")
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
            if not query.dim():
                raise ValueError("query must be a vector, or one each, got a number")
            if query.shape[-1] == self.pca.axes.shape[1]:
                return self.pca.transform_text(query)
            if query.shape[-1] != len(self.pca.axes):
                raise ValueError(
                    f"query must have {self.pca.axes.shape[1]} dimensions, or {len(self.pca.axes)} on the axes, got {list(query.shape)}"
                )
            return unit(query if query.dtype == torch.float64 else query.float())
        if isinstance(query, str):
            return self.pca.transform_text(self.provider.encode_text([query]))[0]
        if not isinstance(query, Sequence):
            raise TypeError(f"query must be a text, texts or vectors, got {type(query).__name__}")
        return self.pca.transform_text(self.provider.encode_text(list(query)))

    def relevance(self, source: ImageLike | Texture, query: str | Sequence[str] | Tensor) -> Tensor:
        """How well each place of a picture, or of a texture with channels 18-33, answers the query. See `relevance`."""
        return relevance(source if isinstance(source, Texture) else self.planes(source), self.query(query))


def _features(provider: EmbeddingProvider, image: ImageLike) -> Tensor:
    picture = as_float(as_rgb(image))
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
        planes = source.level(level)
        source = torch.stack([planes[:, source.index(f"embedding_{i}")] for i in range(AXES)], 1)
    if real_tensor("source", source).dim() != 4:
        raise ValueError(f"source must be planes [B, K, h, w] or a texture, got {list(source.shape)}")
    work = torch.float64 if source.dtype == torch.float64 else torch.float32
    asked = (
        constant(query, work, source.device)
        if isinstance(query, tuple)
        else torch.as_tensor(query, dtype=work, device=source.device)
    )
    if asked.dim() not in (1, 2) or asked.shape[-1] != source.shape[1]:
        raise ValueError(f"query must be [{source.shape[1]}] or [Q, {source.shape[1]}], got {list(asked.shape)}")
    cosine = steady_einsum("...k,bkhw->b...hw", unit(asked), unit(source.to(work), 1))
    return (0.5 + 0.5 * cosine).clamp(0, 1)
