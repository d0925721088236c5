"""What the distance transform means: known answers, brute force, SciPy, ties, and sizes that break 16-bit or banded methods."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm


def brute(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pixel against every True pixel; [H, W]."""
    height, width = mask.shape
    places = mask.flatten().nonzero()[:, 0]
    if len(places) == 0:
        return torch.full(mask.shape, height**2 + width**2), torch.full(mask.shape, -1)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    d = (y[..., None] - places // width) ** 2 + (x[..., None] - places % width) ** 2
    squared = d.amin(-1)
    return squared, torch.where(d == squared[..., None], places, height * width).amin(-1)


@pytest.mark.parametrize(
    ("height", "width", "columns"),
    [(300, 20, 1), (260, 97, 3), (400, 64, 30), (130, 130, 8), (97, 5, 2), (230, 100, 40)],
    ids=str,
)
def test_far_rows_in_narrow_pictures(height: int, width: int, columns: int) -> None:
    """Features beyond the reach of the search, at and around the limits where the envelope takes over."""
    g = torch.Generator().manual_seed(height)
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[0, torch.randperm(width, generator=g)[:columns]] = True
    mask[height // 2, 0] = True
    for actual, wanted in zip(texvlm.distance_transform(mask), brute(mask), strict=True):
        assert torch.equal(actual, wanted)


@examples(60)
@given(st.integers(1, 24), st.integers(1, 130), st.sampled_from([0.0, 0.003, 0.03, 0.2, 1.0]), st.integers(0, 2**31))
def test_equals_brute_force(height: int, width: int, share: float, seed: int) -> None:
    mask = torch.rand(height, width, generator=torch.Generator().manual_seed(seed)) < share
    for actual, wanted in zip(texvlm.distance_transform(mask), brute(mask), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("share", [0.3, 0.01, 1e-4, 2e-6])
@pytest.mark.parametrize("size", [(1100, 700), (300, 2050), (1, 5000), (5000, 1)], ids=str)
def test_equals_scipy(size: tuple[int, int], share: float) -> None:
    ndimage = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed")
    mask = torch.rand(size) < share
    mask[size[0] // 3, size[1] // 2] = True
    squared, index = texvlm.distance_transform(mask)
    exact = torch.from_numpy(ndimage.distance_transform_edt(~mask.numpy())).square().round().long()
    assert torch.equal(squared, exact)
    y, x = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    at_y, at_x = index // size[1], index % size[1]
    assert mask[at_y, at_x].all() and torch.equal((y - at_y) ** 2 + (x - at_x) ** 2, squared)


def test_search_and_envelope_agree() -> None:
    """Rows of one picture take the search near features and the envelope far from them; both break ties alike."""
    mask = torch.zeros(40, 900, dtype=torch.bool)
    mask[::7, 100:160:4] = True
    mask[3, 500] = mask[3, 700] = mask[36, 500] = True
    for actual, wanted in zip(texvlm.distance_transform(mask), brute(mask), strict=True):
        assert torch.equal(actual, wanted)


def test_ties_go_to_the_lowest_index() -> None:
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[0, 1] = mask[1, 0] = mask[1, 2] = mask[2, 1] = True
    squared, index = texvlm.distance_transform(mask)
    assert squared[1, 1] == 1 and index[1, 1] == 1
    assert index[0, 0] == 1 and index[2, 2] == 5


def test_empty_and_full() -> None:
    squared, index = texvlm.distance_transform(torch.zeros(2, 4, 7, dtype=torch.bool))
    assert (squared == 4**2 + 7**2).all() and (index == -1).all()
    squared, index = texvlm.distance_transform(torch.ones(4, 7, dtype=torch.bool))
    assert (squared == 0).all() and torch.equal(index, torch.arange(28).view(4, 7))


def test_pictures_of_a_batch_are_apart() -> None:
    mask = torch.rand(5, 20, 30) < 0.02
    together = texvlm.distance_transform(mask)
    for b in range(5):
        for whole, single in zip(together, texvlm.distance_transform(mask[b]), strict=True):
            assert torch.equal(whole[b], single)


def test_longer_than_32_bit_squares() -> None:
    """A row of 50,000 pixels: squared distances pass 2^31, so the row pass runs in 64 bits."""
    mask = torch.zeros(2, 50_000, dtype=torch.bool)
    mask[1, 0] = True
    squared, index = texvlm.distance_transform(mask)
    x = torch.arange(50_000)
    assert torch.equal(squared[0], x * x + 1) and torch.equal(squared[1], x * x) and (index == 50_000).all()


def contours(side: int, seed: int) -> torch.Tensor:
    """Thin closed lines [side, side], on which jump flooding errs more than on points."""
    low = torch.rand(1, 1, side // 32, side // 32, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(low, (side, side), mode="bicubic")[0, 0]
    inside = smooth > 0.5
    mask = torch.zeros_like(inside)
    mask[1:] |= inside[1:] != inside[:-1]
    mask[:, 1:] |= inside[:, 1:] != inside[:, :-1]
    return mask


@pytest.mark.parametrize("kind", ["points", "dense points", "contours"])
def test_jump_flooding_keeps_its_error_budget(kind: str) -> None:
    wrong, worst, pixels = 0, 0.0, 0
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        mask = (
            contours(512, seed) if kind == "contours" else torch.rand(512, 512, generator=g) < (4e-3 if kind == "points" else 0.1)
        )
        exact = texvlm.distance_transform(mask)[0]
        near, index = texvlm.distance_transform(mask, method="jfa")
        assert mask.flatten()[index].all() and (near >= exact).all()
        wrong += int((near != exact).sum())
        worst = max(worst, (near.double().sqrt() - exact.double().sqrt()).max().item())
        pixels += mask.numel()
    assert wrong <= pixels / 5000 and worst <= 4


def test_bad_masks() -> None:
    with pytest.raises(TypeError, match=r"bool tensor, got torch.float32"):
        texvlm.distance_transform(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"\[B, H, W\] or \[H, W\], got \[3\]"):
        texvlm.distance_transform(torch.zeros(3, dtype=torch.bool))
