"""What a stream remembers of the frames before, moved along the flow: embeddings, saliency, histories, and the way to the key frame."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import ops
from texvlm.channel_sources import HISTORIES
from texvlm.embedding import Embedding, relevance
from texvlm.flow import optical_flow
from texvlm.history import fixation_history, gaze_history
from texvlm.texture import Texture
from texvlm.video.cache import CarryRule, TemporalCache
from texvlm.video.grids import touched

FLOW_SIDE = 320
"""The flow is sought on the first mip level whose longer side is at most this: a tenth of the cost at full size."""

PITCH = 8
"""Pixels between the places at which appearance is compared where no embedding says another grid, and of the histories."""

CROP_MARGIN = 32
"""Pixels around the places whose embedding is made anew: what an encoder sees of their surroundings."""


def small_luma(luma: Tensor) -> Tensor:
    """Luma [B, H, W] on the level that the flow is sought on, [B, 1, h, w]."""
    level = 0
    while max(luma.shape[1:]) >> level > FLOW_SIDE and min(luma.shape[1:]) >> level > 1:
        level += 1
    return F.avg_pool2d(luma[:, None].float(), 1 << level) if level else luma[:, None].float().clone()


class Carried:
    """See the head of the file.

    Args:
        wanted: channels, by name.
        embedding: what says what places hold, or None.
        query: what is looked for, [16], or None.
        rule: when something is made anew.
        follow: whether flow is sought; else everything stays in place.

    Attributes:
        behind: whether something may be older than the newest frame.
        flow, occlusion: from the newest frame to the one before it, on a small grid; None where nothing moved.
        refreshed: how many places of the embedding were made anew for the newest frame.
    """

    def __init__(
        self, wanted: Collection[str], embedding: Embedding | None, query: Tensor | None, rule: CarryRule, follow: bool
    ) -> None:
        self.wanted, self.embedding, self.query, self.follow = set(wanted), embedding, query, follow
        self.cache = TemporalCache(rule)
        self.behind = self.settled = False
        self.luma: Tensor | None = None
        self.flow: Tensor | None = None
        self.occlusion: Tensor | None = None
        self.histories: dict[str, Tensor] = {}
        self.points: dict[str, list[Tensor]] = {name: [] for name in HISTORIES}
        self.previous: dict[str, Tensor] = {}  # relevance and saliency of the frame before, as they lie in this one
        self.refreshed = 0
        self._first: Tensor | None = None  # planes of the first frame, which told the grid

    def step(
        self, picture: Tensor, luma: Tensor, local: Texture, dirty: Tensor, tile: int, saliency: Tensor | None, anew: bool
    ) -> str | None:
        """Takes a frame that differs from the one before.

        Args:
            picture: [B, 3, H, W].
            luma: of it, [B, H, W].
            local: a texture of it with red, green and blue.
            dirty: bool [B, rows, columns], the tiles that changed.
            tile: their side in pixels.
            saliency: the map of the frame before, [B, h, w], or None.
            anew: whether everything is made anew in any case.

        Returns:
            Why else everything is made anew, or None.
        """
        small = small_luma(luma)
        grid = self._grid(picture)
        height, width = picture.shape[2:]
        changed = dirty.is_cuda or bool(dirty.any())
        if self.luma is None or not (self.follow and changed):
            self.flow = self.occlusion = None
        else:
            self.flow, self.occlusion = self._flow(self.luma, small, dirty, tile, (height, width))
        self.luma = small
        pitch = (height / grid[0], width / grid[1])
        still = ~touched(dirty, tile, grid, pitch)
        appearance = self._appearance(local, grid)
        refresh, why = self.cache.step(appearance, self.flow, self.occlusion, still)
        self._remember(None if saliency is None else self._moved(saliency))
        whole = anew or why is not None
        refresh = torch.ones_like(refresh) if whole else refresh
        if self.embedding is not None:
            self._refresh(picture, refresh, whole, grid)
        else:  # nothing but the rule is of use: what is lagged asks it
            self.cache.fill(appearance, refresh)
        self.behind, self.settled = not whole and (self.behind or changed), False
        return why

    def _remember(self, saliency: Tensor | None) -> None:
        """What is known of the frame before, as it lies in this one: its saliency, and the values that were carried here."""
        if saliency is not None and "previous_saliency" in self.wanted:
            self.previous["previous_saliency"] = saliency
        values = None if self.embedding is None else self.cache.values
        if values is not None and "previous_relevance" in self.wanted and self.query is not None:
            self.previous["previous_relevance"] = relevance(values, self.query)

    def age(self, size: Sequence[int]) -> bool:
        """Takes a frame of (height, width), changed or not, into the histories. Returns whether there are any."""
        for name, build in zip(HISTORIES, (fixation_history, gaze_history), strict=True):
            before = self.histories.get(name)
            if self.luma is None or (before is None and not self.points[name]):
                continue
            height, width = (max(1, s // PITCH) for s in size)
            points = torch.cat(self.points[name], 1) if self.points[name] else self.luma.new_empty((len(self.luma), 0, 2))
            self.points[name].clear()
            self.histories[name] = build(points, height, width, previous=before, flow=self.flow, occlusion=self.occlusion)
        return bool(self.histories)

    def still(self, saliency: Tensor | None) -> bool:
        """Takes a frame that is the same as the one before, with its map of saliency. Returns whether a plane is another."""
        self.flow = self.occlusion = None
        first, self.settled = not self.settled, True
        if first:
            self._remember(saliency)
        return first and bool(self.previous)

    def planes(self) -> dict[str, Tensor]:
        """What is remembered of the frames before, [B, h, w] each on grids of their own."""
        return {**self.histories, **self.previous}

    # ---- parts ----

    def _flow(self, before: Tensor, now: Tensor, dirty: Tensor, tile: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        flow, occlusion = optical_flow(before, now, finest=0, initial=self.flow)
        pitch = (size[0] / now.shape[2], size[1] / now.shape[3])
        moves = touched(dirty, tile, (now.shape[2], now.shape[3]), pitch)
        return flow * moves[:, None], occlusion & moves  # what is still does not move, whatever its texture suggests

    def _grid(self, picture: Tensor) -> tuple[int, int]:
        self._size = (picture.shape[2], picture.shape[3])
        if self.cache.values is not None:
            return (self.cache.values.shape[2], self.cache.values.shape[3])
        if self.embedding is not None:
            self._first = self.embedding.planes(picture)
            return (self._first.shape[2], self._first.shape[3])
        return (max(1, -(-self._size[0] // PITCH)), max(1, -(-self._size[1] // PITCH)))

    @staticmethod
    def _appearance(local: Texture, grid: tuple[int, int]) -> Tensor:
        """Red, green and blue at the pitch of the grid, from the mip level that is nearest above it."""
        level = 0
        while level + 1 < local.levels and min(local.height >> (level + 1), local.width >> (level + 1)) >= max(grid):
            level += 1
        rgb = local.level(level)[:, [local.index(name) for name in ("red", "green", "blue")]].float()
        return rgb if rgb.shape[2:] == grid else F.interpolate(rgb, grid, mode="area")

    def _moved(self, plane: Tensor) -> Tensor:
        if self.flow is None:
            return plane
        return ops.warp(plane[:, None], self.flow.to(plane.dtype), 0.0, self.occlusion)[:, 0]

    def _refresh(self, picture: Tensor, refresh: Tensor, whole: bool, grid: tuple[int, int]) -> None:
        """Embeds the places that are to be made anew: all of them, or what is inside a box around them."""
        assert self.embedding is not None
        self.refreshed = int(refresh.sum())
        if self.refreshed == 0:
            return
        rows, columns = refresh.any(0).any(1).nonzero()[:, 0], refresh.any(0).any(0).nonzero()[:, 0]
        top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
        pitch = (self._size[0] // grid[0], self._size[1] // grid[1])
        regular = pitch[0] * grid[0] == self._size[0] and pitch[1] * grid[1] == self._size[1]
        if whole or not regular or 2 * (bottom - top) * (right - left) > grid[0] * grid[1]:
            planes = self.embedding.planes(picture) if self._first is None else self._first
            self._first = None
            self.cache.fill(planes, refresh)
            return
        margins = [-(-CROP_MARGIN // p) for p in pitch]
        y0, y1 = max(0, top - margins[0]), min(grid[0], bottom + margins[0])
        x0, x1 = max(0, left - margins[1]), min(grid[1], right + margins[1])
        crop = picture[:, :, y0 * pitch[0] : y1 * pitch[0], x0 * pitch[1] : x1 * pitch[1]]
        planes = self.embedding.planes(crop)
        if planes.shape[2:] != (y1 - y0, x1 - x0):  # an encoder whose grid does not follow the picture's size
            planes = F.interpolate(planes, (y1 - y0, x1 - x0), mode="bilinear", align_corners=False)
        assert self.cache.values is not None
        values = self.cache.values.clone()
        values[:, :, y0:y1, x0:x1] = planes
        self.cache.fill(values, refresh)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "cache": self.cache.state_dict(),
            "luma": self.luma,
            "flow": self.flow,
            "occlusion": self.occlusion,
            "histories": dict(self.histories),
            "points": {name: list(points) for name, points in self.points.items()},
            "previous": dict(self.previous),
            "behind": self.behind,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.cache.load_state_dict(state["cache"])
        self.luma, self.flow, self.occlusion = state["luma"], state["flow"], state["occlusion"]
        self.behind = state["behind"]
        self.histories, self.previous = dict(state["histories"]), dict(state["previous"])
        self.points = {name: list(points) for name, points in state["points"].items()}
