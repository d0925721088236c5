"""A Qwen3-VL of half a million weights that learns to read cards, with whatever chooses what it sees.

Questions come in chains: all eight colours in an order of chance, each followed by what its card says, so that one picture teaches eight
answers; asked it is about one. A selector that takes a query is taught with one question a picture, since what is kept depends on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._cards import CELL, NAMES, Cards, Token, Words
from texvlm.qwen import QwenVLAdapter, tiny_model
from texvlm.qwen.batch import IGNORED, PreparedBatch
from texvlm.qwen.selectors import Choice
from texvlm.qwen.tiny import END, IMAGE, START

BATCH, TOKENS = 32, 1024
"""Pictures of a step, but no more than have so many tokens in the tower."""

WIDTH = 96
_ROTARY = {"rope_type": "default", "mrope_section": [4, 4, 4], "mrope_interleaved": True, "rope_theta": 1e4}
_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "patch_size": CELL // 2}
_VISION |= {"out_hidden_size": WIDTH, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
_TEXT: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 4, "head_dim": WIDTH // 4, "rope_parameters": _ROTARY}


def reader(seed: int) -> Any:
    """A random one."""
    return tiny_model("qwen3_vl", seed, _VISION, _TEXT)


class Given:
    """A selector that keeps what it has been told to, picture by picture."""

    def __init__(self) -> None:
        self.next: deque[list[Token]] = deque()

    def __call__(self, image: Tensor, grid: tuple[int, int], k: int) -> Choice:
        """The tokens that were given for this picture; of several that begin in the same group, the first."""
        known = dict(reversed(self.next.popleft()))
        cells = torch.tensor(list(reversed(known)))[:k]
        return Choice(cells, torch.tensor([known[cell] for cell in cells.tolist()]))


@dataclass(frozen=True)
class Setting:
    """How a reader gets its pictures.

    Attributes:
        selector: what an adapter takes, made for a seed.
        k: tokens; None: all groups.
        mode, thumbnail, gate, strength: of the adapter.
        embedding: makes that of the adapter, when a reader is made.
        shrinks: whether pictures are shrunk to k groups instead.
        asks: whether the selector takes the question.
        coarse: whether a `Given` selector is given the token that shows a card whole, or all groups that it lies in; None: either, by
            chance.
    """

    selector: Callable[[int], Any] = lambda seed: "random"
    k: int | None = 16
    mode: str = "prune_pre"
    thumbnail: str | None = None
    embedding: Callable[[], Any] = lambda: None
    gate: str = "blend"
    strength: str = "random"
    shrinks: bool = False
    asks: bool = False
    coarse: bool | None = False

    @property
    def dense(self) -> bool:
        """Whether the tower sees all of a picture."""
        return (self.k is None or self.mode != "prune_pre") and not self.shrinks

    def pictures(self, data: Cards) -> int:
        """Of a step."""
        return min(BATCH, TOKENS // (data.kind.groups**2 if self.k is None or self.dense else self.k))


class Reading:
    """A reader, its adapter, and the batches they take.

    Args:
        model: from `reader`; it is trained in place.
        setting: see there.
        seed: of the selector and of chance.
    """

    def __init__(self, model: Any, setting: Setting, seed: int) -> None:
        self.model, self.setting, self.words = model, setting, Words()
        self.generator = torch.Generator().manual_seed(seed)
        self.selector = setting.selector(seed)
        self.adapter = QwenVLAdapter(
            model,
            self.selector,
            None if setting.shrinks else setting.k,
            setting.mode,
            thumbnail=setting.thumbnail,
            embedding=setting.embedding(),
            pixels=(CELL * CELL, 1 << 24),
            generator=self.generator,
            gate=setting.gate,
            strength=setting.strength,
        )
        if setting.mode != "prune_pre" or self.learner is not None:
            self.adapter.attach()

    @property
    def learner(self) -> nn.Module | None:
        """The selector, where it learns."""
        return self.selector if isinstance(self.selector, nn.Module) else None

    def prepared(self, examples: Sequence[dict[str, Any]], chain: int, training: bool) -> PreparedBatch:
        """A batch of pictures, with `chain` questions about each."""
        if self.learner is not None:
            self.learner.train(training)
        rows, labels = [], []
        for example in examples:
            asked = example["cards"][:chain]
            said = [self.words.question(colour) + self.words.answer(digit) for colour, digit in asked]
            rows.append([START, IMAGE, END, *(i for pair in said for i in pair)])
            labels.append([IGNORED] * 3 + [i for _, digit in asked for i in (IGNORED, *self.words.answer(digit))])
            if isinstance(self.selector, Given):
                self.selector.next.append(example.get("given") or everything(example, bool(self.setting.coarse)))
        images = [self.shrunk(example["image"]) if self.setting.shrinks else example["image"] for example in examples]
        inputs = {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)}
        query = [example["question"] for example in examples] if self.setting.asks else None
        with torch.set_grad_enabled(training):  # a scorer explores where its scores can learn
            batch = self.adapter.prepare(inputs, images, query=query)
        return PreparedBatch({name: v.detach() if isinstance(v, Tensor) else v for name, v in batch.items()})

    def shrunk(self, image: Tensor) -> Tensor:
        """A picture of k groups."""
        k = self.setting.k or 0
        rows = 1 << (k.bit_length() - 1) // 2
        size = (rows * CELL, k // rows * CELL)
        return F.interpolate(image[None].float(), size, mode="bicubic", antialias=True)[0].clamp(0, 255).round().byte()

    @torch.no_grad()
    def measure(self, data: Cards, count: int) -> tuple[Tensor, float, float]:
        """Of the first `count` questions: which are answered right, bool [count]; how much of the cards is kept; and seconds for each.

        Kept is the part of the token that would show the card whole (of its groups) that kept tokens of its level or finer ones show.
        Choosing is part of the time.
        """
        self.model.eval()
        size, right, kept, seconds = self.setting.pictures(data), [], 0.0, 0.0
        for first in range(0, count, size):
            examples = [data[i] for i in range(first, min(count, first + size))]
            start = time.perf_counter()
            batch = self.prepared(examples, 1, training=False)
            said = self.model(**batch).logits[:, -2].argmax(-1)
            seconds += time.perf_counter() - start
            right.append(said == batch["labels"][:, -1])
            kept += sum(
                shown(example, batch["texvlm_cells"][batch["texvlm_cells"][:, 0] == i]) for i, example in enumerate(examples)
            )
        return torch.cat(right), float("nan") if self.setting.shrinks else kept / count, seconds / count


def given(example: dict[str, Any], coarse: bool, there: Sequence[bool] = (True,) * len(NAMES)) -> tuple[list[Token], list[Token]]:
    """Tokens of the cards that are there, that which is asked for first, and those of decoys."""
    found = example["tokens" if coarse else "cells"]
    named = [token for tokens, is_there in zip(found, there) if is_there for token in tokens]
    return named, [token for tokens in found[len(NAMES) :] for token in tokens]


def everything(example: dict[str, Any], coarse: bool) -> list[Token]:
    """Both."""
    named, decoys = given(example, coarse)
    return named + decoys


def shown(example: dict[str, Any], kept: Tensor) -> float:
    """How much of the asked card kept tokens [n, 4] show, see `Reading.measure`."""
    ((cell, level),) = example["tokens"][0]
    across, side = example["image"].shape[-1] // CELL, 1 << level
    found = 0
    for other, fine in kept[:, 2:].tolist():
        rows, columns = other // across - cell // across, other % across - cell % across
        found += 0 <= fine <= level and 0 <= rows < side and 0 <= columns < side and 4**fine
    return found / side**2


@dataclass
class Schedule:
    """What a training does.

    Attributes:
        steps: of the optimiser.
        rate: of learning; rises for 20 steps and falls to 0.
        selector_rate: that of the selector.
        entropy: weight of a bonus for a selector that is undecided, which falls to 0.
        seed: of the order of pictures and questions.
        hidden: the largest share of cards that a `Given` selector leaves out of a picture, for noise and decoys, in the second half of the
            steps: so that a reader which can read learns when it cannot know.
    """

    steps: int = 100
    rate: float = 3e-3
    selector_rate: float = 2e-2
    entropy: float = 0.5
    seed: int = 0
    hidden: float = 0.0


class Training:
    """A training that can be broken off and gone on with.

    Args:
        reading: what learns.
        data: to learn from, one part after another: each has as many steps.
        schedule: see there.
    """

    def __init__(self, reading: Reading, data: Sequence[Cards], schedule: Schedule) -> None:
        self.reading, self.data, self.schedule, self.step = reading, data, schedule, 0
        self.generator = torch.Generator().manual_seed(schedule.seed)
        self.losses: list[float] = []
        learner = reading.learner
        own = set() if learner is None else {id(p) for p in learner.parameters()}
        groups = [{"params": [p for p in reading.model.parameters() if id(p) not in own], "lr": schedule.rate}]
        if learner is not None:
            groups.append({"params": list(learner.parameters()), "lr": schedule.selector_rate})
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
        self.rates = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20) * max(0.0, 1 - step / schedule.steps) ** 0.5
        )

    def examples(self) -> list[dict[str, Any]]:
        """Those of the next step, each with a question of chance first."""
        data = self.data[self.step * len(self.data) // self.schedule.steps]
        size = self.reading.setting.pictures(data)
        found = []
        for i in torch.randint(len(data), (size,), generator=self.generator).tolist():
            example = dict(data[i])
            order = torch.randperm(len(NAMES) - 1, generator=self.generator).tolist()
            example["cards"] = [example["cards"][0], *(example["cards"][1:][j] for j in order)]
            if isinstance(self.reading.selector, Given):
                example["given"] = self._given(example)
            found.append(example)
        return found

    def _given(self, example: dict[str, Any]) -> list[Token]:
        """What a `Given` selector keeps of a picture."""
        coarse = self.reading.setting.coarse
        if coarse is None:
            coarse = bool(torch.rand((), generator=self.generator) < 0.5)
        if not self.schedule.hidden or self.step <= self.schedule.steps // 2:
            return everything(example, coarse)
        share = self.schedule.hidden * float(torch.rand((), generator=self.generator))  # once it can read
        named, decoys = given(example, coarse, (torch.rand(len(NAMES), generator=self.generator) >= share).tolist())
        noise = torch.randint((example["image"].shape[-1] // CELL) ** 2, (8,), generator=self.generator).tolist()
        return [*named, *((cell, 0) for cell in noise), *decoys]

    def run(self, until: int | None = None) -> None:
        """Steps until that one, or the last."""
        model = self.reading.model
        until = self.schedule.steps if until is None else until
        while self.step < until:
            batch = self.reading.prepared(self.examples(), 1 if self.reading.setting.asks else len(NAMES), training=True)
            model.train()
            read = model(**batch).loss
            loss, schedule = read, self.schedule
            if self.reading.learner is not None:
                loss = loss - schedule.entropy * (1 - self.step / schedule.steps) * self.reading.adapter.entropy(batch)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.rates.step()
            self.step += 1
            self.losses.append(float(read.detach()))

    def _parts(self) -> dict[str, Any]:
        """A selector that learns is a submodule of the model."""
        return {"model": self.reading.model, "optimizer": self.optimizer, "rates": self.rates}

    def save(self, path: str | Path) -> None:
        """All that `load` needs to go on to the same weights."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        chance = {
            "order": self.generator.get_state(),
            "chance": self.reading.generator.get_state(),
            "gates": torch.get_rng_state(),
        }
        torch.save({**state, **chance, "step": self.step, "losses": self.losses}, path)

    def load(self, path: str | Path) -> None:
        """What `save` saved."""
        state = torch.load(path, weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.generator.set_state(state["order"])
        self.reading.generator.set_state(state["chance"])
        torch.set_rng_state(state["gates"])
        self.step, self.losses = state["step"], state["losses"]


def warm(seed: int, data: Sequence[Cards], steps: int) -> Training:
    """Of the reader that all rows begin with: it has seen most of the cards sharply or as one token, among decoys and noise."""
    reading = Reading(reader(seed), Setting(lambda _: Given(), 16, coarse=None), seed)
    training = Training(reading, data, Schedule(steps, seed=seed, hidden=1.0))
    training.run()
    return training


def started(weights: dict[str, Tensor], setting: Setting, seed: int) -> Reading:
    """A reader of its own, from these weights."""
    model = reader(seed)
    model.load_state_dict(weights)
    return Reading(model, setting, seed)
