"""What the channels mean: the table, known answers, ranges on every level, metadata, and linear adjoints."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm

BUILT = texvlm.MINIMAL


def level0(image: torch.Tensor, name: str, **keywords) -> torch.Tensor:
    return texvlm.build_channels(image, channels=[name], **keywords).level(0)[:, 0]


def test_table() -> None:
    assert len(texvlm.CHANNELS) == 40 and [c.index for c in texvlm.CHANNELS] == list(range(40))
    names = [c.name for c in texvlm.CHANNELS]
    assert len(set(names)) == 40 and names[18] == "embedding_0" and names[33] == "embedding_15"
    assert [names[i] for i in (0, 3, 7, 8, 11, 12, 34, 39)] == [
        "red", "edge", "motion", "saliency", "eccentricity", "cluster", "edge_distance", "text",
    ]  # fmt: skip
    assert [c.name for c in texvlm.CHANNELS if c.reducer == "max"] == [
        "edge", "contrast_edge", "motion", "fixation_history", "gaze_history", "boundary", "text",
    ]  # fmt: skip
    assert [c.name for c in texvlm.CHANNELS if c.reducer in ("min", "mode")] == ["cluster", "edge_distance"]
    assert (*range(12), 34) == BUILT


def test_the_reducers_of_the_table_are_those_of_the_op() -> None:
    """CHANNELS says how each channel becomes one on the next level; the compiled code has a table of its own."""
    planes = torch.randint(0, 4, (1, 40, 12, 20)).float()  # with ties, so that no two reducers agree
    built = torch.ops.texvlm.build_channels(torch.zeros(1, 3, 12, 20), range(40), 3, [planes], range(40))
    wanted = torch.ops.texvlm.generate_mipmaps(planes, [c.reducer for c in texvlm.CHANNELS], 3)
    differ = (built != wanted).any(1)[0].nonzero()[:, 0].tolist()
    assert not differ, [texvlm.CHANNELS[c].name for c in differ]


def test_layouts() -> None:
    image = torch.rand(3, 20, 26)
    minimal, whole = texvlm.build_channels(image, channels="minimal"), texvlm.build_channels(image)
    assert minimal.channels == 13 and whole.channels == 40
    assert whole.names == tuple(c.name for c in texvlm.CHANNELS) and whole.reducer == tuple(c.reducer for c in texvlm.CHANNELS)
    torch.testing.assert_close(whole.data[..., list(BUILT)], minimal.data, rtol=0, atol=0)
    absent = [7, 15, 16, 17, *range(18, 34), 35, 36, 37]  # no previous picture, no embedding, no history, no attention
    assert (whole.data[..., absent] == 0).all()
    assert [c.index for c in texvlm.CHANNELS if whole.meta[c.name].startswith("absent")] == absent
    some = texvlm.build_channels(image, channels=["edge_distance", 4, "red"])
    assert some.names == ("edge_distance", "contrast_edge", "red") and some.reducer == ("min", "max", "mean")
    torch.testing.assert_close(some.data, whole.data[..., [34, 4, 0]], rtol=0, atol=0)


def test_meta() -> None:
    image = torch.rand(3, 16, 16)
    still = texvlm.build_channels(image, channels="minimal")
    assert still.meta["motion"] == "absent: no previous picture" and still.meta["eccentricity"] == "centre of the picture"
    assert (still.level(0)[:, still.index("motion")] == 0).all()
    moving = texvlm.build_channels(image, torch.rand(3, 16, 16), channels="minimal", fixation=torch.tensor([0.2, 0.3]))
    assert moving.meta["motion"] == "picture and previous picture" and moving.meta["eccentricity"] == "fixation"
    assert pickle.loads(pickle.dumps(moving)).meta == moving.meta


@examples(30)
@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 2**31), st.sampled_from(["rand", "binary", "stripes"]))
def test_ranges_hold_on_every_level(height: int, width: int, seed: int, kind: str) -> None:
    g = torch.Generator().manual_seed(seed)
    image, previous = torch.rand(2, 1, 3, height, width, generator=g)
    if kind == "binary":
        image = image.round()
    elif kind == "stripes":
        image = (torch.arange(width) // 2 % 2).expand_as(image).float()
    texture = texvlm.build_channels(image, previous, channels="minimal", fixation=torch.rand(1, 2, generator=g))
    for c, i in enumerate(BUILT):
        low, high = texvlm.CHANNELS[i].range
        values = texture.data[..., c]
        assert (values >= low - 1e-6).all() and (values <= high + 1e-6).all(), texvlm.CHANNELS[i].name


def test_sobel_of_an_edge() -> None:
    image = torch.zeros(3, 9, 10)
    image[:, :, 5:] = 1
    edge = level0(image, "edge")[0]
    wanted = 4 / (4 * math.sqrt(1.25))
    assert torch.allclose(edge[:, 4:6], torch.full((9, 2), wanted)) and (edge[:, :4] == 0).all() and (edge[:, 6:] == 0).all()


def test_largest_edge_is_one() -> None:
    values = torch.tensor([[0.0, 0, 0.5], [0, 0.5, 1], [0.5, 1, 1]])  # (gx, gy) = (3, 3): below the bound
    corner = torch.tensor([[0.0, 0, 1], [0, 0.5, 1], [0, 1, 1]])  # (4, 2): the bound itself
    assert level0(values.expand(3, 3, 3), "edge")[0, 1, 1] < 1
    assert math.isclose(level0(corner.expand(3, 3, 3), "edge")[0, 1, 1].item(), 1, rel_tol=1e-6)


def test_contrast_edge_finds_what_edge_does_not() -> None:
    text = torch.full((3, 40, 80), 0.5)
    text[:, 10:30:4, 10:30] += 0.02  # faint
    text[:, :, 60:] = 1.0  # strong
    edge, contrast = level0(text, "edge")[0], level0(text, "contrast_edge")[0]
    assert edge[9:31, 9:31].max() < 0.05 * edge.max() and contrast[9:31, 9:31].max() > 0.2 * contrast.max()


def test_passes_add_up_to_luma() -> None:
    image = torch.rand(2, 3, 21, 34, dtype=torch.float64)
    luma = 0.299 * image[:, 0] + 0.587 * image[:, 1] + 0.114 * image[:, 2]
    torch.testing.assert_close(level0(image, "high_pass") + level0(image, "low_pass"), luma, rtol=1e-15, atol=1e-15)
    assert torch.allclose(level0(torch.full((3, 9, 9), 0.3), "low_pass"), torch.tensor(0.3))


def test_local_moments_do_not_cancel() -> None:
    """A faint texture on a bright ground, float32 against float64: squares of large values would drown it."""
    texture = 0.9 + 1e-4 * torch.rand(3, 50, 60, dtype=torch.float64)
    texture[:, :, 30:] -= 0.9
    texture = texture.float()
    torch.testing.assert_close(
        level0(texture, "contrast_edge").double(), level0(texture.double(), "contrast_edge"), rtol=1e-3, atol=2e-5
    )


def test_positions_and_eccentricity() -> None:
    image = torch.rand(3, 6, 8)
    assert torch.allclose(level0(image, "x")[0, 0], (torch.arange(8) + 0.5) / 8)
    assert torch.allclose(level0(image, "y")[0, :, 0], (torch.arange(6) + 0.5) / 6)
    at = torch.tensor([[0.25, 0.5]])
    distance = level0(image, "eccentricity", fixation=at)[0]
    far = math.hypot(6, 3)
    assert math.isclose(distance[0, 7].item(), math.hypot(5.5, 2.5) / far, rel_tol=1e-6)
    assert (level0(image, "eccentricity", fixation=torch.tensor([[float("inf"), 0.5]])) == 0).all()


def test_edge_distance() -> None:
    image = torch.zeros(3, 30, 40)
    image[:, :, 20:] = 1
    distance = level0(image, "edge_distance")[0]
    columns = torch.arange(40)
    wanted = torch.minimum((columns - 19).abs(), (columns - 20).abs()) / math.hypot(30, 40)
    assert torch.allclose(distance, wanted.expand(30, 40))
    assert (level0(torch.zeros(3, 5, 6), "edge_distance") == 1).all()  # no edge: the diagonal
    assert torch.equal(level0(image * 0.01, "edge_distance")[0], distance)  # relative to the picture's own edges


def test_motion() -> None:
    image, previous = torch.rand(2, 3, 9, 9)
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    torch.testing.assert_close(level0(image, "motion", previous=previous)[0], ((image - previous) * weights).sum(0).abs())


@pytest.mark.parametrize("name", ["low_pass", "high_pass", "red"])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (2, 3), (8, 8), (13, 6)], ids=str)
def test_adjoint_identity(name: str, size: tuple[int, int]) -> None:
    """<Ax, y> = <x, A'y> for the linear channels, mips included."""
    x = torch.rand(1, 3, *size, dtype=torch.float64, requires_grad=True)
    data = texvlm.build_channels(x, channels=[name]).data
    y = torch.randn_like(data)
    (back,) = torch.autograd.grad(data, x, y)
    torch.testing.assert_close((data * y).sum(), (x * back).sum())


@pytest.mark.parametrize("most", [1e15, 1e19, 3.4e38])
def test_large_numbers_are_finite(most: float) -> None:
    image = torch.rand(1, 3, 24, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1
    fixation = torch.tensor([[most, -most]])
    made = texvlm.build_channels(image * most, previous=-image * most, channels="minimal", fixation=fixation, levels=1)
    assert made.data.isfinite().all(), [name for name in made.names if not made.level(0)[:, made.index(name)].isfinite().all()]
    assert (made.level(0)[:, made.index("eccentricity")] <= 1.01).all()


def test_not_a_number_is_zero_and_has_no_gradient() -> None:
    image = torch.rand(1, 3, 20, 20)
    clean = image.clone()
    image[0, 1, 4, 5] = float("nan")
    image[0, 2, 9, 9] = float("inf")
    clean[0, 1, 4, 5] = clean[0, 2, 9, 9] = 0
    image.requires_grad_()
    texture = texvlm.build_channels(image, channels="minimal")
    assert torch.equal(texture.data, texvlm.build_channels(clean, channels="minimal").data)
    texture.data.sum().backward()
    assert image.grad.isfinite().all() and image.grad[0, 1, 4, 5] == 0 and image.grad[0, 2, 9, 9] == 0


def test_storage_types() -> None:
    image = torch.rand(3, 33, 47)
    coarse = [name for name in texvlm.build_channels(image, channels="minimal").names if name not in ("x", "y")]
    for dtype, tolerance, channels in [(torch.float16, 2e-3, "minimal"), (torch.bfloat16, 2e-2, coarse)]:
        full = texvlm.build_channels(image, channels=channels)
        half = texvlm.build_channels(image, channels=channels, dtype=dtype)
        assert half.data.dtype == dtype
        torch.testing.assert_close(half.data.float(), full.data, rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match="for the channels x, y: bfloat16"):
        texvlm.build_channels(image, channels="minimal", dtype=torch.bfloat16)
    assert texvlm.build_channels(image.bfloat16(), channels="minimal").data.dtype == torch.float32
    assert texvlm.build_channels(image.bfloat16(), channels=coarse).data.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="float16 tells 2048 clusters apart"):
        texvlm.build_channels(image, channels=["cluster"], dtype=torch.float16, n_superpixels=4000)


@pytest.mark.parametrize("picture", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_texels_are_rounded_once(picture: torch.dtype, dtype: torch.dtype) -> None:
    """Level 0 is that of the picture's own arithmetic, rounded, for each pair of types; levels above follow from what is stored."""
    image = torch.rand(2, 3, 21, 34, dtype=picture)
    channels = ["red", "edge", "contrast_edge", "low_pass", "saliency"]
    wide = texvlm.build_channels(image, channels=channels)
    narrow = texvlm.build_channels(image, channels=channels, dtype=dtype)
    assert torch.equal(narrow.level(0), wide.level(0).to(dtype))
    assert torch.equal(texvlm.Texture(narrow.level(0), narrow.reducer).data, narrow.data)


def test_autocast_keeps_the_fixation_usable() -> None:
    image, fixation = torch.rand(3, 16, 16), torch.tensor([[0.3, 0.6]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = texvlm.build_channels(image, channels=["eccentricity"], fixation=fixation.bfloat16())
    outside = texvlm.build_channels(image, channels=["eccentricity"], fixation=fixation.bfloat16().float())
    assert inside.data.dtype == torch.float32 and torch.equal(inside.data, outside.data)


def test_bad_arguments() -> None:
    image = torch.rand(3, 8, 8)
    with pytest.raises(
        ValueError, match=r"no channel 'sobel'; leave channels out for all, or name some: all, minimal.*edge_distance"
    ):
        texvlm.build_channels(image, channels=["sobel"])
    with pytest.raises(ValueError, match=r"each once"):
        texvlm.build_channels(image, channels=["red", 0])
    with pytest.raises(ValueError, match="indices from 0 to 39, got 40"):
        texvlm.build_channels(image, channels=[40])
    with pytest.raises(ValueError, match="query needs embedding="):
        texvlm.build_channels(image, query="a dog")


def test_faint_print_is_found_by_contrast_edges_alone() -> None:
    """Strokes of 4 % contrast beside strokes of 80 %: faint and strong ones differ 20 times as edges, hardly as contrast edges."""
    picture = torch.full((1, 64, 128), 0.5)
    for x in range(8, 56, 8):
        picture[:, 16:48, x : x + 2] += 0.04
        picture[:, 16:48, 64 + x : 66 + x] -= 0.4
    plain, normalised = texvlm.edges(picture)[0], texvlm.contrast_edges(picture)[0]
    faint, strong = (slice(None), slice(4, 60)), (slice(None), slice(68, 124))
    assert plain[strong].mean() > 8 * plain[faint].mean()
    assert normalised[strong].mean() < 3 * normalised[faint].mean()
    texture = texvlm.build_channels(picture, channels=["edge", "contrast_edge"], levels=1).level(0)[0]
    assert torch.equal(texture, torch.stack([plain, normalised]))
