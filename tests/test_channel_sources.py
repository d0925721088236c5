"""All 40 channels: what each is made of, what replaces it, what the previous frame brings, and what odd pictures do."""

from __future__ import annotations

import pytest
import torch

import texvlm
from texvlm import channel_sources as module

GENERATOR = 7


def pictures(height: int = 48, width: int = 64, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture with structure, and the same one, 3 pixels to the left, as the previous one."""
    g = torch.Generator().manual_seed(GENERATOR)
    coarse = torch.rand(batch, 3, 8, 12, generator=g)
    wide = torch.nn.functional.interpolate(coarse, (height, width + 3), mode="bicubic").clamp(0, 1)
    return wide[..., 3:].contiguous(), wide[..., :-3].contiguous()


def everything(image: torch.Tensor, previous: torch.Tensor | texvlm.Texture, **keywords) -> texvlm.Texture:
    batch, _, height, width = image.shape
    g = torch.Generator().manual_seed(GENERATOR)
    given = {
        "attention": torch.rand(batch, 3, 4, generator=g),
        "previous_attention": torch.rand(batch, 3, 4, generator=g),
        "previous_relevance": torch.rand(batch, height, width, generator=g),
        "previous_saliency": torch.rand(batch, height // 2, width // 2, generator=g),
    }
    points = torch.rand(batch, 5, 2, generator=g)
    embedding = texvlm.DigitsEmbedding()
    return texvlm.build_channels(
        image, previous, "seven", given=given, fixations=points, gaze=points, embedding=embedding, **keywords
    )


def test_all_forty_have_a_source_and_keep_their_ranges() -> None:
    image, previous = pictures(batch=2)
    texture = everything(image, previous)
    assert texture.channels == 40 and not [
        name for name, note in texture.meta.items() if isinstance(note, str) and note.startswith("absent")
    ]
    assert len(texture.meta["query_vector"]) == 16
    for row in texvlm.CHANNELS:
        values = texture.data[..., row.index]
        assert values.isfinite().all() and (values >= row.range[0] - 1e-5).all() and (values <= row.range[1] + 1e-5).all(), (
            row.name
        )
        assert values.abs().max() > 0, row.name


def test_nothing_is_computed_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **keywords: object) -> None:
        raise AssertionError("computed, though nobody asked")

    for name in (
        "superpixels",
        "superpixel_channels",
        "boundaries",
        "text_regions",
        "optical_flow",
        "fixation_history",
        "gaze_history",
    ):
        monkeypatch.setattr(module, name, never)
    image, previous = pictures()
    points = torch.rand(1, 3, 2)
    texvlm.build_channels(image, previous, channels="minimal", fixations=points, gaze=points)
    texvlm.build_channels(image, channels=["text", "boundary"], given={"text": image[:, 0], "boundary": image[:, 1]})
    with pytest.raises(AssertionError, match="nobody asked"):
        texvlm.build_channels(image, channels=["cluster"])


def test_a_subset_equals_the_whole() -> None:
    image, previous = pictures()
    whole = everything(image, previous)
    some = ["text", "embedding_3", "cluster", "boundary", "attention", "previous_saliency", "gaze_history", "low_pass"]
    part = everything(image, previous, channels=some)
    assert part.names == tuple(some)
    torch.testing.assert_close(part.data, whole.data[..., [whole.index(name) for name in some]], rtol=0, atol=0)


def test_flow_compensates_motion_and_moves_histories() -> None:
    image, previous = pictures()
    plain = texvlm.build_channels(image, previous, channels=["motion"])
    true = torch.tensor([3.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 48, 64)  # what is at p now was 3 pixels further right
    moved = texvlm.build_channels(
        image, previous, channels=["motion", "previous_saliency"], flow=true, given={"previous_saliency": previous[:, 0]}
    )
    inside = (..., slice(0, 60))
    assert plain.level(0)[inside].mean() > 20 * moved.level(0)[:, 0][inside].mean()
    torch.testing.assert_close(moved.level(0)[:, 1][inside], image[:, 0][inside], rtol=0, atol=1e-5)
    assert (
        moved.meta["motion"] == "picture, previous picture and flow"
        and moved.meta["previous_saliency"] == "given, moved along the flow"
    )
    estimated = texvlm.build_channels(image, previous)
    assert estimated.meta["motion"] == "picture, previous picture and flow"
    still = texvlm.build_channels(image, previous, flow=None)
    torch.testing.assert_close(still.level(0)[:, 7], plain.level(0)[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8], ids=str)
def test_motion_is_one_thing(dtype: torch.dtype) -> None:
    """What the flow does not find stays where it was, for channel 7 as for `motion`, and for saliency."""
    image, previous = ((255 * p).byte() if dtype == torch.uint8 else p.to(dtype) for p in pictures())
    g = torch.Generator().manual_seed(GENERATOR)
    flow, occlusion = torch.randn(1, 2, 13, 17, generator=g), torch.rand(1, 13, 17, generator=g) < 0.3
    flow[0, 0, 3:5, 4:6], flow[0, 1, 9, 9] = float("nan"), float("inf")
    if dtype.is_floating_point:
        previous[0, 0, 20, 30] = float("nan")
    channels = texvlm.build_channels(image, previous, channels=["motion", "saliency"], levels=1, flow=(flow, occlusion)).level(0)
    torch.testing.assert_close(
        channels[:, 0], texvlm.motion(previous=previous, current=image, flow=flow, occlusion=occlusion), rtol=0, atol=0
    )
    nowhere = torch.full((1, 2, 13, 17), float("nan"))
    for field in ((nowhere, None), (flow.nan_to_num(0, 0, 0), torch.ones_like(occlusion))):
        still = texvlm.build_channels(image, previous, channels=["motion", "saliency"], levels=1, flow=field)
        plain = texvlm.build_channels(image, previous, channels=["motion", "saliency"], levels=1, flow=None)
        torch.testing.assert_close(still.data, plain.data, rtol=0, atol=1e-6 if dtype == torch.uint8 else 0)


def test_the_previous_texture_brings_its_own() -> None:
    image, previous = pictures()
    points = torch.tensor([[[0.5, 0.5]]])
    first = texvlm.build_channels(previous, query="seven", embedding=texvlm.DigitsEmbedding(), fixations=points, gaze=points)
    corner = torch.tensor([[[0.05, 0.05]]])
    second = texvlm.build_channels(image, first, flow=None, fixations=corner, gaze=corner)
    torch.testing.assert_close(second.level(0)[:, second.index("previous_saliency")], first.level(0)[:, first.index("saliency")])
    torch.testing.assert_close(second.level(0)[:, second.index("previous_relevance")], texvlm.relevance(first))
    for name in ("fixation_history", "gaze_history"):
        before, after = first.level(0)[:, first.index(name)], second.level(0)[:, second.index(name)]
        middle = (0, slice(12, 36), slice(16, 48))
        assert 0 < after[middle].max() < before[middle].max() and after[middle].argmax() == before[middle].argmax()  # decayed
        assert after[0, 2, 3] > 0.9
    same = texvlm.build_channels(image, previous, channels=["motion"])
    torch.testing.assert_close(second.level(0)[:, 7], same.level(0)[:, 0], rtol=0, atol=1e-6)


def test_labels_of_a_segmentation_replace_superpixels() -> None:
    image, _ = pictures()
    labels = (torch.arange(64) // 32).expand(1, 48, 64)
    texture = texvlm.build_channels(image, channels=["cluster", "cluster_size", "boundary"], given={"cluster": labels})
    torch.testing.assert_close(texture.level(0)[0, 0], labels[0].float(), rtol=0, atol=0)
    assert (texture.level(0)[0, 1] == 0.5).all()
    columns = texture.level(0)[0, 2].nonzero()[:, 1]
    assert ((columns == 31) | (columns == 32)).all()


def test_gradients_reach_what_is_given() -> None:
    image, _ = pictures()
    plane = torch.rand(1, 6, 8, requires_grad=True)
    picture = image.clone().requires_grad_()
    texture = texvlm.build_channels(picture, channels=["saliency", "red", "text"], given={"saliency": plane})
    weight = torch.rand(1, 48, 64)
    (texture.level(0)[:, 0] * weight).sum().backward()
    torch.testing.assert_close(plane.grad.sum(), weight.sum())
    assert picture.grad is None or (picture.grad == 0).all()


def test_query_lights_up_on_the_same_axes() -> None:
    image, _ = pictures()
    embedding = texvlm.Embedding(texvlm.DigitsEmbedding())
    texture = texvlm.build_channels(image, query="seven", embedding=embedding, channels=[*range(18, 34)])
    torch.testing.assert_close(texvlm.relevance(texture), texvlm.relevance(texture, embedding.query("seven")))


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (3, 500), (500, 3), (2, 2)], ids=str)
def test_small_and_narrow_pictures(size: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(GENERATOR)
    image, previous = torch.rand(2, 1, 3, *size, generator=g)
    points = torch.rand(1, 2, 2, generator=g)
    texture = texvlm.build_channels(image, previous, "seven", embedding=texvlm.DigitsEmbedding(), fixations=points, gaze=points)
    assert texture.data.isfinite().all()


@pytest.mark.parametrize("kind", ["not a number", "constant", "black", "alpha", "grey", "uint8", "strided"])
def test_odd_pictures(kind: str) -> None:
    image, previous = pictures()
    if kind == "not a number":
        image[0, 1, 10:20, 5:50], image[0, 0, 3, 3], previous[0, 2, 7] = float("nan"), float("inf"), float("nan")
    elif kind in ("constant", "black"):
        image, previous = (torch.full_like(image, 0.5 if kind == "constant" else 0.0) for _ in range(2))
    elif kind == "alpha":
        image, previous = (torch.cat([p, p[:, :1]], 1) for p in (image, previous))
    elif kind == "grey":
        image, previous = image[:, :1], previous[:, :1]
    elif kind == "uint8":
        image, previous = ((p * 255).to(torch.uint8) for p in (image, previous))
    else:
        image, previous = (p.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2) for p in (image, previous))
    texture = texvlm.build_channels(image, previous, embedding=texvlm.DigitsEmbedding())
    assert texture.data.isfinite().all()
    for row in texvlm.CHANNELS:
        values = texture.data[..., row.index]
        assert (values >= row.range[0] - 1e-5).all() and (values <= row.range[1] + 1e-5).all(), row.name
    if kind in ("constant", "black"):
        for name in ("edge", "contrast_edge", "saliency", "text", "boundary", "motion"):
            assert (texture.level(0)[:, texture.index(name)] == 0).all(), name


def test_half_storage_halves() -> None:
    image, previous = pictures()
    single, half = (texvlm.build_channels(image, previous, dtype=dtype) for dtype in (torch.float32, torch.float16))
    assert half.data.nbytes * 2 == single.data.nbytes
    torch.testing.assert_close(half.level(0).float(), single.level(0).half().float(), rtol=0, atol=0)


def test_bad_arguments_are_named() -> None:
    image, previous = pictures()
    with pytest.raises(ValueError, match="given must name channels or 'embedding', got sobel"):
        texvlm.build_channels(image, given={"sobel": image[:, 0]})
    with pytest.raises(ValueError, match=r"given\['text'\] must be \[B, h, w\] with B = 1, got \[1, 1, 48, 64\]"):
        texvlm.build_channels(image, given={"text": image[:, :1]})
    with pytest.raises(ValueError, match=r"given\['text'\] must be on cpu as the picture is, got meta"):
        texvlm.build_channels(image, given={"text": image[:, 0].to("meta")})
    with pytest.raises(ValueError, match="at most as large as the picture"):
        texvlm.build_channels(image, given={"text": torch.rand(1, 49, 64)})
    with pytest.raises(ValueError, match="flow must be a tensor, 'auto' or None, got 'farneback'"):
        texvlm.build_channels(image, previous, flow="farneback")
    with pytest.raises(ValueError, match="previous must be a texture of 1 pictures of 48 x 64, got 1 of 24 x 64"):
        texvlm.build_channels(image, texvlm.build_channels(image[:, :, :24], channels="minimal"))
    with pytest.raises(ValueError, match="previous must be a texture with the channels red, green and blue"):
        texvlm.build_channels(image, texvlm.build_channels(image, channels=["edge"]))
    with pytest.raises(ValueError, match="query needs embedding="):
        texvlm.build_channels(image, query="seven")


def test_labels_that_are_given_are_whole_and_at_most_as_many_as_pixels() -> None:
    image = torch.rand(1, 3, 8, 8)
    for labels in (
        torch.full((1, 8, 8), 64),
        torch.full((1, 8, 8), -1),
        torch.full((1, 8, 8), 0.5),
        torch.full((1, 8, 8), torch.nan),
    ):
        with pytest.raises(ValueError, match=r"given\['cluster'\] must be whole numbers from 0 to 63"):
            texvlm.build_channels(image, channels=["cluster"], given={"cluster": labels})
    assert texvlm.build_channels(image, channels=["cluster"], n_superpixels=10**9).level(0).max() <= 63


def test_a_flow_is_checked_by_name() -> None:
    image, flow = torch.rand(1, 3, 8, 8), torch.zeros(1, 2, 8, 8)
    for bad, message in [
        ((flow, torch.zeros(1, 8, 8)), "flow's occlusion must be bool"),
        (torch.zeros(1, 8, 8), r"flow must be floating point \[B, 2, h, w\]"),
        ((flow,), "flow must be a tensor, .*got tuple"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            texvlm.build_channels(image, image, channels=["motion"], flow=bad)


def test_several_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="query must be one text or one vector"):
        texvlm.build_channels(torch.rand(3, 40, 40), query=["one", "two"], embedding=texvlm.DigitsEmbedding())


def test_an_embedding_of_other_axes_is_refused() -> None:
    digits = texvlm.DigitsEmbedding()
    other = texvlm.Embedding.fit(digits, torch.rand(2, 3, 64, 64), axes=8)
    with pytest.raises(ValueError, match="embedding must have 16 axes"):
        texvlm.build_channels(torch.rand(3, 40, 40), embedding=other)
