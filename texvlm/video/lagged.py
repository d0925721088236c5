"""Channels that need the whole picture and cost too much for every frame: made at key frames, moved along the flow between."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import ops
from texvlm.channel_sources import CLUSTERS, Sources
from texvlm.channels import CHANNELS

LAGGED = ("edge_distance", *CLUSTERS, "boundary", "text")
"""The edge threshold, superpixels and the text network look at everything: 3 % of a picture changes a quarter to nine tenths of them."""

_INDEX = {channel.name: channel.index for channel in CHANNELS}


def whole_planes(picture: Tensor, names: Collection[str], n_superpixels: int = 50) -> dict[str, Tensor]:
    """These channels of a picture [B, 3, H, W], as planes [B, H, W], as `build_channels` makes them."""
    sources = Sources(picture, None, names, {})
    sources.add_clusters(n_superpixels)
    sources.add_text()
    planes: dict[str, Tensor] = {}
    at = iter(sources.names)
    for stack in sources.planes:
        planes |= {next(at): plane for plane in stack.unbind(1)}
    if of_edges := [name for name in ("edge_distance", "boundary") if name in names and name not in planes]:
        labels = [planes["cluster"][:, None]] if "boundary" in of_edges else []
        ids = [_INDEX["cluster"]] if labels else []
        data = ops.build_channels(picture, [_INDEX[name] for name in of_edges], 1, labels, ids, None, None, None)
        planes |= zip(of_edges, data.unflatten(1, picture.shape[2:]).unbind(-1))
    return {name: planes[name] for name in names}


def moved(planes: dict[str, Tensor], flow: Tensor) -> dict[str, Tensor]:
    """Planes [B, H, W] of another frame as they lie in this one, the nearest value: ids must not mix, and nothing blurs.

    Args:
        planes: of that frame.
        flow: [B, 2, h, w] from this frame to it, in pixels of its own grid.
    """
    stack = torch.stack([plane.float() for plane in planes.values()], 1)
    height, width = stack.shape[2:]
    h, w = flow.shape[2:]
    scale = flow.new_tensor([2 / w, 2 / h]).view(1, 2, 1, 1)
    field = F.interpolate(flow * scale, (height, width), mode="bilinear", align_corners=False)
    y = (torch.arange(height, device=flow.device, dtype=flow.dtype) * 2 + 1) / height - 1
    x = (torch.arange(width, device=flow.device, dtype=flow.dtype) * 2 + 1) / width - 1
    place = torch.stack([field[:, 0] + x, field[:, 1] + y[:, None]], dim=-1)
    out = F.grid_sample(stack, place, mode="nearest", padding_mode="border", align_corners=False)
    return {name: plane.to(planes[name].dtype) for name, plane in zip(planes, out.unbind(1))}


class Lagged:
    """The lagged channels of a stream. They are made when they are read: what nobody reads costs nothing.

    Args:
        names: the channels.
        exact: whether they are made anew for every frame that is read.
    """

    def __init__(self, names: Collection[str], exact: bool) -> None:
        self.names, self.exact = tuple(names), exact
        self.key: dict[str, Tensor] = {}
        self.flow: Tensor | None = None  # from the newest frame to the one that `key` is of; None: the same frame
        self.stale = True

    def follow(self, flow: Tensor | None, occlusion: Tensor | None, whole: bool) -> None:
        """A frame has changed: how it moved against the one before, and whether it is a key frame."""
        self.stale = self.stale or whole or self.exact
        if self.stale or flow is None:
            return
        # the way to the key frame is composed: fields are smooth, so they lose little where planes would blur
        self.flow = flow if self.flow is None else flow + ops.warp(self.flow, flow, 0.0, occlusion)

    def planes(self, picture: Tensor) -> dict[str, Tensor]:
        """The channels as they are in this frame, [B, H, W] each."""
        if self.stale:
            self.key, self.flow, self.stale = whole_planes(picture, self.names), None, False
        return self.key if self.flow is None else moved(self.key, self.flow)

    def state_dict(self) -> dict[str, Any]:
        """All that the next reading depends on."""
        return {"key": dict(self.key), "flow": self.flow, "stale": self.stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.key, self.flow, self.stale = dict(state["key"]), state["flow"], state["stale"]
