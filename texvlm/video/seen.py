"""Which tokens a model has seen before: the content of cells followed from frame to frame."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.selection import Selection
from texvlm.video.grids import touched

STILL = 1 / 8
"""Flow below this, in pixels of its own grid, moves nothing: what is dirty there is another thing."""


LEVELS = 8
"""Levels that tokens may have: those of `CascadeConfig`."""


class Seen:
    """Where the content of each cell was when tokens were last taken.

    Args:
        batch: how many pictures.
        grid: (rows, columns) of cells.
        cell: their side in pixels.
        size: (height, width) of the picture.
        device: of all tensors.
    """

    def __init__(self, batch: int, grid: tuple[int, int], cell: int, size: tuple[int, int], device: torch.device) -> None:
        self.grid, self.cell, self.size = grid, cell, size
        self.came = torch.full((batch, grid[0] * grid[1]), -1, device=device)  # -1: it has not been seen
        self.shown: Selection | None = None

    def follow(self, dirty: Tensor, tile: int, flow: Tensor | None, occlusion: Tensor | None) -> None:
        """Takes a frame: its dirty tiles, and the flow [B, 2, h, w] to the frame before, if it is known."""
        if self.shown is None:  # nothing has been seen
            return
        hit = touched(dirty, tile, self.grid, (self.cell, self.cell)).flatten(1)
        moved = torch.full_like(self.came, -1) if flow is None else self._moved(flow, occlusion)
        self.came = torch.where(hit, moved, self.came)

    def _moved(self, flow: Tensor, occlusion: Tensor | None) -> Tensor:
        rows, columns = self.grid
        step = F.interpolate(flow, self.grid, mode="bilinear", align_corners=False)
        pixels = step * step.new_tensor([self.size[1] / flow.shape[3], self.size[0] / flow.shape[2]]).view(1, 2, 1, 1)
        x, y = (pixels / self.cell).round().long().unbind(1)
        y = y + torch.arange(rows, device=flow.device)[:, None]
        x = x + torch.arange(columns, device=flow.device)
        known = (y >= 0) & (y < rows) & (x >= 0) & (x < columns) & (step.abs().amax(1) >= STILL)
        if occlusion is not None:
            known &= F.interpolate(occlusion[:, None].float(), self.grid, mode="nearest-exact")[:, 0] == 0
        there = y.clamp(0, rows - 1) * columns + x.clamp(0, columns - 1)
        return torch.where(known.flatten(1), self.came.gather(1, there.flatten(1)), -1)

    def status(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """Status and source of the tokens of a selection (see `VideoTokens`), which from now on are those that were shown."""
        indices, last, count = selection.indices, self.shown, self.came.shape[1]
        source = torch.full_like(indices, -1)
        same = torch.zeros_like(indices, dtype=torch.bool)
        if last is not None:
            shown = F.pad(torch.full_like(self.came, -1).repeat(1, LEVELS), (0, 1), value=-1)  # which token showed each node
            nodes = torch.where(last.indices >= 0, last.indices + count * last.lod.long(), LEVELS * count)
            order = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
            shown = shown.scatter(1, nodes, order)[:, : LEVELS * count]
            here, level = indices.clamp(min=0), selection.lod.long()
            came = self.came.gather(1, here)
            same = (indices >= 0) & self._unchanged(here, level)
            # a token over several cells stays or is new; one cell may have come from another
            from_node = torch.where(same, here + count * level, came.clamp(min=0))
            known = same | ((indices >= 0) & (level == 0) & (came >= 0))
            source = torch.where(known, shown.gather(1, from_node), -1)
        status = torch.where(source < 0, 2, torch.where(same, 0, 1))
        self.came = torch.arange(count, device=indices.device).expand_as(self.came).clone()
        self.shown = selection
        return torch.where(indices < 0, -1, status), source

    def _unchanged(self, first: Tensor, level: Tensor) -> Tensor:
        """Whether nothing has changed in the cells of tokens, [B, k], which begin at a cell and cover 2^level along both axes."""
        rows, columns = self.grid
        changed = (self.came != torch.arange(rows * columns, device=self.came.device)).unflatten(1, self.grid)
        above = F.pad(changed.cumsum(1).cumsum(2), (1, 0, 1, 0)).flatten(1)  # how many above and left of each corner
        y, x = first.div(columns, rounding_mode="floor"), first % columns
        side = torch.ones_like(level) << level
        down, right = (y + side).clamp(max=rows), (x + side).clamp(max=columns)

        def at(row: Tensor, column: Tensor) -> Tensor:
            return above.gather(1, row * (columns + 1) + column)

        return at(down, right) - at(y, right) - at(down, x) + at(y, x) == 0

    def state_dict(self) -> dict[str, Any]:
        """All that the next status depends on."""
        return {"came": self.came, "shown": self.shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.came, self.shown = state["came"].clone(), state["shown"]
