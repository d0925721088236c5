"""Reading at a token budget: values of tokens at mixed levels, and the ruler that they are measured with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from benchmarks._documents import Document, document
from benchmarks._reading import COARSE, Block, coarse_tokens, downscaled, expected, recall, shown
from texvlm.reading import GRID, line_heights, text_values

SIDE, CELL, CELLS = 768, 16, 2304
FEW, MANY = 137 * CELLS // 4096, 273 * CELLS // 4096


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Fonts, photographs and some kinds of clutter that the training of `text_regions` never saw."""
    return [document(seed, SIDE, (12, 40)) for seed in range(5000, 5006)]


def allotted(values: list[torch.Tensor], k: int) -> list[Block]:
    taken = enumerate(texvlm.quadtree_cut(values, k).taken)
    found = [(CELL << level, level, y, x) for level, plane in taken for _, y, x in plane.nonzero().tolist()]
    return [(y * side, x * side, side, level) for side, level, y, x in found]


def one_level(found: Document, k: int) -> list[Block]:
    score = F.avg_pool2d(texvlm.text_regions(found.image), CELL)
    return allotted([score], k)


def mixed(image: torch.Tensor, k: int) -> list[Block]:
    return allotted(text_values(image, CELL), k)


# ---- values ----


def test_mixed_levels_show_more_text_than_one(documents: list[Document]) -> None:
    for k, least, more in [(FEW, 0.5, 0.1), (MANY, 0.75, 0.0)]:
        ours = np.mean([expected(d, mixed(d.image, k)) for d in documents])
        plain = np.mean([expected(d, one_level(d, k)) for d in documents])
        assert ours >= least and ours >= plain + more, (k, ours, plain)


def where_text_is(found: Document) -> tuple[torch.Tensor, torch.Tensor]:
    """The cells at the middles of lines and the heights of these lines."""
    cells, heights = [], []
    for corners in found.polygons:
        for along in np.linspace(0.1, 0.9, 9):
            x, y = corners[0] + along * (corners[1] - corners[0]) + 0.5 * (corners[3] - corners[0])
            cells.append((min(max(int(y) // GRID, 0), SIDE // GRID - 1), min(max(int(x) // GRID, 0), SIDE // GRID - 1)))
            heights.append(float(np.linalg.norm(corners[3] - corners[0])))
    return torch.tensor(cells).T, torch.tensor(heights)


def test_heights_of_lines_are_right_to_half_an_octave(documents: list[Document]) -> None:
    errors = []
    for found in documents:
        (y, x), true = where_text_is(found)
        errors.append((line_heights(found.image)[0, y, x] / true).log2())
    error = torch.cat(errors)
    assert error.median().abs() < 0.35 and error.std() < 0.6


def test_a_picture_twice_as_large_has_higher_lines(documents: list[Document]) -> None:
    ratios = []
    for found in documents[:3]:
        large = F.interpolate(found.image[None].float() / 255, scale_factor=2, mode="bicubic", antialias=True).clamp(0, 1)
        (y, x), true = where_text_is(found)
        usual = true > 16
        small = line_heights(found.image)[0, y, x]
        # the mean over bands pulls extremes to the middle: two thirds of an octave is what remains of one
        ratios.append((line_heights(large)[0, 2 * y + 1, 2 * x + 1] / small)[usual].log2())
    assert 0.5 < float(torch.cat(ratios).median()) < 1.2


@pytest.mark.parametrize("gain", [0.3, 0.6])
def test_darker_pictures_get_nearly_the_same_values(documents: list[Document], gain: float) -> None:
    for found in documents[:2]:
        light, dark = expected(found, mixed(found.image, MANY)), expected(found, mixed((found.image * gain).byte(), MANY))
        assert dark > light - 0.15


def test_values_are_finite_and_not_negative_and_nothing_beyond_the_coarse_level(documents: list[Document]) -> None:
    values = text_values(documents[0].image, CELL, 5)
    assert [tuple(v.shape) for v in values] == [(1, 48 >> level, 48 >> level) for level in range(5)]
    assert all(v.isfinite().all() and (v >= 0).all() for v in values)
    assert all((v == 0).all() for v in values[COARSE:]) and values[0].max() > 0


def test_a_token_is_worth_no_more_than_its_four_children(documents: list[Document]) -> None:
    for found in documents[:2]:
        for fine, coarse in itertools.pairwise(text_values(found.image, CELL)):
            assert (coarse <= 4 * F.avg_pool2d(fine, 2) + 1e-5).all()


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_a_constant_picture_is_worth_nothing(value: float) -> None:
    assert all((v == 0).all() for v in text_values(torch.full((2, 3, 70, 150), value), 16))


@examples(25)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.sampled_from([1e-6, 1.0, 1e30]), st.integers(0, 2**31))
def test_any_size_and_cell(height: int, width: int, cell: int, scale: float, seed: int) -> None:
    image = scale * torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed))
    rows, columns = -(-height // cell), -(-width // cell)
    for level, value in enumerate(text_values(image, cell)):
        assert value.shape == (1, -(-rows // 2**level), -(-columns // 2**level))
        assert value.isfinite().all() and (value >= 0).all()


def test_forms_of_a_picture(documents: list[Document]) -> None:
    image = documents[0].image[:, :200, :330].float() / 255
    both = text_values(torch.stack([image, image.flip(2)]), 32)
    for one, two in zip(text_values(image, 32), both):
        torch.testing.assert_close(one[0], two[0])
    broken = image.clone()
    broken[:, 20:30, 40:50] = float("nan")
    assert all(v.isfinite().all() for v in text_values(broken, 32))


# ---- what is shown, and how reading is measured ----


def test_what_is_shown(documents: list[Document]) -> None:
    image = documents[0].image
    everything = [(y, x, 64, 0) for y in range(0, SIDE, 64) for x in range(0, SIDE, 64)]
    assert torch.equal(shown(image, everything), image)
    coarse = shown(image, [])
    block = shown(image, [(128, 256, 64, 1)])
    part = np.s_[:, 128:192, 256:320]
    outside = torch.ones(SIDE, SIDE, dtype=torch.bool)
    outside[120:200, 248:328] = False
    assert torch.equal(block[:, outside], coarse[:, outside])
    error = [(x[part].float() - image[part].float()).square().mean() for x in (coarse, block)]
    assert error[1] < error[0]
    assert coarse_tokens(2048, 32) == coarse_tokens(1024, 16) == 64
    assert torch.equal(downscaled(image, CELLS, CELL), image)


def test_recall_counts_characters_in_their_place(documents: list[Document]) -> None:
    found = documents[1]
    outlines = np.array(found.polygons)
    assert recall(found, outlines, found.texts) == 1
    assert recall(found, outlines[::-1], found.texts[::-1]) == 1
    assert recall(found, outlines[:0], []) == 0
    assert recall(found, outlines, ["#"] * len(outlines)) == 0
    halves = np.concatenate([outlines, outlines])
    middle = (outlines[:, 0] + outlines[:, 1]) / 2, (outlines[:, 3] + outlines[:, 2]) / 2
    halves[: len(outlines), 1], halves[: len(outlines), 2] = middle
    halves[len(outlines) :, 0], halves[len(outlines) :, 3] = middle
    parts = [t[: len(t) // 2] for t in found.texts] + [t[len(t) // 2 :] for t in found.texts]
    assert recall(found, halves[::-1], parts[::-1]) == 1
    assert 0.3 < recall(found, halves[: len(outlines)], parts[: len(outlines)]) < 0.6


def test_every_line_says_something(documents: list[Document]) -> None:
    for found in documents:
        assert len(found.texts) == len(found.polygons) and all(text.strip() for text in found.texts)
        assert expected(found, []) < 0.2 and expected(found, [(0, 0, SIDE, 0)]) > 0.9
