"""What superpixels mean: connected, as many as asked for, along the edges, the same on every device and for any number of threads."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference


def blobs(height: int, width: int, seed: int = 0, side: int = 16, noise: float = 0.1, batch: int = 1) -> torch.Tensor:
    """A smooth random picture [batch, 3, height, width] with noise on it."""
    g = torch.Generator().manual_seed(seed)
    low = torch.rand(batch, 3, -(-height // side), -(-width // side), generator=g)
    picture = torch.nn.functional.interpolate(low, (height, width), mode="bilinear")
    return (1 - noise) * picture + noise * torch.rand(batch, 3, height, width, generator=g)


def regions(height: int, width: int, count: int, seed: int) -> torch.Tensor:
    """A random Voronoi diagram [height, width] of `count` sites."""
    g = torch.Generator().manual_seed(seed)
    sites = torch.rand(count, 2, generator=g) * torch.tensor([height, width])
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return ((y[..., None] - sites[:, 0]) ** 2 + (x[..., None] - sites[:, 1]) ** 2).argmin(-1)


def check(labels: torch.Tensor, count: torch.Tensor, wanted: int) -> None:
    """Labels [B, H, W] are 0 .. wanted - 1, each one 4-connected piece."""
    ndimage = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed")
    assert labels.dtype == count.dtype == torch.int64 and count.tolist() == [wanted] * len(labels)
    for picture in labels:
        assert torch.equal(picture.unique(), torch.arange(wanted))
        # one call for all labels: pixels at odd places, links between equal neighbours in between
        height, width = picture.shape
        grid = torch.zeros(2 * height - 1, 2 * width - 1, dtype=torch.bool)
        grid[::2, ::2] = True
        grid[1::2, ::2] = picture[1:] == picture[:-1]
        grid[::2, 1::2] = picture[:, 1:] == picture[:, :-1]
        assert ndimage.label(grid.numpy())[1] == wanted


@pytest.mark.parametrize("n", [1, 2, 7, 50, 333])
@pytest.mark.parametrize("size", [(240, 320), (321, 481), (700, 64)], ids=str)
def test_connected_and_as_many_as_asked_for(size: tuple[int, int], n: int) -> None:
    check(*texvlm.superpixels(blobs(*size, batch=2), n), n)


@examples(60)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 120), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2**31))
def test_any_size(height: int, width: int, n: int, noise: float, seed: int) -> None:
    check(*texvlm.superpixels(blobs(height, width, seed, 7, noise), n), min(n, height * width))


@examples(15)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 40), st.integers(0, 2**31))
def test_equals_reference_at_any_size(height: int, width: int, n: int, seed: int) -> None:
    image = blobs(height, width, seed, 5, 0.3)
    for actual, wanted in zip(texvlm.superpixels(image, n), reference.superpixels(image, n), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (3, 5000), (5000, 3), (1, 3000)], ids=str)
def test_odd_shapes(size: tuple[int, int]) -> None:
    check(*texvlm.superpixels(blobs(*size)), min(50, size[0] * size[1]))


def test_noise_does_not_break_regions() -> None:
    g = torch.Generator().manual_seed(3)
    check(*texvlm.superpixels(torch.rand(1, 3, 200, 300, generator=g), 50), 50)
    checkers = ((torch.arange(200)[:, None] + torch.arange(300)) % 2).float().expand(3, -1, -1)
    check(*texvlm.superpixels(checkers, 50), 50)


def test_constant_pictures_give_even_regions() -> None:
    labels, count = texvlm.superpixels(torch.full((3, 240, 320), 0.6), 50)
    check(labels, count, 50)
    areas = labels.flatten().bincount()
    assert areas.max() <= 3 * areas.float().mean() and areas.min() >= areas.float().mean() / 4


def test_finds_the_regions_that_there_are() -> None:
    """Eight flat regions, eight superpixels: nearly every pixel in its own, although there is noise."""
    truth = regions(200, 260, 8, seed=5)
    g = torch.Generator().manual_seed(0)
    palette = torch.tensor([[i & 1, i >> 1 & 1, i >> 2 & 1] for i in range(8)]).float() * 0.6 + 0.2
    image = palette[truth].permute(2, 0, 1) + 0.05 * torch.randn(3, 200, 260, generator=g)
    labels = texvlm.superpixels(image, 8)[0][0]
    overlap = torch.zeros(8, 8).index_put_((labels.flatten(), truth.flatten()), torch.ones(200 * 260), accumulate=True)
    assert overlap.amax(1).sum() / truth.numel() > 0.995


def test_dim_pictures_too() -> None:
    truth = regions(200, 260, 6, seed=1)
    image = (0.2 + 0.02 * torch.arange(6))[truth].expand(3, -1, -1)
    labels = texvlm.superpixels(image, 30)[0][0]
    overlap = torch.zeros(30, 6).index_put_((labels.flatten(), truth.flatten()), torch.ones(200 * 260), accumulate=True)
    assert overlap.amax(1).sum() / truth.numel() > 0.97


def test_uint8_equals_float() -> None:
    g = torch.Generator().manual_seed(0)
    image = (blobs(160, 200) * 255).to(torch.uint8)
    assert torch.equal(texvlm.superpixels(image)[0], texvlm.superpixels(image.float() / 255)[0])
    array = image[0].permute(1, 2, 0).numpy()
    assert torch.equal(texvlm.superpixels(array)[0], texvlm.superpixels(image)[0])
    alpha = torch.cat([image, torch.randint(0, 256, (1, 1, 160, 200), generator=g, dtype=torch.uint8)], 1)
    assert torch.equal(texvlm.superpixels(alpha)[0], texvlm.superpixels(image)[0])


def test_what_is_not_finite_counts_as_zero() -> None:
    image = blobs(90, 120)
    hole = torch.zeros(90, 120, dtype=torch.bool)
    hole[20:50, 30:80] = True
    nan, zero = image.clone(), image.clone()
    nan[:, :, hole] = float("nan")
    zero[:, :, hole] = 0
    assert torch.equal(texvlm.superpixels(nan)[0], texvlm.superpixels(zero)[0])
    check(*texvlm.superpixels(torch.full((3, 40, 50), float("nan")), 9), 9)


def test_pictures_of_a_batch_are_apart() -> None:
    image = blobs(120, 150, batch=4)
    together = texvlm.superpixels(image, 20)[0]
    for b in range(4):
        assert torch.equal(together[b], texvlm.superpixels(image[b], 20)[0][0])


def test_threads_do_not_matter() -> None:
    image = blobs(600, 800)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            labels, _ = texvlm.superpixels(image)
            found.append((labels, texvlm.superpixel_channels(labels, 50), texvlm.boundaries(image, labels=labels)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert torch.equal(a, b)


def test_has_no_gradient_and_says_so() -> None:
    image = blobs(40, 50).requires_grad_()
    labels = texvlm.superpixels(image, 5)[0]
    assert not labels.requires_grad
    out = texvlm.boundaries(image, labels=labels)
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()


def test_channels_of_a_square_and_the_rest() -> None:
    labels = torch.zeros(1, 20, 30, dtype=torch.int64)
    labels[0, 5:11, 8:14] = 1
    planes = texvlm.superpixel_channels(labels, 2)
    assert torch.equal(planes[:, 0], labels.float())
    torch.testing.assert_close(planes[0, 2, 5, 8].item(), 36 / 600)
    torch.testing.assert_close(planes[0, 1, 5, 8].item(), math.hypot(2.5, 2.5) / math.sqrt(36 / math.pi))
    labels[0, 0, 0] = 7  # beyond n: itself, 0, 0; -1 alike
    labels[0, 0, 1] = -1
    planes = texvlm.superpixel_channels(labels, 2)
    assert planes[0, :, 0, 0].tolist() == [7, 0, 0] and planes[0, :, 0, 1].tolist() == [-1, 0, 0]


def test_shares_add_up() -> None:
    labels, _ = texvlm.superpixels(blobs(100, 130, batch=2), 17)
    planes = texvlm.superpixel_channels(labels, 17)
    for b in range(2):
        shares = [planes[b, 2][labels[b] == k][0].item() for k in range(17)]
        assert math.isclose(sum(shares), 1, rel_tol=1e-5)
    assert planes[:, 1].min() >= 0 and planes[:, 1].isfinite().all()
    assert 0.5 < planes[:, 1].mean() < 1.2  # 2/3 in a disc


def test_boundaries_need_a_border_and_an_edge() -> None:
    image = torch.full((3, 80, 100), 0.3)
    image[:, 20:60, 30:70] = 0.35  # dim: the threshold is the picture's own
    labels, _ = texvlm.superpixels(image, 12)
    found = texvlm.boundaries(image, labels=labels)[0]
    assert set(found.unique().tolist()) <= {0.0, 1.0}
    outline = torch.zeros(80, 100, dtype=torch.bool)
    outline[19:61, 29:71] = True
    outline[21:59, 31:69] = False
    assert found[~outline].sum() == 0  # borders of superpixels in the flat parts do not count
    assert found[outline].mean() > 0.9
    assert texvlm.boundaries(torch.full((3, 40, 40), 0.5)).sum() == 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        texvlm.superpixels(torch.rand(3, 8, 8), 0)
    with pytest.raises(ValueError, match="1, 3 or 4 channels"):
        texvlm.superpixels(torch.rand(5, 8, 8))
    with pytest.raises(ValueError, match=r"labels must be \[B, H, W\]"):
        texvlm.boundaries(torch.rand(3, 8, 8), labels=torch.zeros(1, 8, 9, dtype=torch.int64))
