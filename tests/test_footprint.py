"""What footprints mean: singular values and taps of known shapes, invariances, gradients through the taps and the LOD."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference

SIDE = 64


def turned(angle: float, major: float, minor: float, mix: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """ddx, ddy [1, 1, 2] of the ellipse with these axes (pixels of a SIDE x SIDE texture); `mix` turns the sides on it."""
    u = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    v = torch.tensor([[math.cos(mix), -math.sin(mix)], [math.sin(mix), math.cos(mix)]], dtype=torch.float64)
    m = u @ torch.diag(torch.tensor([major, minor], dtype=torch.float64)) @ v / SIDE
    return m[:, 0].reshape(1, 1, 2), m[:, 1].reshape(1, 1, 2)


@pytest.fixture
def texture() -> texvlm.Texture:
    return texvlm.Texture(torch.rand(2, SIDE, SIDE, dtype=torch.float64))


def by_hand(texture: texvlm.Texture, uv: torch.Tensor, angle: float, major: float, minor: float, most: int) -> torch.Tensor:
    lod = min(max(math.log2(max(minor, major / most)), 0.0), texture.levels - 1)
    taps = min(max(math.ceil(major * 2**-lod * (1 - 1e-5)), 1), most)
    axis = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64) * major / SIDE
    return sum(texture.sample(uv + ((i + 0.5) / taps - 0.5) * axis, lod) for i in range(taps)) / taps


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.0, math.pi / 2, 2.5, -0.8])
@pytest.mark.parametrize(("major", "minor"), [(6.3, 1.5), (20.1, 0.7), (50.0, 1.0), (3.0, 2.9), (0.5, 0.2), (300.0, 4.0)])
@pytest.mark.parametrize("most", [1, 4, 16])
def test_ellipses_of_any_direction(texture: texvlm.Texture, angle: float, major: float, minor: float, most: int) -> None:
    """The axis is not mirrored: sides turned on the ellipse, and reflected, change nothing."""
    uv = torch.tensor([[[0.47, 0.55]]], dtype=torch.float64)
    wanted = by_hand(texture, uv, angle, major, minor, most)
    for mix in (0.0, 0.7, 2.0, 3.0):
        ddx, ddy = turned(angle, major, minor, mix)
        for a, b in ((ddx, ddy), (ddy, ddx), (-ddx, ddy), (ddx, -ddy)):
            torch.testing.assert_close(texture.sample_footprint(uv, a, b, most), wanted, rtol=1e-9, atol=1e-9)


def test_zero_is_one_tap_at_full_size(texture: texvlm.Texture) -> None:
    uv = torch.rand(1, 9, 2, dtype=torch.float64)
    zero = torch.zeros_like(uv).requires_grad_()
    out = texture.sample_footprint(uv, zero, zero)
    torch.testing.assert_close(out, texture.sample(uv), rtol=1e-12, atol=1e-12)
    out.sum().backward()
    assert not zero.grad.any()


@pytest.mark.parametrize("radius", [0.5, 2.0, 5.7, 400.0])
def test_circles_are_isotropic(texture: texvlm.Texture, radius: float) -> None:
    uv = torch.rand(1, 1, 2, dtype=torch.float64)
    for angle in (0.0, 0.4, 2.0):
        ddx, ddy = (t.requires_grad_() for t in turned(angle, radius, radius))
        out = texture.sample_footprint(uv, ddx, ddy)
        lod = min(max(math.log2(radius), 0), texture.levels - 1)
        if radius < 64:  # one tap
            torch.testing.assert_close(out, texture.sample(uv, lod), rtol=1e-6, atol=1e-6)
        out.sum().backward()
        assert ddx.grad.isfinite().all()
        assert ddy.grad.isfinite().all()


def test_taps_average_what_the_footprint_covers() -> None:
    """A row of 16 texels at full size: 16 taps at their centres, so their mean to rounding."""
    image = torch.rand(1, SIDE, SIDE, dtype=torch.float64)
    texture = texvlm.Texture(image)
    uv = torch.tensor([[[24 / SIDE, 30.5 / SIDE]]], dtype=torch.float64)
    ddx, ddy = torch.tensor([[[16 / SIDE, 0.0]]], dtype=torch.float64), torch.tensor([[[0.0, 1 / SIDE]]], dtype=torch.float64)
    torch.testing.assert_close(texture.sample_footprint(uv, ddx, ddy).squeeze(), image[0, 30, 16:32].mean())


def test_not_finite_and_huge() -> None:
    values = torch.tensor([0.0, 1e-38, 0.1, 1e10, -3e38, math.nan, math.inf])
    ddx = torch.cartesian_prod(values, values, values, values)[None]
    for address in ("clamp", "wrap", "mirror", "border"):
        leaves = [torch.rand(1, 85, 3), torch.full((1, ddx.shape[1], 2), 0.4), ddx[..., :2].clone(), ddx[..., 2:].clone()]
        leaves = [t.requires_grad_() for t in leaves]
        out = torch.ops.texvlm.sample_grad(*leaves, 8, 8, ["mean"], 4, 16, address)
        fine = ddx.isfinite().all(-1)
        assert out[~fine].isnan().all()
        small = fine & (ddx.abs() < 1e20).all(-1)
        assert ((out[small] >= 0) & (out[small] <= 1 + 1e-6)).all()
        out.nan_to_num().sum().backward()
        assert leaves[0].grad.isfinite().all()
        for t in leaves[1:]:
            assert t.grad[small].isfinite().all()
            assert not t.grad[~fine].any()


@examples(40)
@given(
    h=st.integers(1, 40),
    w=st.integers(1, 40),
    c=st.sampled_from([1, 3, 4, 6]),
    n=st.integers(0, 40),
    most=st.integers(1, 16),
    address=st.sampled_from(["clamp", "wrap", "mirror", "border"]),
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([0.3, 2.0, 9.0]),
)
def test_random_footprints_equal_the_reference(h, w, c, n, most, address, seed, size) -> None:
    g = torch.Generator().manual_seed(seed)
    texture = texvlm.Texture(torch.rand(1, c, h, w, generator=g, dtype=torch.float64))
    pixels = torch.tensor([w, h], dtype=torch.float64)
    inputs = [
        texture.data,
        torch.rand(2, n, 2, generator=g, dtype=torch.float64) * 1.4 - 0.2,
        *(torch.randn(2, n, 2, generator=g, dtype=torch.float64) * size / pixels for _ in range(2)),
    ]
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    args = (h, w, ["mean"], texture.levels, most, address)
    out, wanted = torch.ops.texvlm.sample_grad(*mine, *args), reference.sample_grad(*theirs, *args)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn(out.shape, generator=g, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(out, mine, weights), torch.autograd.grad(wanted, theirs, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_adjoint_identity(texture: texvlm.Texture) -> None:
    uv = torch.rand(1, 300, 2, dtype=torch.float64)
    ddx, ddy = (torch.randn(1, 300, 2, dtype=torch.float64) * 0.1 for _ in range(2))
    x = torch.randn_like(texture.data).requires_grad_()
    out = texture.replace(x).sample_footprint(uv, ddx, ddy)
    y = torch.randn_like(out)
    (adjoint,) = torch.autograd.grad(out, x, y)
    torch.testing.assert_close((out * y).sum(), (x * adjoint).sum(), rtol=1e-10, atol=1e-10)


def test_autocast_promotes_coordinates() -> None:
    texture = texvlm.Texture(torch.rand(3, 8, 8))
    uv, ddx, ddy = (torch.rand(1, 5, 2).bfloat16() for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.ops.texvlm.sample_grad(texture.data, uv, ddx, ddy, 8, 8, ["mean"], texture.levels)
    torch.testing.assert_close(out, texture.sample_footprint(uv, ddx, ddy), rtol=0, atol=0)


# ---- on every device ----


@pytest.mark.parametrize("channels", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("address", ["clamp", "border"])
def test_gradients_equal_the_reference_and_repeat(channels: int, address: str, device: torch.device, deterministic) -> None:
    texture = texvlm.Texture(torch.rand(2, channels, 24, 18, dtype=torch.float64))
    uv = torch.rand(2, 30, 2, dtype=torch.float64)
    ddx, ddy = (torch.randn(2, 30, 2, dtype=torch.float64) * 0.2 for _ in range(2))
    weights = torch.randn(2, 30, channels, dtype=torch.float64)
    args = (24, 18, ["mean"], texture.levels, 8, address)
    results = []
    for op, place in ((reference.sample_grad, "cpu"), *((torch.ops.texvlm.sample_grad, device),) * 3):
        leaves = [t.to(place).clone().requires_grad_() for t in (texture.data, uv, ddx, ddy)]
        if op is reference.sample_grad:
            torch.use_deterministic_algorithms(False)
        results.append([g.cpu() for g in torch.autograd.grad(op(*leaves, *args), leaves, weights.to(place))])
        torch.use_deterministic_algorithms(True)
    for a, b in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    for other in results[2:]:
        assert all(torch.equal(a, b) for a, b in zip(results[1], other, strict=True))
