"""Turns of a conversation on one cache: as if it had all been said at once."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from qwen_recipe import ATTENTIVE, FAMILIES, LINEAR, ONE_EACH, cut, model_of, places, tower_told
from torch import Tensor

from texvlm.qwen import QwenVLAdapter, tiny_batch, tiny_model

every_family = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore:bias acts")
OPTIONS: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
OPTIONS |= {"suppress_tokens": [57, 58, 59, 60]}  # a random model would say that it sees things
LENGTH: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4}


def chooser(*kept: list[int]) -> Any:
    waiting = iter(kept)
    return lambda image, grid, k: torch.tensor(next(waiting))


def words(*prompts: list[int]) -> dict[str, Tensor]:
    """A turn of text alone, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def said(inputs: Any, b: int) -> Tensor:
    """The ids of one sample without its padding."""
    return inputs["input_ids"][b][inputs["attention_mask"][b].bool()]


def at_once(model: Any, ids: Tensor, pictures: list[tuple[Any, int, int]], kept: list[list[int]]) -> Any:
    """One generation, by hand, for a whole conversation; `pictures`: of which inputs, from which picture to which."""
    rows, grids = [], []
    for inputs, first, last in pictures:
        counts = inputs["image_grid_thw"].prod(1).tolist()
        rows.append(inputs["pixel_values"][sum(counts[:first]) : sum(counts[:last])])
        grids.append(inputs["image_grid_thw"][first:last])
    whole = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids)[None],
        "mm_token_type_ids": (ids == 60).int()[None],
        "pixel_values": torch.cat(rows),
        "image_grid_thw": torch.cat(grids),
    }
    given, geometry = cut(model, whole, kept)
    with tower_told(model, geometry):
        return model.generate(**given, **OPTIONS, **LENGTH)


def same_answer(found: Any, expected: Any, b: int, family: str) -> None:
    """Tokens, and the logits behind them."""
    steps = len(expected.logits)
    assert torch.equal(found.sequences[b, -steps:], expected.sequences[0, -steps:])
    for mine, its in zip(found.logits, expected.logits):
        torch.testing.assert_close(mine[b], its[0], atol=5e-4 if family in LINEAR else 1e-5, rtol=0)


@every_family
def test_a_turn_of_text(family: str) -> None:
    """Another call of the model in between leaves its stale positions behind, and they do not matter."""
    model = model_of(family)
    first, kept = tiny_batch(model, [(40, 48)]), places(9, 30)
    adapter = QwenVLAdapter(model, chooser(kept), k=9)
    batch = adapter.prepare(first)
    told = adapter.generate(batch, **OPTIONS, **LENGTH)
    state = adapter.state(batch, told.sequences)
    model.generate(**tiny_batch(model, [(24, 40)], seed=9), max_new_tokens=1)
    turn = words([7, 8, 9, 10, 11])
    batch = adapter.prepare(turn, past=state)
    assert torch.equal(batch["input_ids"], torch.cat([told.sequences, turn["input_ids"]], dim=1))
    found = adapter.generate(batch, past_key_values=told.past_key_values, **OPTIONS, **LENGTH)
    ids = torch.cat([said(first, 0), told.sequences[0, -4:], said(turn, 0)])
    same_answer(found, at_once(model, ids, [(first, 0, 1)], [kept]), 0, family)


@every_family
def test_three_turns_with_pictures_in_a_batch_of_two(family: str) -> None:
    """Prompts, pictures and answers of unequal lengths; in the second turn one more picture each, in the third text alone.

    Turns that begin at the same place need no padding, which linear layers would read.
    """
    model, even = model_of(family), family in LINEAR
    turns = [
        tiny_batch(model, [[(40, 48)], [(24, 40), (32, 16)]]),
        tiny_batch(model, [[(24, 24)], [(40, 16)]], seed=5),
        words([5, 6, 7, 8], [9, 8, 7, 6] if even else [9]),
    ]
    kept = [places(9, 30), places(4, 15), places(5, 8), places(7 if even else 3, 9), places(7, 10)]
    adapter = QwenVLAdapter(model, chooser(*kept), k=20)
    state, cache, answers = None, None, []
    for i, turn in enumerate(turns):
        batch = adapter.prepare(turn, past=state, k=[[9, 4, 5], [len(kept[3]), 7], []][i])
        told = adapter.generate(batch, past_key_values=cache, **OPTIONS, **LENGTH)
        state, cache = adapter.state(batch, told.sequences), told.past_key_values
        answers.append(told)
    for b, (mine, which) in enumerate(
        [([(turns[0], 0, 1), (turns[1], 0, 1)], [0, 3]), ([(turns[0], 1, 3), (turns[1], 1, 2)], [1, 2, 4])]
    ):
        ids = torch.empty(0, dtype=torch.int64)
        for i in range(3):
            ids = torch.cat([ids, said(turns[i], b)])
            shown = mine if i else mine[:1]
            cells = [kept[n] for n in (which if i else [n for n in which if n < 3])]
            same_answer(answers[i], at_once(model, ids, shown, cells), b, family)
            ids = torch.cat([ids, answers[i].sequences[b, -4:]])
    # The state's positions are those that a serving engine would work out.
    there = state["attention_mask"].bool()  # type: ignore[index]
    assert torch.equal(
        state["position_ids"][1:].amax((0, 2)) + 1 - there.sum(1),
        state["rope_deltas"][:, 0],  # type: ignore[index]
    )


@every_family
@pytest.mark.parametrize("mode", ["prune_post", "blend", "bias"])
def test_turns_in_other_modes(family: str, mode: str) -> None:
    """What was weighed in an earlier turn stays so: the answer is that of a prepared batch of the whole conversation."""
    model = model_of(family)
    first, second = tiny_batch(model, [(40, 48)]), tiny_batch(model, [(32, 16)], seed=5)
    weights = [torch.rand(30).round(decimals=1), torch.rand(8).round(decimals=1) + 0.1]

    def adapter() -> QwenVLAdapter:
        waiting = iter(weights)
        if mode == "prune_post":
            return QwenVLAdapter(model, chooser(places(9, 30), places(3, 8)), k=9, mode=mode)
        return QwenVLAdapter(model, lambda image, grid, k: (torch.arange(k), next(waiting)), k=None, mode=mode)

    chat = adapter()
    batch = chat.prepare(first)
    told = chat.generate(batch, **OPTIONS, **LENGTH)
    state = chat.state(batch, told.sequences)
    batch = chat.prepare(second, past=state, k=3 if mode == "prune_post" else None)
    found = chat.generate(batch, past_key_values=told.past_key_values, **OPTIONS, **LENGTH)
    state = chat.state(batch, found.sequences)
    batch = chat.prepare(words([4, 5, 6]), past=state)
    last = chat.generate(batch, past_key_values=found.past_key_values, **OPTIONS, **LENGTH)

    ids = torch.cat([said(first, 0), told.sequences[0, -4:], said(second, 0), found.sequences[0, -4:], torch.tensor([4, 5, 6])])
    for answer, length in ((found, len(ids) - 7), (last, len(ids))):
        whole = {
            "input_ids": ids[None, :length],
            "pixel_values": torch.cat([first["pixel_values"], second["pixel_values"]]),
            "image_grid_thw": torch.cat([first["image_grid_thw"], second["image_grid_thw"]]),
        }
        once = adapter()
        expected = once.generate(once.prepare(whole, k=[9, 3] if mode == "prune_post" else None), **OPTIONS, **LENGTH)
        same_answer(answer, expected, 0, family)


@pytest.mark.parametrize("family", ATTENTIVE)
def test_an_answer_that_ends_early_in_a_batch(family: str) -> None:
    """What fills the batch up after its end is not there for the next turn."""
    model, kept, end = tiny_model(family), [places(9, 30), places(4, 15)], None
    for seed in range(20):
        inputs = tiny_batch(model, [[(40, 48)], [(24, 40)]], seed=seed)
        adapter = QwenVLAdapter(model, chooser(*kept, *kept), k=9)
        free = adapter.generate(adapter.prepare(inputs, k=[9, 4]), **OPTIONS, **LENGTH).sequences[:, -4:]
        end = next((int(t) for t in free[0, :2] if int(t) not in free[1].tolist()), None)
        if end is not None:
            break
    assert end is not None
    model.generation_config.eos_token_id = end
    batch = adapter.prepare(inputs, k=[9, 4])
    told = adapter.generate(batch, **OPTIONS, max_new_tokens=4)
    stop = free[0].tolist().index(end) + 1
    assert told.sequences[0, -4:].tolist() == free[0, :stop].tolist() + [0] * (4 - stop)
    turn = words([7, 8, 9], [10, 11, 12])
    state = adapter.state(batch, told.sequences)
    found = adapter.generate(adapter.prepare(turn, past=state), past_key_values=told.past_key_values, **OPTIONS, **LENGTH)
    for b, length in ((0, stop), (1, 4)):
        ids = torch.cat([said(inputs, b), told.sequences[b, -4:][:length], said(turn, b)])
        same_answer(found, at_once(model, ids, [(inputs, b, b + 1)], kept[b : b + 1]), b, family)


@every_family
def test_a_state_without_an_answer_is_a_prompt_so_far(family: str) -> None:
    model = model_of(family)
    first, second, kept = tiny_batch(model, [(40, 48)]), tiny_batch(model, [(32, 16)], seed=5), [places(9, 30), places(3, 8)]
    adapter = QwenVLAdapter(model, chooser(*kept), k=9)
    batch = adapter.prepare(first)
    with torch.no_grad():
        cache = adapter(batch, use_cache=True).past_key_values
    later = adapter.prepare(second, past=adapter.state(batch), k=3)
    found = adapter.generate(later, past_key_values=cache, **OPTIONS, **LENGTH)
    ids = torch.cat([said(first, 0), said(second, 0)])
    same_answer(found, at_once(model, ids, [(first, 0, 1), (second, 0, 1)], kept), 0, family)


@pytest.mark.parametrize("family", ONE_EACH)
def test_a_state_can_be_kept_and_sent(family: str) -> None:
    """Plain tensors: what was kept of each picture, where, and by how much the next position is off."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48), (32, 16)])
    kept = [places(9, 30), places(3, 8)]
    adapter = QwenVLAdapter(model, chooser(*kept), k=9)
    batch = adapter.prepare(inputs, k=[9, 3])
    file = io.BytesIO()
    torch.save(adapter.state(batch), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    given, _ = cut(model, inputs, kept)
    assert torch.equal(state["position_ids"], given["position_ids"])
    assert state["cells"].tolist() == [[i, 0, cell, 0] for i, cells in enumerate(kept) for cell in cells]
    assert state["grids"].tolist() == [[0, 1, 1, 10, 12], [0, 1, 1, 8, 4]]
    dense = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )[0]
    assert int(state["rope_deltas"]) == int(dense.max()) + 1 - given["input_ids"].shape[1]
    for past in (adapter.state(batch), state):
        assert adapter.prepare(words([3, 4]), past=past)["position_ids"][:, 0, -1].tolist() == [
            given["input_ids"].shape[1] + 1,
            *[int(dense.max()) + 2] * 3,
        ]


@pytest.mark.parametrize("family", LINEAR)
def test_padding_inside_a_conversation_is_refused_where_linear_layers_read_it(family: str) -> None:
    model = model_of(family)
    adapter = QwenVLAdapter(model, "uniform", k=4)
    batch = adapter.prepare(tiny_batch(model, [[(40, 48)], [(24, 40), (32, 16)]]))
    with pytest.raises(ValueError, match=rf"conversation of {family} cannot have padding within.* Sample 1 has some"):
        adapter.prepare(words([3, 4], [5]), past=adapter.state(batch))
    answer = torch.tensor([[9, 2, 0], [8, 7, 6]])  # one ended
    state = adapter.state(batch, torch.cat([batch["input_ids"], answer], dim=1))
    with pytest.raises(ValueError, match=rf"conversation of {family} cannot have padding within.* Sample 0 has some"):
        adapter.prepare(words([3], [5]), past=state)


def test_what_does_not_belong_together_is_said() -> None:
    adapter = QwenVLAdapter(model_of("qwen3_vl"), "uniform", k=4)
    batch = adapter.prepare(tiny_batch(adapter.model, [(40, 48)]))
    with pytest.raises(ValueError, match=r"past must be of 2 samples, got 1"):
        adapter.prepare(words([3], [4]), past=adapter.state(batch))
    with pytest.raises(ValueError, match=r"sequences must begin with the batch's input_ids \[1, 12\], got \[1, 3\]"):
        adapter.state(batch, torch.zeros(1, 3, dtype=torch.int64))
