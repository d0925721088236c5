"""Where the kept groups lie, as a tower and a decoder want to be told: positions, taps of the learned table, segments, windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from texvlm.qwen.families import Sizes, interpolation_names


def patch_positions(rows: Tensor, columns: Tensor, levels: Tensor, merge: int) -> Tensor:
    """The centres of the patches of groups, in units of patches of the full picture: [K * merge^2, 2], (row, column).

    A group of level l covers (2^l)^2 groups; its patches' centres are then p 2^l + (2^l - 1) / 2, and a whole number at level 0.

    Args:
        rows: [K] of the groups, in units of groups of their own level.
        columns: [K], likewise.
        levels: [K].
        merge: patches along a side of a group.
    """
    step = torch.arange(merge, device=rows.device)
    inner = torch.cartesian_prod(step, step)  # in-row, in-column
    patch = torch.stack([rows, columns], dim=-1)[:, None] * merge + inner
    if not levels.any():
        return patch.flatten(0, 1)
    scale = levels.double().exp2()[:, None, None]
    return (patch * scale + (scale - 1) / 2).flatten(0, 1).float()


def table_taps(positions: Tensor, size: tuple[int, int], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Four taps of the learned square table of positions and their weights, [N, 4] each: the model's own arithmetic, at any position.

    Args:
        positions: [N, 2], (row, column) in patches; fractions are legal.
        size: rows and columns of patches of the whole picture.
        sizes: of the tower.
    """
    side, earlier = sizes.side, interpolation_names()[2]  # up to 5.14 with other roundings, which are followed to the last bit
    taps, weights = [], []
    for axis in range(2):
        index = positions[:, axis].float()
        if earlier and not positions.is_floating_point():
            source = torch.linspace(0, side - 1, size[axis], device=index.device)[positions[:, axis]]
        elif sizes.align_corners:
            source = index * (side - 1) / torch.tensor(max(size[axis] - 1, 1), device=index.device)
        else:
            source = (index + 0.5) * side / torch.tensor(size[axis], device=index.device) - 0.5
        floor = source.floor()
        offsets = torch.arange(2, device=index.device)
        taps.append((floor.long()[:, None] + offsets).clamp(0, side - 1))
        fraction = (source - floor)[:, None]
        weights.append(torch.cat([1 - fraction, fraction], dim=1) if earlier else (1 - (fraction - offsets).abs()).clamp(min=0))
    indices = (taps[0][:, :, None] * side + taps[1][:, None, :]).reshape(-1, 4)
    return indices, (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, 4)


@dataclass(frozen=True)
class Geometry:
    """What a tower needs to know of packed rows of patches, of one picture or of many, one after another.

    Attributes:
        position_ids: [N, 2], row and column of each patch.
        segments: int32 [S], patches of each segment of attention.
        interp_indices, interp_weights: [N, 4], or None where the tower has no learned table.
        window_index: [N / merge^2], the order of groups by windows, or None where it has none.
        windows: int32, patches of each window, or None.
    """

    position_ids: Tensor
    segments: Tensor
    interp_indices: Tensor | None = None
    interp_weights: Tensor | None = None
    window_index: Tensor | None = None
    windows: Tensor | None = None

    @classmethod
    def of(cls, positions: Tensor, segments: Sequence[int], size: tuple[int, int], sizes: Sizes) -> Geometry:
        """Of one picture's kept patches.

        Args:
            positions: [N, 2], see `patch_positions`.
            segments: patches of each segment, in order; none of them 0.
            size: rows and columns of patches of the whole picture.
            sizes: of the tower.
        """
        device = positions.device
        interp: tuple[Tensor | None, Tensor | None] = table_taps(positions, size, sizes) if sizes.side else (None, None)
        window_index = windows = None
        if sizes.window:
            # The window of a group is that of the full picture; groups keep their order within it, and windows without any are left out.
            group = positions[:: sizes.unit].double().div(sizes.merge * sizes.window, rounding_mode="floor").long()
            across = -(-size[1] // (sizes.merge * sizes.window)) + 1
            window = group[:, 0] * across + group[:, 1]
            # Windows do not cross segments: frames, and a thumbnail of its own, have windows of their own.
            segment = torch.repeat_interleave(torch.tensor(segments, device=device) // sizes.unit)
            window = window + segment * (int(window.max()) + 1)
            window, window_index = window.sort(stable=True)
            windows = (window.unique_consecutive(return_counts=True)[1] * sizes.unit).int()
        return cls(positions, torch.tensor(list(segments), dtype=torch.int32, device=device), *interp, window_index, windows)

    @classmethod
    def whole(cls, rows: int, columns: int, sizes: Sizes) -> Geometry:
        """Of a picture of so many groups that keeps all of them."""
        cells, size = torch.arange(rows * columns), (rows * sizes.merge, columns * sizes.merge)
        row, column = cells.div(columns, rounding_mode="floor"), cells % columns
        positions = patch_positions(row, column, torch.zeros_like(cells), sizes.merge)
        return cls.of(positions, [len(positions)], size, sizes)

    @classmethod
    def join(cls, pictures: Sequence[Geometry]) -> Geometry:
        """Several, one after another."""
        parts: dict[str, Tensor | None] = {}
        for field in fields(cls):
            values: list[Any] = [getattr(picture, field.name) for picture in pictures]
            if values[0] is None:
                parts[field.name] = None
                continue
            if field.name == "window_index":
                start = 0
                for i, value in enumerate(values):
                    values[i] = value + start
                    start += len(value)
            if field.name == "position_ids" and any(value.is_floating_point() for value in values):
                values = [value.float() for value in values]
            parts[field.name] = torch.cat(values)
        return cls(**parts)  # type: ignore[arg-type]

    def keywords(self) -> dict[str, Tensor]:
        """The tower's own keyword arguments; at the model they are prefixed by image_ or video_."""

        def bounds(lengths: Tensor) -> Tensor:
            return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

        out = {"position_ids": self.position_ids, "cu_seqlens": bounds(self.segments)}
        if self.interp_indices is not None and self.interp_weights is not None:
            indices, weights, taps_first = interpolation_names()
            out[indices] = self.interp_indices.T if taps_first else self.interp_indices
            out[weights] = self.interp_weights.T if taps_first else self.interp_weights
        if self.window_index is not None and self.windows is not None:
            out["window_index"] = self.window_index
            out["cu_window_seqlens"] = bounds(self.windows)
        return out
