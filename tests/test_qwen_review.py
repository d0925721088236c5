"""Where a picture, a selector and a prompt lie, what a selector may be given and return, and what of earlier turns is remembered."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen_recipe import GREEDY, model_of
from torch import Tensor, nn

import texvlm
import texvlm.qwen
from texvlm.qwen import Choice, CoarseAttention, QwenVLAdapter, prompts, tiny_batch
from texvlm.qwen.preparation import Preparation

pytestmark = pytest.mark.filterwarnings("ignore:bias acts")


def first(image: Tensor, grid: tuple[int, int], k: int) -> Tensor:
    return torch.arange(k, device=image.device)


# ---- devices ----


@pytest.mark.long
def test_devices_may_differ() -> None:
    """Ids, rows, pictures and selector each on the CPU or on another device (see far_device.py), in a process of its own."""
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, str(here / "far_device.py")], cwd=here.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# ---- turns ----


def test_pictures_of_earlier_turns_stay_in_the_state() -> None:
    """What a serving engine needs to know of them does not end with the turn."""
    model = model_of("qwen3_vl")
    adapter = QwenVLAdapter(model, first, k=3)
    batch = adapter.prepare(tiny_batch(model, [[(40, 48)], [(16, 16)]]))
    second = adapter.prepare(tiny_batch(model, [[], [(32, 16)]]), past=adapter.state(batch))
    third = adapter.prepare(tiny_batch(model, [[], []]), past=adapter.state(second))
    for turn in (second, third):
        state = adapter.state(turn)
        assert state["cells"].tolist() == [[picture, 0, cell, 0] for picture in range(3) for cell in range(3)]
        assert state["grids"].tolist() == [[0, 1, 1, 10, 12], [1, 1, 1, 4, 4], [1, 1, 1, 8, 4]]
    assert second["texvlm_cells"].tolist() == [[0, 0, cell, 0] for cell in range(3)]  # those of the turn alone
    assert len(adapter.show(second)) == 1
    assert adapter.show(third) == []


@pytest.mark.parametrize("thumbnail", [None, "segment"])
def test_pictures_of_a_turn_are_repeated_for_their_own_sample(thumbnail: str | None) -> None:
    """Several returns in a batch of two, in the second turn: as each sample by itself."""
    model = model_of("qwen3_vl")
    adapter = QwenVLAdapter(model, "uniform", k=8, thumbnail=thumbnail)
    turns = [tiny_batch(model, [[(64, 64)], [(64, 64)]], seed=1), tiny_batch(model, [[(64, 64)], [(32, 64)]], seed=2)]
    batch = adapter.prepare(turns[0])
    later = adapter.prepare(turns[1], past=adapter.state(batch))
    (pixels,) = adapter.hooks.call(later).pixels
    assert pixels.samples == ([0, 1] if thumbnail is None else [0, 0, 1, 1])


def test_a_chunked_prefill_is_refused_wherever_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_vl")
    adapter = QwenVLAdapter(model, "uniform", k=4)
    monkeypatch.setattr(model.generation_config, "prefill_chunk_size", 4, raising=False)
    with pytest.raises(ValueError, match=r"prefill_chunk_size cannot be used with 3-D positions"):
        adapter.generate(adapter.prepare(tiny_batch(model, [(40, 48)])), **GREEDY)


# ---- selectors ----


@pytest.mark.parametrize("size", [(40, 48), (45, 50)])
def test_a_function_sees_floats(size: tuple[int, int]) -> None:
    """Whatever was handed in, and whether it had to be resized or not."""
    seen: list[Tensor] = []

    def look(image: Tensor, grid: tuple[int, int], k: int) -> Tensor:
        seen.append(image)
        return torch.arange(k)

    adapter = QwenVLAdapter(model_of("qwen3_vl"), look, k=4, pixels=(64, 1 << 20))
    picture = torch.full((3, *size), 51, dtype=torch.uint8)
    adapter.prepare({"input_ids": torch.tensor([[5, 58, 60, 57, 6]])}, images=[picture])
    torch.testing.assert_close(seen[0], torch.full_like(seen[0], 0.2, dtype=torch.float32))


def test_pictures_in_another_order_are_not_chosen_from() -> None:
    """A processor rounds to cells, up or down, and does no more to the aspect."""
    model = model_of("qwen3_vl")
    adapter, inputs = QwenVLAdapter(model, "predictive", k=4), tiny_batch(model, [(40, 48), (64, 24)])
    for right in ([torch.rand(3, 40, 48), torch.rand(3, 64, 24)], [torch.rand(3, 411, 485), torch.rand(3, 250, 100)]):
        adapter.prepare(inputs, images=right)
        with pytest.raises(ValueError, match=r"images\[0\] is .* which image_grid_thw \[1, 10, 12\] \(40 x 48\) is not made of"):
            adapter.prepare(inputs, images=right[::-1])


@pytest.mark.parametrize("selector", ["uniform", "random"])
def test_who_does_not_look_is_shown_nothing(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are then not even resized."""
    monkeypatch.setattr(Preparation, "_seen", lambda *_: pytest.fail("a picture was prepared for nobody"))
    adapter = QwenVLAdapter(model_of("qwen3_vl"), selector, k=4, pixels=(64, 1 << 20))
    batch = adapter.prepare({"input_ids": torch.tensor([[5, 58, 60, 57, 6]])}, images=[torch.rand(3, 45, 50)])
    assert batch["pixel_values"].shape == (16, 96)


@pytest.mark.parametrize("selector", ["uniform", "predictive", first, texvlm.Allocator(participation=(), cell=8)])
def test_a_query_that_no_one_asks_for_is_refused(selector: Any) -> None:
    """As `select` does: an answer that ignores the question would look like one that does not."""
    model = model_of("qwen3_vl")
    with pytest.raises(ValueError, match=r"query: this selector takes none"):
        QwenVLAdapter(model, selector, k=4).prepare(tiny_batch(model, [(40, 48)]), query="a red car")


def test_a_query_that_is_missing_is_asked_for() -> None:
    model = model_of("qwen3_vl")
    with pytest.raises(ValueError, match=r"^query: this selector needs one, a text or a vector, and embedding=") as caught:
        QwenVLAdapter(model, "query", k=4).prepare(tiny_batch(model, [(40, 48)]))
    assert len(str(caught.value)) < 120


def test_a_bound_that_would_not_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bound needs tokens of one level"):
        QwenVLAdapter(model_of("qwen3_vl"), "multiscale", k=4, bound=0.0)


def one_bright(height: int, width: int) -> Tensor:
    """Something in a corner, nothing elsewhere: worth tokens of several levels."""
    picture = torch.zeros(3, height, width)
    picture[:, :16, :16] = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    picture[:, 32:, 32:] = torch.linspace(0, 1, width - 32)
    return picture


def test_a_function_may_return_tokens_of_several_levels() -> None:
    """They are where those of the path are."""
    model, picture = model_of("qwen3_vl"), one_bright(64, 64)
    inputs = {"input_ids": torch.tensor([[5, 58, 60, 57, 6]])}
    path = QwenVLAdapter(model, "multiscale", k=9).prepare(inputs, images=[picture])
    assert len(path["texvlm_cells"][:, 3].unique()) > 1

    def same(image: Tensor, grid: tuple[int, int], k: int) -> texvlm.Selection:
        return texvlm.select(image, k, 8, "multiscale")

    batch = QwenVLAdapter(model, same, k=9).prepare(inputs, images=[picture])
    for name in ("position_ids", "pixel_values", "image_position_ids", "texvlm_cells"):
        assert torch.equal(batch[name], path[name]), name
    for options in ({"mode": "prune_post"}, {"mode": "bias"}):
        with pytest.raises(ValueError, match=r"tokens of several levels need mode='prune_pre', got"):
            QwenVLAdapter(model, same, k=9, **options).prepare(inputs, images=[picture])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (Choice(torch.tensor([30]), torch.zeros(1).long()), r"indices must be from 0 to 29, got 30 to 30"),
        (Choice(torch.tensor([3, 3]), torch.zeros(2).long()), r"indices must differ from each other"),
        (Choice(torch.arange(7), torch.zeros(7).long()), r"must return 1 to 6 whole numbers, got \[7\]"),
        (texvlm.select(torch.rand(3, 64, 64), 4, 8), r"selection must be of 5 x 6 cells of 8 px, got 8 x 8 of 8"),
        (texvlm.select(torch.rand(3, 80, 96), 4, 16), r"selection must be of 5 x 6 cells of 8 px, got 5 x 6 of 16"),
        (texvlm.select(torch.rand(3, 40, 48), 7, 8), r"must return 1 to 6 whole numbers, got \[7\]"),
    ],
)
def test_choices_and_selections_are_checked_as_indices_are(returned: Any, message: str) -> None:
    model = model_of("qwen3_vl")
    with pytest.raises(ValueError, match=message):
        QwenVLAdapter(model, lambda image, grid, k: returned, k=6).prepare(tiny_batch(model, [(40, 48)]))


def test_whole_windows_where_the_decoder_looks() -> None:
    model = model_of("qwen2_5_vl")
    adapter = QwenVLAdapter(model, CoarseAttention(model, groups=6), k=8, whole_windows=True)
    cells = adapter.prepare(tiny_batch(model, [(64, 64)]))["texvlm_cells"][:, 2]
    window = cells.div(16, rounding_mode="floor") * 4 + cells % 8 // 2
    assert len(cells) == 8 and window.unique(return_counts=True)[1].tolist() == [4, 4]


def test_whole_windows_need_a_ranking() -> None:
    """ "uniform" has none: its first windows would be those at the top."""
    model = model_of("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"whole_windows needs a selector that can rank all groups, got 'uniform'"):
        QwenVLAdapter(model, "uniform", k=8, whole_windows=True)
    with pytest.raises(ValueError, match=r"whole_windows with a selector that learns needs mode 'prune_pre' or 'prune_post'"):
        QwenVLAdapter(model, texvlm.Allocator(participation=(), cell=8), k=8, mode="bias", whole_windows=True)


class Learner(nn.Module):
    """Scores by the mean of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, image: Tensor, grid: tuple[int, int], k: int) -> tuple[Tensor, Tensor]:
        score = self.gain * nn.functional.adaptive_avg_pool2d(image.mean(0)[None], grid).flatten()
        return score.topk(k)[1], score.sigmoid()


def test_a_batch_to_learn_from_holds_what_is_scored() -> None:
    """Of a scorer with terms its features, some numbers of each group, and not the picture; of a module the picture."""
    model, inputs = model_of("qwen3_vl"), tiny_batch(model_of("qwen3_vl"), [(40, 48), (64, 64)])
    allocator = texvlm.Allocator(participation=(), cell=8)
    batch = QwenVLAdapter(model, allocator, k=4).prepare(inputs)
    assert [tuple(part.shape) for part in batch["texvlm_image_seen"]] == [(1, n, len(allocator.terms)) for n in (30, 64)]
    adapter = QwenVLAdapter(model, Learner(), k=4)
    bytes_of = [torch.randint(256, (3, *size), dtype=torch.uint8) for size in ((40, 48), (64, 64))]
    batch = adapter.prepare({**inputs, "labels": inputs["input_ids"]}, images=bytes_of)
    assert [part.dtype for part in batch["texvlm_image_seen"]] == [torch.uint8] * 2
    assert adapter(batch).loss.requires_grad
    assert [tuple(part.shape) for part in batch["texvlm_image_seen"]] == [(1, 3, 40, 48), (1, 3, 64, 64)]


# ---- attribution ----


def test_an_answer_is_counted_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills up the batch behind it is no part of it, whatever it is filled with."""
    model = model_of("qwen3_vl")
    inputs = [tiny_batch(model, [[size]], seed=seed) for size, seed in (((64, 64), 1), ((64, 64), 2))]
    joined = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
    adapter, answers = QwenVLAdapter(model, "uniform", k=8), torch.tensor([[5, 2, 2, 2], [6, 7, 8, 9]])
    apart = []
    for one, answer in zip(inputs, (answers[:1, :2], answers[1:])):
        batch = adapter.prepare(one)
        apart.append(adapter.explain(torch.cat([batch["input_ids"], answer], dim=1), batch, check=1).logprob)
    batch = adapter.prepare(joined)
    for pad in (None, 0, 2):
        monkeypatch.setattr(model.generation_config, "pad_token_id", pad)
        found = adapter.explain(torch.cat([batch["input_ids"], answers], dim=1), batch, check=1)
        torch.testing.assert_close(found.logprob, torch.cat(apart), atol=1e-4, rtol=0)


# ---- documentation ----


@pytest.mark.parametrize("name", [n for n in texvlm.qwen.__all__ if callable(getattr(texvlm.qwen, n))] + ["TinyPrompts"])
def test_examples_say_what_happens(name: str) -> None:
    thing = getattr(prompts if name == "TinyPrompts" else texvlm.qwen, name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(thing, name, globs={}):
        runner.run(test)
    assert not runner.summarize(verbose=False).failed
