"""How weights act: on embeddings and on keys as worked out by hand, and a key of weight 0 is one that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from qwen_recipe import ATTENTIVE, FAMILIES, GREEDY, LINEAR, ONE_EACH, answer, by_window, cut_logits, model_of, places, unchanged
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from texvlm.qwen import QwenVLAdapter, tiny_batch

every_family = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore:bias acts")


def weigher(*weights: Tensor) -> Any:
    """A selector that gives the groups of the pictures that it is shown these weights, one picture after another."""
    waiting = iter(weights)
    return lambda image, grid, k: (torch.arange(k), next(waiting))


def some_weights(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 0.9 + 0.1


def mask_of(kept: list[int], groups: int) -> Tensor:
    weights = torch.zeros(groups)
    weights[kept] = 1
    return weights


def logits_of(adapter: QwenVLAdapter, inputs: Any) -> tuple[Any, Tensor]:
    batch = adapter.prepare(inputs)
    with torch.no_grad(), unchanged(adapter.model):
        return batch, adapter(batch).logits


# ---- embeddings ----


def by_hand(mode: str, weights: list[Tensor]) -> Callable[..., Any]:
    """What leaves the tower, weighted: blended into the mean over its picture; DeepStack's features fade."""

    def weighted(features: Tensor, mode: str) -> Tensor:
        out = []
        for part, w in zip(features.split([len(w) for w in weights]), weights):
            rest = (1 - w[:, None]) * part.mean(0) if mode == "blend" else 0
            out.append(w[:, None] * part + rest)
        return torch.cat(out)

    def hook(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        out.pooler_output = weighted(out.pooler_output, mode)
        if getattr(out, "deepstack_features", None) is not None:
            out.deepstack_features = [weighted(f, "scale") for f in out.deepstack_features]
        return out

    return hook


@every_family
@pytest.mark.parametrize("mode", ["scale", "blend"])
def test_embeddings_are_weighted(family: str, mode: str) -> None:
    """Two pictures, the plain forward and generate, beams too."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48), (32, 16)])
    weights = [some_weights(30), some_weights(8, 1)]
    hook = model.model.visual.register_forward_hook(by_hand(mode, weights), with_kwargs=True)
    try:
        with torch.no_grad():
            expected, tokens = model(**inputs).logits, answer(model, inputs)
    finally:
        hook.remove()
    adapter = QwenVLAdapter(model, weigher(*weights), k=None, mode=mode)
    batch, found = logits_of(adapter, inputs)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    with torch.no_grad():
        assert (expected - model(**inputs).logits).abs().max() > 1e-3
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], tokens)
    several = adapter.generate(batch, **{**GREEDY, "do_sample": True, "top_k": 1, "num_return_sequences": 3})[:, -5:]
    assert torch.equal(several, tokens.expand(3, -1))


@every_family
def test_kept_embeddings_are_gated(family: str) -> None:
    """After a cut, the weights of the kept act as `gate` says; of weight 1 they are as if there were none."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48)])
    kept = places(9, 30)
    with torch.no_grad():
        plain = cut_logits(model, inputs, [kept])
    for gate in ("scale", "blend"):
        for weights in (torch.ones(9), some_weights(9)):
            adapter = QwenVLAdapter(model, lambda image, grid, k, w=weights: (torch.tensor(kept), w), k=9, gate=gate)
            _, found = logits_of(adapter, inputs)
            hook = model.model.visual.register_forward_hook(by_hand(gate, [weights]), with_kwargs=True)
            try:
                expected = cut_logits(model, inputs, [kept])
            finally:
                hook.remove()
            torch.testing.assert_close(found[0], expected, atol=2e-6, rtol=0)
            assert bool((expected - plain).abs().max() > 1e-3) is not bool(weights.eq(1).all())


# ---- keys ----


@contextmanager
def naive_attention(model: Any, segments: Callable[[Any], list[Tensor]], keys: Tensor) -> Iterator[None]:
    """Softmax written out, with log w added: `segments` says which weights the segments of a block have, `keys` [B, S] the prompt."""
    asked: dict[Any, int] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any) -> Any:
        mask = attention_mask
        if mask is None:  # the tower
            parts = segments(module)
            weights = parts[asked.get(module, 0) % len(parts)][None]
            asked[module] = asked.get(module, 0) + 1
            mask = 0
        else:
            weights = torch.cat([keys, keys.new_ones(len(keys), key.shape[2] - keys.shape[1])], dim=1)
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        logits = query @ key.transpose(2, 3) * scaling + mask
        share = logits.exp() * weights[:, None, None]
        out = share / share.sum(-1, keepdim=True).clamp(min=1e-30) @ value
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("naive_for_tests", attend)
    AttentionMaskInterface.register("naive_for_tests", eager_mask)
    parts = [model.model.visual.config, model.model.language_model.config]
    before = [part._attn_implementation for part in parts]
    try:
        for part in parts:
            part._attn_implementation = "naive_for_tests"
        yield
    finally:
        for part, name in zip(parts, before):
            part._attn_implementation = name


@every_family
def test_keys_are_weighted(family: str) -> None:
    """Two pictures of equal size with other weights each, and one of another, in a padded batch; in windows where there are any."""
    model = model_of(family)
    inputs = tiny_batch(model, [[(40, 48)], [(40, 48), (32, 16)]])
    weights = [some_weights(30), some_weights(30, 1), some_weights(8, 2)]
    adapter = QwenVLAdapter(model, weigher(*weights), k=None, mode="bias")
    batch, found = logits_of(adapter, inputs)
    keys = torch.ones(inputs["input_ids"].shape)
    keys[inputs["input_ids"] == 60] = torch.cat(weights)
    whole = [w.repeat_interleave(4) for w in weights]
    grids = inputs["image_grid_thw"].tolist()
    order, counts = by_window([list(range(len(w))) for w in weights], grids, 2, 2)
    windows = list(torch.cat(weights)[order].repeat_interleave(4).split([4 * n for n in counts]))
    grouped = [torch.cat(weights)[order].repeat_interleave(4).split([len(w) for w in whole])[i] for i in range(3)]
    blocks = {block.attn: i for i, block in enumerate(model.model.visual.blocks)}

    def segments(module: Any) -> list[Tensor]:
        if family != "qwen2_5_vl":
            return whole
        return grouped if blocks[module] in model.model.visual.fullatt_block_indexes else windows

    with naive_attention(model, segments, keys), torch.no_grad():
        expected = model(**inputs).logits
    there = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[there], expected[there], atol=1e-4 if family in LINEAR else 2e-5, rtol=0)
    with torch.no_grad():
        assert (found - model(**inputs).logits)[there].abs().max() > 1e-3
    with naive_attention(model, segments, keys):
        tokens = answer(model, inputs)
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], tokens)


@every_family
def test_several_returns_repeat_the_weights_of_keys(family: str) -> None:
    model = model_of(family)
    inputs = tiny_batch(model, [[(40, 48)], [(24, 16)]])
    adapter = QwenVLAdapter(model, weigher(mask_of(places(5, 30), 30), some_weights(6)), k=None, mode="bias")
    batch = adapter.prepare(inputs)
    once = adapter.generate(batch, **GREEDY)
    several = adapter.generate(batch, **{**GREEDY, "do_sample": True, "top_k": 1, "num_return_sequences": 2})
    assert torch.equal(several, once.repeat_interleave(2, 0))
    beams = adapter.generate(batch, **{**GREEDY, "num_beams": 2})
    for b, w in enumerate([mask_of(places(5, 30), 30), some_weights(6)]):
        there = inputs["attention_mask"][b].bool()
        alone = {n: inputs[n][b][there][None] for n in ("input_ids", "attention_mask", "mm_token_type_ids")}
        alone["image_grid_thw"] = inputs["image_grid_thw"][b : b + 1]
        alone["pixel_values"] = inputs["pixel_values"][[slice(0, 120), slice(120, 144)][b]]
        single = QwenVLAdapter(model, weigher(w), k=None, mode="bias")
        found = single.generate(single.prepare(alone), **{**GREEDY, "num_beams": 2})
        assert torch.equal(found[0, -5:], beams[b, -5:])


@pytest.mark.parametrize("family", ATTENTIVE)
def test_a_key_of_weight_zero_is_removed(family: str) -> None:
    """Tower and decoder: the logits of all that is kept are those of the prompt cut before the tower; in windows too."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48), (40, 48)])
    kept = [places(9, 30), places(4, 30, 1)]
    adapter = QwenVLAdapter(model, weigher(*(mask_of(cells, 30) for cells in kept)), k=None, mode="bias")
    batch, found = logits_of(adapter, inputs)
    keep = inputs["input_ids"][0] != 60
    keep[(~keep).nonzero()[:, 0][[*kept[0], *(30 + c for c in kept[1])]]] = True
    torch.testing.assert_close(found[0, keep], cut_logits(model, inputs, kept), atol=5e-6, rtol=0)
    pruned = QwenVLAdapter(model, lambda image, grid, k: torch.tensor(kept[k != 9]), k=9)
    pre = pruned.generate(pruned.prepare(inputs, k=[9, 4]), **GREEDY)[:, -5:]
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], pre)


@pytest.mark.parametrize("family", LINEAR)
def test_linear_layers_have_no_keys_to_remove(family: str) -> None:
    """There, the tower's features of what is kept are those of the cut prompt; linear layers of the decoder still see the rest."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48)])
    kept = places(9, 30)
    seen: list[Tensor] = []
    hook = model.model.visual.register_forward_hook(lambda m, args, out: seen.append(out.pooler_output))
    try:
        adapter = QwenVLAdapter(model, weigher(mask_of(kept, 30)), k=None, mode="bias")
        _, found = logits_of(adapter, inputs)
        cut = cut_logits(model, inputs, [kept])
    finally:
        hook.remove()
    torch.testing.assert_close(seen[0][kept], seen[1], atol=2e-6, rtol=0)
    assert (found[0, -3:] - cut[-3:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", LINEAR)
def test_linear_layers_are_said_to_have_none(family: str) -> None:
    with pytest.warns(UserWarning, match=f"full-attention layers of {family} only"):
        QwenVLAdapter(model_of(family), "uniform", mode="bias")


@pytest.mark.parametrize("family", ATTENTIVE)
def test_nothing_kept_in_a_window_or_a_picture_is_no_nan(family: str) -> None:
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48), (32, 16)])
    adapter = QwenVLAdapter(model, weigher(torch.zeros(30), mask_of([3], 8)), k=None, mode="bias")
    _, found = logits_of(adapter, inputs)
    assert found.isfinite().all()


@pytest.mark.parametrize("family", ONE_EACH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_know_removal(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    inputs = tiny_batch(model, [(40, 48)])
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    weights = mask_of(places(9, 30), 30)
    adapter = QwenVLAdapter(model, weigher(weights), k=None, mode="bias")
    _, found = logits_of(adapter, inputs)
    other = dict(inputs)
    other["pixel_values"] = torch.where(weights.repeat_interleave(4)[:, None] == 1, inputs["pixel_values"], 1)
    again = QwenVLAdapter(model, weigher(weights), k=None, mode="bias")
    _, same = logits_of(again, other)
    text = inputs["input_ids"][0] != 60
    assert found.isfinite().all()
    if family in ATTENTIVE:  # what is removed may be anything
        assert torch.equal(found[0, text], same[0, text])


@every_family
def test_without_the_hooks_weights_are_not_there(family: str) -> None:
    """A plain forward of a model that no adapter is attached to knows nothing of weights: it is dense."""
    model = model_of(family)
    inputs = tiny_batch(model, [(40, 48)])
    batch = QwenVLAdapter(model, weigher(some_weights(30)), k=None, mode="scale").prepare(inputs)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, model(**inputs).logits, atol=1e-6, rtol=0)
