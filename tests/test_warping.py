"""What warping and motion mean: known shifts, the adjoint identity, flow of other resolutions, agreement with channel 7."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference


def test_zero_flow_changes_nothing() -> None:
    planes = torch.rand(2, 3, 37, 53)
    assert torch.equal(texvlm.warp(planes, torch.zeros(2, 2, 37, 53)), planes)
    assert torch.equal(texvlm.warp(planes, torch.zeros(2, 2, 5, 6)), planes)


@pytest.mark.parametrize("shift", [(3, 0), (0, -4), (2, 5)])
def test_whole_pixels_are_copied_and_borders_replicated(shift) -> None:
    planes = torch.rand(1, 2, 20, 30)
    flow = torch.tensor(shift, dtype=torch.float32)[None, :, None, None].expand(1, 2, 20, 30)
    y, x = (torch.arange(20) + shift[1]).clamp(0, 19), (torch.arange(30) + shift[0]).clamp(0, 29)
    assert torch.equal(texvlm.warp(planes, flow), planes[:, :, y[:, None], x])


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (20, 30)])
def test_a_flow_of_few_places_has_the_gradients_of_all_pixels(size) -> None:
    """Hundreds of pixels read a place of it."""
    planes = torch.rand(2, 3, 40, 61, dtype=torch.float64)
    flow = (torch.rand(2, 2, *size, dtype=torch.float64) * 0.2).requires_grad_()
    out, wanted = texvlm.warp(planes, flow), reference.warp(planes, flow)
    weights = torch.rand_like(out)
    (found,), (right,) = torch.autograd.grad(out, flow, weights), torch.autograd.grad(wanted, flow, weights)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_half_a_pixel_is_the_mean() -> None:
    row = torch.tensor([[[1.0, 3.0, 7.0]]])
    flow = torch.zeros(1, 2, 1, 3)
    flow[:, 0] = 0.5
    assert texvlm.warp(row, flow).tolist() == [[[2.0, 5.0, 7.0]]]


def test_flow_is_in_pixels_of_its_own_grid() -> None:
    planes = torch.rand(1, 1, 40, 60)
    fine = torch.tensor([4.0, 2.0])[None, :, None, None].expand(1, 2, 40, 60)
    coarse = torch.tensor([1.0, 0.5])[None, :, None, None].expand(1, 2, 10, 15)
    torch.testing.assert_close(texvlm.warp(planes, coarse), texvlm.warp(planes, fine), rtol=0, atol=1e-5)


def test_occluded_and_unknown_places_are_filled() -> None:
    planes, flow, occlusion = torch.rand(1, 2, 6, 8), torch.zeros(1, 2, 6, 8), torch.zeros(1, 6, 8, dtype=torch.bool)
    occlusion[0, 2, 3] = True
    flow[0, 1, 4, 5] = float("nan")
    out = texvlm.warp(planes, flow, occlusion, fill=0.5)
    assert out[0, 0, 2, 3] == 0.5 and out[0, 1, 4, 5] == 0.5
    assert (out != planes).sum() == 4
    assert texvlm.warp(planes, flow, occlusion)[0, 0, 2, 3] == 0
    half = torch.zeros(1, 3, 4, dtype=torch.bool)
    half[0, 1, 1] = True
    assert (texvlm.warp(planes + 1, torch.zeros(1, 2, 3, 4), half) == 0)[0, 0].nonzero().tolist() == [
        [2, 2],
        [2, 3],
        [3, 2],
        [3, 3],
    ]


@examples(30)
@given(st.integers(1, 17), st.integers(1, 17), st.integers(1, 9), st.integers(1, 9), st.integers(0, 1000))
def test_adjoint(height, width, h, w, seed) -> None:
    """<A x, y> = <x, A' y> for every size and flow; A is linear in the planes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, height, width, generator=g, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 3, height, width, generator=g, dtype=torch.float64)
    flow = torch.randn(2, 2, h, w, generator=g, dtype=torch.float64) * 3
    hidden = torch.rand(2, h, w, generator=g) < 0.2
    out = texvlm.warp(x, flow, hidden)
    (back,) = torch.autograd.grad(out, x, y)
    torch.testing.assert_close((out * y).sum(), (x * back).sum(), rtol=1e-10, atol=1e-10)


def test_gradient_of_the_flow_points_to_the_match() -> None:
    """Descent on the photometric residual recovers a shift: the gradient has the right sign and scale."""
    x = torch.arange(64, dtype=torch.float64)
    previous = torch.sin(x / 5)[None, None].expand(1, 16, 64).clone()
    current = torch.sin((x + 1.5) / 5)[None, None].expand(1, 16, 64)
    flow = torch.zeros(1, 2, 4, 16, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([flow], lr=0.02)
    for _ in range(100):
        optimiser.zero_grad()
        (texvlm.warp(previous, flow) - current)[..., 4:-6].square().sum().backward()
        optimiser.step()
    assert (flow[0, 0, :, 2:-3] * 4 - 1.5).abs().max() < 0.2  # in pixels of the coarse grid, four times as large
    assert flow[0, 1].abs().max() < 0.05


def test_motion_without_flow_is_channel_7() -> None:
    for make in (lambda: torch.rand(2, 3, 33, 40), lambda: torch.randint(0, 256, (1, 3, 20, 31), dtype=torch.uint8)):
        image, previous = make(), make()
        channel = texvlm.build_channels(image, previous, channels=["motion"]).level(0)[:, 0]
        assert torch.equal(texvlm.motion(previous, image), channel)


def test_motion_that_flow_explains_is_gone() -> None:
    g = torch.Generator().manual_seed(0)
    picture = torch.nn.functional.interpolate(torch.rand(1, 3, 16, 20, generator=g), (128, 160), mode="bicubic").clamp(0, 1)
    current = picture.roll(4, dims=3)
    current[..., 50:70, 60:80] = 0.0  # what no motion explains
    flow, occlusion = texvlm.optical_flow(picture, current)
    plain, left = texvlm.motion(picture, current), texvlm.motion(previous=picture, current=current, flow=flow)
    away = torch.ones(128, 160, dtype=torch.bool)
    away[:, :12], away[40:80, 50:90] = False, False
    assert left[0][away].mean() < 0.25 * plain[0][away].mean()
    assert left[0, 55:65, 65:75].mean() > 5 * left[0][away].mean()
    assert left.min() >= 0 and left.max() <= 1
    hidden = torch.ones_like(occlusion)
    assert torch.equal(texvlm.motion(previous=picture, current=current, flow=flow, occlusion=hidden), plain)


def test_motion_is_never_nan() -> None:
    image, previous = torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)
    image[0, 0, 1, 1], previous[0, 2, 3, 3] = float("nan"), float("inf")
    flow = torch.full((1, 2, 8, 8), float("nan"))
    assert torch.equal(texvlm.motion(previous=previous, image=image, flow=flow), texvlm.motion(previous, image))
    assert texvlm.motion(previous, image).isfinite().all()


def test_half_planes_and_autocast() -> None:
    planes, flow = torch.rand(1, 4, 16, 16), torch.randn(1, 2, 16, 16)
    wide = texvlm.warp(planes.half().float(), flow)
    half = texvlm.warp(planes.half(), flow.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(texvlm.warp(planes.half(), flow).float(), wide, rtol=1e-3, atol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.ops.texvlm.warp(planes, flow.bfloat16()), texvlm.warp(planes, flow.bfloat16().float()))
