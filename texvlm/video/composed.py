"""A stream's texture where its channels live in several buffers: those that are global or lag have planes of their own.

Writing one of 40 interleaved channels costs nearly half of copying them all, so what changes as a whole is interleaved when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from texvlm._ext import ops
from texvlm.channel_sources import EMBEDDING, HISTORIES, PREVIOUS
from texvlm.channels import CHANNELS
from texvlm.embedding import Embedding
from texvlm.texture import Texture, _flatten, _unflatten, pytree
from texvlm.video.lagged import LAGGED

ROWS = {channel.name: channel for channel in CHANNELS}


def channel_notes(names: Collection[str], embedding: Embedding | None, query: Tensor | None, exact: bool) -> dict[str, Any]:
    """A texture's `meta`: of each channel where it comes from, and what happens to it between frames."""
    notes = dict.fromkeys(ROWS, "picture, exact")
    notes |= dict.fromkeys(("motion", "saliency"), "picture and previous picture, exact")
    notes |= {"x": "position", "y": "position", "eccentricity": "fixation"}
    notes |= dict.fromkeys(LAGGED, "picture" if exact else "picture, lagged: of the key frame, moved along the flow")
    notes |= dict.fromkeys((*PREVIOUS, *HISTORIES), "frames before, moved along the flow")
    notes |= {"attention": "absent: not given", "previous_attention": "absent: not given"}
    if embedding is None:
        notes |= dict.fromkeys((*EMBEDDING, "previous_relevance"), "absent: no embedding given")
    else:
        notes |= dict.fromkeys(EMBEDDING, embedding.name + ("" if exact else ", carried along the flow"))
        notes |= {"previous_relevance": "absent: no query given"} if query is None else {"attention": "relevance to the query"}
    meta: dict[str, Any] = {name: notes[name] for name in names}
    if query is not None:
        meta["query_vector"] = tuple(query.tolist())
    return meta


class StreamTexture(Texture):
    """A texture that shows the newest frame of a stream; `data` is interleaved when it is read, once a frame."""

    _read: Callable[[], Tensor]

    @classmethod
    def over(cls, local: Texture, names: Sequence[str], meta: Mapping[str, Any], read: Callable[[], Tensor]) -> StreamTexture:
        """Of these channels, in the shape of `local`; `read` gives the data."""
        texture = cls.__new__(cls)
        texture._read = read
        texture.height, texture.width, texture.levels = local.height, local.width, local.levels
        texture.reducer, texture.names, texture.meta = tuple(ROWS[name].reducer for name in names), tuple(names), dict(meta)
        return texture

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """[B, T, C], as of the stream's newest frame."""
        return self._read()

    def __reduce__(self) -> Any:
        return Texture.from_data, (self.data, self.height, self.width, self.levels, self.reducer, self.names, self.meta)

    def __deepcopy__(self, memo: Any) -> Texture:
        return self.replace(self.data.clone())


pytree.register_pytree_node(StreamTexture, _flatten, _unflatten, serialized_type_name="texvlm.StreamTexture")


def planar(
    picture: Tensor, local: Texture, names: Sequence[str], planes: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> Texture:
    """Channels with mips from planes [B, h, w] at any pitch; what has none is zero.

    Args:
        picture: [B, 3, H, W], for its size.
        local: a texture of that picture, for dtype and levels.
        names: of the channels, in their order.
        planes: by channel; "embedding" is [B, 16, h, w].
        meta: of the texture.
    """
    rows = [ROWS[name] for name in names]
    reducers = [row.reducer for row in rows]
    whole = planes.get(names[0]) if len(names) == 1 else None
    if whole is not None and whole.shape[1:] == picture.shape[2:] and whole.dtype != torch.float64:
        data = ops.generate_mipmaps(whole[:, None], reducers, local.levels, local.data.dtype)  # nothing to enlarge or interleave
        return Texture.from_data(data, local.height, local.width, local.levels, reducers, names, meta)
    given, ids = [], []
    for name, plane in planes.items():
        channels = EMBEDDING if name == "embedding" else (name,)
        if not set(channels).isdisjoint(names):
            given.append(plane if plane.dim() == 4 else plane[:, None])
            ids += [ROWS[channel].index for channel in channels]
    for row in rows:  # not the op's own formula
        if row.index not in ids:
            given.append(picture.new_zeros((len(picture), 1, 1, 1), dtype=torch.float32))
            ids.append(row.index)
    data = ops.build_channels(picture, [row.index for row in rows], local.levels, given, ids, local.data.dtype, None, None)
    return Texture.from_data(data, local.height, local.width, local.levels, reducers, names, meta)


def interleave(sources: Sequence[Texture], names: Sequence[str], out: Tensor | None = None) -> Tensor:
    """The named channels of several textures of one size, [B, T, C], into `out` where there is one."""
    batch, texels, _ = sources[0].data.shape
    if out is None:
        out = sources[0].data.new_empty((batch, texels, len(names)))
    left = set(names)
    for source in sources:
        here = [name for name in source.names if name in left]
        if not here:
            continue
        left -= set(here)
        places = torch.tensor([names.index(name) for name in here], device=out.device)
        picked = torch.tensor([source.index(name) for name in here], device=out.device)
        out.index_copy_(2, places, source.data.index_select(2, picked))
    return out
