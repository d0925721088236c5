"""Running with an adapter: nothing stays behind, batches do not know of each other, and what cannot be is said in one line."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from qwen_recipe import ATTENTIVE, FAMILIES, GREEDY, ONE_EACH, answer, cut_logits, model_of, places, unchanged
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from texvlm.qwen import QwenVLAdapter, _needs, tiny_batch, tiny_model
from texvlm.qwen.preparation import Preparation

pytestmark = pytest.mark.filterwarnings("ignore:bias acts")
MODES = ["prune_pre", "prune_post", "scale", "blend", "bias"]


def adapter_of(family: str = "qwen3_vl", mode: str = "prune_pre", **options: Any) -> QwenVLAdapter:
    def selector(image: Tensor, grid: tuple[int, int], k: int) -> Any:
        weights = image.mean(0).unflatten(0, (grid[0], -1)).unflatten(2, (grid[1], -1)).mean((1, 3)).flatten()
        best = weights.argsort(descending=True)[:k]
        return best if mode.startswith("prune") else (best, weights)

    return QwenVLAdapter(model_of(family), selector, **{"k": 6, "mode": mode, **options})


# ---- hooks ----


@pytest.mark.parametrize("family", ONE_EACH)
@pytest.mark.parametrize("mode", MODES)
def test_batches_do_not_know_of_each_other(family: str, mode: str) -> None:
    """Prepared one after another and run in reverse order, each is as if it were alone."""
    adapter = adapter_of(family, mode)
    inputs = [tiny_batch(adapter.model, sizes, seed=i) for i, sizes in enumerate([[(40, 48)], [(24, 40), (32, 16)], [(40, 48)]])]
    with torch.no_grad():
        alone = [adapter(adapter.prepare(one)).logits for one in inputs]
        batches = [adapter.prepare(one) for one in inputs]
        later = [adapter(batch).logits for batch in reversed(batches)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(alone, later))
    tokens = [adapter.generate(adapter.prepare(one), **GREEDY) for one in inputs]
    again = [adapter.generate(batch, **GREEDY) for batch in reversed(batches)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(tokens, again))


@pytest.mark.parametrize("mode", MODES)
def test_attached_for_a_while(mode: str) -> None:
    """Twice and nested too; the model is dense before and after, and for batches that nobody prepared."""
    adapter = adapter_of(mode=mode)
    model, inputs = adapter.model, tiny_batch(adapter.model, [(40, 48)])
    batch = adapter.prepare(inputs)
    with torch.no_grad():
        dense, wanted = model(**inputs).logits, adapter(batch).logits
        with unchanged(model):
            with adapter:
                assert torch.equal(model(**batch).logits, wanted)
                with adapter:
                    adapter.attach()
                    assert torch.equal(adapter(batch).logits, wanted)
                    adapter.generate(batch, **GREEDY)
                    adapter.detach()
                assert torch.equal(model(**batch).logits, wanted)
                torch.testing.assert_close(model(**inputs).logits, dense, atol=1e-6, rtol=0)
            adapter.detach()  # once too often
            assert torch.equal(model(**inputs).logits, dense)


def test_two_adapters_on_one_model() -> None:
    """One after another, not at once; a refusal leaves the first as it was."""
    one, other = adapter_of(), adapter_of(mode="bias")
    batch = other.prepare(tiny_batch(other.model, [(40, 48)]))
    with unchanged(one.model):
        with one:
            for run in (other.attach, lambda: other(batch), lambda: other.generate(batch, **GREEDY)):
                with (
                    unchanged(one.model, attached=True),
                    pytest.raises(RuntimeError, match=r"another adapter is attached .* detach it first"),
                ):
                    run()
        other.generate(batch, **GREEDY)


class Broken(Exception):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["visual", "language_model", "lm_head"])
def test_an_exception_leaves_nothing_behind(mode: str, where: str) -> None:
    adapter = adapter_of(mode=mode)
    model = adapter.model
    batch = adapter.prepare(tiny_batch(model, [(40, 48)]))
    wanted = adapter.generate(batch, **GREEDY)
    place = model.lm_head if where == "lm_head" else getattr(model.model, where)

    def fail(*_: Any) -> None:
        raise Broken

    with unchanged(model):
        hook = place.register_forward_pre_hook(fail)
        for run in (lambda: adapter.generate(batch, **GREEDY), lambda: adapter(batch)):
            with pytest.raises(Broken):
                run()
        with adapter:
            with pytest.raises(Broken):
                model(**batch)
            hook.remove()  # still attached: the next forward knows nothing of the last
            with torch.no_grad():
                assert torch.equal(model(**batch).logits, adapter(batch).logits)
    assert torch.equal(adapter.generate(batch, **GREEDY), wanted)


@pytest.mark.parametrize("family", ONE_EACH)
@pytest.mark.parametrize("mode", MODES)
def test_hidden_states_can_be_asked_for(family: str, mode: str) -> None:
    adapter = adapter_of(family, mode)
    batch = adapter.prepare(tiny_batch(adapter.model, [(40, 48)]))
    with torch.no_grad():
        plain, out = adapter(batch), adapter(batch, output_hidden_states=True)
    assert torch.equal(plain.logits, out.logits)
    layers = adapter.model.config.text_config.num_hidden_layers
    assert len(out.hidden_states) == layers + 1
    assert all(h.shape[:2] == batch["input_ids"].shape for h in out.hidden_states)


@pytest.mark.parametrize("family", ATTENTIVE)
@pytest.mark.parametrize("mode", MODES)
def test_other_ways_to_generate(family: str, mode: str) -> None:
    """Without a cache, where some versions read the pictures again in every step; with a static one; by guesses from the prompt."""
    adapter = adapter_of(family, mode)
    batch = adapter.prepare(tiny_batch(adapter.model, [(40, 48)]))
    options = {**GREEDY, "suppress_tokens": [57, 58, 59, 60], "return_dict_in_generate": True, "output_logits": True}
    wanted = adapter.generate(batch, **options)
    for other in ({"use_cache": False}, {"cache_implementation": "static"}):
        found = adapter.generate(batch, **options, **other)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), atol=1e-5, rtol=0)
    found = adapter.generate(batch, **GREEDY, suppress_tokens=[57, 58, 59, 60], prompt_lookup_num_tokens=2)
    assert torch.equal(found, wanted.sequences)
    options = {**GREEDY, "suppress_tokens": [57, 58, 59, 60], "num_beams": 2}
    assert torch.equal(adapter.generate(batch, **options, use_cache=False), adapter.generate(batch, **options))


# ---- several at once ----


@pytest.mark.parametrize("mode", ["prune_pre", "bias"])
def test_threads_share_a_model(mode: str) -> None:
    """Each gets its own answer, while others generate on the same model through the same adapter, or without it."""
    adapter = adapter_of("qwen3_vl", mode)
    model = adapter.model
    inputs = [tiny_batch(model, [size], seed=i) for i, size in enumerate([(40, 48), (24, 40), (16, 16), (40, 48)])]
    batches = [adapter.prepare(one) for one in inputs]
    wanted = [adapter.generate(batch, **GREEDY) for batch in batches]
    with torch.no_grad():
        dense = [model(**one).logits for one in inputs]
    found: dict[tuple[int, int], Tensor] = {}
    failed: list[BaseException] = []
    start = threading.Barrier(len(inputs) + 1)

    def work(i: int) -> None:
        try:
            start.wait()
            for n in range(4):
                found[i, n] = adapter.generate(batches[i], **GREEDY)
        except BaseException as error:
            failed.append(error)

    def plain() -> None:
        try:
            start.wait()
            with torch.no_grad():
                for _ in range(3):
                    for one, logits in zip(inputs, dense):
                        torch.testing.assert_close(model(**one).logits, logits, atol=1e-5, rtol=0)
        except BaseException as error:
            failed.append(error)

    with unchanged(model):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))] + [threading.Thread(target=plain)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert all(torch.equal(tokens, wanted[i]) for (i, _), tokens in found.items()) and len(found) == 16


class Prompts(Dataset):
    """Prompts that are prepared where they are read."""

    def __init__(self, preparation: Any, inputs: list[Any]) -> None:
        self.preparation, self.inputs = preparation, inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> Any:
        return self.preparation(self.inputs[i])


def only(samples: list[Any]) -> Any:
    return samples[0]


def test_workers_prepare() -> None:
    """Forked ones, with nothing of the model; an allocator that learns goes along."""
    import texvlm

    scorer = texvlm.Allocator(information=["entropy"], perspective=["mean:eccentricity"], participation=[])
    for adapter in (adapter_of(), QwenVLAdapter(model_of("qwen3_vl"), scorer.eval(), k=5)):
        inputs = [tiny_batch(adapter.model, [size], seed=i) for i, size in enumerate([(40, 48), (24, 40), (16, 16)])]
        loader = DataLoader(Prompts(adapter.preparation, inputs), collate_fn=only, num_workers=2, multiprocessing_context="fork")
        for made, one in zip(loader, inputs):
            expected = adapter.prepare(one)
            assert set(made) == set(expected) and type(made) is type(expected)
            for name, value in expected.items():
                if isinstance(value, Tensor):
                    assert torch.equal(made[name], value), name
            torch.testing.assert_close(adapter(made).logits, adapter(expected).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preparation_is_small_and_can_be_sent(family: str) -> None:
    """To workers that are spawned, who have no model."""
    adapter = QwenVLAdapter(model_of(family), "uniform", k=6, thumbnail="segment")
    sent = pickle.dumps(adapter.preparation)
    assert len(sent) < 20_000
    inputs = tiny_batch(adapter.model, [(40, 48)])
    made, expected = pickle.loads(sent)(inputs), adapter.prepare(inputs)
    assert isinstance(adapter.preparation, Preparation)
    assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_a_compiled_forward() -> None:
    """The plain one, of what was cut before the tower; a model of few layers."""
    model = tiny_model("qwen3_vl", vision={"depth": 1, "deepstack_visual_indexes": [0]}, text={"num_hidden_layers": 1})
    inputs, kept = tiny_batch(model, [(40, 48)]), places(9, 30)
    batch = QwenVLAdapter(model, lambda image, grid, k: torch.tensor(kept), k=9).prepare(inputs)
    known = {k: v for k, v in batch.items() if not k.startswith("texvlm_")}
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**known).logits
    torch.testing.assert_close(found[0], cut_logits(model, inputs, [kept]), atol=1e-5, rtol=0)


# ---- what is given ----


def test_samples_of_text_alone() -> None:
    """In a batch with others, and a batch of nothing else; with a selector that learns, too."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.ones(30))

        def forward(self, image: Tensor, grid: tuple[int, int], k: int) -> Any:
            return torch.arange(k), self.weights

    for family in FAMILIES:
        model = model_of(family)
        for selector, mode in (("uniform", "prune_pre"), ("uniform", "bias"), ("uniform", "blend"), (Learned(), "prune_pre")):
            adapter = QwenVLAdapter(model, selector, k=6, mode=mode)
            mixed, alone = tiny_batch(model, [[(40, 48)], []]), tiny_batch(model, [[], []], text=5)
            batch = adapter.prepare(mixed)
            there = batch["attention_mask"][1].bool()
            text = {"input_ids": batch["input_ids"][1:, there], "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
            with torch.no_grad():
                torch.testing.assert_close(adapter(batch).logits[1, there], model(**text).logits[0], atol=1e-4, rtol=0)
                batch = adapter.prepare(alone)
                torch.testing.assert_close(adapter(batch).logits, model(**alone).logits, atol=1e-5, rtol=0)
            assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], answer(model, alone))


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_cut(family: str) -> None:
    """With the prompt; uncut ones raise."""
    adapter = adapter_of(family)
    inputs = tiny_batch(adapter.model, [[(40, 48)], [(24, 40), (32, 16)]], labels=True)
    batch = adapter.prepare(inputs)
    assert batch["labels"].shape == batch["input_ids"].shape
    learned = batch["labels"] != -100
    assert torch.equal(batch["labels"][learned], inputs["labels"][inputs["labels"] != -100])
    assert torch.equal(batch["labels"][learned], batch["input_ids"][learned])
    with torch.no_grad():
        out = adapter(batch)
    picked = out.logits[:, :-1][learned[:, 1:]].log_softmax(-1)
    expected = -picked.gather(1, batch["labels"][:, 1:][learned[:, 1:]][:, None]).mean()
    torch.testing.assert_close(out.loss, expected)
    with pytest.raises((ValueError, RuntimeError)):
        adapter(batch | {"labels": inputs["labels"]})


def given(**changes: Any) -> Any:
    inputs = tiny_batch(model_of("qwen3_vl"), [(40, 48)])
    return {k: v for k, v in {**inputs, **changes}.items() if v is not None}


GRID = torch.tensor([[1, 10, 12]])
SHORT = given()["input_ids"][:, :-5]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (given(input_ids=None), {}, r"input_ids must be whole numbers \[batch, tokens\], got NoneType"),
        (given(input_ids=torch.rand(1, 38)), {}, r"input_ids must be whole numbers \[batch, tokens\], got \[1, 38\] torch.float32"),
        (given(input_ids=torch.ones(38).long()), {}, r"input_ids must be whole numbers \[batch, tokens\], got \[38\]"),
        (given(attention_mask=torch.ones(1, 3)), {}, r"attention_mask must be \[1, 38\] as input_ids, got \[1, 3\]"),
        (given(labels=torch.ones(1, 3)), {}, r"labels must be \[1, 38\] as input_ids, got \[1, 3\]"),
        (given(image_grid_thw=None), {}, r"image_grid_thw must be given with pixel_values"),
        (given(image_grid_thw=GRID[0]), {}, r"image_grid_thw must be \[pictures, 3\], got \[3\]"),
        (given(image_grid_thw=GRID[:, :2]), {}, r"image_grid_thw must be \[pictures, 3\], got \[1, 2\]"),
        (given(image_grid_thw=GRID + 1), {}, r"image_grid_thw must hold positive multiples of 2 patches, got \[\[2, 11, 13\]\]"),
        (given(image_grid_thw=GRID * 0), {}, r"image_grid_thw must hold positive multiples of 2 patches, got \[\[0, 0, 0\]\]"),
        (given(image_grid_thw=GRID.flip(1)), {}, r"must hold positive multiples of 2 patches, got \[\[12, 10, 1\]\]"),
        (given(image_grid_thw=GRID + 2), {}, r"pixel_values must be \[504, 96\] for image_grid_thw \[\[3, 12, 14\]\], got \[120, 96\]"),
        (given(pixel_values=torch.rand(120, 95)), {}, r"pixel_values must be \[120, 96\] .* got \[120, 95\]"),
        (given(pixel_values=None), {}, r"pixel_values must be given with image_grid_thw, or images="),
        (given(input_ids=SHORT, attention_mask=None), {}, r"sample 0 hold 29 image tokens where its next image has 30"),
        (given(pixel_values=None, image_grid_thw=None), {}, r"sample 0 hold 30 image tokens for which there is no image"),
        (given(input_ids=torch.ones(1, 38).long()), {}, r"image_grid_thw has 1 more pictures than input_ids have image tokens for"),
        (given(), {"images": []}, r"images must be the 1 of image_grid_thw, got 0"),
        (given(), {"images": [torch.rand(3, 8, 8)] * 2}, r"images must be the 1 of image_grid_thw, got 2"),
        (given(), {"k": 0}, r"k must be a whole number of at least 1, 'auto' or None, got 0"),
        (given(), {"k": 2.5}, r"k must be a whole number of at least 1, 'auto' or None, got 2.5"),
        (given(), {"k": True}, r"k must be a whole number of at least 1, 'auto' or None, got True"),
        (given(), {"k": [3, 4]}, r"k must be one number, or one for each of 1 pictures, got 2"),
        (given(), {"query": ["a", "b"]}, r"query must be one, or one for each of 1 pictures, got 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_one_line(inputs: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        QwenVLAdapter(model_of("qwen3_vl"), "uniform", k=6).prepare(inputs, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(0).long(), r"the selector must return 1 to 6 whole numbers, got \[0\]"),
        (torch.arange(7), r"the selector must return 1 to 6 whole numbers, got \[7\]"),
        (torch.rand(6), r"the selector must return 1 to 6 whole numbers, got \[6\] of torch.float32"),
        (torch.tensor([0, 30]), r"the selector's indices must be from 0 to 29, got 0 to 30"),
        (torch.tensor([-1, 3]), r"the selector's indices must be from 0 to 29, got -1 to 3"),
        (torch.tensor([3, 3]), r"the selector's indices must differ from each other"),
        ((torch.arange(6), torch.ones(5)), r"the selector's weights must be 6 or 30, got 5"),
    ],
)
def test_what_a_selector_returns_is_checked(returned: Any, message: str) -> None:
    adapter = QwenVLAdapter(model_of("qwen3_vl"), lambda image, grid, k: returned, k=6)
    with pytest.raises(ValueError, match=message):
        adapter.prepare(given())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "prune"}, ValueError, r"mode must be one of scale, blend, bias, prune_post, prune_pre, got 'prune'"),
        ({"selector": "best"}, ValueError, r"path must be .*got 'best'"),
        ({"selector": 3}, TypeError, r"selector must be a path, a CascadeConfig, a module or a function, got int"),
        ({"k": 0}, ValueError, r"k must be a whole number of at least 1, 'auto' or None, got 0"),
        ({"k": "few"}, ValueError, r"k must be .* got 'few'"),
        ({"gate": "drop"}, ValueError, r"gate must be one of bias, scale, blend, got 'drop'"),
        ({"thumbnail": "small"}, ValueError, r"thumbnail must be None, 'segment' or 'joint', got 'small'"),
        ({"thumbnail": "joint", "mode": "bias"}, ValueError, r"thumbnail='joint' needs mode='prune_pre', got 'bias'"),
        ({"whole_windows": True}, ValueError, r"whole_windows needs a tower with windows \(qwen2_5_vl\), got qwen3_vl"),
        ({"selector": "multiscale", "mode": "scale"}, ValueError, r"tokens of several levels need mode='prune_pre', got 'scale'"),
        (
            {"selector": lambda image, grid, k: torch.arange(k), "bound": 0.0},
            ValueError,
            r"bound needs a selector that can be told what to leave out",
        ),
    ],
)
def test_what_an_adapter_cannot_be_is_said(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught, unchanged(model_of("qwen3_vl")):
        QwenVLAdapter(model_of("qwen3_vl"), **{"selector": "uniform", **options})
    assert "\n" not in str(caught.value)


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a model of transformers, got Linear"):
        QwenVLAdapter(nn.Linear(2, 2), "uniform")
    other = nn.Module()
    other.config = SimpleNamespace(model_type="llava")
    with pytest.raises(ValueError, match=r"one of the families qwen2_vl, qwen2_5_vl, .* got model_type='llava'"):
        QwenVLAdapter(other, "uniform")
    with pytest.raises(ValueError, match=r"with its head \(...ForConditionalGeneration\), got Qwen3VLModel"):
        QwenVLAdapter(model_of("qwen3_vl").model, "uniform")
    with pytest.raises(ValueError, match=r"family must be one of .* got 'gpt2'"):
        tiny_model("gpt2")


@pytest.mark.parametrize("version", ["4.57.6", "5.8.1"])
def test_an_old_transformers_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first import of `texvlm.qwen`, before anything of transformers is; and none at all."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"texvlm.qwen needs transformers >= 5.9, found {version}"):
        importlib.reload(_needs)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"texvlm.qwen needs transformers >= 5.9: pip install 'texvlm\[qwen\]'"):
        importlib.reload(_needs)


@pytest.mark.parametrize("part", ["visual", "language_model"])
def test_bias_asks_for_attention_that_takes_it(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the adapter is made, and when it is attached to a model that was changed since."""
    model = model_of("qwen3_vl")
    adapter = adapter_of(mode="bias")
    batch = adapter.prepare(given())
    monkeypatch.setattr(getattr(model.model, part).config, "_attn_implementation", "flash_attention_2")
    for run in (lambda: adapter_of(mode="bias"), adapter.attach, lambda: adapter.generate(batch)):
        with (
            pytest.raises(ValueError, match=r"bias needs attention 'sdpa', the .* has 'flash_attention_2': .*'sdpa'"),
            unchanged(model),
        ):
            run()
    adapter_of(mode="prune_pre")


def test_generate_refuses_what_it_cannot_do() -> None:
    adapter = adapter_of()
    batch = adapter.prepare(given())
    with pytest.raises(ValueError, match=r"prefill_chunk_size cannot be used with 3-D positions"):
        adapter.generate(batch, prefill_chunk_size=4)
    config = transformers.GenerationConfig(prefill_chunk_size=4)
    with pytest.raises(ValueError, match=r"prefill_chunk_size cannot be used with 3-D positions"):
        adapter.generate(batch, generation_config=config)
    embedded = adapter.model.get_input_embeddings()(batch["input_ids"])
    with pytest.raises(ValueError, match=r"inputs_embeds cannot be used: pictures are found by their ids"):
        adapter.generate(batch, inputs_embeds=embedded)
    with pytest.raises(ValueError, match=r"batch must come from prepare"):
        adapter.generate(given())
