"""Constants of the host on the device that uses them.

They are copied there once: a copy in each call would wait for the device, and no CUDA graph could capture it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Copies of a tensor go with it. With each, the version of the tensor that it is of.
_COPIES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def constant(value: Tensor | float | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor, a number or numbers in this dtype on this device; the same tensor in every call, so it must not be written into.

    What requires a gradient is cast anew, and so is all where something traces: what a copy is made of there is not memory.
    """
    if _traced():
        return value.to(device, dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device=device)
    source = value if isinstance(value, Tensor) else _numbers(value, dtype)
    if source.requires_grad or source.is_inference() or (source.device == device and source.dtype == dtype):
        return source.to(device, dtype)
    copies: dict[tuple[torch.dtype, torch.device], tuple[int, Tensor]] = _COPIES.setdefault(source, {})
    version, copy = copies.get((dtype, device), (None, source))
    if version != source._version:
        with torch.inference_mode(False):  # or training could not use it later
            copy = source.to(device, dtype)
        copies[dtype, device] = source._version, copy
    return copy


def places(count: int, device: torch.device) -> Tensor:
    """0, 1, ... count - 1, int64 on this device; the same tensor in every call, so it must not be written into."""
    return torch.arange(count, device=device) if _traced() else constant(_counted(count), torch.int64, device)


def _traced() -> bool:
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.maybe_current_level() is not None


@lru_cache(maxsize=64)
def _counted(count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, device="cpu")


@lru_cache(maxsize=64)
def _numbers(value: float | tuple[float, ...], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")
