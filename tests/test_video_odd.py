"""`VideoStream` where it is used oddly: callers that reuse their tensors, encoders that fail, states of other streams, frames that stay."""

from __future__ import annotations

import copy
import pickle

import films
import pytest
import torch
from test_video_stream import CHANNELS, recomputed, same

import texvlm

FRAMES = list(films.film("moving", 3, (96, 160)))
SCENERY = torch.from_numpy(films.scenery((96, 256), 3)).permute(2, 0, 1)
PAN = [SCENERY[:, :, x : x + 160] for x in (0, 5, 9)]


class Encoder(texvlm.DigitsEmbedding):
    """Counts how often it is asked, and fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.fails = 0, False

    def encode_image(self, pictures: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails:
            raise ConnectionError("the encoder is away")
        return super().encode_image(pictures)


def read(stream: texvlm.VideoStream) -> torch.Tensor:
    """What lags is made when it is read."""
    return stream.texture.data


# ---- what callers hand in ----


def test_each_picture_of_a_batch_has_a_fixation_of_its_own() -> None:
    frames, fixation = torch.stack(FRAMES[:2]), torch.tensor([[0.1, 0.2], [0.9, 0.7]])
    for given in (fixation, fixation[:1], fixation[0]):
        texture = texvlm.VideoStream(["eccentricity"]).update(frames, fixation=given)
        full = texvlm.build_channels(frames, channels=["eccentricity"], fixation=given.expand(2, 2))
        same(texture, full)
    for bad in (torch.zeros(3, 2), torch.zeros(2, 1, 2), torch.zeros(2)[:1]):
        with pytest.raises(ValueError, match=r"fixation must be \[B, 2\]"):
            texvlm.VideoStream(["red"]).update(frames, fixation=bad)


def test_callers_reuse_their_tensors() -> None:
    stream = texvlm.VideoStream(["red", "motion", "eccentricity", "gaze_history"])
    frame, fixation, gaze = FRAMES[0].clone(), torch.tensor([[0.1, 0.1]]), torch.tensor([[[0.1, 0.1]]])
    stream.update(frame, fixation=fixation)
    stream.sample_foveated(gaze)
    kept = stream.texture.data.clone()
    frame.copy_(FRAMES[1])
    fixation.fill_(0.9)
    gaze.fill_(0.9)
    assert torch.equal(stream.texture.data, kept)
    texture = stream.update(frame, fixation=fixation)
    names = ["red", "motion", "eccentricity"]
    full = recomputed(FRAMES[1], FRAMES[0], names, fixation=fixation)
    for name in names:
        assert torch.equal(texture.level(0)[:, texture.index(name)], full.level(0)[:, full.index(name)]), name
    history = texture.level(0)[0, texture.index("gaze_history")]
    assert history[10, 16] > 0.9 and history[86, 144] < 0.1  # where it was when it was given


def test_what_nobody_reads_is_not_hoarded() -> None:
    stream = texvlm.VideoStream(["red"])
    for _ in range(3):
        stream.update(FRAMES[0], fixations=torch.rand(1, 2, 2), gaze=torch.rand(1, 2, 2))
    assert not any(stream.state_dict()["carried"]["points"].values())


def test_a_moving_eye_is_no_key_frame_and_no_change() -> None:
    stream = texvlm.VideoStream(["red", "eccentricity", "cluster"], k=20)
    stream.update(PAN[0], fixation=torch.tensor([[0.2, 0.2]]))
    stream.tokens()
    for at in (0.4, 0.6):
        fixation = torch.full((1, 2), at)
        texture = stream.update(PAN[0], fixation=fixation)
        full = texvlm.build_channels(PAN[0], channels=["eccentricity"], fixation=fixation)
        assert torch.equal(texture.level(0)[:, 1], full.level(0)[:, 0])
        assert stream.stats.key is None and stream.stats.dirty == 0 and (stream.tokens().status == 0).all()


@pytest.mark.parametrize("query", [["one", "two"], torch.zeros(16), torch.full((16,), torch.nan)])
def test_a_query_is_one_vector(query: object) -> None:
    with pytest.raises(ValueError, match="query must"):
        texvlm.VideoStream(["attention"], embedding=texvlm.DigitsEmbedding(), query=query)


def test_an_embedding_has_an_axis_for_each_channel() -> None:
    few = texvlm.Embedding.fit(texvlm.DigitsEmbedding(), FRAMES[0], axes=8)
    with pytest.raises(ValueError, match="embedding must have 16 axes"):
        texvlm.VideoStream(["red"], embedding=few)


def test_in_inference_mode_and_out_of_it() -> None:
    stream, before = texvlm.VideoStream([*CHANNELS, "cluster", "gaze_history"], path="video", k=9), None
    for i, frame in enumerate([*FRAMES, *PAN]):
        with torch.inference_mode(i % 2 == 0):
            texture = stream.update(frame, gaze=torch.tensor([[0.5, 0.5]]))
            stream.select(), stream.tokens(), read(stream)
        full = recomputed(frame, before)
        for name in CHANNELS:
            assert torch.equal(texture.level(0)[:, texture.index(name)], full.level(0)[:, full.index(name)]), name
        before = frame


# ---- failures ----


def test_an_encoder_that_fails_costs_one_frame() -> None:
    encoder = Encoder()
    names = ["red", "motion", "saliency", "embedding_0", "cluster"]
    stream, fresh = texvlm.VideoStream(names, embedding=encoder), texvlm.VideoStream(names, embedding=encoder)
    encoder.fails = True
    with pytest.raises(ConnectionError):
        stream.update(PAN[0])
    with pytest.raises(RuntimeError, match="failed"):
        stream.select()
    encoder.fails = False
    stream.update(PAN[0])
    read(stream), stream.tokens()
    encoder.fails = True
    with pytest.raises(ConnectionError):
        stream.update(FRAMES[0])
    encoder.fails = False
    texture, full = stream.update(FRAMES[1]), recomputed(FRAMES[1], FRAMES[0], names[:3])
    for name in full.names:
        assert torch.equal(texture.level(0)[:, texture.index(name)], full.level(0)[:, full.index(name)]), name
    whole = fresh.update(FRAMES[1])
    for name in names[3:]:
        assert torch.equal(texture.level(0)[:, texture.index(name)], whole.level(0)[:, whole.index(name)]), name
    assert stream.stats.key == "failure" and set(stream.tokens().status.flatten().tolist()) == {2, -1}


def test_a_size_that_does_not_fit_the_levels_changes_nothing() -> None:
    stream = texvlm.VideoStream(CHANNELS, levels=5)
    stream.update(FRAMES[0])
    with pytest.raises(ValueError, match="levels"):
        stream.update(FRAMES[1][:, :4, :4])
    same(stream.update(FRAMES[1]), recomputed(FRAMES[1], FRAMES[0], levels=5))


@pytest.mark.parametrize("names", [["red", "green"], ["green", "red"]])
def test_a_texture_of_another_size_is_not_mixed_up(names: list[str]) -> None:
    stream = texvlm.VideoStream(names, path=texvlm.CascadeConfig(terms={"mean:red": 1.0, "mean:green": 1.0}))
    held = stream.update(FRAMES[0])
    kept = held.data.clone()
    stream.update(FRAMES[1][:, :48, :64])
    try:
        assert torch.equal(held.data, kept)
    except RuntimeError as error:
        assert "96 x 160" in str(error)


# ---- key frames ----


def test_key_frames_make_everything_anew() -> None:
    names = ["embedding_0", "embedding_7", "cluster"]
    encoder = Encoder()
    for keyframe, how in ((1, {}), (30, {"delta_only": False})):
        stream = texvlm.VideoStream(names, embedding=encoder, keyframe=keyframe)
        for frame in PAN:
            frame = frame.clone()
            stream.update(frame)
            frame[:, 40:44, 40:44] += 3
            texture, fresh = stream.update(frame, **how), texvlm.VideoStream(names, embedding=encoder).update(frame)
            assert stream.stats.key is not None
            same(texture, fresh)


def test_key_frames_on_a_still_scene_make_anew_what_was_moved() -> None:
    encoder = Encoder()
    stream = texvlm.VideoStream(["cluster", "embedding_0"], embedding=encoder, keyframe=5)
    stream.update(PAN[0])
    read(stream)
    for _ in range(5):
        stream.update(PAN[1])
        read(stream)
    assert stream.stats.key == "age"
    same(stream.texture, texvlm.VideoStream(["cluster", "embedding_0"], embedding=encoder).update(PAN[1]))
    calls = encoder.calls
    for _ in range(10):
        stream.update(PAN[1])
    assert encoder.calls == calls  # all of it is of this picture
    unchanged = texvlm.VideoStream(["embedding_0"], embedding=encoder, keyframe=3)
    for _ in range(10):
        unchanged.update(PAN[1])
    assert encoder.calls == calls + 1


def test_means_of_blocks_do_not_hide_pixels_from_key_frames() -> None:
    stripes = torch.zeros(3, 64, 64)
    stripes[:, ::2] = 1
    for arguments in ({"threshold": 0.1, "keyframe": 1}, {"threshold": 0.0}):
        stream = texvlm.VideoStream(["red"], measure="mean", **arguments)
        stream.update(stripes)
        same(stream.update(1 - stripes), recomputed(1 - stripes, stripes, ["red"]))


# ---- what is of the frame before ----


def test_the_frame_before_a_still_frame_is_the_same() -> None:
    stream = texvlm.VideoStream(["saliency", "previous_saliency", "previous_relevance"], embedding=Encoder(), query="seven")
    for frame in (PAN[0], FRAMES[0], FRAMES[0], FRAMES[0], FRAMES[0]):
        texture = stream.update(frame)
        read(stream)
    now, before, relevance = texture.level(0)[0]
    torch.testing.assert_close(now, before)
    grid = stream.relevance()
    torch.testing.assert_close(relevance[4::8, 4::8].mean(), grid.mean(), rtol=0.1, atol=0.01)


def test_a_selection_by_history_follows_it_on_a_still_scene() -> None:
    stream = texvlm.VideoStream(["red"], path=texvlm.CascadeConfig(terms={"mean:gaze_history": 1.0}), k=1)
    for at, cell in ((0.05, 0), (0.05, 0), (0.97, 59)):
        stream.update(FRAMES[0], gaze=torch.full((1, 3, 2), at))
        assert stream.select().indices.tolist() == [[cell]]


# ---- embeddings ----


def test_relevance_needs_no_channel() -> None:
    embedding = texvlm.Embedding(texvlm.DigitsEmbedding())
    for names in (["red"], ["previous_relevance"], ["attention"]):
        stream = texvlm.VideoStream(names, embedding=embedding, query="seven")
        stream.update(FRAMES[0])
        assert torch.equal(stream.relevance(), embedding.relevance(FRAMES[0], "seven"))


def test_an_embedding_that_nobody_reads_costs_nothing_and_exact_is_made_once() -> None:
    encoder = Encoder()
    stream = texvlm.VideoStream(["red", "gaze_history"], embedding=encoder, query="seven")
    stream.update(PAN[0])
    stream.update(PAN[1])
    assert encoder.calls == 0
    stream = texvlm.VideoStream(["attention", "embedding_0"], path="query", embedding=encoder, query="seven", exact=True, k=5)
    for frame in PAN:
        stream.update(frame)
        read(stream), stream.select(), stream.relevance(), stream.update(frame), read(stream)
    assert encoder.calls == len(PAN)


def test_tokens_of_mixed_levels_answer_the_query() -> None:
    how = {"path": "multiscale", "query": "seven", "embedding": texvlm.DigitsEmbedding(), "k": 20}
    stream = texvlm.VideoStream(["red"], **how)
    stream.update(FRAMES[0])
    assert torch.equal(stream.select().indices, texvlm.select(FRAMES[0], **how).indices)


def test_without_flow_what_is_carried_stays_in_place() -> None:
    names = ["embedding_0", "gaze_history", "cluster"]
    rule = texvlm.video.CarryRule(residual=10, mean=1)
    stream = texvlm.VideoStream(names, embedding=texvlm.DigitsEmbedding(), follow=False, rule=rule)
    first = stream.update(PAN[0], gaze=torch.tensor([[0.5, 0.5]])).data.clone()
    assert all(first[..., i].any() for i in range(3))
    texture = stream.update(PAN[1])
    assert stream.stats.key is None and torch.equal(texture.data[..., ::2], first[..., ::2])


@pytest.mark.parametrize("names", [["red"], ["edge"]])
def test_tokens_show_colours_whatever_the_channels(names: list[str]) -> None:
    stream = texvlm.VideoStream(names, path=texvlm.CascadeConfig(terms={"rms:edge": 1.0}), k=12)
    for frame in FRAMES:
        stream.update(frame)
        shown, tokens = stream.select().tokens(texvlm.Texture(frame)), stream.tokens()
        assert torch.equal(tokens.patches, shown.patches) and torch.equal(tokens.rest, shown.rest)


# ---- states and copies ----


@pytest.mark.parametrize(
    "other", [{"cell": 28}, {"dtype": torch.float16}, {"tile": 200}, {"path": "salience"}, {"levels": 2}], ids=str
)
def test_a_state_of_other_arguments_is_refused_and_changes_nothing(other: dict) -> None:
    arguments = {"channels": ["red", "green", "blue", "edge"], "path": texvlm.CascadeConfig(terms={"rms:edge": 1.0}), "tile": 180}
    saved, stream = texvlm.VideoStream(**arguments), texvlm.VideoStream(**{**arguments, **other})
    saved.update(FRAMES[0])
    stream.update(FRAMES[1])
    data = stream.texture.data.clone()
    with pytest.raises(ValueError, match="state must"):
        stream.load_state_dict(saved.state_dict())
    assert torch.equal(stream.texture.data, data) and stream.stats.frame == 0


def test_resumed_between_update_and_select() -> None:
    stream, second = (texvlm.VideoStream(path="video", k=9) for _ in range(2))
    for frame in PAN:
        stream.update(frame)
        chosen = stream.select()
    second.load_state_dict(copy.deepcopy(stream.state_dict()))
    assert torch.equal(second.select().indices, chosen.indices) and torch.equal(second.select().score, chosen.score)
    stream.update(FRAMES[0])
    second.load_state_dict(copy.deepcopy(stream.state_dict()))  # nothing of this frame is chosen yet
    assert torch.equal(second.select().score, stream.select().score)


def test_resumed_on_a_still_frame() -> None:
    stream, second = (texvlm.VideoStream(["gaze_history"]) for _ in range(2))
    for _ in range(2):
        stream.update(FRAMES[0], gaze=torch.tensor([[0.5, 0.5]]))
    second.load_state_dict(copy.deepcopy(stream.state_dict()))
    same(second.update(FRAMES[0]), stream.update(FRAMES[0]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_of_a_stream_goes_on_by_itself(copied) -> None:
    names = ["blue", "red"]
    stream = texvlm.VideoStream(names)
    stream.update(PAN[0])
    read(stream)
    other = copied(stream)
    same(other.update(PAN[1]), recomputed(PAN[1], PAN[0], names))
    same(stream.texture, recomputed(PAN[0], None, names))


def test_bytes_of_a_still_frame_are_those_of_looking_at_it() -> None:
    stream = texvlm.VideoStream(["red"])
    for _ in range(3):
        stream.update(FRAMES[0])
    assert stream.stats.bytes == 2 * FRAMES[0].numel()
