"""What a stream says of a frame."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


@dataclass
class VideoStats:
    """What the newest frame cost.

    Attributes:
        frame: its number, from 0.
        dirty: how many tiles changed (all, where all are computed anew, but for "age"); -1 on a GPU, where asking would wait for it.
        tiles: of how many, over all pictures of the batch.
        key: why everything that lags or is carried was made anew, or None: "first", "size ...", "asked", "failure" (of the update before),
            "age", "dirty", "cut" or "fade".
        milliseconds: by stage, of `update` and of the `select` after it (on a GPU: of queueing it).
        bytes: read and written by detection and by the update of texels, planes and mips: an estimate, from the tiles.
    """

    frame: int = -1
    dirty: int = 0
    tiles: int = 0
    key: str | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0


class VideoTokens(NamedTuple):
    """What a model is shown of a frame, and what it has seen before.

    Attributes:
        patches: [B, k, C, cell, cell]; 0 beyond the selection's count.
        uv: [B, k, 2], their centres.
        lod: [B, k], their levels of detail.
        rest: [B, C, h, w], the whole picture at a coarse level.
        status: int64 [B, k]: 0 unchanged since the last call, 1 moved, 2 new (or changed), -1 beyond count.
        source: int64 [B, k]: which token of the last call shows the same thing, or -1.
    """

    patches: Tensor
    uv: Tensor
    lod: Tensor
    rest: Tensor
    status: Tensor
    source: Tensor
