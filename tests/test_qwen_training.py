"""Fine-tuning through Trainer and PEFT: what learns and what does not, what comes from checkpoints, and what a command leaves behind."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import qwen_folder
from peft import PeftModel
from qwen_recipe import FAMILIES, ONE_EACH
from transformers import TrainerCallback

import texvlm
from texvlm.qwen import finetune, tiny_model
from texvlm.qwen.finetune import Collator, Lines, Part, Patches, build, lora_targets, main, measure
from texvlm.qwen.prompts import TemplatePrompts, TinyPrompts
from texvlm.qwen.selectors import Kept, Selecting
from texvlm.soft_selection import log_soft_topk

pytestmark = [
    pytest.mark.filterwarnings("ignore:bias acts"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*is deprecated"),
]

CELL, SIDE = 8, 4
DATA = Patches(400, CELL, SIDE)
PROMPTS = TinyPrompts()


def fresh(family: str = "qwen3_vl", **options: Any) -> tuple[Any, Any]:
    """A model with LoRA, and its adapter, the same each time."""
    torch.manual_seed(0)
    selector = finetune.new_selector(DATA, CELL, 4)
    return build(tiny_model(family), selector, k=4, rank=4, pixels=(CELL**2, 2**20), **options)


def train(pair: tuple[Any, Any], out: Path, **options: Any) -> Any:
    settings = {"steps": 6, "batch": 2, "per_round": 4, "rate": 1e-2, "selector_rate": 1e-2, "quiet": True, **options}
    return finetune.finetune(*pair, PROMPTS, DATA, out, **settings)[0]


def numbered(*numbers: int) -> list[dict[str, Any]]:
    return [{**DATA[n], "number": n} for n in numbers]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class Stop(TrainerCallback):
    """Breaks a run off after a step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


# ---- what learns ----


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_is_on_merger_and_decoder_only(family: str) -> None:
    model, adapter = fresh(family)
    targets = lora_targets(model.get_base_model())
    assert any("merger" in name for name in targets) and any("self_attn" in name for name in targets)
    for name, parameter in model.named_parameters():
        learns = "lora_" in name or "texvlm_selector" in name
        assert parameter.requires_grad == learns, name
        if "lora_" in name:
            assert re.search(r"language_model\.layers|\.merger\.|deepstack_merger", name), name
    assert model.get_base_model().texvlm_selector is adapter.selector


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ONE_EACH)
def test_a_step_changes_selector_and_lora_and_nothing_else(family: str, checkpointing: bool, tmp_path: Path) -> None:
    pair = fresh(family)
    before = weights(pair[0])
    assert all(p.dtype == torch.float32 for p in before.values())
    train(pair, tmp_path, steps=1, checkpointing=checkpointing)
    changed = {name for name, p in weights(pair[0]).items() if not torch.equal(p, before[name])}
    assert {name for name in changed if "texvlm_selector" in name}
    assert {name for name in changed if "lora_B" in name and "visual" in name}
    assert {name for name in changed if "lora_B" in name and "language_model" in name}
    assert all("lora_" in name or "texvlm_selector" in name for name in changed)


@pytest.mark.parametrize("gate", ["bias", "scale", "blend"])
def test_checkpointed_gradients_of_the_selector_are_the_same(gate: str) -> None:
    found = []
    for checkpointing in (False, True):
        model, adapter = fresh(gate=gate)
        model.train()
        batch = Collator(adapter.preparation, PROMPTS)(numbered(0, 1))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**batch).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in adapter.selector.parameters() if p.grad is not None]))
    assert found[0].abs().max() > 1e-6
    torch.testing.assert_close(found[0], found[1], atol=1e-8, rtol=1e-4)


def test_gates_of_random_strength_learn_what_presence_is_worth() -> None:
    torch.manual_seed(0)
    selector = texvlm.Allocator("linear", ["entropy"], [], [], cell=CELL)
    evidence, cells, weight = torch.randn(9, 1), torch.tensor([2, 5, 7]), selector.information.head.weight
    worth = torch.tensor([3.0, -1.0, 0.5])

    def slope(strength: str, draws: int) -> float:
        selecting = Selecting(selector.train(), CELL, strength=strength)
        found = 0.0
        for _ in range(draws):
            gates = selecting.gates([Kept(evidence, cells, (3, 3))])[0][0]
            assert bool(((gates >= 0) & (gates <= 1)).all())
            lost = -(worth * (1 - (1 - gates) ** 8)).sum()  # as good as sure of it long before it is all there
            found += float(torch.autograd.grad(lost, weight)[0]) / draws
        return found

    logs = log_soft_topk(selector(evidence[None]), len(cells), 1.0, "gumbel")[0][cells]
    whole = float(torch.autograd.grad(-(worth * logs).sum(), weight)[0])
    assert slope("full", 1) == pytest.approx(0, abs=1e-6)
    assert slope("random", 4000) == pytest.approx(whole, rel=0.1)
    deployed = Selecting(selector.eval(), CELL, strength="random").gates([Kept(evidence, cells, (3, 3))])[0][0]
    assert torch.equal(deployed, torch.ones(3))
    with pytest.raises(ValueError, match="strength must be one of full, random, got 'some'"):
        Selecting(selector, CELL, strength="some")


def test_what_wraps_a_model_may_call_its_forward_past_its_hooks() -> None:
    """As PEFT up to 0.20 does."""
    model, adapter = fresh()
    batch = Collator(adapter.preparation, PROMPTS)(numbered(0, 1))
    found = []
    for call in (model, model.get_base_model().forward):
        model.zero_grad()
        call(**batch).loss.backward()
        found.append([p.grad.clone() for p in adapter.selector.parameters() if p.grad is not None])
    assert found[0] and max(float(g.abs().max()) for g in found[0]) > 1e-6
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_the_selector_learns_late_where_the_reader_shall_go_first(tmp_path: Path) -> None:
    pair = fresh()
    before = weights(pair[1].selector)
    train(pair, tmp_path, steps=4, reader_first=0.5, callbacks=[Stop(2)])
    assert all(torch.equal(p, before[name]) for name, p in weights(pair[1].selector).items())
    pair = fresh()
    train(pair, tmp_path / "on", steps=4, reader_first=0.5)
    assert any(not torch.equal(p, before[name]) for name, p in weights(pair[1].selector).items())


@pytest.mark.long
def test_it_learns_to_keep_what_answers(tmp_path: Path) -> None:
    """Two of 16 cells: by chance an eighth of the decisive cells is kept, and a bit over a quarter of the answers is right."""
    torch.manual_seed(2)
    model, prompts, pixels = finetune._untrained("qwen3_vl")
    wrapped, adapter = build(model, finetune.new_selector(DATA, CELL), k=2, rank=8, pixels=pixels, temperature=0.5)
    held = [Patches(48, CELL, SIDE, first=10**6)[i] for i in range(48)]
    before = measure(wrapped, Collator(adapter.preparation, prompts), held)
    options = {
        "steps": 80,
        "batch": 16,
        "per_round": 10,
        "rate": 5e-3,
        "selector_rate": 4e-2,
        "reader_first": 0.25,
        "quiet": True,
    }
    _, collator = finetune.finetune(wrapped, adapter, prompts, Patches(3000, CELL, SIDE), tmp_path, **options)
    after = measure(wrapped, collator, held)
    assert before["kept"] < 0.3 and after["kept"] > 0.45
    assert after["right"] > 0.45 and after["loss"] < before["loss"] / 10


# ---- batches ----


def test_a_batch_is_pruned_and_bears_no_graph() -> None:
    _, adapter = fresh()
    batch = Collator(adapter.preparation, PROMPTS)(numbered(0, 1))
    answers = torch.tensor([PROMPTS.answer(DATA[n]["answer"]) for n in (0, 1)])
    assert batch["input_ids"].shape == (2, len(PROMPTS.opening("Which colour?")) - 1 + 4 + 2)
    assert torch.equal(batch["labels"][:, -2:], answers) and (batch["labels"][:, :-2] == -100).all()
    assert torch.equal(batch["input_ids"][:, -2:], answers)
    assert not any(isinstance(v, Tensor) and v.requires_grad for v in batch.values())
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again["pixel_values"], batch["pixel_values"])


def test_noise_is_of_the_examples_numbers_and_deployed_there_is_none() -> None:
    _, adapter = fresh()
    collator = Collator(adapter.preparation, PROMPTS)
    cells = [collator(numbered(*n))["texvlm_cells"][:, 2].tolist() for n in ((0, 1), (2, 3), (0, 1))]
    assert cells[0] == cells[2]
    same = [[{**DATA[0], "number": n}] for n in range(8)]
    assert len({tuple(collator(e)["texvlm_cells"][:, 2].tolist()) for e in same}) > 1
    assert len({tuple(collator.deployed(e)["texvlm_cells"][:, 2].tolist()) for e in same}) == 1
    assert collator.chooser is not adapter.selector


def test_workers_prepare_the_same() -> None:
    """Forked ones get the collator as it is, spawned ones get it pickled."""
    _, adapter = fresh()
    collator = Collator(adapter.preparation, PROMPTS)
    part = Part(DATA, 4, seed=0)
    here = list(DataLoader(part, 2, collate_fn=collator))
    assert collator.selecting.generator is None  # which torch cannot hand to a spawned one
    sent = pickle.loads(pickle.dumps(collator))
    for there in (
        list(DataLoader(part, 2, collate_fn=collator, num_workers=2, multiprocessing_context="fork")),
        list(DataLoader(part, 2, collate_fn=sent)),
    ):
        assert len(here) == len(there) == 2
        for a, b in zip(here, there):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in a if isinstance(a[name], Tensor))


def test_rounds_go_through_the_data() -> None:
    part = Part(Patches(10, CELL, SIDE), 4, seed=0)
    seen = []
    for part.round in range(5):
        seen += [(part[i]["number"], part[i]["cell"]) for i in range(4)]
    assert [number for number, _ in seen] == list(range(20))
    cells = [DATA[i]["cell"] for i in range(10)]
    assert sorted(cell for _, cell in seen[:10]) == sorted(cells) and seen[0][1] == seen[10][1]


# ---- checkpoints ----


@pytest.mark.parametrize(("stop", "workers"), [(3, 0), (4, 0), (3, 2)], ids=["within a round", "between rounds", "with workers"])
def test_what_was_broken_off_goes_on_exactly(stop: int, workers: int, tmp_path: Path) -> None:
    whole = fresh()
    told = train(whole, tmp_path / "whole").state.log_history
    train(fresh(), tmp_path / "parts", callbacks=[Stop(stop)], workers=workers)
    assert (tmp_path / "parts" / f"checkpoint-{stop}" / "selector").is_dir()
    torch.manual_seed(7)
    again = fresh()
    with torch.no_grad():  # nothing but the checkpoint may bring it back
        for parameter in again[0].parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    resumed = train(again, tmp_path / "parts", resume=True, workers=workers)
    assert resumed.state.global_step == 6
    for (name, a), (_, b) in zip(weights(whole[0]).items(), weights(again[0]).items()):
        assert torch.equal(a, b), name
    assert [e["loss"] for e in told if "loss" in e] == [e["loss"] for e in resumed.state.log_history if "loss" in e]


# ---- the command ----


def test_the_command_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--steps", "4", "--batch", "2", "--per-round", "2", "--held-out", "4", "--save", "2"]
    assert main(["--tiny", "--out", str(tmp_path), *short]) == 0
    out = capsys.readouterr().out
    assert re.search(r"before: loss [\d.]+, \d+% of answers right, \d+% of pictures", out) and "after:" in out
    selector = texvlm.Allocator.from_pretrained(tmp_path / "selector")
    saved = texvlm.Allocator.from_pretrained(tmp_path / "checkpoint-4" / "selector")
    assert all(torch.equal(a, b) for a, b in zip(selector.state_dict().values(), saved.state_dict().values()))
    assert selector.cell == 8

    # What was saved answers as what was trained did.
    model, prompts, pixels = finetune._untrained("qwen3_vl")
    adapter = texvlm.qwen.QwenVLAdapter(model, selector, 6, pixels=pixels, temperature=0.5)
    wrapped = PeftModel.from_pretrained(model, tmp_path / "lora")
    held = [Patches(100_000, CELL)[99_999 - i] for i in range(4)]
    figures = measure(wrapped, Collator(adapter.preparation, prompts), held)
    assert f"after:  {finetune._said(figures)}" in out

    assert main(["--tiny", "--out", str(tmp_path), *short, "--steps", "6", "--resume"]) == 0
    assert (tmp_path / "checkpoint-6").is_dir()


def test_the_command_on_a_folder_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = qwen_folder.save(tmp_path / "model")
    lines = []
    for i in range(6):
        image.fromarray((DATA[i]["image"].permute(1, 2, 0) * 255).byte().numpy()).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"image": f"{i}.png", "question": "what colour is here", "answer": DATA[i]["answer"]}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    command = ["--model", str(folder), "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out"), "--held-out", "2"]
    assert main([*command, "--steps", "2", "--accumulate", "2", "--budget", "4", "--rank", "4", "--checkpointing"]) == 0
    assert "answers right" in capsys.readouterr().out
    assert (tmp_path / "out" / "lora").is_dir() and (tmp_path / "out" / "selector").is_dir()


def test_answers_are_closed_and_asked_as_the_template_does() -> None:
    prompts = TemplatePrompts(qwen_folder.tokenizer(), 60)
    words = prompts.tokenizer.decode
    assert words(prompts.opening("what is here")).split("user")[1].split() == (
        ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "what", "is", "here", "<|im_end|>", "<|im_start|>", "assistant"]
    )
    assert words(prompts.answer("red")).split() == ["red", "<|im_end|>"]
    later = ["<|im_start|>", "user", "which", "is", "blue", "<|im_end|>", "<|im_start|>", "assistant"]
    assert words(prompts.following("which is blue", last=2)).split() == later  # the answer's end was generated
    assert words(prompts.following("which is blue", last=9)).split() == ["<|im_end|>", *later]
    assert prompts.text([*prompts.answer("red")]).strip() == "red"


def test_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        with pytest.raises(SystemExit, match="2"):
            main([str(a) for a in arguments])
        return capsys.readouterr().err.splitlines()[-1]

    assert "--model needs --data and --out" in refused("--model", "somewhere")
    assert "--resume needs --out" in refused("--tiny", "--resume")
    assert "family must be one of" in refused("--tiny", "llama")
    (tmp_path / "bad.jsonl").write_text('{"image": "a.png", "question": "what"}\n')
    assert "line 1 must have" in refused("--tiny", "--data", tmp_path / "bad.jsonl")
    assert "No such file" in refused("--tiny", "--data", tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="line 1 must have"):
        Lines(tmp_path / "bad.jsonl")
    tokenizer = qwen_folder.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content[0].type }}"
    with pytest.raises(ValueError, match="1 x token 60 for pictures, got 0"):
        TemplatePrompts(tokenizer, 60).opening("what")
