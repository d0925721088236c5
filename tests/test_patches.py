"""What a patch means: which texels it shows, that it turns with its axes, and where its gradients go."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference


def table(texture: texvlm.Texture) -> tuple:
    return texture.height, texture.width, list(texture.reducer), texture.levels


def centres(*pixels: tuple[float, float], height: int, width: int, dtype=torch.float32) -> torch.Tensor:
    """[1, N, 2] uv of (x, y) in level-0 pixels."""
    return torch.tensor([[(x / width, y / height) for x, y in pixels]], dtype=dtype)


@pytest.mark.parametrize("channels", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("size", [1, 2, 8, 16, 32])
def test_aligned_patch_is_the_texels_themselves(channels: int, size: int) -> None:
    image = torch.rand(channels, 64, 128)
    cells = [(2, 1), (0, 0), (128 // size - 1, 64 // size - 1)]
    uv = centres(*(((x + 0.5) * size, (y + 0.5) * size) for x, y in cells), height=64, width=128)
    out = texvlm.extract_patches(texvlm.Texture(image), uv, size=size)
    for patch, (x, y) in zip(out[0], cells, strict=True):
        assert torch.equal(patch, image[:, y * size : (y + 1) * size, x * size : (x + 1) * size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_aligned_patch_at_level_2_is_a_piece_of_that_level(dtype: torch.dtype) -> None:
    texture = texvlm.Texture(torch.rand(3, 128, 192), dtype=dtype)
    out = texvlm.extract_patches(texture, centres((96, 96), height=128, width=192), lod=2.0)
    assert torch.equal(out[0, 0], texture.level(2)[0, :, 16:32, 16:32])


def test_neighbouring_samples_are_two_to_the_lod_pixels_apart() -> None:
    """In a ramp the value says where a sample was taken, at every level."""
    side = 256
    x, y = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="xy")
    texture = texvlm.Texture(torch.stack([x, y]))
    for lod in (0.0, 0.5, 1.0, 2.3):
        out = texvlm.extract_patches(texture, centres((120.2, 130.7), height=side, width=side), lod, size=8)
        step = (torch.arange(8) - 3.5) * 2**lod
        torch.testing.assert_close(out[0, 0, 0], (120.2 + step).expand(8, 8), rtol=0, atol=2e-3)
        torch.testing.assert_close(out[0, 0, 1], (130.7 + step)[:, None].expand(8, 8), rtol=0, atol=2e-3)


def test_axes_turn_a_patch() -> None:
    image = torch.rand(3, 32, 32)
    texture, uv = texvlm.Texture(image), centres((16, 16), height=32, width=32)
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).expand(1, 1, 2, 2)  # x becomes y, y becomes -x
    plain, turned = (texvlm.extract_patches(texture, uv, size=8, axes=a)[0, 0] for a in (None, quarter))
    torch.testing.assert_close(turned, plain.transpose(1, 2).flip(1))
    mirrored = texvlm.extract_patches(texture, uv, size=8, axes=torch.diag(torch.tensor([-1.0, 1.0])).expand(1, 1, 2, 2))
    torch.testing.assert_close(mirrored[0, 0], plain.flip(2))
    flat = texvlm.extract_patches(texture, uv, size=8, axes=torch.zeros(1, 1, 2, 2))
    torch.testing.assert_close(
        flat[0, 0],
        reference.sample_lod(texture.data, uv, 0.0, *table(texture))[0, 0, :, None, None].expand(3, 8, 8),
    )


@pytest.mark.parametrize("address", ["clamp", "wrap", "mirror", "border"])
def test_identity_axes_change_nothing(address: str) -> None:
    """The separable path, also over borders, against the path sample by sample."""
    texture = texvlm.Texture(torch.rand(2, 3, 45, 70))
    uv, lod = torch.rand(2, 40, 2) * 1.4 - 0.2, torch.rand(2, 40) * 6
    eye = torch.eye(2).expand(2, 40, 2, 2)
    plain, mapped = (texvlm.extract_patches(texture, uv, lod, 16, a, address) for a in (None, eye))
    torch.testing.assert_close(plain, mapped, rtol=0, atol=2e-5)


def test_constant_picture_stays_constant() -> None:
    texture = texvlm.Texture(torch.full((4, 37, 53), 0.7))
    out = texvlm.extract_patches(texture, torch.rand(1, 30, 2) * 3 - 1, torch.rand(1, 30) * 7)
    torch.testing.assert_close(out, torch.full_like(out, 0.7), rtol=0, atol=2e-7)


@examples(60)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    channels=st.sampled_from([1, 2, 3, 4, 17]),
    size=st.sampled_from([1, 2, 3, 16, 17, 34]),
    address=st.sampled_from(["clamp", "wrap", "mirror", "border"]),
    turned=st.booleans(),
    whole=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_equals_reference(height, width, channels, size, address, turned, whole, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    texture = texvlm.Texture(torch.rand(channels, height, width, generator=g, dtype=torch.float64))
    uv = torch.rand(2, 3, 2, generator=g, dtype=torch.float64) * 2 - 0.5
    lod = torch.rand(2, 3, generator=g, dtype=torch.float64) * 7 - 1
    lod = lod.floor() if whole else lod
    axes = torch.randn(2, 3, 2, 2, generator=g, dtype=torch.float64) if turned else None
    inputs = [t.requires_grad_() for t in (texture.data, uv, lod, axes) if t is not None]
    out = texvlm.extract_patches(texture, uv, lod, size, axes, address)
    wanted = reference.extract_patches(texture.data, uv, lod, *table(texture), size, address, axes)
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-11)
    weight = torch.randn(out.shape, generator=g, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(out, inputs, weight), torch.autograd.grad(wanted, inputs, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-8)


def test_adjoint_identity_in_the_texels() -> None:
    texture = texvlm.Texture(torch.rand(3, 33, 50, dtype=torch.float64))
    uv, lod = (
        torch.rand(1, 20, 2, dtype=torch.float64) * 1.2 - 0.1,
        torch.rand(1, 20, dtype=torch.float64) * 5,
    )
    x = texture.data.requires_grad_()
    out = texvlm.extract_patches(texture, uv, lod)
    y = torch.randn_like(out)
    (adjoint,) = torch.autograd.grad(out, x, y)
    torch.testing.assert_close((out * y).sum(), (x * adjoint).sum())


def test_a_shared_texture_sums_its_gradient() -> None:
    texture = texvlm.Texture(torch.rand(3, 16, 16, dtype=torch.float64))
    uv, lod = torch.rand(4, 5, 2, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
    x = texture.data.requires_grad_()
    (shared,) = torch.autograd.grad(texvlm.extract_patches(texture, uv, lod, 4).square().sum(), x)
    apart = x.detach().repeat(4, 1, 1).requires_grad_()
    (each,) = torch.autograd.grad(texvlm.extract_patches(texture.replace(apart), uv, lod, 4).square().sum(), apart)
    torch.testing.assert_close(shared, each.sum(0, keepdim=True))


def test_gradient_by_lod_at_integers_is_that_of_the_right_side() -> None:
    texture = texvlm.Texture(torch.rand(3, 64, 64, dtype=torch.float64))
    uv = torch.rand(1, 6, 2, dtype=torch.float64)
    lod = torch.tensor([[0.0, 1, 2, 0, 3, 1]], dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 6, 3, 8, 8, dtype=torch.float64)

    def value(level):
        return (texvlm.extract_patches(texture, uv, level, 8) * weight).sum((2, 3, 4))

    (slope,) = torch.autograd.grad(value(lod).sum(), lod)
    step = 1e-7
    torch.testing.assert_close(slope, (value(lod + step) - value(lod)).detach() / step, rtol=1e-5, atol=1e-4)


def test_clamped_lod_has_no_gradient() -> None:
    texture = texvlm.Texture(torch.rand(3, 16, 16))
    lod = torch.tensor([[-0.5, 4.5, 1.5]], requires_grad=True)
    texvlm.extract_patches(texture, torch.full((1, 3, 2), 0.4), lod, 4).square().sum().backward()
    assert lod.grad[0, :2].tolist() == [0, 0]
    assert lod.grad[0, 2] != 0


def test_channels_of_reducer_mode_are_nearest_and_without_gradient() -> None:
    image = (torch.rand(2, 4, 21, 34, dtype=torch.float64) * 3).round()
    texture = texvlm.Texture(image, ["mean", "mode", "max", "mode"])
    args = torch.rand(2, 9, 2, dtype=torch.float64) * 1.2 - 0.1, torch.rand(2, 9, dtype=torch.float64) * 5
    inputs = [t.clone().requires_grad_() for t in (texture.data, *args)]
    out = texvlm.extract_patches(texture.replace(inputs[0]), *inputs[1:], 5)
    wanted = reference.extract_patches(*inputs, *table(texture), 5)
    assert torch.equal(out[:, :, 1::2], wanted[:, :, 1::2])
    assert torch.equal(out[:, :, 1::2], out[:, :, 1::2].round())
    weight = torch.randn_like(out)
    mine, theirs = torch.autograd.grad(out, inputs, weight), torch.autograd.grad(wanted, inputs, weight)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert mine[0][..., 1::2].abs().max() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["center", "lod", "axes"])
@pytest.mark.parametrize("address", ["clamp", "wrap", "mirror", "border"])
def test_not_finite_gives_nan_and_no_gradient(bad: float, where: str, address: str) -> None:
    texture = texvlm.Texture(torch.rand(3, 16, 16))
    center, lod, axes = torch.rand(1, 3, 2), torch.rand(1, 3), torch.eye(2).repeat(1, 3, 1, 1)
    broken = {"center": center, "lod": lod, "axes": axes}[where]
    broken[0, 1].view(-1)[-1] = bad
    inputs = [t.requires_grad_() for t in (texture.data, center, lod, axes)]
    out = texvlm.extract_patches(texture, center, lod, 4, axes if where == "axes" else None, address)
    assert out[0, 1].isnan().all()
    assert out[0, ::2].isfinite().all()
    used = inputs if where == "axes" else inputs[:3]
    grads = torch.autograd.grad(out, used, torch.ones_like(out))
    assert all(g.isfinite().all() for g in grads)
    assert all(g[0, 1].abs().max() == 0 for g in grads[1:])
    (texels,) = torch.autograd.grad(
        texvlm.extract_patches(texture, center[:, ::2], lod[:, ::2], 4, None, address).sum(), texture.data
    )
    torch.testing.assert_close(grads[0], texels)


def test_axes_that_overflow_give_nan_where_they_do() -> None:
    texture = texvlm.Texture(torch.rand(3, 16, 16).requires_grad_())
    axes = (torch.eye(2) * 3e38).expand(1, 1, 2, 2).clone().requires_grad_()
    out = texvlm.extract_patches(texture, torch.full((1, 1, 2), 0.5), 3.0, 16, axes, "wrap")
    assert out.isnan().any()
    out.nansum().backward()
    assert axes.grad.isfinite().all()


@pytest.mark.parametrize("value", [1e30, -1e30, 3e38, -3e38])
@pytest.mark.parametrize("address", ["clamp", "wrap", "mirror", "border"])
def test_huge_coordinates_are_finite(value: float, address: str) -> None:
    texture = texvlm.Texture(torch.rand(3, 16, 12))
    center = torch.tensor([[[value, 0.5], [0.5, value]]], requires_grad=True)
    lod = torch.tensor([[value, 0.0]], requires_grad=True)
    out = texvlm.extract_patches(texture, center, lod, 8, None, address)
    assert out.isfinite().all()
    out.sum().backward()
    assert center.grad.isfinite().all()
    assert lod.grad.isfinite().all()


def test_strided_gradients_need_no_copy() -> None:
    texture = texvlm.Texture(torch.rand(3, 32, 32).requires_grad_())
    uv = torch.rand(1, 7, 2)
    out = texvlm.extract_patches(texture, uv, 0.7, 8)
    weight = torch.randn(8, 8, 3, 7, 1).permute(4, 3, 2, 0, 1)
    for w in (weight, torch.ones(1).expand(out.shape)):
        (a,) = torch.autograd.grad(out, texture.data, w, retain_graph=True)
        (b,) = torch.autograd.grad(out, texture.data, w.contiguous(), retain_graph=True)
        assert torch.equal(a, b)


def test_autocast_keeps_coordinates_in_float32() -> None:
    texture = texvlm.Texture(torch.rand(3, 64, 64), dtype=torch.bfloat16)
    uv, lod = torch.rand(1, 5, 2), torch.rand(1, 5)
    plain = texvlm.extract_patches(texture, uv, lod)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(texvlm.extract_patches(texture, uv, lod), plain)
        low = torch.ops.texvlm.extract_patches(texture.data, uv.bfloat16(), lod.bfloat16(), *table(texture))
    assert low.dtype == torch.bfloat16


def test_lod_may_be_a_number_or_what_broadcasts() -> None:
    texture, uv = texvlm.Texture(torch.rand(3, 32, 32)), torch.rand(2, 3, 2)
    wanted = texvlm.extract_patches(texture, uv, torch.full((2, 3), 1.25), 4)
    for lod in (1.25, torch.tensor(1.25), torch.full((3,), 1.25), torch.full((2, 1), 1.25, dtype=torch.float64)):
        assert torch.equal(texvlm.extract_patches(texture, uv, lod, 4), wanted)
    assert torch.equal(texture.patches(uv, 1.25, 4), wanted)
    for lod in (torch.zeros(2), torch.zeros(3, 3), torch.zeros(1, 2, 3)):
        with pytest.raises(ValueError, match=r"lod must be a number, or broadcast to \[2, 3\]"):
            texvlm.extract_patches(texture, uv, lod, 4)


def test_every_size_and_channel_count_reads_inside() -> None:
    """All shapes of strips at once, on the smallest textures that they can overrun."""
    for channels, size, side in itertools.product((1, 2, 3, 4, 5), (1, 15, 16, 17), (1, 2, 15, 17)):
        texture = texvlm.Texture(torch.ones(channels, side, side))
        uv = torch.rand(1, 8, 2) * 1.5 - 0.25
        out = texvlm.extract_patches(texture, uv, torch.tensor([0.0, 1, 2, 0.5, 0, 0, 0, 9])[None], size)
        torch.testing.assert_close(out, torch.ones_like(out))


# ---- on every device ----


def patches_of(channels: int, size: int, device: torch.device, turned: bool, dtype: torch.dtype = torch.float64):
    texture = texvlm.Texture(torch.rand(1, channels, 40, 56, dtype=torch.float64).to(dtype).to(device))
    coordinates = torch.float64 if dtype == torch.float64 else torch.float32
    center, lod = torch.rand(2, 5, 2, dtype=coordinates), torch.rand(2, 5, dtype=coordinates) * 4
    axes = torch.randn(2, 5, 2, 2, dtype=coordinates) if turned else None
    places = [t.to(device) for t in (center, lod, axes) if t is not None]
    return texture, places, size


def patch_gradients(texture: texvlm.Texture, places: list[torch.Tensor], size: int, weights: torch.Tensor | None = None):
    leaves = [t.clone().requires_grad_() for t in (texture.data, *places)]
    axes = leaves[3] if len(leaves) == 4 else None
    out = torch.ops.texvlm.extract_patches(leaves[0], leaves[1], leaves[2], *table(texture), size, "clamp", axes)
    if weights is None:
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return out, torch.autograd.grad(out, leaves, weights.to(out.dtype).to(out.device))


@pytest.mark.parametrize("channels", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 33])
def test_any_size_and_number_of_channels(channels: int, size: int, device: torch.device) -> None:
    texture, places, size = patches_of(channels, size, device, turned=size == 17)
    out, grads = patch_gradients(texture, places, size)
    leaves = [t.cpu().clone().requires_grad_() for t in (texture.data, *places)]
    axes = leaves[3] if len(leaves) == 4 else None
    wanted = reference.extract_patches(leaves[0], leaves[1], leaves[2], *table(texture), size, "clamp", axes)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(grads, torch.autograd.grad(wanted, leaves, weights), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_deterministic_gradients(channels: int, dtype: torch.dtype, device: torch.device, deterministic) -> None:
    """Patches overlap, and all of one patch add to its centre: yet every run gives the same bits."""
    texture, places, size = patches_of(channels, 20, device, turned=True, dtype=dtype)
    (_, first), *others = (patch_gradients(texture, places, size) for _ in range(3))
    for _, other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)
    torch.use_deterministic_algorithms(False)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(first, patch_gradients(texture, places, size)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_texel_gradients_alone(device: torch.device) -> None:
    """Without a gradient for the frames, blocks share out a patch's samples and channels."""
    texture, places, size = patches_of(20, 33, device, turned=False)
    leaf = texture.data.clone().requires_grad_()
    out = torch.ops.texvlm.extract_patches(leaf, places[0], places[1], *table(texture), size, "clamp", None)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    (alone,) = torch.autograd.grad(out, leaf, weights)
    torch.testing.assert_close(alone, patch_gradients(texture, places, size)[1][0], rtol=1e-9, atol=1e-9)
