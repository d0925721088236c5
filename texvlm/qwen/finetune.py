"""Fine-tuning by transformers' Trainer and PEFT: LoRA on merger and decoder, and what is looked at learned along with them.

    python -m texvlm.qwen.finetune --tiny                 # a random model and a task of drawn pictures, on any machine
    python -m texvlm.qwen.finetune --model Qwen/Qwen3-VL-2B-Instruct --data questions.jsonl --out run [--resume]

A line of the data is {"image": FILE, "question": TEXT, "answer": TEXT}; a relative FILE begins where the data is. Needs peft and
accelerate: pip install 'texvlm[finetune]'. This file is an example to copy from: what is particular to texvlm is in `Collator` (which calls
`prepare`), in `Checkpoints`, and in `build`.

The choice is made in rounds. At the beginning of a round the collator takes a copy of the selector, which chooses for all batches of the
round; the selector itself gets its gradients in the forward of the model, and steps with the optimiser. So batches are the same whether
they are made in time or far ahead, by this process or by workers, and a run that was broken off goes on exactly.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from texvlm.allocator import LEVEL, PERSPECTIVE, Allocator
from texvlm.cli.image import read_picture
from texvlm.qwen import QwenVLAdapter, tiny_model
from texvlm.qwen.adapter import GATES
from texvlm.qwen.batch import IGNORED, PreparedBatch
from texvlm.qwen.families import sizes_of
from texvlm.qwen.preparation import Preparation
from texvlm.qwen.prompts import Prompts, TinyPrompts, load
from texvlm.qwen.selectors import STRENGTHS, features_of

SELECTOR, CHOOSER = "selector", "chooser"
"""Folders of a checkpoint: the selector as it has learned so far, and the copy that chooses in this round."""

INFORMATION = ("entropy", "rms:edge", "mean:saliency", "variance:saliency")

Example = dict[str, Any]
"""image [3, H, W], question, answer; `cell` where it is known which group matters."""


# ---- data ----


class Patches(Dataset[Example]):
    """Drawn pictures of noise, with grey checkers and one coloured cell: which colour is asked for, and only that cell says it.

    Args:
        count: of examples; the same number is always the same example.
        cell: side of a cell in pixels.
        side: cells along a side of a picture.
        first: the number of the first one.
    """

    colours = (("red", (0.9, 0.1, 0.1)), ("green", (0.1, 0.9, 0.1)), ("blue", (0.1, 0.1, 0.9)), ("yellow", (0.9, 0.9, 0.1)))
    checkers = 4

    def __init__(self, count: int, cell: int, side: int = 6, first: int = 0) -> None:
        self.count, self.cell, self.side, self.first = count, cell, side, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        """One example."""
        g, cell, side = torch.Generator().manual_seed(self.first + index), self.cell, self.side
        cells = 0.5 + 0.1 * torch.randn(side**2, 3, cell, cell, generator=g)
        *grey, coloured = torch.randperm(side**2, generator=g)[: self.checkers + 1].tolist()
        step = torch.arange(cell) // (cell // 4)
        cells[grey] = 0.2 + 0.6 * ((step[:, None] + step) % 2).float()
        name, colour = self.colours[int(torch.randint(len(self.colours), (), generator=g))]
        cells[coloured] = torch.tensor(colour)[:, None, None] + 0.1 * torch.randn(3, cell, cell, generator=g)
        image = cells.unflatten(0, (side, side)).permute(2, 0, 3, 1, 4).reshape(3, side * cell, side * cell).clamp(0, 1)
        return {"image": image, "question": "Which colour?", "answer": name, "cell": coloured}


class Lines(Dataset[Example]):
    """Examples from a file of lines of JSON; pictures are read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path).parent
        self.lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
        for number, line in enumerate(self.lines, 1):
            if not isinstance(line, dict) or not all(isinstance(line.get(k), str) for k in ("image", "question", "answer")):
                raise ValueError(f"{path}: line {number} must have the texts image, question and answer")

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Example:
        """One example."""
        line = self.lines[index]
        return {**line, "image": read_picture(str(self.folder / line["image"])).image}


class Part(Dataset[Example]):
    """As many examples as a round takes, another part of the data in each round; examples know their number."""

    def __init__(self, data: Dataset[Example], size: int, seed: int) -> None:
        self.data, self.size, self.round = data, size, 0
        self.order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        """One example."""
        number = self.round * self.size + index
        return {**self.data[self.order[number % len(self.order)]], "number": number}


# ---- batches ----


class Collator:
    """Examples to a prepared batch: ids and labels by the prompts, and `prepare`, which chooses, cuts, and prunes the labels too.

    Small and without the model, so that DataLoader workers can have it.

    Args:
        preparation: an adapter's.
        prompts: of its model.
        seed: of the noise that makes choices vary while the selector learns; also the examples' numbers go into it.
    """

    def __init__(self, preparation: Preparation, prompts: Prompts, seed: int = 0) -> None:
        self.selecting = copy.copy(preparation.selecting)
        self.chooser: Allocator = copy.deepcopy(preparation.selecting.selector).cpu()  # type: ignore[union-attr]
        self.selecting.selector = self.chooser
        self.preparation = dataclasses.replace(preparation, selecting=self.selecting)
        self.prompts, self.seed = prompts, seed

    def __call__(self, examples: Sequence[Example]) -> Any:
        """A batch to train on."""
        numbers = [example["number"] for example in examples]
        self.selecting.generator = torch.Generator().manual_seed(hash((self.seed, *numbers)) % 2**63)
        with torch.enable_grad():  # a scorer explores where its scores can learn
            batch = self._prepared(examples, training=True)
        self.selecting.generator = None  # no spawned worker could have it
        return PreparedBatch({name: value.detach() if isinstance(value, Tensor) else value for name, value in batch.items()})

    @torch.no_grad()
    def deployed(self, examples: Sequence[Example]) -> PreparedBatch:
        """A batch to measure on: the best k, no noise."""
        return self._prepared(examples, training=False)

    def _prepared(self, examples: Sequence[Example], training: bool) -> PreparedBatch:
        self.chooser.train(training)
        asked = [self.prompts.opening(example["question"]) for example in examples]
        said = [self.prompts.answer(example["answer"]) for example in examples]
        longest = max(len(a) + len(b) for a, b in zip(asked, said))
        ids, labels, mask = (torch.full((len(examples), longest), fill) for fill in (0, IGNORED, 0))
        for row, (question, answer) in enumerate(zip(asked, said)):
            ids[row, longest - len(question) - len(answer) :] = torch.tensor(question + answer)
            labels[row, longest - len(answer) :] = torch.tensor(answer)
            mask[row, longest - len(question) - len(answer) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return self.preparation(inputs, [example["image"] for example in examples])


class Checkpoints(TrainerCallback):
    """Begins rounds, and saves the selector, and the copy that chooses, with the Trainer's checkpoints.

    Args:
        selector: that learns.
        collator: whose copy chooses.
        part: the data of a round.
    """

    def __init__(self, selector: Allocator, collator: Collator, part: Part) -> None:
        self.selector, self.collator, self.part = selector, collator, part

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A round is an epoch of the Trainer; one that goes on from a checkpoint keeps the choosing copy that was loaded."""
        epoch = state.epoch or 0.0
        self.part.round = int(epoch)
        if epoch == int(epoch):
            self.collator.chooser.load_state_dict(self.selector.state_dict())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Beside what the Trainer saves: LoRA, optimiser, scheduler, random numbers, place in the data."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.selector.save_pretrained(folder / SELECTOR)
        self.collator.chooser.save_pretrained(folder / CHOOSER)

    def load(self, folder: Path) -> None:
        """What `on_save` saved."""
        for module, name in ((self.selector, SELECTOR), (self.collator.chooser, CHOOSER)):
            module.load_state_dict(Allocator.from_pretrained(folder / name).state_dict())


# ---- the model ----


def lora_targets(model: Any) -> list[str]:
    """The linear layers of merger and decoder, by name; experts that share one tensor are left as they are."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (".merger." in name or "deepstack_merger" in name or "language_model.layers." in name)
    ]


def build(model: Any, selector: Allocator, k: int | str, rank: int, **options: Any) -> tuple[Any, QwenVLAdapter]:
    """LoRA around a frozen model, and an attached adapter whose selector learns.

    Args:
        model: of transformers; it is changed.
        selector: becomes a submodule of it.
        k: groups that a picture keeps.
        rank: of LoRA.
        options: further ones, of `QwenVLAdapter`.

    Returns:
        The PEFT model, which the Trainer gets, and the adapter.
    """
    from peft import LoraConfig, get_peft_model

    adapter = QwenVLAdapter(model, selector, k, **options).attach()
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=lora_targets(model), task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, lora)
    selector.requires_grad_(True)  # PEFT froze it with the rest
    return wrapped, adapter


def new_selector(data: Dataset[Example], cell: int, pictures: int = 32, levels: int = 1) -> Allocator:
    """An allocator that knows nothing but the mean and the deviation of its terms."""
    information = INFORMATION if levels == 1 else (*INFORMATION, LEVEL)
    selector = Allocator("mlp", information, PERSPECTIVE, participation=(), cell=cell, levels=levels)
    rows = [features_of(selector, data[i]["image"], cell) for i in range(min(pictures, len(data)))]  # type: ignore[arg-type]
    return selector.fit_normalisation(torch.cat(rows))


@torch.no_grad()
def measure(model: Any, collator: Collator, examples: Sequence[Example], batch: int = 16) -> dict[str, float]:
    """Of the selector as it is deployed: loss, share of answers that are right, and of pictures whose decisive cell is kept."""
    was, device = model.training, next(model.parameters()).device
    model.eval()
    losses, right, kept = [], [], []
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        prepared = collator.deployed(part)
        out = model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in prepared.items()})
        goal = prepared["labels"][:, 1:].to(device)
        hit = (out.logits[:, :-1].argmax(-1) == goal) | (goal == IGNORED)
        losses += [float(out.loss)] * len(part)
        right += hit.all(1).tolist()
        cells = prepared["texvlm_cells"]
        sharp = cells[cells[:, 3] == 0]
        kept += [e["cell"] in sharp[sharp[:, 0] == i, 2].tolist() for i, e in enumerate(part) if "cell" in e]
    model.train(was)
    figures = {"loss": sum(losses) / len(losses), "right": sum(right) / len(right)}
    return figures | ({"kept": sum(kept) / len(kept)} if kept else {})


def finetune(
    model: Any,
    adapter: QwenVLAdapter,
    prompts: Prompts,
    data: Dataset[Example],
    out: str | Path,
    *,
    steps: int,
    batch: int = 8,
    accumulate: int = 1,
    per_round: int = 50,
    rate: float = 1e-4,
    selector_rate: float = 1e-3,
    reader_first: float = 0.0,
    save: int = 100,
    workers: int = 0,
    seed: int = 0,
    checkpointing: bool = False,
    resume: bool = False,
    quiet: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[Trainer, Collator]:
    """Trains what `build` made.

    Args:
        model: from `build`, as is the adapter.
        adapter: of the model.
        prompts: of the model.
        data: to train on.
        out: folder of the checkpoints.
        steps: of the optimiser.
        batch: examples of a forward.
        accumulate: batches of a step.
        per_round: steps between renewals of the copy that chooses.
        rate: of learning, of LoRA; falls linearly to 0.
        selector_rate: the same of the selector.
        reader_first: the part of the steps after which the selector begins to learn; a model that cannot read yet teaches it noise.
        save: steps between checkpoints.
        workers: processes that prepare batches.
        seed: of the data's order and of noise.
        checkpointing: whether activations are computed again in the backward pass, instead of kept.
        resume: from the last checkpoint in `out`, if there is one.
        quiet: no progress bar.
        callbacks: of the Trainer, more of them.

    Returns:
        The Trainer, done, and the collator, whose copy of the selector is then the newest.
    """
    selector, collator = adapter.selector, Collator(adapter.preparation, prompts, seed)
    part = Part(data, per_round * batch * accumulate, seed)
    checkpoints = Checkpoints(selector, collator, part)
    known = {id(p) for p in selector.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    optimizer = torch.optim.AdamW(
        [{"params": others, "lr": rate}, {"params": list(selector.parameters()), "lr": selector_rate}], weight_decay=0.0
    )

    def falling(step: int) -> float:
        return max(0.0, 1 - step / steps)

    def later(step: int) -> float:
        return falling(step) * (step >= reader_first * steps)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [falling, later])
    if checkpointing:
        # Not reentrant: gates of one choice act in many layers, and a reentrant one would go back through the selector once for each.
        options = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        save_steps=save,
        save_total_limit=2,
        logging_steps=max(1, min(10, steps // 4)),
        dataloader_num_workers=workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        label_names=["labels"],
        report_to="none",
        disable_tqdm=quiet,
        seed=seed,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=part,
        optimizers=(optimizer, scheduler),
        callbacks=[checkpoints, *callbacks],
    )
    last = get_last_checkpoint(str(out)) if resume and Path(out).is_dir() else None
    if last is not None:
        checkpoints.load(Path(last))
    trainer.train(resume_from_checkpoint=last)
    collator.chooser.load_state_dict(selector.state_dict())
    return trainer, collator


# ---- the command ----

TINY: dict[str, Any] = {"steps": 160, "batch": 16, "per_round": 20, "rate": 5e-3, "selector_rate": 2e-2, "reader_first": 0.25}
REAL: dict[str, Any] = {"steps": 1000, "batch": 1, "per_round": 50, "rate": 1e-4, "selector_rate": 1e-3, "reader_first": 0.0}
TINY |= {"accumulate": 1, "save": 80, "rank": 8, "budget": 6, "held_out": 64, "temperature": 0.5}
REAL |= {"accumulate": 8, "save": 100, "rank": 16, "budget": 273, "held_out": 64, "temperature": 1.0}
HELP = {
    "steps": "of the optimiser",
    "batch": "examples of a forward",
    "accumulate": "batches of a step",
    "per_round": "steps between renewals of the copy that chooses",
    "rate": "of learning, of LoRA",
    "selector_rate": "of learning, of the selector",
    "reader_first": "the part of the steps after which the selector begins to learn",
    "save": "steps between checkpoints",
    "rank": "of LoRA",
    "budget": "groups that a picture keeps",
    "held_out": "examples to measure on, the last of the data",
    "temperature": "of the selector's noise and weights",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Builds, measures, trains, measures again, saves."""
    parser = argparse.ArgumentParser(prog="python -m texvlm.qwen.finetune", description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tiny", nargs="?", const="qwen3_vl", metavar="FAMILY", help="a random tiny model and drawn pictures")
    which.add_argument("--model", metavar="NAME", help="of a Qwen with eyes, on the Hub or in a folder; needs --data and --out")
    parser.add_argument("--data", metavar="FILE", help='lines of {"image": FILE, "question": TEXT, "answer": TEXT}')
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for checkpoints, LoRA and the selector")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out, if there is one")
    parser.add_argument("--selector", metavar="FOLDER", help="a saved Allocator to begin with")
    parser.add_argument(
        "--levels", type=int, default=1, help="of tokens that a new selector chooses from (%(default)s: groups only)"
    )
    parser.add_argument("--gate", choices=GATES, default="bias", help="how the selector's weights act (%(default)s)")
    parser.add_argument("--strength", choices=STRENGTHS, default="full", help="of those weights while it learns (%(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed again, not kept")
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare batches (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in REAL.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), help=f"{HELP[name]} ({value}; tiny: {TINY[name]})", metavar="N")
    args = parser.parse_args(argv)
    if args.model is not None and (args.data is None or args.out is None):
        parser.error("--model needs --data and --out")
    if args.resume and args.out is None:
        parser.error("--resume needs --out")
    default = REAL if args.tiny is None else TINY
    chosen = {name: default[name] if getattr(args, name) is None else getattr(args, name) for name in default}
    rank, budget, held, temperature = (chosen.pop(name) for name in ("rank", "budget", "held_out", "temperature"))
    set_seed(args.seed)

    try:
        import accelerate  # noqa: F401  (the Trainer needs it)
        import peft  # noqa: F401
    except ImportError as error:
        parser.error(f"{error}: pip install 'texvlm[finetune]'")
    try:
        prompts: Prompts
        if args.tiny is None:
            model, prompts, pixels = load(args.model, "cuda" if torch.cuda.is_available() else "cpu")
        else:
            model, prompts, pixels = _untrained(args.tiny)
        cell = sizes_of(model).cell
        data: Dataset[Example] = Patches(100_000, cell) if args.data is None else Lines(args.data)
        selector = (
            new_selector(data, cell, levels=args.levels) if args.selector is None else Allocator.from_pretrained(args.selector)
        )
    except (OSError, ValueError) as error:
        parser.error(str(error).strip().splitlines()[0])
    count = len(data)  # type: ignore[arg-type]
    if count < 2 * held:
        parser.error(f"--held-out must be at most half of the {count} examples, got {held}")
    measured = [data[count - 1 - i] for i in range(held)]
    wrapped, adapter = build(
        model, selector, budget, rank, gate=args.gate, strength=args.strength, pixels=pixels, temperature=temperature
    )

    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        print("before:", _said(measure(wrapped, Collator(adapter.preparation, prompts), measured)))
        _, collator = finetune(
            wrapped,
            adapter,
            prompts,
            Subset(data, range(count - held)),
            out,
            **chosen,
            workers=args.workers,
            seed=args.seed,
            checkpointing=args.checkpointing,
            resume=args.resume,
        )
        print("after: ", _said(measure(wrapped, collator, measured)))
        if args.out is not None:
            wrapped.save_pretrained(out / "lora")
            selector.save_pretrained(out / SELECTOR)
            print(f"saved: {out / 'lora'} (PeftModel.from_pretrained), {out / SELECTOR} (texvlm.Allocator.from_pretrained)")
    return 0


def _untrained(family: str) -> tuple[Any, Prompts, tuple[int, int]]:
    """A tiny model for `Patches`; its head, which stays as it is, is sharpened, or no answer could be likely."""
    model = tiny_model(family)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model, TinyPrompts(), (sizes_of(model).cell ** 2, 2**24)


def _said(figures: dict[str, float]) -> str:
    names = {
        "loss": "loss {:.3f}",
        "right": "{:.0%} of answers right",
        "kept": "{:.0%} of pictures with their decisive cell kept",
    }
    return ", ".join(names[name].format(value) for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
