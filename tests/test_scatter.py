"""Gradients that many queries add to: the same bits by any number of threads, and what the serial scatter of a few queries gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effort import ADDRESS_MODES, EMULATED

import texvlm

Outputs = tuple[torch.Tensor | None, ...]


def same_by_any_number_of_threads(call: Callable[[], Outputs]) -> Outputs:
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1,) if EMULATED else (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    return results[0]


def assert_sum_of_parts(whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Of few queries each, which are scattered serially."""
    total = torch.stack([part.double() for part in parts]).sum(0)
    tolerance = 1e-11 if whole.dtype == torch.float64 else 1e-4 if whole.dtype == torch.float32 else 0.1
    torch.testing.assert_close(whole.double(), total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("channels", [1, 3, 4, 21])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float32), (19, torch.float64), (5, torch.float16)])
def test_patches(address: str, channels: int, shared: bool, turned: bool, size: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    texture = texvlm.Texture(torch.rand(1 if shared else 2, channels, 96, 128, generator=g), dtype=dtype)
    coords, count = torch.float64 if dtype == torch.float64 else torch.float32, 10 if EMULATED else 60
    uv = torch.rand(2, count, 2, generator=g, dtype=coords) * 1.6 - 0.3
    lod = (torch.rand(2, count, generator=g, dtype=coords) * 6 - 1).where(torch.arange(count) % 2 == 0, 0.0)
    uv[0, 3], lod[1, 4] = torch.nan, torch.inf
    axes = torch.randn(2, count, 2, 2, generator=g, dtype=coords) if turned else None
    grad = torch.randn(2, count, channels, size, size, generator=g).to(dtype)
    rest = (96, 128, ["mean"], texture.levels, size, address)

    def backward(rows: slice, mask: list[bool]) -> Outputs:
        cut = None if axes is None else axes[:, rows]
        places = uv[:, rows], lod[:, rows]
        return torch.ops.texvlm.extract_patches_backward(grad[:, rows], texture.data, *places, *rest, cut, mask=mask)

    whole = same_by_any_number_of_threads(lambda: backward(slice(None), [True, True, True, turned]))
    step = 2048 // size**2 // 2
    assert_sum_of_parts(whole[0], [backward(slice(n, n + step), [True, False, False, False])[0] for n in range(0, count, step)])
    alone = backward(slice(None), [False, True, True, turned])
    for a, b in zip(whole[1:], alone[1:], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("channels", [1, 3, 4, 21, 70])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reducer", ["mean", "mixed"])
def test_footprints(address: str, channels: int, shared: bool, dtype: torch.dtype, reducer: str) -> None:
    g = torch.Generator().manual_seed(0)
    names = ["mean"] if reducer == "mean" else ["mode" if c % 3 == 1 else "mean" for c in range(channels)]
    image = (torch.rand(1 if shared else 2, channels, 96, 128, generator=g) * 4).round()
    texture = texvlm.Texture(image, names, dtype=dtype)
    coords, count = torch.float64 if dtype == torch.float64 else torch.float32, 220 if EMULATED else 700
    uv = torch.rand(2, count, 2, generator=g, dtype=coords) * 1.6 - 0.3
    ddx, ddy = (torch.randn(2, count, 2, generator=g, dtype=coords) * 0.03 for _ in range(2))
    uv[0, 3], ddx[1, 4] = torch.nan, torch.inf
    grad = torch.randn(2, count, channels, generator=g).to(dtype)
    rest = (96, 128, names, texture.levels, 16, address)

    def backward(rows: slice, mask: list[bool]) -> Outputs:
        places = uv[:, rows], ddx[:, rows], ddy[:, rows]
        return torch.ops.texvlm.sample_grad_backward(grad[:, rows], texture.data, *places, *rest, mask=mask)

    whole = same_by_any_number_of_threads(lambda: backward(slice(None), [True] * 4))
    assert_sum_of_parts(whole[0], [backward(slice(n, n + 200), [True, False, False, False])[0] for n in range(0, count, 200)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("scale", [1, 4])
def test_warp(dtype: torch.dtype, scale: int) -> None:
    g = torch.Generator().manual_seed(0)
    planes = torch.rand(2, 3, 150, 200, generator=g).to(dtype)
    coords = torch.float64 if dtype == torch.float64 else torch.float32
    flow = torch.randn(2, 2, 152 // scale, 200 // scale, generator=g, dtype=coords) * 12 / scale
    flow[0, 0, 5:9], flow[1, 1, :, 20] = torch.nan, torch.inf
    hidden = torch.rand(2, 152 // scale, 200 // scale, generator=g) < 0.1
    grad = torch.randn(2, 3, 150, 200, generator=g).to(dtype)
    both = [True, True]
    whole = same_by_any_number_of_threads(lambda: torch.ops.texvlm.warp_backward(grad, planes, flow, 0.0, hidden, mask=both))
    x = torch.randn(planes.shape, generator=g, dtype=torch.float64)
    out = texvlm.warp(x, flow.double(), hidden)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close((x * whole[0].double()).sum(), (out * grad.double()).sum(), rtol=tolerance, atol=tolerance * 1e3)
