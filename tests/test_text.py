"""What text regions mean: writing is found, at any contrast and polarity, what only looks like it is not, and nothing is 0."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from benchmarks._documents import Document, coverage, document
from texvlm import reference

SIDE, CELL = 768, 16


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Fonts, photographs and some kinds of clutter that the training never saw."""
    return [document(seed, SIDE, (12, 40)) for seed in range(5000, 5006)]


def best_cells(score: torch.Tensor, found: Document, how: str) -> float:
    """Share of the text's area in the best 273 of 4096 cells, by their mean or by their largest value."""
    pool = F.avg_pool2d if how == "mean" else F.max_pool2d
    cells = pool(score[None], CELL, ceil_mode=True)[0]
    return coverage(cells, found.overlap(CELL), 273 * cells.numel() // 4096)


@pytest.mark.parametrize("how", ["mean", "max"])
def test_the_best_cells_hold_the_text(documents: list[Document], how: str) -> None:
    ours = oracle = edges = 0.0
    for found in documents:
        ours += best_cells(texvlm.text_regions(found.image)[0], found, how)
        oracle += best_cells(found.mask.float(), found, "mean")
        edges += best_cells(texvlm.edges(found.image)[0], found, "mean")
    assert ours >= 0.7 * oracle and ours >= 1.6 * edges


def test_light_on_dark_is_as_good_as_dark_on_light(documents: list[Document]) -> None:
    for found in documents[:3]:
        plain, negative = (best_cells(texvlm.text_regions(x)[0], found, "mean") for x in (found.image, 255 - found.image))
        assert abs(plain - negative) < 0.25


@pytest.mark.parametrize("angle", [45, 90, 135])
def test_text_at_any_angle_is_found(angle: int) -> None:
    """In scripts, fonts and photographs that no training saw."""
    shown = [document(seed, SIDE, (12, 40), "unseen", angle=(angle, angle)) for seed in range(41000, 41003)]
    ours = sum(best_cells(texvlm.text_regions(found.image)[0], found, "mean") for found in shown)
    assert ours >= 0.75 * sum(best_cells(found.mask.float(), found, "mean") for found in shown)


@pytest.mark.parametrize("value", [0.0, 0.37, 1.0])
def test_a_constant_picture_has_none(value: float) -> None:
    assert (texvlm.text_regions(torch.full((2, 3, 70, 150), value)) == 0).all()


@examples(25)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 1e30]))
def test_range(height: int, width: int, seed: int, scale: float) -> None:
    image = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed)) * scale
    result = texvlm.text_regions(image)
    assert result.shape == (1, height, width) and (result >= 0).all() and (result <= 1).all()


@pytest.mark.parametrize("size", [(3, 5000), (5000, 3), (1, 1), (17, 16)])
def test_any_size(size: tuple[int, int]) -> None:
    image = torch.rand(1, 3, *size)
    torch.testing.assert_close(texvlm.text_regions(image), reference.text_regions(image), atol=1e-4, rtol=0)


@pytest.mark.parametrize("more", [1, 2, 3, 9])
@pytest.mark.parametrize("turned", [False, True], ids=["row", "column"])
def test_a_nearly_empty_last_row_of_cells_is_no_text(documents: list[Document], more: int, turned: bool) -> None:
    """The last cell is measured over as many texels as the others, so what continues a picture by a few rows changes little."""
    apart = []
    for found in documents:
        image = (found.image.transpose(1, 2) if turned else found.image)[:, :, :500]
        for height in (256, 400, 512, 640):
            last, whole = (texvlm.text_regions(image[:, :h])[0, height : height + more] for h in (height + more, height + 16))
            apart.append(float((last - whole).abs().mean()))
    assert sum(apart) / len(apart) < 0.05


def test_pixels_that_are_not_finite_count_as_black(documents: list[Document]) -> None:
    image = documents[0].image[None, :, :128, :128].float() / 255
    black, broken = image.clone(), image.clone()
    black[:, :, 20:30, 40:50] = 0
    broken[:, :, 20:30, 40:50] = float("nan")
    assert torch.equal(texvlm.text_regions(broken), texvlm.text_regions(black))


def test_forms_of_a_picture() -> None:
    grey = torch.rand(2, 1, 40, 50)
    rgb = grey.expand(-1, 3, -1, -1)
    assert torch.equal(texvlm.text_regions(grey), texvlm.text_regions(rgb))
    assert torch.equal(texvlm.text_regions(torch.cat([rgb, rgb[:, :1]], dim=1)), texvlm.text_regions(rgb))
    assert torch.equal(texvlm.text_regions(rgb[1]), texvlm.text_regions(rgb)[1:])
    bytes_ = (rgb * 255).to(torch.uint8)
    torch.testing.assert_close(texvlm.text_regions(bytes_), texvlm.text_regions(bytes_.float() / 255), atol=1e-4, rtol=0)
    assert texvlm.text_regions(rgb.half()).dtype == torch.float16


def test_no_gradient_is_said_aloud() -> None:
    image = torch.rand(1, 3, 32, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"not implemented|does not require grad"):
        texvlm.text_regions(image).sum().backward()


def test_the_reference_reads_the_same_weights() -> None:
    from texvlm.text import trained_weights

    weights = trained_weights(torch.device("cpu"))
    assert torch.equal(weights, reference.text.trained_weights()) and len(weights) == reference.text.WEIGHTS
    assert weights.isfinite().all() and weights.std() > 0.01
