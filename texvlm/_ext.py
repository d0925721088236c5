"""Loads the compiled extension once and attaches fakes to its ops."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat, cast

from texvlm import _load

try:
    import torch
    from torch import Tensor

    _load.extension()
    from texvlm import _C
except Exception as error:  # a torch that does not load fails in many ways
    if Path(sys.argv[0]).name in ("-m", "texvlm") and sys.argv[1:2] == ["doctor"]:  # which is there for exactly this
        from texvlm.cli import doctor

        raise SystemExit(doctor.run()) from None
    why, advice = _load.explain(error)
    raise ImportError(f"texvlm's compiled extension does not load: {why}. What helps: {advice}") from error

ops = torch.ops.texvlm


def build_info() -> dict[str, Any]:
    """What the extension was built with: cuda, cuda_archs, cuda_version, compiler, torch, and cpu (the instruction set in use)."""
    return dict(_C.build_info())


def cached_bytes() -> int:
    """Bytes of freed CPU buffers that texvlm keeps for its next large tensor; at most $TEXVLM_CACHE_MB (512 by default)."""
    return int(_C.cached_bytes())


def empty_cache() -> None:
    """Returns the kept CPU buffers to the system, as `torch.cuda.empty_cache` does on the GPU."""
    _C.empty_cache()


def fake(name: str, elsewhere: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function computes the output shapes of `torch.ops.texvlm.<name>` for compile and export.

    It is given those of the op's arguments that it names, or with **kwargs all. A tensor on the device `meta` among others brings an op
    here too: it is refused, as any mix of devices is. `elsewhere`: the arguments that may be on another device than the others.
    """
    schema = getattr(ops, name).default._schema

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        wanted = inspect.signature(shapes).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in wanted.values())

        @torch.library.register_fake(f"texvlm::{name}")
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip((a.name for a in schema.arguments), args)) | kwargs
            given |= {a.name: a.default_value for a in schema.arguments if a.has_default_value() and a.name not in given}
            first: torch.Tensor | None = None
            for argument, value in given.items():
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if not isinstance(tensor, torch.Tensor) or argument in elsewhere:
                        continue
                    first = tensor if first is None else first
                    if tensor.device != first.device:
                        raise ValueError(
                            f"texvlm::{name}: {argument} must be on the device of the other arguments ({first.device}), got {tensor.device}"
                        )
            return shapes(**{n: v for n, v in given.items() if takes_all or n in wanted})

        return checked

    return register


def fake_gradients(name: str, dtype: Callable[[torch.dtype], torch.dtype] | None = None, **like: str) -> None:
    """Registers the fake of `torch.ops.texvlm.<name>_backward`, which its schema tells.

    A result grad_x is contiguous and as large as the argument x, or another that `like` names, in its dtype or what `dtype` makes of it;
    None where the mask asks for nothing or nothing is. In a list, which holds no None, it is empty then.
    """
    schema = getattr(ops, f"{name}_backward").default._schema

    @fake(f"{name}_backward")
    def _(**given: Any) -> tuple[Any, ...]:
        wanted = iter(given["mask"])

        def gradient(of: Tensor | None) -> Tensor | None:
            return of.new_empty(of.shape, dtype=dtype and dtype(of.dtype)) if next(wanted) and of is not None else None

        def result(argument: Any) -> Any:
            if not isinstance(argument, (list, tuple)):
                return gradient(argument)
            return [t if (t := gradient(of)) is not None else of.new_empty(0, dtype=torch.float32) for of in argument]

        names = [r.name.removeprefix("grad_") for r in schema.returns]
        return tuple(result(given[like.get(n, n)]) for n in names)


_CALLED_BY = {
    "attention_pack": ("attention.pack_keys", ""),
    "enlarge": ("update_saliency", "Planes [B, h, w], read bilinearly at the pixels of height x width."),
    "fovea_tokens": ("sample_foveated", "Where the tokens of a layout lie around fixations, and at which level of detail."),
    "generate_mipmaps_gl": ("gl.generate", ""),
    "keep_topk": (
        "topk",
        "The k best of each row in the order of their places: what `cells` holds there, or the places themselves.",
    ),
    "select_topk": ("topk", ""),
}
"""The public function over an op of another name, and what the op does where that is not what the function does."""


def describe_ops(package: ModuleType) -> None:
    """Gives every op a docstring, for `help(torch.ops.texvlm.NAME)`: what it does, its schema, and the function that says more."""
    for name in ops:
        forward = name.removesuffix("_backward")
        path, what = _CALLED_BY.get(forward, (forward, ""))
        if name != forward:
            what = f"The gradients of torch.ops.texvlm.{forward}, which autograd calls."
        what = what or (functools.reduce(getattr, path.split("."), package).__doc__ or "").partition("\n")[0]
        getattr(ops, name).__doc__ = (
            f"{what}\n\n{getattr(ops, name).default._schema}\n\n"
            f"The op under texvlm.{path}, whose docstring has the ranges, gradients and errors. A texture is data [B, T, C], all\n"
            "levels one after another, with height and width of level 0, reducer (one name, or one per channel) and levels; uv\n"
            "[B, N, 2] is (x, y) in [0, 1]."
        )


def texel_dtype(image: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of what is made of a picture, unless another is asked for: its own, float32 for uint8."""
    return dtype or (torch.float32 if image.dtype == torch.uint8 else image.dtype)


def integer(argument: str, value: Any, least: int | None = None) -> int:
    """A whole number (of Python, NumPy, or a symbolic size), at least `least`; no bool."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        number = value
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{argument} must be an integer, got {value!r}")
    else:
        number = value.__index__()
    if least is not None and not least <= number < 1 << 63:
        raise ValueError(f"{argument} must be at least {least}{'' if number < least else ' and below 2^63'}, got {number}")
    return cast("int", number)


def real(argument: str, value: Any) -> float:
    """A real number (of Python, NumPy, a 0-d tensor, or symbolic) as a float, as torch takes no whole number beyond 64 bits; no bool."""
    if isinstance(value, (float, torch.SymInt, torch.SymFloat)):
        return cast("float", value)
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{argument} must be at most 1.8e308 in size, got a larger whole number") from None


def sequence(argument: str, value: Any) -> tuple[Any, ...]:
    """Several values, of whatever holds them, but for a text."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{argument} must be a sequence, got {value!r}")
    return tuple(value)


def real_tensor(argument: str, value: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of real numbers; with `dtype` cast to it, copied only where it is another; with `device` also of an ndarray, put there."""
    if not isinstance(value, torch.Tensor):
        if device is not None and hasattr(value, "__array_interface__"):
            return real_tensor(argument, torch.tensor(value.copy(), device=device), dtype)
        raise TypeError(f"{argument} must be a tensor, got {type(value).__name__}")
    if value.is_complex():
        raise TypeError(f"{argument} must be real, got {value.dtype}")
    return value if dtype is None or value.dtype == dtype else value.to(dtype)


def acc_dtype(texels: torch.dtype) -> torch.dtype:
    """The dtype of coordinates beside texels of this dtype: float64 for float64, else float32."""
    return torch.float64 if texels == torch.float64 else torch.float32


def coordinates(argument: str, value: Any, like: Tensor) -> Tensor:
    """A tensor, or an ndarray put beside `like`, in the dtype that coordinates have there."""
    return real_tensor(argument, value, acc_dtype(like.dtype), like.device)
