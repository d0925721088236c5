"""The vision tower of a model of transformers, and its attention modules."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from texvlm import attention
from texvlm._ext import integer

OLDEST = "5.9"
"""The first transformers that this is tried with."""


def check_version() -> None:
    """Says in one line that transformers is missing or too old."""
    try:
        import transformers
    except ImportError:
        raise ImportError(
            f"texvlm.attention.replace needs transformers >= {OLDEST}: pip install 'transformers>={OLDEST}'"
        ) from None
    numbers = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if numbers < tuple(int(part) for part in OLDEST.split(".")):
        raise ImportError(f"texvlm.attention.replace needs transformers >= {OLDEST}, found {transformers.__version__}")


def attends(module: Any) -> bool:
    """Whether a module attends through transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def tower_of(model: Any) -> Any:
    """The vision tower of a model: what takes pictures or their rows, has attention, and holds nothing else of that kind.

    Raises:
        ValueError: there is none, or more than one.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model must be a model of transformers, got {type(model).__name__}")
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        takes = inspect.signature(module.forward).parameters
        if ("pixel_values" in takes or "grid_thw" in takes) and hasattr(module, "config") and any(map(attends, module.modules())):
            found = {n: m for n, m in found.items() if n and not name.startswith(f"{n}.")} | {name: module}
    if len(found) != 1:
        kind = type(model).__name__
        if not found:
            raise ValueError(
                f"model must be or hold a vision tower whose attention goes through transformers' interface, got {kind}"
            )
        raise ValueError(f"model must hold one vision tower, {kind} has several: hand in one of {', '.join(found)}")
    return next(iter(found.values()))


def layers_of(tower: Any) -> list[Any]:
    """Its attention modules, in order."""
    return [module for module in tower.modules() if attends(module)]


def chosen_layers(tower: Any, layers: Sequence[int] | None) -> dict[int, Any]:
    """The attention modules of these layers by index; by default of all that have full attention."""
    modules = layers_of(tower)
    full = getattr(tower.config, "fullatt_block_indexes", None)
    if layers is None:
        return {index: module for index, module in enumerate(modules) if full is None or index in full}
    chosen = {}
    for layer in layers:
        index = integer("layers", layer) + (len(modules) if layer < 0 else 0)
        if not 0 <= index < len(modules):
            raise ValueError(f"layers must be from {-len(modules)} to {len(modules) - 1}, got {layer}")
        if full is not None and index not in full:
            raise ValueError(f"layer {index} attends within windows: it cannot be replaced, only {', '.join(map(str, full))} can")
        chosen[index] = modules[index]
    if not chosen:
        raise ValueError("layers must name at least one layer")
    return chosen


def known_grid(tower: Any, grid: tuple[int, int] | None) -> tuple[int, int] | None:
    """A grid that is given, checked."""
    if grid is not None:
        attention.plan(grid)
        if {"grid_thw", "spatial_shapes"} & set(inspect.signature(tower.forward).parameters):
            raise ValueError(f"grid must be left out: a {type(tower).__name__} is called with the grids of its pictures")
        return int(grid[0]), int(grid[1])
    return None
