"""Stem `channels`: the table of the 40 channels, and a texture of them from a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, coordinates, fake, fake_gradients, integer, ops, real_tensor, texel_dtype
from texvlm.channel_sources import EMBEDDING, Sources
from texvlm.pictures import as_rgb
from texvlm.pyramid import levels_or_all, texel_count
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.embedding import Embedding, EmbeddingProvider
    from texvlm.pictures import ImageLike


class Channel(NamedTuple):
    """One row of `CHANNELS`: where it is, what it means, what values it takes, how texels become one on the next level, its halo.

    The halo is how far away a pixel may be that a texel of level 0 depends on; None: anywhere, or on something else than pictures.
    """

    index: int  # type: ignore[assignment]  # the tuple method of this name gives way to the field that the table documents
    name: str
    description: str
    range: tuple[float, float]
    reducer: str
    halo: int | None = None


_UNIT = (0.0, 1.0)
_SIGNED = (-1.0, 1.0)
_ANY = (0.0, float("inf"))
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("red", "red as given, sRGB", _UNIT, "mean", 0),
    ("green", "green as given, sRGB", _UNIT, "mean", 0),
    ("blue", "blue as given, sRGB", _UNIT, "mean", 0),
    ("edge", "Sobel gradient magnitude of luma over its largest possible value", _UNIT, "max", 1),
    ("contrast_edge", "Sobel magnitude of the locally contrast-normalised luma: low-contrast text and edges", _UNIT, "max", 5),
    ("high_pass", "luma minus its low pass", _SIGNED, "mean", 2),
    ("low_pass", "binomial low pass of luma", _UNIT, "mean", 2),
    ("motion", "magnitude of the change of luma against the previous picture", _UNIT, "max", 0),
    ("saliency", "what stands out: centre-surround differences of colour, edges and motion; no centre prior", _UNIT, "mean"),
    ("x", "position of the texel centre, left to right", _UNIT, "mean", 0),
    ("y", "position of the texel centre, top to bottom", _UNIT, "mean", 0),
    ("eccentricity", "distance from the fixation, 1 at the farthest corner", _UNIT, "mean", 0),
    ("cluster", "superpixel id", _ANY, "mode"),
    ("cluster_distance", "distance from the superpixel's centroid over its radius", _ANY, "mean"),
    ("cluster_size", "the superpixel's share of the picture", _UNIT, "mean"),
    ("previous_relevance", "last frame's query relevance, warped by flow", _UNIT, "mean"),
    ("previous_saliency", "last frame's saliency, warped by flow", _UNIT, "mean"),
    ("fixation_history", "decayed sum of Gaussians at past fixations, warped by flow", _UNIT, "max"),
    *((name, f"dense image-text embedding, principal axis {i}", _SIGNED, "mean") for i, name in enumerate(EMBEDDING)),
    ("edge_distance", "exact Euclidean distance to the nearest edge over the picture's diagonal", _UNIT, "min"),
    ("previous_attention", "attention of the previous layer on this place", _UNIT, "mean"),
    ("attention", "attention of the current layer on this place", _UNIT, "mean"),
    ("gaze_history", "where the foveas have been", _UNIT, "max"),
    ("boundary", "object boundary: superpixel border supported by an edge", _UNIT, "max"),
    ("text", "text region", _UNIT, "max"),
)

CHANNELS: tuple[Channel, ...] = tuple(Channel(index, *row) for index, row in enumerate(_ROWS))
"""The 40 channels: index, name, description, range (of level 0 and of every mip), reducer and halo. Stable."""

LOCAL: tuple[int, ...] = tuple(channel.index for channel in CHANNELS if channel.halo is not None)
"""The channels that pixels nearby decide: what `update_channels` keeps up to date."""

_FORMULAS = {
    **dict.fromkeys(("red", "green", "blue", "edge", "contrast_edge", "high_pass", "low_pass"), "picture"),
    **dict.fromkeys(("saliency", "edge_distance"), "picture"),
    **dict.fromkeys(("x", "y"), "position"),
    "eccentricity": "centre of the picture",
    "motion": "absent: no previous picture",
}
"""What the op `build_channels` computes itself, and from what, where there is nothing but a picture."""

MINIMAL: tuple[int, ...] = tuple(channel.index for channel in CHANNELS if channel.name in _FORMULAS)
"""The channels that need nothing but pictures and a fixation: `channels="minimal"`."""

_BY_NAME = {channel.name: channel.index for channel in CHANNELS}
GROUPS = {"all": tuple(range(len(CHANNELS))), "minimal": MINIMAL, "embedding": tuple(_BY_NAME[name] for name in EMBEDDING)}
"""Names of several channels, wherever channels are named."""


def channel_indices(channels: str | Sequence[str | int] | None) -> list[int]:
    """The channels argument as indices into `CHANNELS`: names, indices and names of `GROUPS`; None is all 40.

    A group stands for those of its channels that are not named by themselves.
    """
    channels = ["all"] if channels is None else [channels] if isinstance(channels, str) else list(channels)
    wanted = [channel if isinstance(channel, str) and channel in GROUPS else _index_of(channel) for channel in channels]
    named = [index for index in wanted if isinstance(index, int)]
    if not wanted or len(set(named)) != len(named):
        raise ValueError(f"channels must name at least one channel, each once, got {channels}")
    members = ([w] if isinstance(w, int) else [index for index in GROUPS[w] if index not in named] for w in wanted)
    return list(dict.fromkeys(index for some in members for index in some))


def _index_of(channel: str | int) -> int:
    if isinstance(channel, str):
        if channel not in _BY_NAME:
            known = ", ".join(name for name in (*GROUPS, *_BY_NAME) if name not in EMBEDDING)
            raise ValueError(
                f"no channel {channel!r}; leave channels out for all, or name some: {known}, embedding_0 to embedding_15"
            )
        return _BY_NAME[channel]
    if isinstance(channel, bool) or not hasattr(channel, "__index__") or not 0 <= channel < len(CHANNELS):
        raise ValueError(f"channels must be names or indices from 0 to {len(CHANNELS) - 1}, got {channel!r}")
    return int(channel)


def build_channels(
    image: ImageLike,
    previous: ImageLike | Texture | None = None,
    query: str | Tensor | None = None,
    channels: str | Sequence[str | int] | None = None,
    *,
    fixation: Tensor | None = None,
    levels: int | None = None,
    dtype: torch.dtype | None = None,
    embedding: Embedding | EmbeddingProvider | None = None,
    fixations: Tensor | None = None,
    gaze: Tensor | None = None,
    flow: Tensor | tuple[Tensor, Tensor | None] | str | None = "auto",
    given: Mapping[str, Tensor] | None = None,
    n_superpixels: int = 50,
) -> Texture:
    """A mipmapped texture of named channels of a picture: forty answers about each place, or those that are asked for.

    What is local (0-6, 9-11) is written in one pass over the picture; other channels are planes, made once and enlarged while the texels
    are written. Nothing is computed for a channel that is not asked for, and nothing for one that is `given`.

    Args:
        image: see `Texture`; RGB in [0, 1] (uint8 is divided by 255). Grey is repeated to RGB, alpha dropped; values that are not
            finite count as 0, so no channel is ever NaN.
        previous: the picture before it, of the same shape and dtype, for motion and saliency; or the texture that this function made of
            it, which also brings its saliency, its relevance to its query, and its histories (15-17, 37), all moved along the flow.
        query: what is looked for: a text, or a vector [16] or [D] (see `Embedding.query`). It needs `embedding` and is kept in
            `meta["query_vector"]`, for `relevance(texture)`, and for channel 15 of the next frame.
        channels: which ones, in the order wanted: None for all 40, or names and indices of `CHANNELS`; "all", "minimal" (0-11 and 34)
            and "embedding" (18-33) are names of several. One without a source (no previous picture, no embedding) is zero, and `meta`
            says so.
        fixation: where the eye is, uv [B, 2] (or [2]), for the eccentricity; the centre by default. One that is not finite gives 0.
        levels: of the pyramid; all by default.
        dtype: of the texels: float32, float64, float16 or bfloat16. By default the picture's, float32 for uint8. Arithmetic is in
            float32 (float64 for a double picture) and rounded once. bfloat16 cannot tell the values of x, y and cluster apart: with
            these channels it is refused, and not the default of a bfloat16 picture, which gets float32.
        embedding: for channels 18-33: an `Embedding`, or a provider that brings its axes (`DigitsEmbedding`).
        fixations: past fixations, uv [B, P, 2] or [P, 2], the latest last, for channel 17: see `fixation_history`.
        gaze: where the foveas have been, uv [B, P, 2] or [P, 2], for channel 37: see `gaze_history`.
        flow: from this picture to the previous one, [B, 2, h, w], or that and occlusion [B, h, w], as `optical_flow` gives them.
            "auto" estimates it where there is something to move along it (15-17, 37, or all 40 channels, with a previous picture). Where
            there is a flow, motion and saliency are compensated by it. None: no flow.
        given: planes [B, h, w], at most as large as the picture, that replace what would be computed, by channel name: `saliency`,
            `text` or `motion` of another model, `attention` and `previous_attention` of token grids, `previous_relevance` and
            `previous_saliency` (of the previous picture; moved along the flow), `cluster` (labels of a segmentation, from which 13, 14
            and 38 follow too), `embedding` (unit vectors [B, 16, h, w]).
        n_superpixels: how many, or as many as there are pixels if these are fewer; for channels 12-14 and 38.

    Returns:
        Texture, data [B, T, len(channels)] with `names`, one reducer per channel as in `CHANNELS`, and `meta`: for each channel's name
        where it came from, or "absent: ..." and why it is zero.

        Differentiable in `image` (0-6, 8, and 7), in `previous` (7, 8), in `fixation` (11) and in the planes that are given; x, y,
        edge_distance, clusters, boundary and text have no gradient. At kinks: square roots and |x| have gradient 0 at 0, contrast_edge
        none where it is cut off at 1, max and min of the mips pass theirs to the first extremal texel. Second derivatives raise.

    Raises:
        ValueError: an unknown or repeated channel, another shape, dtype or device of `previous` or of a given plane, channel counts
            other than 1, 3 and 4, a query without an embedding.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.build_channels(torch.rand(3, 48, 64), channels=["edge", "motion", "saliency"])
        >>> texture.data.shape, texture.meta["motion"]
        (torch.Size([1, 4095, 3]), 'absent: no previous picture')
    """
    given = dict(given or {})
    if strangers := sorted(given.keys() - {*_BY_NAME, "embedding"}):
        raise ValueError(f"given must name channels or 'embedding', got {', '.join(strangers)}")
    rows = [CHANNELS[i] for i in channel_indices(channels)]
    image = as_rgb(image)
    sources = Sources(image, previous, [row.name for row in rows], given)
    sources.follow(flow, always=len(rows) == len(CHANNELS))
    sources.add_previous()
    sources.add_histories(fixations, gaze)
    sources.add_clusters(integer("n_superpixels", n_superpixels, 1))
    sources.add_text()
    vector = sources.add_embedding(embedding, query)

    picture = sources.picture
    height, width = picture.shape[2:]
    levels = levels_or_all(levels, height, width)
    if fixation is not None:
        fixation = coordinates("fixation", fixation, picture).to(picture.device)
        if fixation.dim() == 1:
            fixation = fixation[None]
        if fixation.shape[-2:] == (1, 2) and fixation.dim() == 2:
            fixation = fixation.expand(picture.shape[0], 2)
    fine = [row.name for row in rows if row.name in ("x", "y", "cluster")]
    if dtype is None and image.is_floating_point():
        dtype = torch.float32 if image.dtype == torch.bfloat16 and fine else image.dtype
    if dtype == torch.bfloat16 and fine:
        raise ValueError(f"dtype must be float32, float64 or float16 for the channels {', '.join(fine)}: bfloat16 has 8 bits")
    if dtype == torch.float16 and "cluster" in fine and n_superpixels > 2048 and "cluster" not in given:
        raise ValueError(f"dtype float16 tells 2048 clusters apart, got n_superpixels = {n_superpixels}; float32 holds them all")
    given_channels = [_BY_NAME[name] for name in sources.names]
    data = ops.build_channels(
        picture, [row.index for row in rows], levels, sources.planes, given_channels, dtype, sources.before, fixation
    )
    origins = dict(_FORMULAS)
    if fixation is not None:
        origins["eccentricity"] = "fixation"
    if sources.before is not None:
        pair = "picture and previous picture" if sources.field is None else "picture, previous picture and flow"
        origins |= {"motion": pair, "saliency": pair}
    origins |= sources.notes
    meta: dict[str, Any] = {row.name: origins.get(row.name, "absent: not given") for row in rows}
    if vector is not None:
        meta["query_vector"] = tuple(vector.tolist())  # a pytree's context is compared
    return Texture.from_data(data, height, width, levels, [row.reducer for row in rows], [row.name for row in rows], meta)


def channel_planes(image: Tensor) -> Tensor:
    """What `update_channels` remembers of a picture [B, 3, H, W]: [4, B, H, W], float32 (float64 beside a double picture), zero.

    Luma, edge, luma normalised by its local contrast, and motion: those of them that its channels need.
    """
    if real_tensor("image", image).dim() != 4 or image.shape[1] != 3:
        raise ValueError(f"image must be [B, 3, H, W], got {list(image.shape)}")
    batch, _, height, width = image.shape
    zero = image.new_zeros((4 * batch, 1, 1), dtype=acc_dtype(image.dtype))
    # Made by an op, so that they lie in huge pages: scattered tiles are on thousands of small ones, which takes a third longer.
    return ops.enlarge(zero, height, width).view(4, batch, height, width)


def update_channels(
    texture: Texture,
    planes: Tensor,
    image: Tensor,
    dirty: Tensor,
    before: Tensor,
    tile: int = 32,
    *,
    fixation: Tensor | None = None,
    first: bool = False,
) -> Texture:
    """Brings a texture of local channels up to the next picture, in place, computing only what depends on tiles that changed.

    The result is bit for bit that of `build_channels(image, previous=the picture before, flow=None)`, on all levels. Nothing is read back
    from a GPU. Where most of the picture depends on what is dirty, all of it is computed, which then costs no more.

    Args:
        texture: of channels of `LOCAL` (0-7 and 9-11), of the picture before; any texel dtype that `build_channels` gives them.
        planes: of the same picture, from `channel_planes`; those that the channels need are changed in place.
        image: [B, 3, H, W], uint8 or floating point. Outside dirty tiles it equals the picture before.
        dirty: bool [B, ceil(H / tile), ceil(W / tile)], contiguous: the tiles in which the picture changed (see `dirty_tiles`).
        before: the same of the picture before: there, where nothing is dirty any more, motion returns to 0.
        tile: side of a tile in pixels, at least 8.
        fixation: as for `build_channels`, float [B, 2]; the same at every call, or all of eccentricity (11) must be made anew.
        first: texture and planes hold nothing yet: all is computed, and motion is 0.

    Returns:
        The same texture. Not differentiable: a tensor that requires a gradient raises.

    Raises:
        ValueError: another channel, shape, dtype or device; nothing is changed then.

    Example:
        >>> import torch, texvlm
        >>> frames = torch.rand(3, 64, 64).repeat(2, 1, 1, 1)
        >>> frames[1, :, 4:8, 4:8] = 1
        >>> texture, planes = texvlm.build_channels(frames[:1], channels=["edge", "motion"]), texvlm.channel_planes(frames[:1])
        >>> dirty = torch.zeros(1, 2, 2, dtype=torch.bool)
        >>> _ = texvlm.update_channels(texture, planes, frames[:1], dirty, dirty, first=True)
        >>> dirty[0, 0, 0] = True
        >>> _ = texvlm.update_channels(texture, planes, frames[1:], dirty, torch.zeros_like(dirty))
        >>> torch.equal(texture.data, texvlm.build_channels(frames[1:], frames[:1], channels=["edge", "motion"]).data)
        True
    """
    tile = integer("tile", tile, 8)
    if fixation is not None:
        fixation = real_tensor("fixation", fixation).to(planes.device, planes.dtype)
    indices = channel_indices(texture.names)
    ops.update_channels(texture.data, planes, image, dirty, before, indices, texture.levels, tile, fixation, first)
    return texture


def _plane(image: ImageLike, channel: str) -> Tensor:
    return build_channels(image, channels=[channel], levels=1).level(0)[:, 0]


def edges(image: ImageLike) -> Tensor:
    """Channel 3 by itself: the Sobel magnitude of luma over the largest one that there can be.

    Args:
        image: see `build_channels`.

    Returns:
        [B, H, W] in [0, 1] for values in [0, 1], in the picture's dtype (float32 for uint8), borders replicated. Differentiable in
        the picture, with gradient 0 where the magnitude is 0.

    Example:
        >>> import torch, texvlm
        >>> step = torch.zeros(1, 4, 4).index_fill(2, torch.tensor([2, 3]), 1.0)
        >>> (texvlm.edges(step)[0, 1] * 5**0.5).round(decimals=4).tolist()
        [0.0, 2.0, 2.0, 0.0]
    """
    return _plane(image, "edge")


def contrast_edges(image: ImageLike) -> Tensor:
    """Channel 4 by itself: edges of the locally contrast-normalised luma, which finds print that is barely darker than its paper.

    The Sobel magnitude of (I - mean) / (standard deviation + 0.02), both over 9 x 9 pixels, over twice the largest magnitude that
    there can be on values in [0, 1], cut off at 1. Unlike `edges` it is nearly the same at any contrast well above 0.02.

    Args:
        image: see `build_channels`.

    Returns:
        [B, H, W] in [0, 1], in the picture's dtype (float32 for uint8). Differentiable in the picture, with gradient 0 where the
        magnitude is 0 and where it is cut off.

    Example:
        >>> import torch, texvlm
        >>> faint = torch.full((1, 32, 32), 0.5)
        >>> faint[:, :, 16:] += 0.1
        >>> (texvlm.edges(faint).amax() < 0.1).item(), (texvlm.contrast_edges(faint).amax() > 0.5).item()
        (True, True)
    """
    return _plane(image, "contrast_edge")


@fake("build_channels")
def _(
    image: Tensor,
    channels: list[int],
    levels: int,
    given: Sequence[Tensor],
    given_channels: Sequence[int],
    dtype: torch.dtype | None = None,
    previous: Tensor | None = None,
    fixation: Tensor | None = None,
) -> Tensor:
    batch, _, height, width = image.shape
    return image.new_empty((batch, texel_count(height, width, levels), len(channels)), dtype=texel_dtype(image, dtype))


fake_gradients("build_channels", dtype=acc_dtype)


@fake("update_channels")
def _(data: Tensor) -> None:
    """Nothing is returned."""
