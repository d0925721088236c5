"""What is carried along the flow: values of cells that are expensive to compute, and the rule by which they are computed anew."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from texvlm.carrying import carry

STILL_FADE = 0.125
"""Where less than this share of a cell is moved, in the mean, and yet most cells look otherwise, the picture fades."""


@dataclass(frozen=True)
class CarryRule:
    """When values that were carried are computed anew. The defaults are measured by benchmarks/carrying.py.

    A cell's appearance (its mean colour when its value was computed, carried along with the value) is compared with what is seen there
    now: that is the *residual*, the mean of the colours' absolute differences. A difference counts by the contrast around the cell, as
    in Weber's law: descriptors of faint texture turn with differences that would be nothing at an edge.

    Attributes:
        residual: a cell is computed anew where residual > `residual` * (contrast + `floor`), the contrast being the standard deviation
            of appearance in the 3 x 3 cells around.
        floor: see `residual`, in [0, 1] units of colour: differences far below are what codecs and sensors add.
        quiet: a cell whose appearance changed by less than this share of contrast + floor since the frame before does not move, whatever
            the flow says: the flow of what codecs and sensors add to a still scene is none.
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
    quiet: float = 1 / 64
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
    it, so that a slow movement moves it on after some frames. (benchmarks/carrying.py compares with bilinear warping from
    frame to frame, and with values that stay in place: where descriptors turn with the pixels under them, the rule brings more than the
    flow, and a caller that has no other use for flow may leave it out.)

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

        Cells that are not computed though they were named are named again. A change of the grid, the batch or the
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
        self._check(appearance, still)
        now = torch.nan_to_num(appearance.detach().float(), 0.0, 0.0, 0.0)
        held, before, offset = self._appearance, self._now, self.offset
        if held is not None and (held.shape != now.shape or held.device != now.device):
            self.reset()
        self._now = now
        if self.values is None:
            self._age = torch.zeros(len(now), dtype=torch.int64, device=now.device)
            return torch.ones_like(still), "first"
        assert held is not None and before is not None and offset is not None and self._age is not None
        rule = self.rule
        field = None if flow is None else flow.detach().float()
        moved = carry(
            now, before, held, offset, still, field, occlusion, floor=rule.floor, quiet=rule.quiet, occluded=rule.occluded
        )
        self.source, self.offset, self._appearance, residual = moved
        if flow is not None:
            self.values = self.values.flatten(2).gather(2, _index(moved.source, self.values)).reshape(self.values.shape)
        self._age = self._age + 1
        refresh = residual[1] > rule.residual
        because = {
            "age": self._age >= rule.age,
            "cut": residual[0].mean((1, 2)) > rule.mean,
            "dirty": refresh.float().mean((1, 2)) > rule.dirty,
        }
        everything = because["age"] | because["cut"] | because["dirty"]
        refresh = refresh | everything[:, None, None]
        return refresh, None if refresh.is_cuda else _why(because, everything, field, still)

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
    def _check(appearance: Tensor, still: Tensor) -> None:
        if appearance.dim() != 4:
            raise ValueError(f"appearance must be [B, A, rows, columns], got {list(appearance.shape)}")
        grid = (len(appearance), *appearance.shape[2:])
        if still.shape != grid or still.dtype != torch.bool:
            raise ValueError(f"still must be bool {list(grid)}, got {still.dtype} {list(still.shape)}")


def _why(because: dict[str, Tensor], everything: Tensor, flow: Tensor | None, still: Tensor) -> str | None:
    if not bool(everything.all()):
        return None
    reason = next((name for name, where in because.items() if bool(where.all())), "dirty")
    cell = 1.0 if flow is None else (flow.shape[2] * flow.shape[3] / max(1, still[0].numel())) ** 0.5
    faint = flow is None or bool(torch.nan_to_num(flow, 0.0, 0.0, 0.0).norm(dim=1).mean() < STILL_FADE * cell)
    return "fade" if reason == "dirty" and faint else reason


def _index(source: Tensor, planes: Tensor) -> Tensor:
    return source.flatten(1)[:, None].expand(-1, planes.shape[1], -1)
