"""What prediction means: what is left out can be put back within the bound, neighbours are asked in order, and nothing else is left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference


def cells_of(image: torch.Tensor, cell: int) -> torch.Tensor:
    """The values of all cells, [B, N, C cell^2], partial ones filled up by their border."""
    height, width = image.shape[2:]
    padded = F.pad(image.float(), (0, -width % cell, 0, -height % cell), mode="replicate")
    return F.pixel_unshuffle(padded, cell).flatten(2).transpose(1, 2)


def put_back(image: torch.Tensor, source: torch.Tensor, cell: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cells as they are put back, and as they are."""
    cells = cells_of(image, cell)
    return cells.gather(1, source[..., None].expand_as(cells)), cells


def screenshot(height: int = 200, width: int = 330, seed: int = 0) -> torch.Tensor:
    """Flat windows with lines of small glyphs, uint8 [1, 3, H, W]."""
    g = torch.Generator().manual_seed(seed)
    image = torch.full((1, 3, height, width), 240, dtype=torch.uint8)
    for _ in range(4):
        y, x = (int(torch.randint(n // 2, (), generator=g)) for n in (height, width))
        colour = torch.randint(256, (3, 1, 1), generator=g, dtype=torch.uint8)
        window = image[0, :, y : y + height // 2, x : x + width // 2]
        window[:] = colour
        for line in range(8, window.shape[1] - 8, 24):
            glyphs = torch.rand(8, window.shape[2] // 2, generator=g) < 0.4
            window[:, line : line + 8, : glyphs.shape[1]][:, glyphs] = 255 - colour[..., 0]
    return image


@pytest.mark.parametrize("bound", [0.0, 0.02, 0.1])
def test_what_is_left_out_can_be_put_back_within_the_bound(bound: float) -> None:
    g = torch.Generator().manual_seed(10)
    ramp = torch.linspace(0, 1, 100).expand(2, 3, 70, 100) + 0.01 * torch.rand(2, 3, 70, 100, generator=g)
    ramp[1, :, :40] = 0.25
    source = texvlm.predict_cells(ramp, 8, bound)
    back, cells = put_back(ramp, source, 8)
    assert (back - cells).abs().max() <= bound
    kept = source == torch.arange(source.shape[1])
    assert torch.equal(source.gather(1, source), source)  # only kept cells are sources
    assert kept[:, 0].all() and (bound == 0) == bool(kept[0].all()) and not kept[1].all()


@examples(40)
@given(
    st.integers(1, 3),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 17),
    st.sampled_from([0.0, 0.01, 0.3, 0.7]),
    st.integers(0, 2**31),
)
def test_the_bound_holds_on_random_pictures(batch: int, height: int, width: int, cell: int, bound: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    image = torch.rand(batch, 3, 1, 1, generator=g).round() / 2 + bound * torch.rand(batch, 3, height, width, generator=g)
    image[:, :, torch.randint(height, (), generator=g) :] += 0.4
    source = texvlm.predict_cells(image, cell, bound)
    back, cells = put_back(image, source, cell)
    assert (back - cells).abs().max().item() <= bound
    assert torch.equal(source.gather(1, source), source)
    assert (source <= torch.arange(source.shape[1])).all()
    assert torch.equal(source, reference.predict_cells(image, cell, bound))


@pytest.mark.parametrize("bound", [0, 1, 5, 30])
def test_bytes_are_compared_exactly(bound: int) -> None:
    """On a screenshot with noise of `bound` steps; 255ths are no floating point numbers, steps are."""
    image = screenshot()
    g = torch.Generator().manual_seed(1)
    image = (image // 2 + torch.randint(bound + 1, image.shape, generator=g, dtype=torch.uint8)).contiguous()
    source = texvlm.predict_cells(image, 16, bound / 255)
    back, cells = put_back(image, source, 16)
    assert (back - cells).abs().max() == bound
    kept = float((source == torch.arange(source.shape[1])).float().mean())
    assert 0.1 < kept < 0.8
    if bound:
        within = put_back(image, texvlm.predict_cells(image, 16, (bound - 0.01) / 255), 16)
        assert (within[0] - within[1]).abs().max() <= bound - 1


@pytest.mark.parametrize("seed", range(3))
def test_without_a_bound_duplicates_of_neighbours_are_left_out_and_nothing_else(seed: int) -> None:
    image = screenshot(seed=seed)
    source = texvlm.predict_cells(image, 16)
    back, cells = put_back(image, source, 16)
    assert torch.equal(back, cells)
    grid = cells.unflatten(1, (-(-image.shape[2] // 16), -1))
    duplicate = torch.zeros(grid.shape[:3], dtype=torch.bool)
    duplicate[:, :, 1:] |= (grid[:, :, 1:] == grid[:, :, :-1]).all(-1)
    duplicate[:, 1:] |= (grid[:, 1:] == grid[:, :-1]).all(-1)
    duplicate[:, 1:, 1:] |= (grid[:, 1:, 1:] == grid[:, :-1, :-1]).all(-1)
    assert torch.equal(source != torch.arange(source.shape[1]), duplicate.flatten(1))
    assert duplicate.any() and not duplicate.all()


def test_left_before_upper_before_upper_left() -> None:
    """Cells of one pixel. The last is near to all three of its neighbours, then to fewer and fewer."""

    def last(corner: float, upper: float, left: float) -> int:
        picture = torch.tensor([[corner, upper], [left, 0.5]])[None].expand(3, -1, -1)
        return int(texvlm.predict_cells(picture, 1, 0.1)[0, 3])

    # corner, upper and left are kept: they differ from one another by more than the bound, but for the last
    assert last(corner=0.0, upper=1.0, left=0.5) == 2
    assert last(corner=0.0, upper=0.5, left=1.0) == 1
    assert last(corner=0.5, upper=1.0, left=0.0) == 0
    assert last(corner=0.0, upper=1.0, left=0.25) == 3
    assert last(corner=0.25, upper=0.59, left=0.41) == 2
    assert last(corner=0.59, upper=0.41, left=0.75) == 1


def test_errors_do_not_add_up() -> None:
    """A ramp in steps of the bound: what a neighbour is put back from counts, not the neighbour."""
    picture = (torch.arange(8) / 8.0).expand(3, 1, 8)
    assert texvlm.predict_cells(picture, 1, 0.25).tolist() == [[0, 0, 0, 3, 3, 3, 6, 6]]


def test_the_border_fills_up_partial_cells() -> None:
    picture = torch.zeros(3, 10, 10)
    assert (texvlm.predict_cells(picture, 4) == 0).all()
    picture[:, 9, 9] = 1  # of the corner cell's 2 x 2 pixels
    assert texvlm.predict_cells(picture, 4).tolist() == [[0] * 8 + [8]]
    picture = torch.zeros(3, 4, 10)
    picture[0, :, 7] = 1  # the second cell is (0, 0, 0, 1), the third (0, 0) and twice its border
    assert texvlm.predict_cells(picture, 4).tolist() == [[0, 1, 2]]
    picture[0, :, 9] = 1  # (0, 1) and twice its border
    assert texvlm.predict_cells(picture, 4).tolist() == [[0, 1, 2]]
    picture[0, :, 4:] = 1
    assert texvlm.predict_cells(picture, 4).tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_cells_with_values_that_are_not_finite_are_kept(value: float, dtype: torch.dtype) -> None:
    picture = torch.zeros(3, 12, 16, dtype=dtype)
    picture[1, 5, 4:12] = value  # two cells beside one another
    for bound in (0.0, 1.0, 1e38, 1e300):
        assert texvlm.predict_cells(picture, 4, bound).tolist() == [[0, 0, 0, 0, 0, 5, 6, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("bound", [0.0, 0.1])
def test_the_same_by_any_number_of_threads(bound: float) -> None:
    image = torch.cat([screenshot(640, 640, seed).float() / 255 for seed in range(2)])
    image += bound * torch.rand(image.shape, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found += [texvlm.predict_cells(image, 8, bound) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(found[0], torch.cat([texvlm.predict_cells(one, 8, bound) for one in image]))


def test_forms_of_a_picture() -> None:
    image = screenshot()
    source = texvlm.predict_cells(image)
    assert torch.equal(texvlm.predict_cells(image.float() / 255), source)
    assert torch.equal(texvlm.predict_cells(image[0].permute(1, 2, 0).contiguous().numpy()), source)
    assert torch.equal(texvlm.predict_cells(torch.cat([image, torch.rand(1, 1, 200, 330).byte()], dim=1)), source)
    assert torch.equal(texvlm.predict_cells(image[:, :1].repeat(1, 3, 1, 1)), texvlm.predict_cells(image[:, :1]))
    learned = (image.float() / 255).requires_grad_()
    assert torch.equal(texvlm.predict_cells(learned), source) and not texvlm.predict_cells(learned).requires_grad


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="cell must be an integer"):
        texvlm.predict_cells(torch.rand(3, 8, 8), 4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cell must be at least 1"):
        texvlm.predict_cells(torch.rand(3, 8, 8), 0)
    with pytest.raises(ValueError, match="bound must be finite and at least 0"):
        texvlm.predict_cells(torch.rand(3, 8, 8), 4, -1.0)
    assert texvlm.predict_cells(torch.rand(3, 8, 8), 1 << 62).tolist() == [[0]]
