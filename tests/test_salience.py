"""What saliency means: odd ones stand out, flat pictures do not, and exact symmetries hold."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from benchmarks._popout import display


def spot(colour: tuple[float, float, float], y: int, x: int, size: int = 10, side: int = 96, ground: float = 0.5) -> torch.Tensor:
    picture = torch.full((3, side, side), ground)
    picture[:, y : y + size, x : x + size] = torch.tensor(colour)[:, None, None]
    return picture


@pytest.mark.parametrize("colour", [(1.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.3, 0.6, 0.5)], ids=str)
def test_the_odd_spot_stands_out(colour: tuple[float, float, float]) -> None:
    place = texvlm.saliency(spot(colour, 60, 20))[0].argmax().item()
    assert 54 <= place // 96 < 76 and 14 <= place % 96 < 36


def test_motion_stands_out() -> None:
    torch.manual_seed(1)
    before = torch.rand(3, 128, 128) * 0.02 + 0.5
    after = before.clone()
    after[:, 80:92, 30:42] += 0.2
    still, moved = texvlm.saliency(before)[0], texvlm.saliency(after, before)[0]
    assert moved[80:92, 30:42].mean() > 2 * moved.mean() and moved[80:92, 30:42].mean() > still[80:92, 30:42].mean()


@pytest.mark.parametrize("value", [0.0, 0.37, 1.0])
def test_flat_pictures_have_none(value: float) -> None:
    assert (texvlm.saliency(torch.full((3, 70, 50), value)) == 0).all()


@examples(30)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(0, 2**31))
def test_range(height: int, width: int, moving: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    image, previous = torch.rand(1, 3, height, width, generator=g), torch.rand(1, 3, height, width, generator=g)
    result = texvlm.saliency(image, previous if moving else None)
    assert result.shape == (1, height, width) and (result >= 0).all() and (result <= 1 + 1e-6).all()
    assert (result > 0).any() == (max(height, width) >= 2)  # nothing is rare among one place


def test_mirror_and_batch() -> None:
    image = torch.rand(2, 3, 64, 96)
    result = texvlm.saliency(image)
    torch.testing.assert_close(texvlm.saliency(image.flip(3)), result.flip(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(texvlm.saliency(image[1])[0], result[1], atol=0, rtol=0)


def test_forms_of_a_picture() -> None:
    grey = torch.rand(1, 1, 40, 30)
    rgb = grey.expand(1, 3, 40, 30)
    assert torch.equal(texvlm.saliency(grey), texvlm.saliency(rgb))
    assert torch.equal(texvlm.saliency(torch.cat([rgb, torch.rand(1, 1, 40, 30)], dim=1)), texvlm.saliency(rgb))
    bytes_ = (rgb * 255).to(torch.uint8)
    torch.testing.assert_close(texvlm.saliency(bytes_), texvlm.saliency(bytes_.float() / 255))


def test_gradient_of_grey_is_summed() -> None:
    grey = torch.rand(1, 1, 16, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(texvlm.saliency, (grey,), atol=1e-5)


def test_pixels_that_are_not_finite_have_no_gradient() -> None:
    image = torch.rand(1, 3, 24, 24)
    image[0, :, 5, 5] = float("nan")
    image.requires_grad_()
    result = texvlm.saliency(image)
    result.square().sum().backward()
    assert result.isfinite().all() and image.grad.isfinite().all() and (image.grad[0, :, 5, 5] == 0).all()
    assert (image.grad != 0).any()


def test_bad_pictures() -> None:
    with pytest.raises(ValueError, match="1, 3 or 4 channels"):
        texvlm.saliency(torch.rand(2, 8, 8))
    with pytest.raises(ValueError, match="previous must have the shape"):
        texvlm.saliency(torch.rand(3, 8, 8), torch.rand(3, 8, 9))
    with pytest.raises(ValueError, match="previous must have the dtype"):
        texvlm.saliency(torch.rand(3, 8, 8), torch.rand(3, 8, 8).double())


@pytest.mark.parametrize(("kind", "wanted"), [("colour", 0.9), ("orientation", 0.85), ("size", 0.7), ("missing", 0.4)])
def test_the_odd_item_pops_out(kind: str, wanted: float) -> None:
    displays = [display(kind, 90000 + seed) for seed in range(24)]
    assert sum(d.hit(texvlm.saliency(d.image)[0]) for d in displays) >= wanted * len(displays)


@pytest.mark.parametrize("kind", ["colour", "orientation", "size"])
def test_the_odd_item_pops_out_of_small_pictures(kind: str) -> None:
    displays = [display(kind, 95000 + seed, 64) for seed in range(12)]
    assert sum(d.hit(texvlm.saliency(d.image)[0]) for d in displays) >= 0.5 * len(displays)


def test_small_contrasts_count_like_large_ones() -> None:
    faint = 0.5 + (display("colour", 3).image.float() / 255 - 0.5) * 0.1
    assert display("colour", 3).hit(texvlm.saliency(faint)[0])


def test_size_of_the_picture_hardly_matters() -> None:
    for seed in range(4):
        d = display("colour", seed, 1024)
        assert d.hit(texvlm.saliency(d.image)[0])
