"""Constants of the host are copied to a device once, not in each call; and the copies are never stale, shared or left by a tracer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import texvlm
from texvlm._constants import _COPIES, constant

META = torch.device("meta")  # another device than the host's, where there is no GPU


class Copies(TorchFunctionMode):
    """Counts what is brought from the host to META: tensors, numbers and lists."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        index = args[1] if func is Tensor.__getitem__ else ()
        moved = func is Tensor.to and args[0].device != out.device
        numbers = func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and out.device == META
        self.count += (
            moved or numbers or any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))
        )
        return out


def copies(call: Callable[[], Any]) -> int:
    """Of the second call."""
    call()
    with Copies() as seen:
        call()
    return seen.count


def texture() -> texvlm.Texture:
    names = [f"embedding_{i}" for i in range(16)]
    return texvlm.Texture.from_data(torch.rand(1, 85, 16, device=META), 8, 8, 4, "mean", names, {"query_vector": (1.0,) * 16})


def rand(*sizes: int) -> Tensor:
    return torch.rand(*sizes, device=META)


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "sample_foveated": lambda: partial(texvlm.sample_foveated, texture(), rand(1, 1, 2), texvlm.FoveaLayout(2, ())),
    "a layout that learns": lambda: partial(texvlm.FoveaLayout(2, (), e0=rand(1)[0]).place, torch.float32, META),
    "relevance": lambda: partial(texvlm.relevance, texture()),
    "select by a query": lambda: partial(texvlm.select, texture(), k=2, cell=2, path="query"),
    "node_places": lambda: partial(texvlm.quadtree.node_places, rand(3).long(), (2, 4), 2),
    "given clusters": lambda: partial(
        texvlm.build_channels, rand(1, 3, 8, 8), channels=["cluster", "cluster_distance"], given={"cluster_size": rand(1, 8, 8)}
    ),
    "features on axes": lambda: partial(texvlm.PCA.fit(torch.rand(64, 20)).transform, rand(3, 20)),
    "texts on axes": lambda: partial(texvlm.PCA.fit(torch.rand(64, 20)).transform_text, rand(3, 20)),
    "text_regions": lambda: partial(texvlm.text_regions, rand(1, 3, 32, 32)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_copies_nothing(name: str) -> None:
    assert copies(CALLS[name]()) == 0


def test_a_copy_follows_its_tensor() -> None:
    source = torch.rand(3)
    assert constant(source, torch.float32, source.device) is source
    first = constant(source, torch.float64, source.device)
    assert constant(source, torch.float64, source.device) is first and torch.equal(first, source.double())
    source.mul_(2)
    assert torch.equal(constant(source, torch.float64, source.device), source.double())
    other = copy.deepcopy(source)
    assert constant(other, torch.float64, other.device) is not constant(source, torch.float64, source.device)
    held = len(_COPIES)
    del source, first
    gc.collect()
    assert len(_COPIES) == held - 1


def test_what_learns_keeps_its_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    constant(weight, torch.float64, weight.device).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2))


def test_a_copy_of_inference_serves_training() -> None:
    source, weight = torch.rand(3), torch.ones(3, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        constant(source, torch.float64, source.device)
        constant((1.0, 2.5, 4.0), torch.float64, source.device)
    for value in (source, (1.0, 2.5, 4.0)):
        (weight * constant(value, torch.float64, weight.device)).sum().backward()


def test_tracers_leave_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    source = torch.rand(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(constant(source, torch.float64, source.device), FakeTensor)
        assert isinstance(constant((7.0, 8.0), torch.float64, source.device), FakeTensor)
    assert type(constant(source, torch.float64, source.device)) is Tensor
    assert type(constant((7.0, 8.0), torch.float64, source.device)) is Tensor
    compiled = torch.compile(lambda x: x * constant(source, torch.float64, x.device), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.ones(3)), source.double())
    inside = torch.func.vmap(lambda x: x * constant((1.0, 2.0), torch.float32, x.device))(torch.ones(4, 2))
    assert torch.equal(inside, torch.tensor([[1.0, 2.0]] * 4))


def test_offsets_may_be_written_into() -> None:
    layout = texvlm.FoveaLayout()
    layout.offsets.mul_(2)
    assert torch.equal(layout.offsets, texvlm.FoveaLayout().offsets)
