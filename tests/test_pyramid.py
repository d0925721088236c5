"""Mipmaps: known answers, the mean, the adjoint, rectangles, and the Texture around them."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import texvlm
from texvlm import reference

ops = torch.ops.texvlm


def test_known_answers() -> None:
    image = torch.tensor([[[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]]])
    assert texvlm.Texture(image).level(1).flatten().tolist() == [3.5, 5.5]
    assert texvlm.Texture(image).level(2).item() == 4.5
    assert texvlm.Texture(image, "max").level(1).flatten().tolist() == [6, 8]
    assert texvlm.Texture(image, "min").level(1).flatten().tolist() == [1, 3]
    labels = torch.tensor([[[[2.0, 7.0], [7.0, 2.0]]]])
    assert texvlm.Texture(labels, "mode").level(1).item() == 2.0, "ties go to the lowest"


def test_odd_side_uses_every_texel() -> None:
    impulses = torch.eye(5).reshape(5, 1, 1, 5)
    weights = texvlm.Texture(impulses, levels=2).level(1).reshape(5, 2).T * 5
    torch.testing.assert_close(weights, torch.tensor([[2.0, 2, 1, 0, 0], [0, 0, 1, 2, 2]]))


@pytest.mark.parametrize("backend", ["auto", "native", "texture"])
def test_texels_have_the_dtype_that_is_asked_for(backend: str) -> None:
    image = torch.randint(0, 256, (3, 9, 12), dtype=torch.uint8)
    for dtype in (None, torch.float32, torch.float16, torch.bfloat16):
        texture = texvlm.generate_mipmaps(image, backend=backend, dtype=dtype)
        wanted = texvlm.Texture(image, dtype=dtype)
        assert texture.data.dtype == (dtype or torch.float32) and torch.equal(texture.data, wanted.data)
    with pytest.raises(ValueError, match="dtype must be"):
        texvlm.generate_mipmaps(image, backend=backend, dtype=torch.int32)


@pytest.mark.parametrize("height", range(1, 34))
def test_mean_is_kept(height: int) -> None:
    for width in range(1, 34):
        texture = texvlm.Texture(torch.rand(1, 2, height, width, dtype=torch.float64).float())
        mean = texture.level(0).double().mean((2, 3))
        for level in range(1, texture.levels):
            assert (texture.level(level).double().mean((2, 3)) - mean).abs().max() < 1e-6


@pytest.mark.parametrize("reducer", ["mean", "max", "min"])
def test_adjoint(reducer: str) -> None:
    """<A x, y> = <x, A' y>; for max and min A is the linear map at x."""
    for height in range(1, 18):
        for width in range(1, 18):
            x = torch.rand(2, 3, height, width, dtype=torch.float64, requires_grad=True)
            out = ops.generate_mipmaps(x, [reducer], texvlm.level_count(height, width))
            y = torch.randn_like(out)
            (back,) = torch.autograd.grad(out, x, y)
            torch.testing.assert_close((out * y).sum(), (x * back).sum())


def test_gradient_of_max_goes_to_the_first_extremal_texel() -> None:
    image = torch.zeros(1, 1, 4, 4, requires_grad=True)
    texvlm.Texture(image, "max").level(1).sum().backward()
    assert image.grad.nonzero()[:, 2:].tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]


def test_mode_has_no_gradient_below_level_0() -> None:
    image = torch.randint(0, 3, (1, 1, 6, 5)).float().requires_grad_()
    texture = texvlm.Texture(image, "mode")
    texture.data[:, 30:].sum().backward()
    assert not image.grad.any()


@examples(60)
@given(st.data())
def test_rectangles_equal_a_rebuild(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    channels = data.draw(st.sampled_from([1, 2, 3, 4, 5, 13]))
    reducer = data.draw(st.sampled_from([["mean"], ["max"], ["mean", "max", "min", "mode", "mean", "min"] * 3]))
    reducer = reducer if len(reducer) == 1 else reducer[:channels]
    texture = texvlm.Texture(torch.rand(2, channels, height, width), reducer)
    y0, x0 = data.draw(st.integers(0, height)), data.draw(st.integers(0, width))
    y1, x1 = data.draw(st.integers(y0, height)), data.draw(st.integers(x0, width))
    texture.level(0)[:, :, y0:y1, x0:x1] = torch.rand(2, channels, y1 - y0, x1 - x0)
    texvlm.update_mipmaps(texture, [(y0, x0, y1, x1)])
    rebuilt = texvlm.Texture(texture.level(0), reducer)
    assert torch.equal(texture.data, rebuilt.data)
    texture.data[:, height * width :] = -1
    assert torch.equal(texvlm.update_mipmaps(texture).data, rebuilt.data)


def test_levels_are_built_from_the_stored_level_above() -> None:
    texture = texvlm.Texture(torch.rand(1, 3, 64, 64), dtype=torch.float16)
    again = texvlm.Texture(texture.level(1), dtype=torch.float16)
    assert torch.equal(again.level(1), texture.level(2))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 8, 13, 40, 64, 200])
@pytest.mark.parametrize("size", [(64, 64), (96, 80), (33, 47), (50, 1)], ids=str)
def test_every_loop_equals_the_reference(channels: int, size: tuple[int, int]) -> None:
    """The vector loops differ by channel count, parity and reducer."""
    from texvlm import reference

    image = torch.rand(2, channels, *size)
    mixed = [("mean", "max", "min")[c % 3] for c in range(channels)]
    for reducer in (["mean"], ["min"], mixed):
        levels = texvlm.level_count(*size)
        for picture in (image, (image * 255).to(torch.uint8), image.to(memory_format=torch.channels_last)):
            actual = ops.generate_mipmaps(picture, reducer, levels)
            torch.testing.assert_close(actual, reference.generate_mipmaps(picture, reducer, levels), rtol=0, atol=1e-6)


def test_nan_and_infinity_propagate() -> None:
    image = torch.zeros(1, 13, 8, 8)
    image[:, :, 3, 5] = float("nan")
    reducers = [("mean", "max", "min")[c % 3] for c in range(13)]
    texture = texvlm.Texture(image, reducers)
    for level in range(1, 4):
        y, x = 3 >> level, 5 >> level
        bad = texture.level(level).isnan()
        assert bad[:, :, y, x].all()
        assert bad.sum() == 13


def test_index_arithmetic_beyond_2_31_elements() -> None:
    """A picture of 3 x 2^31 + elements without the memory: one row of strides 0, read by an odd number of channels."""
    table = texvlm.pyramid.level_table(40000, 40000, 16)
    assert table[1][0] == 1_600_000_000
    assert texvlm.pyramid.texel_count(40000, 40000, 16) * 40 > 2**36
    data = torch.zeros(1).expand(1, texvlm.pyramid.texel_count(40000, 40000, 16), 3)
    with pytest.raises(ValueError, match="contiguous"):
        ops.update_mipmaps(data, 40000, 40000, ["mean"], 16)


def test_updates_count_as_writes() -> None:
    """So autograd refuses to use texels that changed after they were saved, and caches see that they did."""
    texture = texvlm.Texture(torch.rand(1, 3, 8, 8))
    uv = torch.rand(1, 5, 2, requires_grad=True)
    out = texture.sample(uv, 0.3)
    before = texture.data._version
    texvlm.update_mipmaps(texture)
    texvlm.update_mipmaps(texture, [(0, 0, 2, 2)])
    assert texture.data._version == before + 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class TestTexture:
    def test_inputs(self) -> None:
        from PIL import Image

        array = (np.random.default_rng(0).random((6, 5, 3)) * 255).astype(np.uint8)
        by_array = texvlm.Texture(array)
        assert torch.equal(by_array.data, texvlm.Texture(Image.fromarray(array)).data)
        assert torch.equal(by_array.data, texvlm.Texture(torch.from_numpy(array).permute(2, 0, 1)).data)
        torch.testing.assert_close(by_array.level(0)[0], torch.from_numpy(array).permute(2, 0, 1) / 255)
        assert torch.equal(texvlm.Texture(array[::-1]).level(0), by_array.level(0).flip(2))
        assert texvlm.Texture(array[..., 0]).channels == 1
        assert texvlm.Texture(Image.fromarray(array).convert("P")).channels == 3
        assert texvlm.Texture(torch.rand(2, 12, 7), layout="spatial", grid=(3, 4)).data.shape == (2, 12 + 2 + 1, 7)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: texvlm.Texture(torch.rand(4, 4)), r"\[C, H, W\] or \[B, C, H, W\], got \[4, 4\]"),
            (lambda: texvlm.Texture(torch.zeros(3, 4, 4, dtype=torch.int64)), "floating point or uint8, got torch.int64"),
            (lambda: texvlm.Texture(np.zeros((4, 4, 3), dtype=np.int64)), "uint8"),
            (lambda: texvlm.Texture("cat.jpg"), "got str"),
            (lambda: texvlm.Texture(torch.rand(3, 4, 4), "median"), "median"),
            (lambda: texvlm.Texture(torch.rand(3, 4, 4), levels=9), "levels must be from 1 to 3"),
            (lambda: texvlm.Texture(torch.rand(3, 4, 4), names=["a"]), "each of the 3 channels"),
            (lambda: texvlm.Texture(torch.rand(1, 5, 4), layout="spatial", grid=(2, 2)), r"rows \* cols = N"),
            (lambda: texvlm.Texture.from_data(torch.rand(1, 20, 3), 4, 4, 3), "T = 21 texels"),
            (lambda: texvlm.Texture(torch.rand(3, 4, 4)).level(3), "level must be in"),
            (lambda: texvlm.Texture(torch.rand(3, 4, 4)).index("red"), "no names"),
            (lambda: texvlm.generate_mipmaps(torch.rand(3, 4, 4), backend="vulkan"), "vulkan"),
            (lambda: texvlm.update_mipmaps(texvlm.Texture(torch.rand(3, 4, 4, requires_grad=True))), "not differentiable"),
        ],
    )
    def test_errors(self, make, message: str) -> None:
        with pytest.raises((ValueError, TypeError, IndexError, KeyError), match=message):
            make()

    def test_is_a_pytree_and_pickles(self) -> None:
        texture = texvlm.Texture(torch.rand(2, 3, 9, 7), ["mean", "max", "min"], names=["a", "b", "c"])
        doubled = pytree.tree_map(lambda t: 2 * t, texture)
        assert torch.equal(doubled.level(1), 2 * texture.level(1))
        assert doubled.names == texture.names
        buffer = io.BytesIO()
        torch.save(texture.data, buffer)
        for other in (pickle.loads(pickle.dumps(texture)), copy.deepcopy(texture), texture.to(torch.float64).to(torch.float32)):
            assert torch.equal(other.data, texture.data)
            assert other.reducer == texture.reducer
            assert other.index("c") == 2

    def test_goes_through_compile(self) -> None:
        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def f(image: torch.Tensor) -> torch.Tensor:
            return texvlm.Texture(image).level(1).sum()

        image = torch.rand(1, 3, 12, 10, requires_grad=True)
        f(image).backward()
        torch.testing.assert_close(image.grad, torch.full_like(image, 0.25))

    def test_one_recompilation_for_each_power_of_two_bracket(self) -> None:
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        f = torch.compile(lambda image: texvlm.Texture(image).data * 2, fullgraph=True, dynamic=True, backend=backend)
        for side in (33, 40, 47, 50, 63, 60, 34):
            f(torch.rand(1, 3, side, side - 1))
        assert len(graphs) == 1


def test_inference_mode_texture_in_training_is_refused_in_one_line() -> None:
    with torch.inference_mode():
        texture = texvlm.Texture(torch.rand(1, 1, 4, 4))
    with pytest.raises(RuntimeError, match="inference tensor"):
        texture.data.requires_grad_()


@pytest.mark.alone
def test_import_is_quick() -> None:
    code = "import time, torch; t = time.perf_counter(); import texvlm; print(time.perf_counter() - t)"
    seconds = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(3)
    )
    assert seconds < 0.3


# ---- where tiles of 64 (and of 32) meet, and where the halo of odd sizes ends the fusing of levels ----

BORDERS = [(63, 64), (64, 64), (65, 63), (127, 128), (128, 129), (129, 127), (1, 300), (300, 1), (200, 70), (96, 33), (2, 3)]


def chain_equals_reference(image: torch.Tensor, reducers: list[str], dtype: torch.dtype, tolerance: float) -> None:
    height, width = image.shape[2:]
    levels = texvlm.level_count(height, width)
    data = ops.generate_mipmaps(image, reducers, levels, dtype)
    wanted = reference.generate_mipmaps(image.cpu(), reducers, levels, dtype)
    torch.testing.assert_close(data.cpu(), wanted, rtol=tolerance, atol=tolerance)
    if image.is_cuda:
        torch.testing.assert_close(data.cpu(), ops.generate_mipmaps(image.cpu(), reducers, levels, dtype), rtol=0, atol=0)
    again = data.clone()
    again[:, height * width :] = -1
    ops.update_mipmaps(again, height, width, reducers, levels)
    torch.testing.assert_close(again, data, rtol=0, atol=0)


@pytest.mark.parametrize("size", BORDERS, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_tile_borders(size: tuple[int, int], channels: int, device: torch.device) -> None:
    chain_equals_reference(torch.rand(2, channels, *size).to(device), ["mean"], torch.float32, 2e-6)


@pytest.mark.parametrize("size", [(65, 63), (128, 64)], ids=str)
@pytest.mark.parametrize("channels", [2, 40])
def test_tile_borders_of_every_reducer(size: tuple[int, int], channels: int, device: torch.device) -> None:
    image = (torch.rand(2, channels, *size) * 8).round() / 8
    reducers = [("mean", "max", "min", "mode")[(3 * c + c // 4) % 4] for c in range(channels)]
    chain_equals_reference(image.to(device), reducers, torch.float32, 2e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize("channels", [3, 10])
def test_tile_borders_of_every_dtype(dtype: torch.dtype, tolerance: float, channels: int, device: torch.device) -> None:
    for size in ((65, 70), (128, 64)):
        chain_equals_reference(torch.rand(1, channels, *size, dtype=dtype).to(device), ["mean"], dtype, tolerance)
        chain_equals_reference(torch.randint(256, (1, channels, *size), dtype=torch.uint8).to(device), ["mean"], dtype, tolerance)


@pytest.mark.parametrize("size", [(1, 4097), (4097, 1), (270, 480), (1023, 33)], ids=str)
def test_more_tiles_than_the_last_block_takes(size: tuple[int, int], device: torch.device) -> None:
    chain_equals_reference(torch.rand(1, 1, *size).to(device), ["mean"], torch.float32, 2e-6)


def test_powers_of_two_are_exact(device: torch.device) -> None:
    """Sums of 8-bit integers over 2^14 texels fit a float, so that no rounding hides an error."""
    image = torch.randint(256, (3, 3, 128, 128)).float()
    texture = texvlm.Texture(image.to(device))
    for level in range(texture.levels):
        wanted = torch.nn.functional.avg_pool2d(image.double(), 2**level).float()
        torch.testing.assert_close(texture.level(level).cpu(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("levels", [1, 2, 5, 7])
def test_fewer_levels(levels: int, device: torch.device) -> None:
    image = torch.rand(2, 3, 130, 100).to(device)
    wanted = ops.generate_mipmaps(image, ["mean"], 8)
    got = ops.generate_mipmaps(image, ["mean"], levels)
    torch.testing.assert_close(got, wanted[:, : got.shape[1]], rtol=0, atol=0)


def test_strided_pictures(device: torch.device) -> None:
    image = torch.rand(2, 3, 130, 70).to(device)
    levels = texvlm.level_count(130, 70)
    wanted = ops.generate_mipmaps(image, ["mean"], levels)
    for strided in (image.contiguous(memory_format=torch.channels_last), image.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.testing.assert_close(ops.generate_mipmaps(strided, ["mean"], levels), wanted, rtol=0, atol=0)
    one = image[:1, :1].expand(2, 3, 130, 70)
    torch.testing.assert_close(
        ops.generate_mipmaps(one, ["mean"], levels), ops.generate_mipmaps(one.contiguous(), ["mean"], levels), rtol=0, atol=0
    )
