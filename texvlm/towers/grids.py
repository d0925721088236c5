"""Where the tokens of a vision tower lie: the grid of each picture of a call, read from what the tower was called with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

GEOMETRY = ("cu_seqlens", "position_ids")
"""Keyword arguments of a Qwen tower by which somebody else says where its rows lie: then `grid_thw` does not say it."""


@lru_cache(maxsize=64)
def place_of_rows(rows: int, columns: int, merge: int, window: int, device: torch.device) -> Tensor:
    """Where the rows of one picture lie in the grid, row-major, in the order in which a Qwen tower has them: group after group.

    Args:
        rows: of patches, a multiple of merge.
        columns: of patches.
        merge: patches along a side of a group.
        window: groups along a side of a window (Qwen2.5-VL), by which groups are ordered; 0 where there are none.
        device: of the result.

    Returns:
        int64 [rows * columns].
    """
    places = torch.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge).transpose(1, 2)
    groups = torch.arange(len(places) * places.shape[1])
    if window:
        down, right = (torch.arange(count) // window for count in places.shape[:2])
        groups = (down[:, None] * (len(places) + places.shape[1]) + right).flatten().argsort(stable=True)
    return places.reshape(-1, merge * merge)[groups].flatten().to(device)


@lru_cache(maxsize=64)
def row_of_places(rows: int, columns: int, merge: int, window: int, device: torch.device) -> Tensor:
    """The inverse of `place_of_rows`."""
    return place_of_rows(rows, columns, merge, window, device).argsort()


@dataclass
class Call:
    """What is known of one call of a tower.

    Attributes:
        grids: (rows, columns) of each segment of rows, each picture of a padded batch, or the one of a whole batch; None: not known.
        kind: "rows": segments come to the attention one by one, in the order of `place_of_rows`; "padded": a batch of pictures, each of
            its own grid, with padding at the end; "batch": a batch of one grid, after tokens of another kind.
        merge, window: see `place_of_rows`.
        again: whether a checkpointed layer runs again: nothing is collected then.
        mass: for each segment or batch, the attention that its places got, summed over layers, [B, N].
        layers: how many layers `mass` is summed over, for each.
    """

    grids: list[tuple[int, int]] | None
    kind: str
    merge: int = 1
    window: int = 0
    again: bool = False
    mass: dict[int, Tensor] = field(default_factory=dict)
    layers: dict[int, int] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)
    _mask: tuple[Tensor | None, tuple[Tensor | None, Tensor | None]] = (None, (None, None))

    def repeated(self) -> Call:
        """The same once more, for a layer that runs again."""
        return Call(self.grids, self.kind, self.merge, self.window, again=True)

    def segment(self, layer: int) -> int:
        """Which of the segments a layer asks for; it asks for one after another, and leaves none out."""
        at = self._next.get(layer, 0)
        self._next[layer] = (at + 1) % max(1, len(self.grids or ()))
        return at

    def collect(self, at: int, mass: Tensor) -> None:
        """Adds what a layer's places got, [B, H, N]."""
        if not self.again:
            mean = mass.detach().mean(1)
            self.mass[at] = self.mass[at] + mean if at in self.mass else mean
            self.layers[at] = self.layers.get(at, 0) + 1

    def of_keys(self, mask: Tensor | None, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """What a mask of attention [B, 1, Nq, N] says of keys: bool and bias, [B, N] or None; all layers have the same."""
        if mask is not self._mask[0]:
            self._mask = mask, (None, None) if mask is None else _of_keys(mask, layer)
        return self._mask[1]


def _of_keys(mask: Tensor, layer: int) -> tuple[Tensor | None, Tensor | None]:
    first = mask[:, :1, :1]
    if mask.dim() != 4 or not bool((mask == first).all()):
        raise ValueError(
            f"layer {layer} has an attention mask {list(mask.shape)} that differs between queries: it cannot be replaced"
        )
    keys = first[:, 0, 0]
    if mask.dtype == torch.bool:
        return (None, None) if bool(keys.all()) else (keys, None)
    there = keys > torch.finfo(mask.dtype).min / 2
    if bool(there.all()):
        return None, keys if bool(keys.any()) else None
    return there, keys.masked_fill(~there, 0)


def of_call(tower: Any, given: dict[str, Any], grid: tuple[int, int] | None) -> Call:
    """What the arguments of a call say of its grids.

    Args:
        tower: the module that is called.
        given: its arguments by name.
        grid: what is known already, or None.

    Raises:
        ValueError: neither says it.
    """
    config = tower.config
    if isinstance(shapes := given.get("grid_thw"), Tensor):
        if any(given.get(name) is not None for name in GEOMETRY):
            return Call(None, "rows")
        merge = getattr(config, "spatial_merge_size", 1)
        # Windows decide the order of the rows in layers without windows too.
        window = config.window_size // merge // config.patch_size if getattr(config, "fullatt_block_indexes", None) else 0
        return Call([(h, w) for t, h, w in shapes.tolist() for _ in range(t)], "rows", merge, window)
    if isinstance(shapes := given.get("spatial_shapes"), Tensor):
        return Call([(h, w) for h, w in shapes.tolist()], "padded")
    if grid is not None:
        return Call([grid], "batch")
    pixels, patch = given.get("pixel_values"), getattr(config, "patch_size", None)
    if patch is None or not isinstance(pixels, Tensor) or pixels.dim() != 4:
        found = list(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise ValueError(f"grid must be given for a {type(tower).__name__} called with pixel_values {found}")
    tall, wide = (patch, patch) if isinstance(patch, int) else patch
    return Call([(pixels.shape[2] // tall, pixels.shape[3] // wide)], "batch")
