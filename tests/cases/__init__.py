"""What the contract test knows of each op: inputs that exercise it, its reference, and inputs that it must refuse.

One module per stem, each with CASES: list[Case] and BAD: list[Bad].
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One way to call torch.ops.texvlm.<op>.

    make(dtype, generator) returns the positional arguments on the CPU, float tensors in `dtype` where texels are meant (coordinates in
    float32, or float64 beside float64 texels). Sizes stay small: gradcheck runs on them. Points stay off kinks (cell edges, integer LOD).
    """

    op: str
    label: str
    make: Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]
    grads: tuple[int | tuple[int, int], ...] = ()  # positions of the arguments that have gradients; (i, j): item j of the list i
    dtypes: tuple[torch.dtype, ...] = FLOATS
    reference: Callable[..., Any] | None = None  # default: texvlm.reference.<op>
    exact: bool = False  # integers or the same arithmetic: equal to the last bit in float32 and float64
    inductor: bool = False  # also compiled with inductor; once per stem
    atol: float | None = None  # instead of the tolerance table's
    mutates: tuple[int, ...] = ()  # positions of the arguments that the op writes into; the reference returns them last

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


@dataclass(frozen=True)
class Bad:
    """A call that must raise one clear error and change nothing."""

    op: str
    label: str
    make: Callable[[], tuple[Any, ...]]
    message: str  # a regular expression that the message must match
    error: type[Exception] | tuple[type[Exception], ...] = field(default=(ValueError, RuntimeError, NotImplementedError))

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def _modules() -> list[Any]:
    return [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]


def all_cases() -> list[Case]:
    return [case for module in _modules() for case in module.CASES]


def one_of_each(cases: list[Case]) -> list[Case]:
    """The first case of every op and set of arguments that have gradients, which is a graph of its own."""
    return list({(case.op, case.grads): case for case in reversed(cases)}.values())[::-1]


def all_bad() -> list[Bad]:
    return [bad for module in _modules() for bad in getattr(module, "BAD", [])]


def rand(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uniform in [0, 1), drawn in float64 so that all dtypes see the same values."""
    return torch.rand(*shape, dtype=torch.float64, generator=g).to(dtype)


def coords(dtype: torch.dtype) -> torch.dtype:
    """The dtype of coordinates beside texels of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
