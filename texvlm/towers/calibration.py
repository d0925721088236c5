"""How much of its attention each layer of a vision tower can do without: measured on pictures, and shared out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from texvlm import attention
from texvlm.attention import KEEP
from texvlm.towers.finding import check_version, chosen_layers, known_grid, tower_of
from texvlm.towers.grids import Call
from texvlm.towers.interface import Replacement, Triple


@dataclass(frozen=True)
class Calibration:
    """What a few pictures said of a tower's layers; `texvlm.attention.replace(model, found)` takes it as it is.

    Attributes:
        layers: the indices of those that were measured.
        keep: what is proposed for each.
        shares: the values of keep that were measured; the last is 1, which reads everything.
        errors: [layers][shares], the relative L2 error of what a layer's attention gives, the mean over the pictures.
        read: [shares], entries scored over the places, the mean over the pictures.
    """

    layers: list[int]
    keep: list[float]
    shares: list[float]
    errors: list[list[float]]
    read: list[float]

    @property
    def total(self) -> float:
        """What is read with the proposed keep, the mean over the layers."""
        return sum(self.read[self.shares.index(keep)] for keep in self.keep) / len(self.keep)

    @property
    def error(self) -> float:
        """The mean over the layers of the errors that were measured at the proposed keep."""
        return sum(of[self.shares.index(keep)] for of, keep in zip(self.errors, self.keep)) / len(self.keep)


class _Measurement(Replacement):
    """Layers that attend densely, and note how far off each share would have been."""

    def __init__(self, tower: Any, layers: dict[int, Any], shares: Sequence[float], **how: Any) -> None:
        super().__init__(tower, {index: (module, 1.0) for index, module in layers.items()}, collect=False, **how)
        self.shares = shares
        self.errors: dict[int, list[list[float]]] = {index: [] for index in layers}
        self.read: list[list[float]] = []

    def _attend(
        self,
        layer: Any,
        call: Call,
        at: int,
        qkv: Triple,
        grid: tuple[int, int],
        of_keys: tuple[Tensor | None, Tensor | None],
        scale: float,
    ) -> Tensor:
        exact, _ = self._attended(1.0, qkv, grid, of_keys, scale, False)
        norm = exact.double().norm().clamp_min(1e-30)
        parts = (self._attended(share, qkv, grid, of_keys, scale, False)[0] for share in self.shares)
        self.errors[layer.index].append([float((part - exact).double().norm() / norm) for part in parts])
        if layer.index == self.layers[0]:
            self.read.append([attention.plan(grid, share, self._stages).read for share in (*self.shares, KEEP)])
        return exact


@contextmanager
def _at_rest(model: Any) -> Iterator[None]:
    """In evaluation mode for a while, without gradients."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _mean(columns: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*columns)]


def shared_out(errors: Sequence[Sequence[float]], read: Sequence[float], total: float | None, error: float | None) -> list[int]:
    """Which share each layer gets: the errors' sum as small as it can be for what is read, or what is read for the errors.

    On the convex hulls of the layers' curves, step by step where a step takes away most error for what it reads: this is optimal for
    every total at which it stops (Everett, 1963: generalized Lagrange multipliers; so are bits shared out in rate-distortion theory).

    Args:
        errors: [layers][shares].
        read: [shares], increasing.
        total: the mean of what is read, at most.
        error: or the mean error, at most.

    Returns:
        An index of a share for each layer.
    """
    at, count = [0] * len(errors), len(errors)
    steps = []
    for layer, curve in enumerate(errors):
        here = 0
        while here + 1 < len(read):
            slope, there = max(
                ((curve[here] - curve[n]) / max(read[n] - read[here], 1e-12), n) for n in range(here + 1, len(read))
            )
            if slope <= 0:
                break
            steps.append((-slope, layer, here, there))
            here = there
    spent, wrong = read[0] * count, sum(curve[0] for curve in errors)
    for _, layer, here, there in sorted(steps):
        if error is not None and wrong <= error * count:
            break
        cost = read[there] - read[here]
        if at[layer] != here or (total is not None and spent + cost > total * count * (1 + 1e-9)):
            continue
        at[layer], spent, wrong = there, spent + cost, wrong - errors[layer][here] + errors[layer][there]
    return at


def _print(found: Calibration, to: TextIO) -> None:
    """The table, plain where rich is not installed."""
    shares = found.shares[:-1]
    titles = ["layer", *(f"{share:g}" for share in shares), "keep", "read", "error"]

    def row(name: str, errors: Sequence[float], keep: str, read: float, error: float) -> list[str]:
        return [name, *(f"{100 * e:.1f}" for e in errors), keep, f"{read:.3f}", f"{100 * error:.1f}"]

    rows = []
    for layer, keep, errors in zip(found.layers, found.keep, found.errors):
        chosen = found.shares.index(keep)
        rows.append(row(str(layer), errors[: len(shares)], f"{keep:g}", found.read[chosen], errors[chosen]))
    rows.append(row("mean", _mean(found.errors)[: len(shares)], "", found.total, found.error))
    rows.append(["read", *(f"{read:.3f}" for read in found.read[: len(shares)]), "", "", ""])
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for cells in [titles, *rows]:
            print(" ".join(f"{cell:>7}" for cell in cells), file=to)
        return
    table = Table(header_style="bold", title="relative L2 error of attention, in percent, at each keep")
    for title in titles:
        table.add_column(title, justify="right")
    for cells in rows[:-2]:
        table.add_row(*cells)
    table.add_section()
    for cells in rows[-2:]:
        table.add_row(*cells)
    Console(file=to).print(table)


def calibrate(
    model: Any,
    pictures: Any,
    keep: Sequence[float] = (0.05, 0.1, 0.2, 0.4),
    total: float | None = None,
    *,
    error: float | None = None,
    layers: Sequence[int] | None = None,
    stages: str | Sequence[int] = "auto",
    importance: str = "spread",
    grid: tuple[int, int] | None = None,
    quiet: bool = False,
) -> Calibration:
    """Measures how much each layer of a vision tower suffers from being read in part, and shares out a total among the layers.

    A few pictures go through the model as it is; each layer's queries, keys and values are attended to densely and at each of several
    `keep`, and the relative L2 error of what comes out is noted. Layers differ fourfold.

    Args:
        model: see `replace`.
        pictures: what the model is called with, once for each: mappings of keyword arguments (as processors return), or tensors
            [B, C, H, W] of pixels. A single one stands for a list of one.
        keep: shares to measure, see `plan`.
        total: the mean over the layers of what is read, over the places (`AttentionPlan.read`), at most; by default what keep = 0.1 reads.
        error: in place of `total`, the mean error over the layers, at most.
        layers: see `replace`.
        stages: see `replace`.
        importance: see `replace`.
        grid: see `replace`.
        quiet: print no table.

    Returns:
        Calibration: `replace(model, found)` takes it; `.keep` is the proposal, `.errors` and `.read` are the measurements.

    Raises:
        ValueError: as `replace`; a total that is less than the least keep reads.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTModel
        >>> from texvlm import attention
        >>> sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = ViTModel(ViTConfig(image_size=64, patch_size=4, **sizes)).eval()
        >>> found = attention.calibrate(model, torch.rand(1, 3, 64, 64), total=0.4, quiet=True)
        >>> attention.replace(model, found).remove()
    """
    check_version()
    tower = tower_of(model)
    modules = chosen_layers(tower, layers)
    shares = sorted({float(share) for share in keep if share < 1})
    if not shares:
        raise ValueError(f"keep must be values below 1 to measure, got {list(keep)}")
    for share in shares:
        attention.plan((64, 64), share, stages)
    if total is not None and error is not None:
        raise ValueError("total and error must not both be given: one follows from the other")
    if importance not in attention.IMPORTANCE:
        raise ValueError(f"importance must be one of {', '.join(attention.IMPORTANCE)}, got {importance!r}")
    measured = _Measurement(tower, modules, shares, stages=stages, importance=importance, grid=known_grid(tower, grid))
    given = [pictures] if isinstance(pictures, (Tensor, Mapping)) else list(pictures)
    with _at_rest(model), measured.begin():
        for picture in given:
            if isinstance(picture, Mapping):
                model(**picture)
            else:
                model(pixel_values=picture)
    if not measured.read:
        raise ValueError("pictures must bring grids to the tower: nothing was measured")
    *read, usual = _mean(measured.read)
    errors = [[*_mean(of), 0.0] for of in measured.errors.values()]
    read = [*read, 1.0]
    if error is None:
        total = usual if total is None else total
        if total < read[0] * (1 - 1e-9):
            raise ValueError(f"total must be at least {read[0]:.3f}, what keep = {shares[0]:g} reads, got {total}")
    elif error < 0:
        raise ValueError(f"error must not be negative, got {error}")
    at = shared_out(errors, read, total, error)
    shares = [*shares, 1.0]
    found = Calibration(list(modules), [shares[i] for i in at], shares, errors, read)
    if not quiet:
        _print(found, sys.stdout)
    return found
