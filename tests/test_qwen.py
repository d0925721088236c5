"""What `texvlm.qwen` promises on every family: all kept is dense, some kept is the recipe by hand, and positions stay what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qwen_recipe import DENSE_TOWERS, FAMILIES, GREEDY, LINEAR, answer, cut, cut_logits, model_of, places, tower_told, unchanged
from torch import Tensor

from texvlm.qwen import QwenVLAdapter, tiny_batch

every_family = pytest.mark.parametrize("family", FAMILIES)
SIZES = [[(40, 48)], [(24, 40), (32, 16)]]
"""Two prompts; pictures of 30, 15 and 8 groups."""


def padded_tolerance(family: str) -> dict[str, float]:
    """Padding changes how the chunks of linear attention fall, and so its rounding: dense prompts differ by as much."""
    return {"atol": 1e-4 if family in LINEAR else 5e-6, "rtol": 0}


def chooser(*kept: list[int]) -> Any:
    """A selector that keeps these cells of the pictures it is shown, one after another."""
    waiting = iter(kept)
    return lambda image, grid, k: torch.tensor(next(waiting))


def text(batch: Any) -> Tensor:
    """Whether a token is text, [B, S]."""
    return batch["attention_mask"].bool() & (batch["input_ids"] < 59)


# ---- keep-all ----


@every_family
@pytest.mark.parametrize("mode", ["prune_pre", "prune_post", "scale", "blend", "bias"])
@pytest.mark.filterwarnings("ignore:bias acts")
def test_all_kept_is_dense(family: str, mode: str) -> None:
    """Pictures of three sizes, in one left-padded batch."""
    model = model_of(family)
    inputs = tiny_batch(model, SIZES)
    adapter = QwenVLAdapter(model, "uniform", k=None, mode=mode)
    batch = adapter.prepare(inputs)
    with unchanged(model), torch.no_grad():
        there = inputs["attention_mask"].bool()
        torch.testing.assert_close(adapter(batch).logits[there], model(**inputs).logits[there], atol=1e-6, rtol=0)
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], answer(model, inputs))


@every_family
def test_all_kept_generates_the_same_with_beams_and_several_returns(family: str) -> None:
    model = model_of(family)
    inputs = tiny_batch(model, SIZES)
    adapter = QwenVLAdapter(model, "uniform", k=None)
    batch = adapter.prepare(inputs)
    for options in (
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
    ):
        torch.manual_seed(1)
        expected = answer(model, inputs, **options)
        torch.manual_seed(1)
        found = adapter.generate(batch, **{**GREEDY, **options})[:, batch["input_ids"].shape[1] :]
        assert torch.equal(found, expected), options


# ---- some kept ----


@every_family
def test_some_kept_is_the_recipe_by_hand(family: str) -> None:
    """One prompt with two pictures, through the model's own keywords and through generate."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48), (32, 16)])
    kept = [places(9, 30), places(3, 8)]
    adapter = QwenVLAdapter(model, chooser(*kept), k=9)
    batch = adapter.prepare(inputs, k=[9, 3])
    given, geometry = cut(model, inputs, kept)
    for name, value in given.items():
        assert torch.equal(batch[name], value), name
    for name, value in geometry.items():
        torch.testing.assert_close(batch[f"image_{name}"], value, atol=1e-6, rtol=0, check_dtype=False)
    with torch.no_grad():
        expected = cut_logits(model, inputs, kept)
        torch.testing.assert_close(model(**{k: v for k, v in batch.items() if not k.startswith("texvlm_")}).logits[0], expected)
        assert (expected[-3:] - model(**inputs).logits[0, -3:]).abs().max() > 1e-3  # what was cut had a say
    with tower_told(model, geometry):
        tokens = answer(model, given)
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], tokens)


@every_family
def test_a_left_padded_batch_is_separate_runs(family: str) -> None:
    """Pictures of equal size with different k, and with beams: geometry is repeated when the rows are."""
    model = model_of(family)
    inputs = tiny_batch(model, [[(40, 48)], [(40, 48)], [(16, 16), (24, 40)]])
    kept = [places(20, 30), places(4, 30, 1), places(1, 4), places(7, 15)]
    adapter = QwenVLAdapter(model, chooser(*kept), k=9)
    batch = adapter.prepare(inputs, k=[20, 4, 1, 7])
    assert batch["attention_mask"].sum(1).tolist() == [28, 12, 21] and bool(batch["attention_mask"][:, -1].all())
    assert not batch["position_ids"][:, batch["attention_mask"] == 0].any()
    with torch.no_grad():
        logits = adapter(batch).logits
    starts = [0, 30, 60, 79]
    beams = adapter.generate(batch, **{**GREEDY, "num_beams": 2, "num_return_sequences": 2})[:, -5:]
    greedy = adapter.generate(batch, **GREEDY)[:, -5:]
    for b, mine in enumerate([[0], [1], [2, 3]]):
        there = inputs["attention_mask"][b].bool()
        alone = {n: inputs[n][b][there][None] for n in ("input_ids", "attention_mask", "mm_token_type_ids")}
        alone["image_grid_thw"] = inputs["image_grid_thw"][mine]
        alone["pixel_values"] = inputs["pixel_values"][4 * starts[mine[0]] : 4 * (starts[mine[-1]] + [30, 30, 4, 15][mine[-1]])]
        choice = [kept[i] for i in mine]
        torch.testing.assert_close(
            logits[b][batch["attention_mask"][b].bool()], cut_logits(model, alone, choice), **padded_tolerance(family)
        )
        given, geometry = cut(model, alone, choice)
        with tower_told(model, geometry):
            assert torch.equal(greedy[b], answer(model, given)[0])
        separate = QwenVLAdapter(model, chooser(*choice), k=9)
        one = separate.prepare(alone, k=[len(c) for c in choice])
        found = separate.generate(one, **{**GREEDY, "num_beams": 2, "num_return_sequences": 2})[:, -5:]
        assert torch.equal(beams[2 * b : 2 * b + 2], found)


@every_family
def test_right_padding(family: str) -> None:
    model = model_of(family)
    inputs = tiny_batch(model, SIZES)
    left = QwenVLAdapter(model, "uniform", k=7).prepare(inputs)
    right = dict(inputs)
    for b in range(2):
        missing = int((inputs["attention_mask"][b] == 0).sum())
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            right[name] = right[name].clone()
            right[name][b] = inputs[name][b].roll(-missing)
    batch = QwenVLAdapter(model, "uniform", k=7).prepare(right)
    assert bool(batch["attention_mask"][:, 0].all()) and not bool(batch["attention_mask"].all())
    with torch.no_grad():
        one, other = model(**strip(batch)).logits, model(**strip(left)).logits
    for b in range(2):
        mine, its = batch["attention_mask"][b].bool(), left["attention_mask"][b].bool()
        assert torch.equal(batch["position_ids"][:, b, mine], left["position_ids"][:, b, its])
        torch.testing.assert_close(one[b, mine], other[b, its], **padded_tolerance(family))


def strip(batch: Any) -> dict[str, Any]:
    """What the model knows of a batch."""
    return {k: v for k, v in batch.items() if not k.startswith("texvlm_")}


@every_family
def test_a_batch_runs_in_a_model_without_adapter(family: str) -> None:
    model = model_of(family)
    batch = QwenVLAdapter(model, "uniform", k=5).prepare(tiny_batch(model, SIZES, labels=True))
    with unchanged(model), torch.no_grad():
        out = model(**batch)
    assert out.logits.shape[:2] == batch["input_ids"].shape and out.loss.isfinite()


@every_family
@pytest.mark.parametrize("mode", ["prune_pre", "prune_post"])
def test_deepstack_has_as_many_features_as_are_kept(family: str, mode: str) -> None:
    model = model_of(family)
    told: list[dict[str, Any]] = []
    rows: list[int] = []
    hooks = [
        model.model.language_model.register_forward_pre_hook(lambda m, args, kwargs: told.append(kwargs), with_kwargs=True),
        model.model.visual.register_forward_hook(lambda m, args, out: rows.append(len(out.last_hidden_state))),
    ]
    try:
        adapter = QwenVLAdapter(model, "uniform", k=9, mode=mode)
        adapter(adapter.prepare(tiny_batch(model, [(40, 48), (32, 16)]), k=[9, 3]))
    finally:
        for hook in hooks:
            hook.remove()
    assert rows == [4 * (12 if mode == "prune_pre" else 38)]  # what the tower pays for
    stacked = told[0].get("deepstack_visual_embeds") or []
    assert [len(f) for f in stacked] == [12] * (3 if family.startswith("qwen3_vl") else 0)
    if stacked:
        assert int(told[0]["visual_pos_masks"].sum()) == 12


# ---- positions ----


@every_family
def test_positions_are_those_of_the_dense_prompt(family: str) -> None:
    model = model_of(family)
    inputs = tiny_batch(model, SIZES)
    dense = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )[0]
    after = []
    for k in (1, 4, 8, None):
        batch = QwenVLAdapter(model, "random", k=k, generator=torch.Generator().manual_seed(3)).prepare(inputs)
        picture, frame, cell, level = batch["texvlm_cells"].T
        assert not frame.any() and not level.any()
        for b, (mine, offset) in enumerate([([0], 0), ([1, 2], 15)]):
            there = batch["attention_mask"][b].bool()
            assert batch["position_ids"][0, b, there].tolist() == list(range(int(there.sum())))  # else read as packed sequences
            tokens = (inputs["input_ids"][b] == 60).nonzero()[:, 0]
            keep = inputs["attention_mask"][b].bool() & (inputs["input_ids"][b] != 60)
            for number in mine:
                keep[tokens[cell[picture == number] + (offset if number == 2 else 0)]] = True
            assert torch.equal(batch["input_ids"][b, there], inputs["input_ids"][b, keep])
            assert torch.equal(batch["position_ids"][1:, b, there], dense[:, b, keep])
        after.append(batch["position_ids"][1:].amax((0, 2)) + 1)
        assert torch.equal(batch["attention_mask"].sum(1) + batch["texvlm_rope_deltas"][:, 0], after[-1])
    assert all(torch.equal(a, after[0]) for a in after)


@every_family
def test_the_next_token_is_at_the_next_position(family: str) -> None:
    """What the decoder is told while it generates: dense or cut, the answer is at the same places."""
    model = model_of(family)
    inputs = tiny_batch(model, SIZES)

    def told(run: Any) -> Tensor:
        seen: list[Tensor] = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(kwargs["position_ids"][-3:, :, -1].clone()), with_kwargs=True
        )
        try:
            run()
        finally:
            hook.remove()
        return torch.stack(seen)

    adapter = QwenVLAdapter(model, "uniform", k=4)
    batch = adapter.prepare(inputs)
    assert torch.equal(told(lambda: adapter.generate(batch, **GREEDY)), told(lambda: answer(model, inputs)))


# ---- the tower ----


@pytest.mark.parametrize("family", DENSE_TOWERS)
def test_cutting_before_and_after_the_tower_differ(family: str) -> None:
    """After the tower the kept have seen all; before it, only each other. With all kept they are the same (above)."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48)])
    logits = {}
    for mode in ("prune_pre", "prune_post"):
        adapter = QwenVLAdapter(model, "uniform", k=6, mode=mode)
        batch = adapter.prepare(inputs)
        with torch.no_grad():
            logits[mode] = adapter(batch).logits
    assert (logits["prune_pre"] - logits["prune_post"])[text(batch)].abs().max() > 1e-3


@every_family
def test_cutting_after_the_tower_by_hand(family: str) -> None:
    """The whole tower, then rows picked out of what it returns, DeepStack's too."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48), (32, 16)])
    kept = [places(9, 30), places(3, 8)]
    rows = torch.tensor([*kept[0], *(30 + c for c in kept[1])])
    given, _ = cut(model, inputs, kept)

    def whole(module: Any, args: Any, kwargs: Any) -> Any:
        return (inputs["pixel_values"], *args[1:]), kwargs | {"grid_thw": inputs["image_grid_thw"]}

    def pick(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        out.pooler_output = out.pooler_output[rows]
        if getattr(out, "deepstack_features", None) is not None:
            out.deepstack_features = [f[rows] for f in out.deepstack_features]
        return out

    tower = model.model.visual
    hooks = [tower.register_forward_pre_hook(whole, with_kwargs=True), tower.register_forward_hook(pick, with_kwargs=True)]
    try:
        with torch.no_grad():
            expected, tokens = model(**given).logits, answer(model, given)
    finally:
        for hook in hooks:
            hook.remove()
    adapter = QwenVLAdapter(model, chooser(*kept), k=9, mode="prune_post")
    batch = adapter.prepare(inputs, k=[9, 3])
    with torch.no_grad(), unchanged(model):
        torch.testing.assert_close(adapter(batch).logits, expected, atol=1e-6, rtol=0)
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], tokens)
    beams = adapter.generate(batch, **{**GREEDY, "num_beams": 3})
    assert beams.shape == (1, batch["input_ids"].shape[1] + 5)


@pytest.mark.skipif("qwen2_5_vl" not in FAMILIES, reason="no such family")
def test_whole_windows_are_dense_inside() -> None:
    """Qwen2.5: until its first block of full attention, tokens of a window that is kept whole are what they are in the dense tower."""
    model = model_of("qwen2_5_vl")
    inputs = tiny_batch(model, [(40, 56)])  # 5 x 7 groups: windows of 2 x 2, those at the edges smaller
    kept = (
        [r * 7 + c for r in (2, 3) for c in (4, 5)] + [4 * 7 + 0, 4 * 7 + 1] + [0, 1]
    )  # whole, whole at the edge, half a window
    adapter = QwenVLAdapter(model, chooser(sorted(kept)), k=8)
    batch = adapter.prepare(inputs)

    def features(run: Any) -> dict[int, Tensor]:
        tower, seen = model.model.visual, {}
        hooks = [
            block.register_forward_hook(lambda m, args, out, i=i: seen.__setitem__(i, out if isinstance(out, Tensor) else out[0]))
            for i, block in enumerate(tower.blocks)
        ]
        try:
            with torch.no_grad():
                run()
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def in_order(seen: Tensor, order: Tensor) -> Tensor:
        return seen.unflatten(0, (-1, 4))[order.argsort()]

    from transformers.vision_utils import get_vision_window_index

    vision = model.config.vision_config
    order = torch.as_tensor(get_vision_window_index(inputs["image_grid_thw"], 2, vision.window_size, vision.patch_size)[0])
    dense = features(lambda: model(**inputs))
    sparse = features(lambda: adapter(batch))
    cells = torch.tensor(sorted(kept))
    expected = in_order(dense[0], order)[cells]
    found = in_order(sparse[0], batch["image_window_index"])
    off = (found - expected).abs().amax((1, 2))
    half = torch.isin(cells, torch.tensor([0, 1]))
    assert off[~half].max() < 1e-6 and off[half].min() > 1e-3
    after = (in_order(sparse[1], batch["image_window_index"]) - in_order(dense[1], order)[cells]).abs().amax((1, 2))
    assert after.min() > 1e-3  # the block of full attention


@pytest.mark.skipif("qwen2_5_vl" not in FAMILIES, reason="no such family")
def test_the_choice_of_whole_windows() -> None:
    model = model_of("qwen2_5_vl")
    best = [*range(34, -1, -1)]  # the last cells first
    adapter = QwenVLAdapter(model, lambda image, grid, k: torch.tensor(best[:k]), k=9, whole_windows=True)
    batch = adapter.prepare(tiny_batch(model, [(40, 56)]))
    cells = batch["texvlm_cells"][:, 2].tolist()
    windows: dict[tuple[int, int], set[int]] = {}
    for cell in range(35):
        windows.setdefault((cell // 7 // 2, cell % 7 // 2), set()).add(cell)
    touched = [w for w in windows.values() if w & set(cells)]
    assert set().union(*touched) == set(cells) and len(cells) <= 9 and 34 in cells
    assert batch["image_cu_window_seqlens"].diff().tolist() == [4 * len(w) for w in touched]


# ---- half precision ----


@every_family
def test_all_kept_in_bfloat16(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    inputs = tiny_batch(model, SIZES)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    adapter = QwenVLAdapter(model, "uniform", k=None)
    batch = adapter.prepare(inputs).to(torch.bfloat16)
    assert batch["image_position_ids"].dtype == torch.int64 and batch["pixel_values"].dtype == torch.bfloat16
    there = inputs["attention_mask"].bool()
    with torch.no_grad():
        dense, found = model(**inputs).logits[there], adapter(batch).logits[there]
    assert (dense - found).abs().max() <= 2**-7 * dense.abs().max()
    assert (dense.argmax(-1) == found.argmax(-1)).float().mean() > 0.95
    agree = adapter.generate(batch, **GREEDY)[:, -5:] == answer(model, inputs)
    assert agree[:, 0].all() and agree.float().mean() >= 0.8


@every_family
def test_geometry_keeps_its_dtype_when_a_batch_is_cast(family: str) -> None:
    model = model_of(family)
    adapter = QwenVLAdapter(model, "multiscale", k=6)
    batch = adapter.prepare(tiny_batch(model, [(64, 64)]))
    before = {k: v.clone() for k, v in batch.items()}
    assert batch.to(torch.float16) is batch
    for name, value in before.items():
        if name == "pixel_values":
            assert batch[name].dtype == torch.float16
        else:
            assert torch.equal(batch[name], value) and batch[name].dtype == value.dtype, name
