"""Stem `channels`: the table of the 40 channels, and a texture of them from a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, fake, ops
from texvlm.pyramid import level_count, texel_count
from texvlm.salience import as_previous, as_rgb
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.texture import ImageLike


class Channel(NamedTuple):
    """One row of `CHANNELS`: where it is, what it means, what values it takes, and how texels become one on the next level."""

    index: int  # type: ignore[assignment]  # the tuple method of this name gives way to the field that the table documents
    name: str
    description: str
    range: tuple[float, float]
    reducer: str


_UNIT = (0.0, 1.0)
_SIGNED = (-1.0, 1.0)
_ANY = (0.0, float("inf"))
_ROWS: tuple[tuple[str, str, tuple[float, float], str], ...] = (
    ("red", "red as given, sRGB", _UNIT, "mean"),
    ("green", "green as given, sRGB", _UNIT, "mean"),
    ("blue", "blue as given, sRGB", _UNIT, "mean"),
    ("edge", "Sobel gradient magnitude of luma over its largest possible value", _UNIT, "max"),
    ("contrast_edge", "Sobel magnitude of the locally contrast-normalised luma: low-contrast text and edges", _UNIT, "max"),
    ("high_pass", "luma minus its low pass", _SIGNED, "mean"),
    ("low_pass", "binomial low pass of luma", _UNIT, "mean"),
    ("motion", "magnitude of the change of luma against the previous picture", _UNIT, "max"),
    ("saliency", "what stands out: centre-surround differences of colour, edges and motion; no centre prior", _UNIT, "mean"),
    ("x", "position of the texel centre, left to right", _UNIT, "mean"),
    ("y", "position of the texel centre, top to bottom", _UNIT, "mean"),
    ("eccentricity", "distance from the fixation, 1 at the farthest corner", _UNIT, "mean"),
    ("cluster", "superpixel id", _ANY, "mode"),
    ("cluster_distance", "distance from the superpixel's centroid over its radius", _ANY, "mean"),
    ("cluster_size", "the superpixel's share of the picture", _UNIT, "mean"),
    ("previous_relevance", "last frame's query relevance, warped by flow", _UNIT, "mean"),
    ("previous_saliency", "last frame's saliency, warped by flow", _UNIT, "mean"),
    ("fixation_history", "decayed sum of Gaussians at past fixations, warped by flow", _UNIT, "max"),
    *((f"embedding_{i}", f"dense image-text embedding, principal axis {i}", _SIGNED, "mean") for i in range(16)),
    ("edge_distance", "exact Euclidean distance to the nearest edge over the picture's diagonal", _UNIT, "min"),
    ("previous_attention", "attention of the previous layer on this place", _UNIT, "mean"),
    ("attention", "attention of the current layer on this place", _UNIT, "mean"),
    ("gaze_history", "where the foveas have been", _UNIT, "max"),
    ("boundary", "object boundary: superpixel border supported by an edge", _UNIT, "max"),
    ("text", "text region", _UNIT, "max"),
)

CHANNELS: tuple[Channel, ...] = tuple(Channel(index, *row) for index, row in enumerate(_ROWS))
"""The 40 channels: index, name, description, range (of level 0 and of every mip) and reducer. Stable."""

MINIMAL: tuple[int, ...] = (*range(12), 34)
"""The channels that need nothing but pictures and a fixation: `channels="minimal"`."""

_BY_NAME = {channel.name: channel.index for channel in CHANNELS}
_SOURCES = {
    **dict.fromkeys(range(9), "picture"),
    7: "picture and previous picture",
    9: "position",
    10: "position",
    34: "picture",
}
_ABSENT = "absent: not part of this version"


def channel_indices(channels: str | Sequence[str | int] | None) -> list[int]:
    """The channels argument as indices into `CHANNELS`: None is all 40, "minimal" is `MINIMAL`, else names or indices."""
    if channels is None:
        return list(range(len(CHANNELS)))
    if isinstance(channels, str):
        channels = MINIMAL if channels == "minimal" else [channels]
    indices = []
    for channel in channels:
        if isinstance(channel, str):
            if channel not in _BY_NAME:
                raise ValueError(f"no channel {channel!r}; channels are 'minimal' (as the whole argument), {', '.join(_BY_NAME)}")
            channel = _BY_NAME[channel]
        if not 0 <= channel < len(CHANNELS):
            raise ValueError(f"channels must be names or indices from 0 to {len(CHANNELS) - 1}, got {channel}")
        indices.append(int(channel))
    if not indices or len(set(indices)) != len(indices):
        raise ValueError(f"channels must name at least one channel, each once, got {list(channels)}")
    return indices


def _source(index: int, previous: bool, fixation: bool) -> str:
    if index == 7 and not previous:
        return "absent: no previous picture"
    if index == 8 and previous:
        return "picture and previous picture"
    if index == 11:
        return "fixation" if fixation else "centre of the picture"
    return _SOURCES.get(index, _ABSENT)


def build_channels(
    image: ImageLike,
    previous: ImageLike | None = None,
    query: object = None,
    channels: str | Sequence[str | int] | None = None,
    *,
    fixation: Tensor | None = None,
    levels: int | None = None,
    dtype: torch.dtype | None = None,
) -> Texture:
    """A mipmapped texture of named channels of a picture, written in one pass.

    Args:
        image: see `Texture`; RGB in [0, 1] (uint8 is divided by 255). Grey is repeated to RGB, alpha dropped; values that are not
            finite count as 0, so no channel is ever NaN.
        previous: the picture before it, of the same shape and dtype, for motion and saliency.
        query: for the embedding channels, which this version does not build: must be None.
        channels: which ones, in the order wanted: "minimal" (0-11 and 34), names or indices of `CHANNELS`. Nothing is computed for a
            channel that is not asked for. None is the layout of all 40: those that this version does not build (12-33 and 35-39) are
            zero, so that indices are already the final ones; it takes three times the memory of "minimal".
        fixation: where the eye is, uv [B, 2] (or [2]), for the eccentricity; the centre by default. One that is not finite gives 0.
        levels: of the pyramid; all by default.
        dtype: of the texels: float32, float64, float16 or bfloat16. By default the picture's, float32 for uint8. Arithmetic is in
            float32 (float64 for a double picture) and rounded once.

    Returns:
        Texture, data [B, T, len(channels)] with `names`, one reducer per channel as in `CHANNELS`, and `meta`: for each channel's name
        where it came from, or "absent: ..." and why it is zero.

        Differentiable in `image` (0-6, 8, and 7), in `previous` (7, 8) and in `fixation` (11); x, y and edge_distance have no
        gradient. At kinks: square roots and |x| have gradient 0 at 0, contrast_edge none where it is cut off at 1, max and min of the
        mips pass theirs to the first extremal texel. Second derivatives raise.

    Raises:
        ValueError: an unknown or repeated channel, another shape or dtype of `previous`, channel counts other than 1, 3 and 4.
        NotImplementedError: a query.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.build_channels(torch.rand(3, 48, 64), channels=["edge", "motion", "saliency"])
        >>> texture.data.shape, texture.meta["motion"]
        (torch.Size([1, 4095, 3]), 'absent: no previous picture')
    """
    if query is not None:
        raise NotImplementedError("query: the embedding channels are not part of this version; pass query=None")
    picture = as_rgb(image)
    before = as_previous(previous, picture)
    indices = channel_indices(channels)
    height, width = picture.shape[2:]
    levels = level_count(height, width) if levels is None else levels
    if fixation is not None:
        fixation = fixation.to(picture.device, acc_dtype(picture.dtype))
        if fixation.dim() == 1:
            fixation = fixation[None]
        if fixation.shape[-2:] == (1, 2) and fixation.dim() == 2:
            fixation = fixation.expand(picture.shape[0], 2)
    data = ops.build_channels(picture, indices, levels, [], [], dtype, before, fixation)
    rows = [CHANNELS[i] for i in indices]
    meta = {row.name: _source(row.index, before is not None, fixation is not None) for row in rows}
    return Texture.from_data(data, height, width, levels, [row.reducer for row in rows], [row.name for row in rows], meta)


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
    dtype = dtype or (torch.float32 if image.dtype == torch.uint8 else image.dtype)
    return image.new_empty((batch, texel_count(height, width, levels), len(channels)), dtype=dtype)


@fake("build_channels_backward")
def _(
    grad: Tensor,
    data: Tensor,
    image: Tensor,
    channels: list[int],
    levels: int,
    given: Sequence[Tensor],
    given_channels: Sequence[int],
    mask: list[bool],
    previous: Tensor | None = None,
    fixation: Tensor | None = None,
) -> list[Tensor]:
    def like(value: Tensor | None, wanted: bool) -> Tensor:
        if not wanted or value is None:
            return image.new_empty(0, dtype=torch.float32)
        return value.new_empty(value.shape, dtype=acc_dtype(image.dtype if value.dim() == 4 else value.dtype))

    return [like(value, wanted) for value, wanted in zip((image, previous, fixation, *given), mask, strict=True)]
