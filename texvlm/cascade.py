"""Stem `cascade`: the exact best k, and `select`: which places of a picture deserve a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._constants import constant
from texvlm._ext import acc_dtype, fake, integer, ops, real_tensor
from texvlm.channel_sources import COLOURS
from texvlm.channels import CHANNELS, build_channels
from texvlm.embedding import Embedding, relevance
from texvlm.learned import VALUE_CHANNELS, ValueNet
from texvlm.paths import MAX_CELL, SCORERS, CascadeConfig, Scorer, channels_of
from texvlm.stages import Run
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.embedding import EmbeddingProvider
    from texvlm.pictures import ImageLike
    from texvlm.selection import Selection


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
    if real_tensor("mask", mask).dim() == 1:
        indices, count = ops.compact(mask[None])
        return indices[0], count[0]
    return ops.compact(mask)


def select(
    image_or_texture: ImageLike | Texture,
    k: int = 273,
    cell: int = 16,
    path: str | CascadeConfig = "salience",
    query: str | Tensor | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    embedding: Embedding | EmbeddingProvider | None = None,
    scorer: Scorer | ValueNet | str | None = None,
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
        adaptive          salience, with as many cells as hold 0.9 of the energy of its scores, at most k: `count` varies
        video             salience and motion, and what the last frame kept (`memory`) is a little more likely to stay
        soft              salience of all cells, with weights in [0, 1] that sum to k and carry gradients, in `weights_all`
        learned           what a small network says that it is worth to read or look at, of the cell, its neighbours and coarser levels;
                          or by `scorer`, of its own terms (`Allocator`) or the features of "salience"
        predictive        cells that no neighbour predicts, those that differ most first: duplicates cost nothing, `count` varies
        multiscale        tokens of the level that each place deserves: detail, text that is too small to be read at a coarser level,
                          relevance to the query, allotted by `quadtree_cut`

    Args:
        image_or_texture: a picture (see `Texture`), or a texture with the channels that the path reads, by name (`build_channels`).
        k: the budget, at least 0.
        cell: the side of a cell in pixels, 1 to 4096; partial cells at the edges count as cells.
        path: one of these, or a `CascadeConfig`.
        query: a text or a vector (see `Embedding.query`), for "query", "multiscale" and a scorer that asks; a text needs `embedding`,
            and so does a vector where the texture has no embedding channels. Where nothing in the picture is more relevant than what
            says nothing (0.5), a warning says so (on the CPU: on a GPU that would wait for the device).
        weights: over the path's: of "edge", "entropy", "saliency", of any channel by its name ("text": its mean), of any term
            ("max:motion"), of "contiguity" (the mean score of the neighbours); on "multiscale" of "detail", "text" and "query".
        embedding: what reads the query and the picture.
        scorer: for "learned", an `Allocator`, or any features [B, n, terms] -> scores [B, n]; or a `learned.ValueNet`, or the folder or
            name of one: with path="multiscale" and scorer="default" the network that comes with the package allots tokens of mixed levels.
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
    config = path if isinstance(path, CascadeConfig) else CascadeConfig.preset(path)
    config = (config if scorer is None else replace(config, scorer=scorer)).weighed(weights)
    k, cell = integer("k", k, 0), integer("cell", cell)
    if not 1 <= cell <= MAX_CELL:
        raise ValueError(f"cell must be from 1 to {MAX_CELL} pixels, got {cell}")
    if set(weights or {}) - {"contiguity"} and hasattr(config.scorer, "terms"):
        raise ValueError(f"weights must be of contiguity where the scorer brings its own terms, got {', '.join(weights or {})}")
    if query is not None and not (config.asks or "mean:attention" in config.terms or config.allocates):
        raise ValueError(f"path={path!r} takes no query; 'query', 'learned', 'multiscale' and a scorer that asks do")
    if query is None and config.asks and not (isinstance(image_or_texture, Texture) and "query_vector" in image_or_texture.meta):
        raise ValueError("this scorer needs query=, or a texture with embedding channels built for one")
    if query is None and "mean:attention" in config.terms and not _has_attention(image_or_texture):
        raise ValueError(f"path={path!r} needs query=, or a texture with attention or embedding channels built for one")
    with torch.set_grad_enabled(torch.is_grad_enabled() and config.temperature is not None):
        texture, config, vector = _prepared(image_or_texture, config, query, embedding, previous)
        run = Run(texture, config, k, cell, vector, memory)
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
    if embedding is not None and not isinstance(embedding, Embedding):
        embedding = Embedding(embedding)
    if isinstance(query, str) and embedding is None:
        raise ValueError("query: a text needs embedding=, which reads it (DigitsEmbedding, ClipEmbedding), or pass its vector")
    vector = None if query is None else embedding.query(query) if embedding is not None else real_tensor("query", query)
    if isinstance(source, Texture):
        if vector is None and (config.asks or "attention" not in source.names) and "query_vector" in source.meta:
            vector = constant(source.meta["query_vector"], acc_dtype(source.data.dtype), source.data.device)
        if vector is None or not (config.asks or "embedding_0" in source.names):
            return source, config, None
        if config.asks:
            return source, config, vector.reshape(-1, vector.shape[-1]).to(source.data.device)
        terms = {("cosine" if t == "mean:attention" else t): w for t, w in config.terms.items()}
        return source, replace(config, terms=terms), vector.reshape(1, -1).to(source.data.device)
    given = {}
    if vector is not None:
        if embedding is None:
            raise ValueError("query: a picture needs embedding=, which says what its places hold")
        given["embedding"] = embedding.planes(source)
        if not config.asks:
            given = {"attention": relevance(given["embedding"], vector.reshape(-1))}
        vector = vector.reshape(-1, vector.shape[-1])
    wanted = needed_channels(config) | given.keys()
    names = [channel.name for channel in CHANNELS if channel.name in wanted] or ["red"]
    texture = build_channels(source, previous, channels=names, given=given)
    return texture, config, vector.to(texture.data.device) if vector is not None and config.asks else None


def needed_channels(config: CascadeConfig) -> set[str]:
    """The channels that a configuration reads, besides the embedding that a query is put to."""
    if config.allocates:
        return {*(COLOURS if config.value_net is None else VALUE_CHANNELS)}
    needs: set[str] = set().union(*map(channels_of, _stage_terms(config)))
    return needs | {"cluster"} if config.schedule == "clusters" else needs


def _stage_terms(config: CascadeConfig) -> dict[str, float]:
    """The terms that some stage counts."""
    terms = dict(config.terms)
    if config.query_stages is not None:
        terms = {**SCORERS["salience"], **terms}
    return {term: weight for term, weight in terms.items() if weight != 0 or config.scorer is not None}


@fake("select_topk")
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    batch, count = scores.shape
    size = (batch, torch.sym_min(k, count))
    return scores.new_empty(size), scores.new_empty(size, dtype=torch.int64)


@fake("select_topk_backward")
def _(grad: Tensor, indices: Tensor, count: int) -> Tensor:
    return grad.new_empty((grad.shape[0], count))


@fake("keep_topk")
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty((scores.shape[0], torch.sym_min(k, scores.shape[1])), dtype=torch.int64)


@fake("compact")
def _(mask: Tensor) -> tuple[Tensor, Tensor]:
    return mask.new_empty(mask.shape, dtype=torch.int64), mask.new_empty(mask.shape[:1], dtype=torch.int64)
