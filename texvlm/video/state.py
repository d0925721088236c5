"""What a stream holds from frame to frame of the newest picture itself, and how it is brought up to the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from texvlm._ext import ops
from texvlm.channels import channel_planes
from texvlm.pyramid import levels_or_all
from texvlm.salience import saliency_state
from texvlm.texture import Texture
from texvlm.video.composed import ROWS
from texvlm.video.scoring import CellCache, MapMeans
from texvlm.video.seen import Seen


@dataclass
class State:
    """See the head of the file.

    Attributes:
        reference: the picture that everything here is of, planar or colour last as the frames are.
        local: the texture of the local channels.
        planes: what these are made of; see `update_channels`.
        colours, features: what saliency is made of, or None; see `update_saliency`.
        map: of saliency, [B, h, w].
        embedded: planes of the embedding, where they are made of the newest picture when they are read.
        means: of the map, by cells.
        before: tiles that were dirty one frame ago, and `any_before`, whether there were any.
        fresh: no frame has been taken in, or the last one only in part.
        cells: features of cells that nothing touched.
        seen: what tokens have shown.
    """

    tile: int
    reference: Tensor
    local: Texture
    planes: Tensor
    before: Tensor
    cells: CellCache
    seen: Seen
    colours: Tensor | None = None
    features: Tensor | None = None
    map: Tensor | None = None
    embedded: Tensor | None = None
    means: MapMeans | None = None
    any_before: bool = True
    fresh: bool = True

    _SAVED = ("reference", "planes", "colours", "features", "map", "before", "any_before", "fresh")

    @classmethod
    def begin(
        cls,
        picture: Tensor,
        names: Sequence[str],
        saliency: bool,
        tile: int,
        cell: int,
        dtype: torch.dtype | None,
        levels: int | None,
        meta: dict[str, Any],
    ) -> State:
        """For pictures like this one, [B, 3, H, W], with these local channels; nothing is computed yet."""
        batch, _, height, width = picture.shape
        levels = levels_or_all(levels, height, width)
        dtype = dtype or (torch.float32 if picture.dtype in (torch.uint8, torch.bfloat16) else picture.dtype)
        reducers = [ROWS[name].reducer for name in names]
        # Texels are made by an op for the same reason as channel_planes: scattered tiles want huge pages.
        nothing = picture.new_zeros((), dtype=torch.uint8).expand(batch, len(names), height, width)
        data = ops.generate_mipmaps(nothing, reducers, levels, dtype)
        colour_last = picture.stride(1) == 1
        grid = (-(-height // cell), -(-width // cell))
        state = cls(
            tile,
            torch.empty_like(picture, memory_format=torch.channels_last if colour_last else torch.contiguous_format),
            Texture.from_data(data, height, width, levels, reducers, names, meta),
            channel_planes(picture),
            torch.ones((batch, -(-height // tile), -(-width // tile)), dtype=torch.bool, device=picture.device),
            CellCache(cell, grid),
            Seen(batch, grid, cell, (height, width), picture.device),
        )
        if saliency:
            state.colours, state.features = saliency_state(picture)
        return state

    @contextmanager
    def whole(self) -> Iterator[bool]:
        """Around what takes in a frame: if it is cut short, this state begins anew. Gives whether it begins."""
        first, self.fresh = self.fresh, True
        yield first
        self.fresh = False

    def update_channels(self, dirty: Tensor, fixation: Tensor | None, first: bool) -> None:
        """Brings the local channels up to `reference`, which differs from what they are of in dirty tiles."""
        ops.update_channels(
            self.local.data,
            self.planes,
            self.reference,
            dirty,
            self.before,
            [ROWS[name].index for name in self.local.names],
            self.local.levels,
            self.tile,
            None if fixation is None else fixation.to(self.planes.dtype),
            first,
        )

    def update_saliency(self, dirty: Tensor, first: bool) -> None:
        """Brings the map of saliency up to `reference`."""
        self.map = ops.update_saliency(self.reference, self.colours, self.features, dirty, self.before, self.tile, first)

    def saliency(self) -> tuple[Tensor, MapMeans] | None:
        """The map and what reads it by cells, where that is as good as reading the channel."""
        if self.map is None or self.local.data.dtype != torch.float32:
            return None
        if self.means is None:
            h, w = self.map.shape[1:]
            self.means = MapMeans((h, w), (self.local.height, self.local.width), self.cells.cell, self.local.levels)
        return self.map, self.means

    def touch_cells(self, dirty: Tensor) -> None:
        """Forgets the features of cells that changed, or whose motion ended."""
        self.cells.touch(dirty | self.before, self.tile, max(ROWS[name].halo or 0 for name in self.local.names))

    def bytes_touched(self, dirty: int) -> int:
        """About how many bytes this frame moved, by its number of dirty tiles (-1: unknown, all)."""
        share = dirty / max(1, self.before.numel()) if dirty >= 0 else 1.0
        around = min(1.0, share * (1 + 10 / self.tile) ** 2)  # within 5 pixels
        return int((2 + share) * self.reference.nbytes + around * (self.planes.nbytes + self.local.data.nbytes))

    def state_dict(self) -> dict[str, Any]:
        """All that the next frame depends on."""
        return {**{name: getattr(self, name) for name in self._SAVED}, "local": self.local.data, "seen": self.seen.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        own, other = self.local.data, state["local"]
        if own.shape != other.shape or own.dtype != other.dtype:
            raise ValueError(f"state must have texels {own.dtype} {list(own.shape)}, got {other.dtype} {list(other.shape)}")
        for name in self._SAVED:
            setattr(self, name, state[name].clone() if isinstance(state[name], Tensor) else state[name])
        self.local.data.copy_(state["local"])
        self.seen.load_state_dict(state["seen"])
