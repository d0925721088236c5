"""The training loop: a task, an allocator, an estimator; checkpoints, exact resume, mixed precision, several processes."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from texvlm.allocator import Allocator
from texvlm.soft_selection import gumbel_noise, soft_topk
from texvlm.training.estimators import ESTIMATORS, Choice, Noise, hard
from texvlm.training.maps import Sample, heat_map

SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "geometric": lambda start, end, t: start * (end / start) ** t,
    "linear": lambda start, end, t: start + (end - start) * t,
    "cosine": lambda start, end, t: end + (start - end) * (0.5 + 0.5 * math.cos(math.pi * t)),
}


@dataclass(frozen=True)
class Annealing:
    """A number that goes from `start` to `end` along training: the temperature.

    Attributes:
        start, end: positive.
        shape: "geometric", "linear" or "cosine".

    Example:
        >>> from texvlm.training import Annealing
        >>> [round(Annealing(1.0, 0.01)(t), 2) for t in (0, 0.5, 1)]
        [1.0, 0.1, 0.01]
    """

    start: float = 1.0
    end: float = 0.05
    shape: str = "geometric"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be {', '.join(SHAPES)}, got {self.shape!r}")
        if not (0 < self.start < math.inf and 0 < self.end < math.inf):
            raise ValueError(f"start and end must be positive, got {self.start} and {self.end}")

    def __call__(self, t: float) -> float:
        """The number at t, 0 (first step) to 1 (last step)."""
        return SHAPES[self.shape](self.start, self.end, min(max(t, 0.0), 1.0))


@dataclass(frozen=True)
class Settings:
    """How an allocator is trained. A resumed run must have the same, but for what only says where and how often to write.

    Attributes:
        steps: of the optimiser (AdamW).
        batch: examples in a step, over all processes.
        rate: of learning, after `warmup` steps; it falls to 0 along half a cosine.
        warmup: steps.
        decay: of weights.
        clip: largest norm of the gradient.
        estimator: one of `ESTIMATORS`.
        temperature: of the estimator; of "perturbed" its sigma.
        samples: of "perturbed".
        entropy: weight of the mean entropy of the soft selection's weights: presses them to 0 or 1.
        balance: weight of the load balance, N / k^2 sum over cells of the squared mean use, less 1: 0 if a process's examples use all cells
            alike. Against a selector that looks at the same places in every picture.
        precision: "fp32", or "bf16": the allocator runs under autocast; its scores and all that follows are float32.
        seed: of examples and noise. What is drawn depends on it, the step and nothing else.
    """

    steps: int = 1000
    batch: int = 32
    rate: float = 1e-2
    warmup: int = 50
    decay: float = 0.0
    clip: float = 1.0
    estimator: str = "noisy_topk"
    temperature: Annealing = field(default_factory=Annealing)
    samples: int = 100
    entropy: float = 0.0
    balance: float = 0.0
    precision: str = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("estimator", tuple(ESTIMATORS)), ("precision", ("fp32", "bf16"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("steps", "batch", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Examples(Protocol):
    """What the loop knows of a batch."""

    features: Tensor
    query: Tensor | None

    def to(self, device: torch.device) -> Any:
        """The same on a device."""

    def part(self, number: int, of: int) -> Any:
        """One of `of` equal parts."""


class Task(Protocol):
    """What an allocator is trained for. `ProxyTask` is one.

    Attributes:
        k: cells that are kept.
        held_out: examples that are measured on.
    """

    k: int
    held_out: Any

    def draw(self, count: int, generator: torch.Generator) -> Any:
        """Examples to train on, from this generator alone."""

    def figure(self, choice: Choice, batch: Any) -> Tensor:
        """How good a choice is, [B], 1 at best; differentiable in its weights. The loss is 1 less its mean."""

    def random(self) -> float:
        """The figure of k cells at random, on what is held out."""


@dataclass
class Report:
    """What came out.

    Attributes:
        hard: the figure on what is held out, of the k best cells, as deployed.
        soft: the same as trained: of the estimator's choice at the last temperature.
        random: of k cells at random.
        estimator: its name.
        steps: that were made.
        seconds: of this run.
        history: step, loss, hard, temperature along training.
    """

    hard: float
    soft: float
    random: float
    estimator: str
    steps: int
    seconds: float
    history: list[dict[str, float]]

    @property
    def gap(self) -> float:
        """What is lost between training and deployment."""
        return self.soft - self.hard

    def __str__(self) -> str:
        return (
            f"{self.estimator}, {self.steps} steps, {self.seconds:.0f} s: deployed hard {self.hard:.3f}, as trained {self.soft:.3f} "
            f"(gap {100 * self.gap:+.1f} points), random {self.random:.3f}"
        )


class Trainer:
    """Trains an allocator for a task.

    Under torchrun (RANK and WORLD_SIZE are set, the process group is `distributed`) each process takes its part of every batch, and the
    gradients are those of one process on the whole.

    Args:
        allocator: is trained in place, on the device it is on.
        task: see `Task`.
        settings: see `Settings`.
        folder: where checkpoint.pt, report.json, the allocator and maps are written; None: nowhere.
        every: steps between checkpoints, figures and maps.
        sample: a picture to draw heat maps of along training, into `folder`.

    Example:
        >>> import texvlm
        >>> from texvlm.training import ProxyTask, Settings, Trainer
        >>> allocator = texvlm.Allocator()
        >>> report = Trainer(allocator, ProxyTask(allocator, pictures=2, held_out=2), Settings(steps=2, batch=4)).fit(progress=False)
        >>> report.steps, 0 <= report.hard <= 1
        (2, True)
    """

    def __init__(
        self,
        allocator: Allocator,
        task: Task,
        settings: Settings | None = None,
        folder: str | Path | None = None,
        every: int = 100,
        sample: Sample | None = None,
    ) -> None:
        self.allocator, self.task, self.settings = allocator, task, settings or Settings()
        self.folder = None if folder is None else Path(folder)
        self.every, self.sample = every, sample
        self.device = next(allocator.parameters()).device
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self.settings.batch % self.world:
            raise ValueError(f"batch must be a multiple of the {self.world} processes, got {self.settings.batch}")
        self.model: nn.Module = allocator
        if self.world > 1:
            on = [self.device.index] if self.device.type == "cuda" else None
            self.model = DistributedDataParallel(allocator, device_ids=on)
        self.optimiser = torch.optim.AdamW(allocator.parameters(), self.settings.rate, weight_decay=self.settings.decay)
        self.step, self.history = 0, list[dict[str, float]]()

    # ---- one step ----

    def temperature(self) -> float:
        """At this step."""
        return self.settings.temperature(self.step / max(1, self.settings.steps - 1))

    def rate(self) -> float:
        """Of learning, at this step."""
        s = self.settings
        return s.rate * min(1.0, (self.step + 1) / max(1, s.warmup)) * (0.5 + 0.5 * math.cos(math.pi * self.step / s.steps))

    def scores(self, batch: Examples) -> Tensor:
        """Of the cells of these examples, float32 [B, N]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            return self.model(batch.features, batch.query).float()

    def choose(self, scores: Tensor, noise: Noise) -> Choice:
        """What the estimator reads at this step's temperature."""
        s = self.settings
        return ESTIMATORS[s.estimator](scores, self.task.k, self.temperature(), noise, s.samples)

    def loss(self, step: int) -> Tensor:
        """Of this process's part of a step's batch. Examples and noise depend on the seed and the step alone."""
        s = self.settings
        generator = torch.Generator().manual_seed((s.seed << 32) + step)
        batch = self.task.draw(s.batch, generator)
        gumbel = gumbel_noise(torch.empty(batch.features.shape[:2]), generator)
        local = batch.part(self.rank, self.world).to(self.device)
        scores = self.scores(local)
        loss = 1 - self.task.figure(self.choose(scores, self._noise(gumbel, step)), local).mean()
        if s.entropy or s.balance:
            weight = soft_topk(scores, self.task.k, self.temperature())
            loss = loss + s.entropy * entropy(weight) + s.balance * load_balance(weight)
        return loss

    def _noise(self, gumbel: Tensor, step: int) -> Noise:
        size = len(gumbel) // self.world
        gumbel = gumbel[self.rank * size :][:size].to(self.device)
        seed = ((self.settings.seed << 32) + step) * self.world + self.rank
        return Noise(gumbel, torch.Generator(self.device).manual_seed(seed), seed % (1 << 62))

    def advance(self) -> float:
        """Makes one step; returns the loss, of this process.

        Raises:
            FloatingPointError: the loss is not finite; the weights are those before.
        """
        self.model.train()
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()
        self.optimiser.zero_grad()
        loss = self.loss(self.step)
        if not loss.isfinite():
            raise FloatingPointError(f"loss must be finite, got {float(loss.detach())} at step {self.step}")
        loss.backward()
        nn.utils.clip_grad_norm_(self.allocator.parameters(), self.settings.clip)
        self.optimiser.step()
        self.step += 1
        return float(loss.detach())

    # ---- all of them ----

    def fit(self, resume: bool = False, progress: bool = True) -> Report:
        """Trains to the last step.

        Args:
            resume: go on from the checkpoint in `folder`, if there is one; the weights come out as without the interruption.
            progress: say how it goes.
        """
        if resume:
            self.load()
        start = time.perf_counter()
        with _progress(self.settings.steps, progress and self.rank == 0) as say:
            while self.step < self.settings.steps:
                if self.step == 0:
                    self._map()
                temperature = self.temperature()
                loss = self.advance()
                if self.step % self.every == 0 or self.step == self.settings.steps:
                    figure = float(self.measure().mean())
                    self.history.append({"step": self.step, "loss": loss, "hard": figure, "temperature": temperature})
                    self._map()
                    self.save()
                    say(self.step, f"loss {loss:.3f}, deployed hard {figure:.3f}, temperature {temperature:.3g}")
                else:
                    say(self.step, None)
        return self.report(time.perf_counter() - start)

    @torch.no_grad()
    def measure(self, batch: Any = None, soft: bool = False) -> Tensor:
        """Figures [B] of the k best cells, or (soft) of the estimator's choice, as trained; on what is held out by default."""
        batch = (self.task.held_out if batch is None else batch).to(self.device)
        self.allocator.eval()
        scores = self.allocator(batch.features, batch.query)
        if not soft:
            return self.task.figure(hard(scores, self.task.k), batch)
        generator = torch.Generator().manual_seed(self.settings.seed)
        noise = Noise(gumbel_noise(torch.empty(scores.shape), generator).to(self.device), _like(generator, self.device), 0)
        return self.task.figure(self.choose(scores, noise), batch)

    def report(self, seconds: float = 0.0) -> Report:
        """What came out; also written, with the allocator, where there is a folder."""
        figures = float(self.measure().mean()), float(self.measure(soft=True).mean())
        report = Report(*figures, self.task.random(), self.settings.estimator, self.step, seconds, self.history)
        if self.folder is not None and self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.allocator.save_pretrained(self.folder / "allocator")
            written = {**asdict(report), "gap": report.gap, "settings": asdict(self.settings)}
            (self.folder / "report.json").write_text(json.dumps(written, indent=1) + "\n")
        return report

    # ---- what is written ----

    def save(self) -> None:
        """Writes the checkpoint: it is there as a whole, or the one before is."""
        if self.folder is None or self.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "checkpoint.pt"
        state = {
            "settings": asdict(self.settings),
            "config": self.allocator.config,
            "step": self.step,
            "history": self.history,
            "allocator": self.allocator.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self) -> None:
        """Takes up the checkpoint in the folder, if there is one.

        Raises:
            ValueError: no folder, or the checkpoint is of other settings or of another allocator.
        """
        if self.folder is None:
            raise ValueError("resume needs folder=, where the checkpoint is")
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name, ours in (("settings", asdict(self.settings)), ("config", self.allocator.config)):
            if apart := [key for key in ours if state[name].get(key) != ours[key]]:
                got = ", ".join(f"{key} = {state[name].get(key)!r} there, {ours[key]!r} here" for key in apart)
                raise ValueError(f"{path} is of another run: {got}")
        self.allocator.load_state_dict(state["allocator"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.history = state["step"], state["history"]

    def _map(self) -> None:
        """The heat map of the sample, as it is now."""
        if self.folder is None or self.rank or self.sample is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.allocator.eval()
        with torch.no_grad():
            scores = self.allocator(self.sample.features.to(self.device), self.sample.query.to(self.device))[0].cpu()
        heat_map(self.sample, scores, self.task.k).save(self.folder / f"map-{self.step:06d}.png")


def entropy(weight: Tensor) -> Tensor:
    """Mean entropy of weights [B, N] as probabilities, in nats: 0 if all are 0 or 1."""
    w = weight.clamp(1e-6, 1 - 1e-6)
    return -(w * w.log() + (1 - w) * (1 - w).log()).mean()


def load_balance(weight: Tensor) -> Tensor:
    """N sum_i u_i^2 - 1, u_i the share of all weight [B, N] that cell i gets: 0 if all get the same."""
    use = weight.mean(0)
    use = use / use.sum()
    return len(use) * use.square().sum() - 1


def _like(generator: torch.Generator, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(generator.initial_seed())


@contextmanager
def distributed() -> Iterator[torch.device]:
    """Joins the process group of torchrun where there is one, by nccl with CUDA, else gloo; leaves it at the end. Gives the device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    ours = "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if cuda:
        torch.cuda.set_device(device)
    if ours:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        if ours:
            dist.destroy_process_group()


@contextmanager
def _progress(steps: int, wanted: bool) -> Iterator[Callable[[int, str | None], None]]:
    """How far it is: a bar where rich is installed and the output is a terminal, else a line for each message."""
    bar: Any = None
    if wanted:
        try:
            from rich.console import Console
            from rich.progress import Progress

            if Console().is_terminal:
                bar = Progress()
        except ImportError:
            pass
    if bar is None:

        def say(step: int, message: str | None) -> None:
            if wanted and message is not None:
                print(f"step {step} of {steps}: {message}", flush=True)

        yield say
        return
    with bar:
        task = bar.add_task("training", total=steps)

        def show(step: int, message: str | None) -> None:
            bar.update(task, completed=step)
            if message is not None:
                bar.console.print(f"step {step}: {message}")

        yield show
