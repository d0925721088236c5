"""Run by itself: prepares and runs batches whose parts are on the CPU and on another device, which is the CPU under another name.

A tensor there (`Far`) holds one on the CPU, says that it is on "far", and refuses to be mixed with tensors on the CPU, as CUDA does. So
what stands on the wrong device is found where there is no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("far")
FAR = torch.device("far:0")
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Far(Tensor):
    """A tensor on the other device."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Far:
        made = Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype, device=FAR
        )
        made.elem = elem
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.elem})"

    def tolist(self) -> Any:
        return self.elem.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == "far"


def check(name: str, args: Any, leaves: list[Any]) -> None:
    """Raises where CUDA would."""
    near = [a for a in leaves if isinstance(a, Tensor) and not isinstance(a, Far)]
    if not near or not any(isinstance(a, Far) for a in leaves) or name in ("aten::_to_copy", "aten::copy_"):
        return
    if name in INDEXING:
        if not isinstance(args[0], Far):
            raise RuntimeError(f"indices on another device than the CPU tensor, in {name}")
        near = [a for a in args[2:3] if isinstance(a, Tensor) and not isinstance(a, Far)]
    if any(a.dim() for a in near) or (near and name in ("aten::cat", "aten::stack")):
        raise RuntimeError(f"tensors on different devices in {name}: {[(type(a).__name__, list(a.shape)) for a in near]} are not")


def run(func: Any, args: Any, kwargs: Any) -> Any:
    name, leaves = func._schema.name, tree_leaves((args, kwargs))
    check(name, args, leaves)
    far = any(isinstance(a, Far) for a in leaves)
    if kwargs.get("device") is not None:
        far = is_far(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args_there, kwargs_there = tree_map(lambda a: a.elem if isinstance(a, Far) else a, (args, kwargs))
    out = func(*args_there, **kwargs_there)
    if name == "aten::_local_scalar_dense":
        return out
    if func._schema.is_mutable and name.endswith("_"):
        return args[0]
    return tree_map(lambda o: Far(o) if far and isinstance(o, Tensor) else o, out)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Function(TorchFunctionMode):
    """What is made of Python's numbers and lists, which no dispatcher sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and is_far(kwargs.get("device")) and not isinstance(args[0], Tensor):
            del kwargs["device"]
            numbers = tree_map(lambda a: a.item() if isinstance(a, Tensor) else a, args)
            return Far(func(*numbers, **kwargs))
        if func is Tensor.new_tensor and isinstance(args[0], Far):
            return Far(torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}))
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], Far):
            index = tree_map(lambda i: i, args[1], is_leaf=lambda i: isinstance(i, list))
            parts = index if isinstance(index, tuple) else (index,)
            there = tuple(Far(torch.tensor(part)) if isinstance(part, list) else part for part in parts)
            return func(args[0], there if isinstance(index, tuple) else there[0], *args[2:], **kwargs)
        return func(*args, **kwargs)


@contextmanager
def far_device() -> Iterator[None]:
    with _Dispatch(), _Function():
        yield


def far(value: Any) -> Any:
    """Over there, with what is in it."""
    return tree_map(lambda v: Far(v) if isinstance(v, Tensor) else v, value)


def moved(module: Any) -> Any:
    """With its weights over there."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(Far(weight.data), requires_grad=weight.requires_grad)
        for name, value in part._buffers.items():
            part._buffers[name] = None if value is None else Far(value)
    return module


class Learner(nn.Module):
    """Scores by the mean of each group; in training its weights act."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, image: Tensor, grid: tuple[int, int], k: int) -> tuple[Tensor, Tensor]:
        assert is_far(image.device)
        score = self.gain * nn.functional.adaptive_avg_pool2d(image.mean(0)[None], grid).flatten()
        return score.topk(k)[1], score.sigmoid()


def weighing(image: Tensor, grid: tuple[int, int], k: int) -> tuple[Tensor, Tensor]:
    return torch.arange(k, device=image.device), torch.linspace(0.5, 1, k, device=image.device)


def selectors_for(model: Any) -> dict[str, Any]:
    import texvlm
    from texvlm.qwen import CoarseAttention

    return {
        "uniform": "uniform",
        "predictive": "predictive",
        "multiscale": "multiscale",
        "function": weighing,
        "coarse": CoarseAttention(model, groups=6),
        "module": moved(Learner()),
        "allocator": moved(texvlm.Allocator(participation=(), cell=8)),
    }


MODES = [
    ("prune_pre", None),
    ("prune_pre", "segment"),
    ("prune_pre", "joint"),
    ("prune_post", None),
    ("bias", None),
    ("blend", None),
]


def main() -> None:
    """Every mode with every selector; families, and where the parts are, in turns."""
    from texvlm.qwen import QwenVLAdapter, tiny_batch, tiny_model

    families = ("qwen3_vl", "qwen2_5_vl")
    inputs = tiny_batch(tiny_model(families[0]), [[(40, 48), (32, 64)], [(64, 64)]], labels=True)
    bare = {name: value for name, value in inputs.items() if name != "pixel_values"}
    pictures = [torch.rand(3, 45, 50), (torch.rand(3, 30, 64) * 255).byte(), torch.rand(3, 64, 64)]
    ways: dict[str, tuple[Any, Any]] = {
        "all there": (far(inputs), None),
        "pictures here": (far(bare), pictures),
        "ids here, pictures there": (bare, far(pictures)),
        "rows here": ({**far(inputs), "pixel_values": inputs["pixel_values"]}, None),
        "pictures there": (far(bare), far(pictures)),
        "ids here, rows here": (inputs, None),
    }
    budgets = itertools.cycle([[8, None, 3], None, None])
    turns = itertools.cycle(range(len(ways)))
    for family in families:
        model = moved(tiny_model(family).requires_grad_(False))
        for (mode, thumbnail), (name, selector) in itertools.product(MODES, selectors_for(model).items()):
            if (name == "multiscale" and mode != "prune_pre") or (family != families[0] and mode == "blend"):
                continue
            adapter = QwenVLAdapter(model, selector, 8, mode, thumbnail=thumbnail, pixels=(64, 1 << 20))
            way = list(ways)[next(turns)]
            with far_device():
                try:
                    batch = adapter.prepare(*ways[way], k=next(budgets))
                    there = {is_far(value.device) for value in tree_leaves(dict(batch)) if isinstance(value, Tensor)}
                    assert there == {"ids here" not in way}, batch
                    assert adapter(batch.to(FAR)).loss.isfinite()
                    adapter.show(batch)
                except Exception as error:
                    raise AssertionError(f"{family} {mode} {thumbnail} {name}, {way}: {error}") from error


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    main()
