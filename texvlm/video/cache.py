"""What is carried along the flow: values of cells that are expensive to compute, and the rule by which they are computed anew."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STILL_FADE = 0.125
"""Where less than this share of a cell is moved, in the mean, and yet most cells look otherwise, the picture fades."""


@dataclass(frozen=True)
class CarryRule:
    """When values that were carried are computed anew. The defaults are measured by benchmarks/video_carrying.py.

    A cell's appearance (its mean colour when its value was computed, carried along with the value) is compared with what is seen there
    now: that is the *residual*, the mean of the colours' absolute differences. A difference counts by the contrast around the cell, as
    in Weber's law: descriptors of faint texture turn with differences that would be nothing at an edge.

    Attributes:
        residual: a cell is computed anew where residual > `residual` * (contrast + `floor`), the contrast being the standard deviation
            of appearance in the 3 x 3 cells around.
        floor: see `residual`, in [0, 1] units of colour: differences far below are what codecs and sensors add.
        occluded: a cell that moves is computed anew where more than this share of it is occluded, or its flow is not finite.
        mean: everything is, where the mean residual is larger: a cut.
        dirty: everything is, where more than this share of the cells would be.
        age: everything is, this many frames after the last time.

    Example:
        >>> import texvlm
        >>> texvlm.video.CarryRule(age=60).age
        60
    """

    residual: float = 3 / 16
    floor: float = 4 / 255
    occluded: float = 0.5
    mean: float = 16 / 255
    dirty: float = 0.5
    age: int = 30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and value >= 0):  # NaN is not
                raise ValueError(f"{field.name} must be a number of at least 0, got {value!r}")
        if self.age < 1:
            raise ValueError(f"age must be at least 1, got {self.age}")


class TemporalCache:
    """Values of the cells of a grid, carried from frame to frame along the flow, and which of them are to be computed anew.

    A cell takes the value of that cell of the frame before which lies nearest to where the flow leads. Values are moved whole, never
    blended, so that they do not blur however long they are carried, and any number of channels is one gather. What is lost by taking the
    nearest is not lost twice: each value knows by how much it lies beside its cell, and nearest is the value, not the cell that holds
    it, so that a slow movement moves it on after some frames. (Measured against chained bilinear warping and against coordinates into
    the frame where a value was computed, at equal cost: benchmarks/video_carrying.py.)

    Per frame: `step`, which moves; then the caller computes the cells that `step` names, and gives them to `fill`.

    Args:
        rule: when cells are computed anew.

    Attributes:
        values: [B, C, rows, columns], or None before the first `fill`.
        source: int64 [B, rows, columns], the cell of the frame before that each came from (row * columns + column), -1 where it is new.
        offset: float32 [B, 2, rows, columns], (y, x): by how much of a cell each value lies beside the cell that holds it.

    Example:
        >>> import torch, texvlm
        >>> cache = texvlm.video.TemporalCache()
        >>> look, still = torch.rand(1, 3, 4, 6), torch.zeros(1, 4, 6, dtype=torch.bool)
        >>> refresh, why = cache.step(look, None, None, still)
        >>> why, refresh.all().item()
        ('first', True)
        >>> cache.fill(torch.rand(1, 16, 4, 6), refresh)
        >>> flow = torch.zeros(1, 2, 4, 6)
        >>> flow[:, 0] = -1  # everything moved right by one cell
        >>> refresh, why = cache.step(look.roll(1, 3), flow, None, still)
        >>> cache.source[0, 0].tolist(), refresh[0, 0, 1:].any().item()
        ([0, 0, 1, 2, 3, 4], False)
    """

    _TENSORS = ("values", "source", "offset", "_appearance", "_now", "_age")

    def __init__(self, rule: CarryRule | None = None) -> None:
        self.rule = CarryRule() if rule is None else rule
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the next `step` is the first."""
        self.values: Tensor | None = None
        self.source: Tensor | None = None
        self.offset: Tensor | None = None
        self._appearance: Tensor | None = None  # of the values
        self._now: Tensor | None = None  # of the newest frame
        self._age: Tensor | None = None  # [B] frames since everything was computed

    def step(self, appearance: Tensor, flow: Tensor | None, occlusion: Tensor | None, still: Tensor) -> tuple[Tensor, str | None]:
        """Moves the values to where they lie in the next frame, and says which are to be computed anew.

        Cells that are not computed though they were named are named again. A change of the grid, the batch, the dtype of the flow or the
        device starts anew.

        Args:
            appearance: [B, A, rows, columns] of the next frame at cell pitch, colours in [0, 1]; values that are not finite count as 0.
            flow: [B, 2, h, w], (x, y), of any resolution, in pixels of its own grid, from the next frame to the one before, as
                `optical_flow` gives it. A cell moves by the mean over its pixels. None: everything stays in place.
            occlusion: bool [B, h, w], as `optical_flow` gives it.
            still: bool [B, rows, columns], cells in which no pixel changed: there the flow is taken to be 0, whatever it says.

        Returns:
            (refresh, why). refresh bool [B, rows, columns]: cells to be computed anew. why: None, or why all cells of all pictures are:
            "first", "age", "cut" (the mean residual is large), "fade" (more than half changed, and little moved) or "dirty" (more than
            half changed).
            On CUDA nothing waits for the device: `refresh` is the same, and `why` is "first" or None. On the CPU `why` costs a read.

        Raises:
            ValueError: shapes that do not fit.
        """
        self._check(appearance, flow, occlusion, still)
        now = torch.nan_to_num(appearance.detach().float(), 0.0, 0.0, 0.0)
        held = self._appearance
        if self.values is None or held is None or held.shape != now.shape or held.device != now.device:
            self.reset()
            self._now, self._age = now, torch.zeros(len(now), dtype=torch.int64, device=now.device)
            return torch.ones_like(still), "first"
        shift, lost = self._shift(flow, occlusion, still)
        if shift is None:
            self.source = _identity(still)
        else:
            self._move(shift, still)
        assert self._appearance is not None and self._age is not None
        rule, self._now, self._age = self.rule, now, self._age + 1
        residual = (now - self._appearance).abs().mean(1)
        refresh = residual > rule.residual * (_contrast(now) + rule.floor)
        if lost is not None:
            refresh = refresh | lost
        because = {
            "age": self._age >= rule.age,
            "cut": residual.mean((1, 2)) > rule.mean,
            "dirty": refresh.float().mean((1, 2)) > rule.dirty,
        }
        everything = torch.stack(list(because.values())).any(0)
        refresh = refresh | everything[:, None, None]
        return refresh, None if refresh.is_cuda else _why(because, everything, shift)

    def fill(self, values: Tensor, refresh: Tensor) -> None:
        """Takes over values of the frame of the last `step`.

        Args:
            values: [B, C, rows, columns]; what is outside of `refresh` is ignored. A first `fill`, or one of another C or dtype, has to
                bring all cells.
            refresh: bool [B, rows, columns]: which are new; as `step` gave it, or more or fewer.

        Raises:
            ValueError: shapes that do not fit, or before the first `step`.
        """
        if self._now is None or self._age is None:
            raise ValueError("fill: there is no frame yet, call step first")
        batch, rows, columns = len(self._now), *self._now.shape[2:]
        if values.dim() != 4 or (len(values), *values.shape[2:]) != (batch, rows, columns):
            raise ValueError(f"values must be [{batch}, C, {rows}, {columns}], got {list(values.shape)}")
        if refresh.shape != (batch, rows, columns) or refresh.dtype != torch.bool:
            raise ValueError(f"refresh must be bool [{batch}, {rows}, {columns}], got {refresh.dtype} {list(refresh.shape)}")
        old = self.values
        if old is None or old.shape != values.shape or old.dtype != values.dtype:
            self.values, self._appearance = values.detach().clone(), self._now
            self.source = torch.full_like(refresh, -1, dtype=torch.int64)
            self.offset = self._now.new_zeros((batch, 2, rows, columns))
            self._age = torch.zeros_like(self._age)
            return
        assert self._appearance is not None and self.source is not None and self.offset is not None
        new = refresh[:, None]
        self.values = torch.where(new, values.detach(), old)
        self._appearance = torch.where(new, self._now, self._appearance)
        self.offset = torch.where(new, 0.0, self.offset)
        self.source = torch.where(refresh, -1, self.source)
        self._age = torch.where(refresh.flatten(1).all(1), 0, self._age)

    def state_dict(self) -> dict[str, Any]:
        """All that the next `step` depends on, but for the rule."""
        return {name: getattr(self, name) for name in self._TENSORS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        if set(state) != set(self._TENSORS):
            raise ValueError(f"state must hold {sorted(self._TENSORS)}, got {sorted(state)}")
        for name in self._TENSORS:
            setattr(self, name, None if state[name] is None else state[name].clone())

    # ---- parts ----

    @staticmethod
    def _check(appearance: Tensor, flow: Tensor | None, occlusion: Tensor | None, still: Tensor) -> None:
        if appearance.dim() != 4:
            raise ValueError(f"appearance must be [B, A, rows, columns], got {list(appearance.shape)}")
        grid = (len(appearance), *appearance.shape[2:])
        if still.shape != grid or still.dtype != torch.bool:
            raise ValueError(f"still must be bool {list(grid)}, got {still.dtype} {list(still.shape)}")
        if flow is not None and (flow.dim() != 4 or flow.shape[:2] != (grid[0], 2)):
            raise ValueError(f"flow must be [{grid[0]}, 2, h, w], got {list(flow.shape)}")
        if occlusion is not None and (flow is None or occlusion.shape != (grid[0], *flow.shape[2:])):
            raise ValueError(f"occlusion must be [B, h, w] like the flow, got {list(occlusion.shape)}")

    def _shift(self, flow: Tensor | None, occlusion: Tensor | None, still: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """By how many cells each cell came from elsewhere, (y, x), and where that is not known."""
        if flow is None or (not still.is_cuda and bool(still.all())):
            return None, None
        rows, columns = still.shape[1:]
        mean = F.adaptive_avg_pool2d(flow.detach().float(), (rows, columns))
        shift = torch.stack([mean[:, 1] * (rows / flow.shape[2]), mean[:, 0] * (columns / flow.shape[3])], 1)
        known = shift.isfinite().all(1)
        if occlusion is not None:
            known &= F.adaptive_avg_pool2d(occlusion[:, None].float(), (rows, columns))[:, 0] <= self.rule.occluded
        return torch.where((still | ~shift.isfinite().all(1))[:, None], 0.0, shift), ~(known | still)

    def _move(self, shift: Tensor, still: Tensor) -> None:
        assert self.values is not None and self._appearance is not None and self.offset is not None
        source, offset = _nearest(shift, self.offset)
        # What is still keeps its value, though its neighbour's may lie nearer since something moved there.
        self.source = torch.where(still, _identity(still), source)
        self.offset = torch.where(still[:, None], self.offset, offset)
        self.values, self._appearance = _gather(self.values, self.source), _gather(self._appearance, self.source)


def _why(because: dict[str, Tensor], everything: Tensor, shift: Tensor | None) -> str | None:
    if not bool(everything.all()):
        return None
    reason = next((name for name, where in because.items() if bool(where.all())), "dirty")
    faint = shift is None or bool(shift.norm(dim=1).mean() < STILL_FADE)
    return "fade" if reason == "dirty" and faint else reason


def _identity(still: Tensor) -> Tensor:
    return torch.arange(math.prod(still.shape[1:]), device=still.device).reshape(1, *still.shape[1:]).expand(still.shape)


def _gather(planes: Tensor, source: Tensor) -> Tensor:
    index = source.flatten(1)[:, None].expand(-1, planes.shape[1], -1)
    return planes.flatten(2).gather(2, index).reshape(planes.shape)


def _contrast(appearance: Tensor) -> Tensor:
    """Standard deviation of the colours in the 3 x 3 cells around each, [B, rows, columns]."""
    both = F.pad(torch.cat([appearance, appearance.square()], 1), (1, 1, 1, 1), mode="replicate")
    mean, square = F.avg_pool2d(both, 3, 1).chunk(2, 1)
    return (square - mean.square()).mean(1).clamp(min=0).sqrt()


def _nearest(shift: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Of the 3 x 3 cells around the place that each cell came from, the one whose value lies nearest.

    Args:
        shift: [B, 2, rows, columns] cells, (y, x).
        offset: alike, of the values.

    Returns:
        Which, int64 [B, rows, columns], and the new offset.
    """
    rows, columns = shift.shape[2:]
    y, x = (torch.arange(n, device=shift.device, dtype=shift.dtype) for n in (rows, columns))
    place_y, place_x = shift[:, 0] + y[:, None], shift[:, 1] + x
    # Around the middle first, so that a tie leaves a value where it is.
    steps = torch.tensor([(0, 0), *((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)], device=shift.device)
    near_y = (place_y.round().clamp(0, rows - 1)[:, None] + steps[:, 0, None, None]).clamp(0, rows - 1)
    near_x = (place_x.round().clamp(0, columns - 1)[:, None] + steps[:, 1, None, None]).clamp(0, columns - 1)
    cell = (near_y * columns + near_x).long()  # [B, 9, rows, columns]
    off_y, off_x = (
        offset[:, i].flatten(1).gather(1, cell.flatten(1)).reshape(cell.shape) + near - place[:, None]
        for i, (near, place) in enumerate(((near_y, place_y), (near_x, place_x)))
    )
    best = (off_y.square() + off_x.square()).argmin(1, keepdim=True)
    source, *moved = (t.gather(1, best) for t in (cell, off_y, off_x))
    return source[:, 0], torch.cat(moved, 1)
