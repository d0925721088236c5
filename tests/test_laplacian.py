"""What a Laplacian pyramid means: bands hold what the coarser level lacks, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm


@examples(60)
@given(
    height=st.integers(1, 70),
    width=st.integers(1, 140),
    channels=st.sampled_from([1, 3, 4, 6]),
    seed=st.integers(0, 10**6),
)
def test_reconstructs_exactly(height: int, width: int, channels: int, seed: int) -> None:
    texture = texvlm.Texture(torch.rand(1, channels, height, width, generator=torch.Generator().manual_seed(seed)))
    again = texvlm.laplacian_reconstruct(texvlm.laplacian_decompose(texture))
    torch.testing.assert_close(again.data, texture.data, rtol=0, atol=1e-6)


def test_reconstructs_large_and_mixed_reducers() -> None:
    texture = texvlm.Texture(torch.rand(2, 3, 517, 1024), ["mean", "max", "min"])
    again = texvlm.laplacian_reconstruct(texvlm.laplacian_decompose(texture))
    torch.testing.assert_close(again.data, texture.data, rtol=0, atol=1e-6)
    assert again.reducer == texture.reducer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_reconstruct_within_their_rounding(dtype: torch.dtype) -> None:
    texture = texvlm.Texture(torch.rand(1, 3, 64, 48), dtype=dtype)
    again = texvlm.laplacian_reconstruct(texvlm.laplacian_decompose(texture))
    torch.testing.assert_close(again.data, texture.data, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_flat_picture_has_one_band() -> None:
    bands = texvlm.laplacian_decompose(texvlm.Texture(torch.full((3, 33, 20), 0.25)))
    for level in range(bands.levels - 1):
        assert bands.level(level).abs().max() < 1e-7
    torch.testing.assert_close(bands.level(-1), torch.full_like(bands.level(-1), 0.25))


def test_even_levels_use_quarters() -> None:
    texture = texvlm.Texture(torch.zeros(1, 1, 8), levels=2)
    texture.level(1)[0, 0, 0] = torch.tensor([0.0, 4.0, 0.0, 0.0])
    band = -texvlm.laplacian_decompose(texture).level(0)[0, 0, 0]
    assert band.tolist() == [0, 1, 3, 3, 1, 0, 0, 0]


@pytest.mark.parametrize("op", [torch.ops.texvlm.laplacian_decompose, torch.ops.texvlm.laplacian_reconstruct])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (17, 31), (1, 40), (3, 2), (66, 130)])
def test_adjoint_identity(op, height: int, width: int) -> None:
    levels = texvlm.level_count(height, width)
    x = torch.rand(2, texvlm.pyramid.texel_count(height, width, levels), 3, dtype=torch.float64, requires_grad=True)
    out = op(x, height, width, levels)
    y = torch.randn_like(out)
    (adjoint,) = torch.autograd.grad(out, x, y)
    torch.testing.assert_close((out * y).sum(), (x * adjoint).sum())


def test_band_edit_reaches_the_picture_with_its_gradient() -> None:
    image = torch.rand(1, 3, 32, 24, dtype=torch.float64, requires_grad=True)
    bands = texvlm.laplacian_decompose(texvlm.Texture(image))
    gain = torch.ones(bands.levels, dtype=torch.float64, requires_grad=True)
    table = texvlm.pyramid.level_table(32, 24, bands.levels)
    each = torch.cat([g.expand(h * w) for g, (_, h, w) in zip(gain, table, strict=True)])
    picture = texvlm.laplacian_reconstruct(bands.replace(bands.data * each[:, None])).level(0)
    torch.testing.assert_close(picture, image)
    by_gain, by_image = torch.autograd.grad(picture.square().sum(), (gain, image))
    assert by_gain.abs().min() > 0
    torch.testing.assert_close(by_image, 2 * image)
