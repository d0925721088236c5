"""What packing means: the rows of Qwen-VL's processor, for the cells that are kept; Pillow's resize to the byte; means of levels."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import texvlm
from texvlm import reference

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [H, W, 3]: smooth colours, hard edges (where a cubic kernel overshoots) and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([128 + 120 * np.sin(x / 17 + c) * np.cos(y / (11 + 3 * c)) for c in range(3)], -1)
    edges = 255.0 * ((x // 23 + y // 31) % 2)[..., None]
    mixed = np.where((x < width // 2)[..., None], smooth, edges) + random.normal(0, 12, (height, width, 3))
    return mixed.clip(0, 255).astype(np.uint8)


def columns_first(height: int, width: int, to_height: int, to_width: int) -> bool:
    """Pillow's order of the passes from version 13 on; before, rows always came first."""
    return to_height < height and height - to_height > 2 * (width - to_width)


def closeness(*sizes: int) -> float:
    """To the processor: a step of 255 where an older Pillow has another order of the passes."""
    other = int(PIL.__version__.partition(".")[0]) < 13 and columns_first(*sizes)
    return 2 / 255 / min(CLIP["std"]) if other else 1e-5


def pillow(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pillow's resize, a pass at a time."""
    picture = Image.fromarray(pixels)
    first = (picture.width, height) if columns_first(*pixels.shape[:2], height, width) else (width, picture.height)
    return np.array(picture.resize(first, Image.Resampling.BICUBIC).resize((width, height), Image.Resampling.BICUBIC))


def processed(pixels: np.ndarray, patch: int, size: tuple[int, int] | None) -> tuple[torch.Tensor, list[int]]:
    """What the processor makes of a picture, and its grid in patches."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    assert transformers.__version__
    bounds = (
        {"shortest_edge": 1, "longest_edge": 1 << 30}
        if size is None
        else dict.fromkeys(("shortest_edge", "longest_edge"), size[0] * size[1])
    )
    processor = Qwen2VLImageProcessorPil(patch_size=patch, size=bounds, image_mean=CLIP["mean"], image_std=CLIP["std"])
    out = processor(images=Image.fromarray(pixels), return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"][0].tolist()


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize(("height", "width"), [(6, 9), (331, 517), (200, 330), (1, 2), (3, 1)], ids=str)
def test_a_whole_picture_is_the_processors(patch: int, height: int, width: int) -> None:
    """Sizes that stay (6 x 9 cells), and sizes that do not: the grid of the processor is the size."""
    side = 2 * patch
    pixels = photograph(*((height * side, width * side) if height < 10 else (height, width)))
    wanted, (_, rows, columns) = processed(pixels, patch, None)
    size = (rows * patch, columns * patch)
    assert (size == pixels.shape[:2]) == (height < 10)
    cells = torch.arange(rows * columns // 4)
    given = torch.from_numpy(pixels).permute(2, 0, 1)
    for picture in (given, given.contiguous(), Image.fromarray(pixels)):
        rows_of = texvlm.pack_cells(picture, cells, size, patch=patch, **CLIP)
        assert rows_of.dtype == torch.float32 and rows_of.is_contiguous()
        torch.testing.assert_close(rows_of, wanted, rtol=0, atol=closeness(*pixels.shape[:2], *size))


@pytest.mark.parametrize("bounds", [(128, 160), (512, 640)], ids=str)
def test_kept_cells_are_the_processors_rows(bounds: tuple[int, int]) -> None:
    """Made smaller and larger; cells in any order, with repeats, and none."""
    pixels = photograph(243, 331)
    wanted, (_, rows, columns) = processed(pixels, 16, bounds)
    cells = torch.tensor([7, 3, rows * columns // 4 - 1, 3, 0])
    out = texvlm.pack_cells(torch.from_numpy(pixels).permute(2, 0, 1), cells, (16 * rows, 16 * columns), **CLIP)
    near = closeness(243, 331, 16 * rows, 16 * columns)
    torch.testing.assert_close(out.view(5, 4, -1), wanted.view(-1, 4, wanted.shape[1])[cells], rtol=0, atol=near)
    none = texvlm.pack_cells(Image.fromarray(pixels), torch.tensor([-1, 2]), (16 * rows, 16 * columns), **CLIP)
    assert not none[:4].any() and none[4:].any()


@examples(60)
@given(
    st.integers(1, 80),
    st.integers(1, 80),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([(4, 2), (7, 1), (5, 3), (33, 1)]),
    st.integers(0, 2**31),
)
def test_bytes_are_resized_as_pillow_does(
    height: int, width: int, rows: int, columns: int, shape: tuple[int, int], seed: int
) -> None:
    patch, merge = shape
    side = patch * merge
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if seed % 2:
        pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)  # overshoots everywhere
    resized = pillow(pixels, rows * side, columns * side)
    cells, plain = torch.arange(rows * columns), {"mean": (0.0,), "std": (1.0,), "rescale": 1.0}
    options = {"patch": patch, "merge": merge, "temporal": 1, **plain}
    out = texvlm.pack_cells(torch.from_numpy(pixels).permute(2, 0, 1), cells, (rows * side, columns * side), **options)
    wanted = texvlm.pack_cells(torch.from_numpy(resized).permute(2, 0, 1), cells, **options)
    assert torch.equal(out, wanted)


def picture_of(rows: torch.Tensor, grid: tuple[int, int], channels: int, patch: int, merge: int) -> torch.Tensor:
    """Rows of all cells of one time back to the picture."""
    split = rows.view(*grid, merge, merge, channels, patch, patch)
    return split.permute(4, 0, 2, 5, 1, 3, 6).reshape(channels, grid[0] * merge * patch, grid[1] * merge * patch)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (70, 83), (200, 131), (31, 40)])
def test_floats_are_resized_as_torch_does(height: int, width: int, device: torch.device) -> None:
    """Without rounding and without clipping: a cubic kernel goes beyond what it reads."""
    image = torch.rand(3, height, width, dtype=torch.float64).round()
    out = texvlm.pack_cells(image.to(device), torch.arange(24, device=device), (64, 96), patch=8, temporal=1, mean=[0], std=[1])
    wanted = F.interpolate(image[None], (64, 96), mode="bicubic", antialias=True)[0]
    resized = picture_of(out.cpu(), (4, 6), 3, 8, 2)
    torch.testing.assert_close(resized, wanted, rtol=0, atol=1e-12)
    assert (height, width) == (64, 96) or resized.max() > 1.01


@pytest.mark.parametrize(("height", "width", "levels"), [(64, 96, 3), (48, 40, 3), (16, 88, 4)])
def test_levels_are_those_of_the_texture(height: int, width: int, levels: int, device: torch.device) -> None:
    """Where sizes are even; beyond the picture the last samples are repeated."""
    image = torch.rand(2, 3, height, width, dtype=torch.float64, device=device)
    texture = texvlm.Texture(image)
    for level in range(levels):
        rows, columns = -(-height // (8 << level)), -(-width // (8 << level))
        at = torch.cartesian_prod(torch.tensor([level]), torch.arange(rows), torch.arange(columns)).to(device)
        out = texvlm.pack_cells(image, at.expand(2, -1, -1), patch=4, temporal=1, mean=[0], std=[1])
        of_level = texture.level(level)
        wanted = F.pad(of_level, (0, 8 * columns - of_level.shape[3], 0, 8 * rows - of_level.shape[2]), mode="replicate")
        for b in range(2):
            torch.testing.assert_close(picture_of(out[b], (rows, columns), 3, 4, 2), wanted[b], rtol=0, atol=1e-12)


def test_levels_of_a_resized_picture_average_its_bytes() -> None:
    pixels = photograph(150, 210)
    resized = pillow(pixels, 96, 128)
    cells = torch.tensor([[0, 2, 3], [1, 1, 0], [2, 0, 0], [2, 0, 1], [0, -1, 0]])
    out = texvlm.pack_cells(Image.fromarray(pixels), cells, (96, 128), patch=8)
    torch.testing.assert_close(out, texvlm.pack_cells(Image.fromarray(resized), cells, patch=8), rtol=0, atol=1e-6)


def test_half_types_are_rounded_once() -> None:
    image = torch.rand(3, 53, 47, dtype=torch.float64)
    cells = torch.tensor([[0, 1, 2], [1, 0, 1], [0, 2, 0]])
    for dtype in (torch.float16, torch.bfloat16):
        half = image.to(dtype)
        out = texvlm.pack_cells(half, cells, (48, 48), patch=8, std=(0.3, 0.2, 0.1))
        exact = texvlm.pack_cells(half.double(), cells, (48, 48), patch=8, std=(0.3, 0.2, 0.1))
        assert out.dtype == dtype
        assert ((out - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-5).all()


def test_a_still_picture_is_the_same_at_all_times() -> None:
    out = texvlm.pack_cells(torch.rand(2, 3, 32, 32), torch.tensor([[0], [0]]), patch=16, temporal=3).view(2, 4, 3, 3, 256)
    assert torch.equal(out, out[:, :, :, :1].expand_as(out))


def test_values_beside_the_kept_cells_do_not_count(device: torch.device) -> None:
    image = torch.rand(1, 3, 64, 64, device=device)
    cells = torch.tensor([[0, 5]], device=device)
    wanted = texvlm.pack_cells(image, cells, patch=8)
    image[:, :, 32:48] = float("nan")
    assert torch.equal(texvlm.pack_cells(image, cells, patch=8), wanted)


@pytest.mark.parametrize("size", [None, (48, 80)], ids=str)
def test_adjoint(size: tuple[int, int] | None, device: torch.device) -> None:
    """<pack x, y> = <x, pack' y>, with cells of all levels that overlap, and y of any strides."""
    side = 4
    image = torch.rand(2, 5, 64, 40, dtype=torch.float64, device=device, requires_grad=True)
    level = torch.randint(4, (2, 30), device=device)
    height, width = size or (64, 40)
    at = [(torch.rand(2, 30, device=device) * ((n // side + (1 << level) - 1) >> level)).long() for n in (height, width)]
    cells = torch.stack([level, *at], -1)
    out = texvlm.pack_cells(image, cells, size, patch=2, mean=[0], std=(0.5, 1, 2, 3, 4), rescale=0.7)
    packed = torch.randn(out.shape, dtype=out.dtype, device=device)
    for y in (
        packed,
        packed.transpose(1, 2).contiguous().transpose(1, 2),
        torch.ones(1, device=device, dtype=out.dtype).expand(out.shape),
    ):
        (grad,) = torch.autograd.grad(out, image, y, retain_graph=True)
        torch.testing.assert_close((grad * image).sum(), (out * y).sum(), rtol=1e-12, atol=1e-12)


def test_gradients_are_the_same_every_time(device: torch.device) -> None:
    image = torch.rand(1, 3, 50, 70, device=device, requires_grad=True)
    cells = torch.randint(24, (1, 300), device=device)
    out = texvlm.pack_cells(image, cells, (64, 96), patch=8)
    weights = torch.randn(out.shape, device=device)
    first, *others = (torch.autograd.grad(out, image, weights, retain_graph=True)[0] for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


@examples(40)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([(1, 1), (2, 2), (3, 1), (2, 3)]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_random_pictures_and_cells(
    height: int, width: int, rows: int, columns: int, shape: tuple[int, int], resize: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    patch, merge = shape
    size = (rows * patch * merge, columns * patch * merge)
    image = torch.rand(2, 3, *((height, width) if resize else size), dtype=torch.float64, generator=g).requires_grad_()
    top = (max(rows, columns) - 1).bit_length()
    level = torch.randint(top + 1, (2, 7), generator=g)
    at = [(torch.rand(2, 7, generator=g) * -(-n // 2**level)).long() for n in (rows, columns)]
    cells = torch.stack([level, *at], -1)
    cells[0, 0, seed % 3] = -1
    out = texvlm.pack_cells(image, cells, size, patch=patch, merge=merge, rescale=2.0)
    numbers = ([0.5] * 3, [0.5] * 3, 2.0)
    wanted = reference.pack_cells(image, cells, *size, patch, merge, 2, *numbers)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=g)
    (a,), (b,) = (torch.autograd.grad(o, image, weights) for o in (out, wanted))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_cells_of_a_selection_in_a_batch() -> None:
    """What `select` keeps, -1 beyond its count, goes in as it is."""
    image = torch.rand(2, 3, 128, 160)
    kept = texvlm.select(image, k=7, cell=32)
    out = texvlm.pack_cells(image, kept.indices)
    assert out.shape == (2, 28, 1536)
    for b in range(2):
        assert torch.equal(out[b], texvlm.pack_cells(image[b], kept.indices[b]))


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"cells must be a tensor \[K\] or \[K, 3\], got \[1, 2, 3\]"),
        (3, r"cells must be a tensor \[K\] or \[K, 3\], got 3"),
        (torch.zeros(2, 2, dtype=torch.int64), r"cells must be \[B, K\]|cells must be \[B, K, 3\]"),
    ],
)
def test_bad_input_of_the_function(cells, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        texvlm.pack_cells(torch.rand(3, 32, 32), cells)


def test_bad_input_size_of_the_picture() -> None:
    with pytest.raises(ValueError, match=r"size must be multiples of patch \* merge \(32\), got 33 x 64"):
        texvlm.pack_cells(torch.rand(3, 33, 64), torch.tensor([0]))
    with pytest.raises(ValueError, match="cells must be below 8"):
        texvlm.pack_cells(torch.rand(3, 64, 128), torch.tensor([8]))


@pytest.mark.gpu
def test_cells_beyond_the_grid_are_none_on_cuda(cuda: torch.device) -> None:
    """Nothing waits for the device to say so."""
    out = texvlm.pack_cells(torch.ones(3, 64, 64, device=cuda), torch.tensor([1, 4, -1], device=cuda))
    assert out[:4].all() and not out[4:].any()
