"""The rows of Megapixel Digits: trained on canvases that grow, measured deployed; and those that need no training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import texvlm
from benchmarks._harness import peak_memory
from benchmarks._megapixel import CELL, DIGITS, GRID, Bank, Batch, compose, recall
from benchmarks._selectors import (
    DEPLOYED,
    ESTIMATORS,
    TAUGHT,
    Context,
    Downscaled,
    Estimator,
    Picked,
    Reader,
    Scorer,
    read,
    relaxed,
    taught,
)

CURRICULUM = ((8, 32, 0.7), (16, 16, 0.15), (32, 8, 0.05), (GRID, 4, 0.1))
"""Cells along a side of the canvases, canvases a step, and the share of the time."""
POOL = (80, 40, 12, 8)  # batches that each of these draws from
SHOWN = 4  # canvases of a test batch
MOST = 8  # cells for one that is kept, at least
REHEARSAL = 0.5  # of the steps are on canvases of an earlier stage
RATE, DECAY, CLIP = 4e-3, 1e-2, 1.0

DEFAULT, ORACLE, FULL, DOWNSCALE, RANDOM, CENTRE = TAUGHT, "oracle", "full resolution", "downscale", "random", "centre"
PATHS = ("salience", "five_stage", "anisotropic_text")
FIXED = (RANDOM, CENTRE, *PATHS)
TRAINED = (FULL, DOWNSCALE, ORACLE, *ESTIMATORS)
NOISE = ", noise"  # the control of a trained selector
PATH_CANVASES = 40  # that paths of `select` are measured on, a seed


class Model(nn.Module):
    """One trained row: what it picks, and how it reads that."""

    def __init__(self, row: str, k: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.row, self.k = row, k
        self.generator = torch.Generator().manual_seed(seed)
        self.estimator = ESTIMATORS.get(row.removesuffix(NOISE))
        self.scorer = Scorer(noise=row.endswith(NOISE)) if self.estimator else None
        self.reader = Downscaled() if row == DOWNSCALE else Reader()

    def budget(self, batch: Batch) -> int:
        """k, or fewer on the smallest canvases of training, which would else be kept by half."""
        return min(self.k, max(DIGITS, batch.grid**2 // MOST))

    def context(self, batch: Batch, progress: float) -> Context:
        return Context(self.budget(batch), progress, self.generator)

    def picked(self, batch: Batch, progress: float, estimator: Estimator | None) -> Picked:
        """What is read of a batch; with the estimator for training, or another."""
        if self.row == FULL:
            return Picked(batch.everything())
        if self.scorer is None or estimator is None:
            return Picked(oracle(batch, self.budget(batch), self.generator))
        return estimator(self.scorer(batch), self.context(batch, progress))

    def read(self, batch: Batch, picked: Picked) -> Tensor:
        """Logits of what was picked."""
        assert isinstance(self.reader, Reader)
        return read(self.reader, batch, picked)

    def forward(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor]:
        """The loss and the logits of training."""
        extra: Tensor | None = None
        if isinstance(self.reader, Downscaled):
            logits = self.reader(batch, self.k)
        elif self.row.removesuffix(NOISE) == TAUGHT and self.scorer is not None and self.estimator is not None:
            scores, context = self.scorer(batch), self.context(batch, progress)
            logits, extra = taught(self.reader, batch, scores, self.estimator(scores, context), context)
        else:
            picked = self.picked(batch, progress, self.estimator)
            logits, extra = self.read(batch, picked), picked.loss
        loss = F.cross_entropy(logits, batch.labels)
        return (loss if extra is None else loss + extra), logits

    def deployed(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits, and the cells that were read."""
        if isinstance(self.reader, Downscaled):
            return self.reader(batch, self.k), None
        picked = self.picked(batch, 1.0, DEPLOYED.get(self.row.removesuffix(NOISE)))
        return self.read(batch, picked), picked.indices


def oracle(batch: Batch, k: int, generator: torch.Generator) -> Tensor:
    """The cells that hold digits, and others at random."""
    order = torch.rand(len(batch.labels), batch.grid**2, generator=generator)
    return order.scatter_add(1, batch.digits, torch.ones_like(batch.digits, dtype=order.dtype)).topk(k, 1).indices


def random(batch: Batch, k: int, generator: torch.Generator) -> Tensor:
    return torch.rand(len(batch.labels), batch.grid**2, generator=generator).topk(k, 1).indices


def centre(batch: Batch, k: int, generator: torch.Generator) -> Tensor:
    """The k cells nearest to the middle of the canvas."""
    at = torch.arange(batch.grid) - (batch.grid - 1) / 2
    far = (at[:, None] ** 2 + at**2).flatten()
    return far.argsort(stable=True)[:k].expand(len(batch.labels), -1)


def along(path: str) -> Callable[[Batch, int, torch.Generator], Tensor]:
    """A path of `texvlm.select`."""

    def pick(batch: Batch, k: int, generator: torch.Generator) -> Tensor:
        pictures = batch.texture.level(0).float()
        return torch.cat([texvlm.select(picture.expand(3, -1, -1), k=k, cell=CELL, path=path).indices for picture in pictures])

    return pick


PICKS = {RANDOM: random, CENTRE: centre, **{path: along(path) for path in PATHS}, ORACLE: oracle}


class Data(NamedTuple):
    """What a seed trains and is measured on."""

    pools: list[list[Batch]]  # by stage of the curriculum
    test: list[Batch]


def data(train: Bank, test: Bank, seed: int, shown: int, share: float = 1.0) -> Data:
    """Batches of a seed; `share` of the training pools."""
    pools = [
        [Batch.of(compose(train, 100_000 * seed + 1000 * stage + i, count, grid)) for i in range(max(1, round(share * pool)))]
        for stage, ((grid, count, _), pool) in enumerate(zip(CURRICULUM, POOL))
    ]
    # labels are even over ten canvases, which are shown a few at a time
    drawn = [compose(test, 1000 * seed + i, 2 * SHOWN + 2) for i in range(max(1, shown // (2 * SHOWN + 2)))]
    return Data(pools, [Batch.of(canvases, torch.float16) for canvases in drawn])


class Trained(NamedTuple):
    model: Model
    steps: int
    milliseconds: float  # a step on whole canvases, processor time


def train(row: str, k: int, seed: int, pools: list[list[Batch]], seconds: float, steps: int | None = None) -> Trained:
    """A row, trained for so much processor time, or for so many steps of each stage."""
    model = Model(row, k, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    order = torch.Generator().manual_seed(seed)
    spent, total, done, whole = 0.0, 0, 0.0, []
    for stage, (_, _, share) in enumerate(CURRICULUM):
        began, count, done = done, 0, done + share
        while count < steps if steps is not None else spent < done * seconds:
            progress = min(1.0, began + share * count / steps if steps is not None else spent / seconds)
            earlier = stage and torch.rand((), generator=order) < REHEARSAL
            at = int(torch.randint(stage, (), generator=order)) if earlier else stage
            batch = pools[at][int(torch.randint(len(pools[at]), (), generator=order))]
            start = time.process_time()
            for group in optimiser.param_groups:
                group["lr"] = RATE * min(1.0, 20 * progress + 0.05) * (1 - 0.95 * progress)
            optimiser.zero_grad()
            model(batch, progress)[0].backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimiser.step()
            took = time.process_time() - start
            spent, total, count = spent + took, total + 1, count + 1
            if at == len(pools) - 1:
                whole.append(took)
    return Trained(model.eval(), total, 1e3 * statistics.fmean(whole) if whole else 0.0)


def megabytes(model: Model, batch: Batch) -> float | None:
    """By how much a step of training on whole canvases raises the memory."""
    moved = peak_memory(lambda: model(batch, 1.0)[0].backward())
    return None if moved is None else moved / 1e6


class Score(NamedTuple):
    accuracy: float
    recall: float | None
    soft: float | None = None  # accuracy as trained, with the noise of the end
    relaxed: float | None = None  # accuracy with the soft weights as a bias


@torch.no_grad()
def measured(model: Model, test: list[Batch], soft: bool, draws: int = 1) -> Score:
    """A trained row, deployed; over several draws where it chooses by noise."""
    right: dict[str, list[float]] = {"hard": [], "soft": [], "relaxed": []}
    found = []

    def note(name: str, logits: Tensor, batch: Batch) -> None:
        right[name].append(float((logits.argmax(1) == batch.labels).float().mean()))

    for batch in test:
        for _ in range(draws):
            logits, cells = model.deployed(batch)
            note("hard", logits, batch)
            if cells is not None:
                found.append(recall(cells, batch.digits))
        if soft and model.scorer is not None:
            shown = model.read(batch, model.picked(batch, 1.0, relaxed))
            note("relaxed", shown, batch)
            # all cells of whole canvases are too many for the one that reads them all
            note("soft", shown if model.row == "soft bias" else model(batch, 1.0)[1], batch)
    mean = {name: statistics.fmean(values) if values else None for name, values in right.items()}
    return Score(mean["hard"] or 0.0, statistics.fmean(found) if found else None, mean["soft"], mean["relaxed"])


@torch.no_grad()
def untrained(test: list[Batch], k: int, seed: int) -> dict[str, list[Tensor]]:
    """The cells of every row without training, best first: the first of them are what it would keep of fewer.

    Paths of `select` are slow and look at PATH_CANVASES only.
    """
    few = test[: max(1, PATH_CANVASES // len(test[0].labels))]
    found = {}
    for row, pick in PICKS.items():
        generator = torch.Generator().manual_seed(seed)
        found[row] = [pick(batch, k, generator) for batch in (few if row in PATHS else test)]
    return found


@torch.no_grad()
def fixed(reader: nn.Module, cells: list[Tensor], test: list[Batch], k: int) -> Score:
    """A row without training, read by the oracle's reader."""
    assert isinstance(reader, Reader)
    right, found = [], []
    for batch, best in zip(test, cells):
        shown = best[:, :k].clamp(min=0)  # a path may keep fewer
        right.append(float((read(reader, batch, Picked(shown)).argmax(1) == batch.labels).float().mean()))
        found.append(recall(shown, batch.digits))
    return Score(statistics.fmean(right), statistics.fmean(found))
