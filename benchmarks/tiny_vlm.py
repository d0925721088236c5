"""Does choosing where to look help a vision-language model that is trained with the choice, from nothing?

A Qwen3-VL of half a million weights answers which digit is on the card of a colour, in pictures full of cards of other colours
(`_cards.py`), at 8, 16 and 32 tokens of 256. A reader is trained once a seed; each row goes on from there with its own, for as many steps.
`--model FOLDER --data LINES.jsonl` instead trains a selector through a checkpoint of one's own (see `texvlm.qwen.finetune`).
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import texvlm
from benchmarks import _cards
from benchmarks._cards import CELL, HUES, NAMES, OTHER_HUES, Cards
from benchmarks._harness import Bench
from benchmarks._tiny_reader import Given, Reading, Schedule, Setting, Training, started, warm
from texvlm.qwen.selectors import features_of

CHANCE = 0.1
TERMS = ("rms:edge", "entropy", "mean:saliency", "mean:red", "mean:green", "mean:blue")
BUDGETS = (16, 8, 32)
MAIN = ("downscale", "random", "salience", "query", "learned", "oracle")
"""Rows of all budgets; the others have the first."""


class Colours:
    """An embedding of pictures and of the names of colours: how near the mean of a group is to each of sixteen hues, and to grey."""

    name = "colours"

    def __init__(self) -> None:
        known = torch.stack([_cards.colour(hue) for hue in (*HUES, *OTHER_HUES)])
        self.known = torch.cat([known - known.mean(1, keepdim=True), torch.zeros(1, 3)])

    def _near(self, colours: Tensor) -> Tensor:
        chroma = colours - colours.mean(-1, keepdim=True)
        return (-(torch.cdist(chroma, self.known) / 0.12).square()).exp()

    def encode_image(self, pictures: Tensor) -> Tensor:
        """[B, 17, h, w], of groups. The mean of a card with ink on it is darker, and its chroma smaller, than the card's colour."""
        means = torch.nn.functional.avg_pool2d(pictures, CELL, ceil_mode=True).movedim(1, -1)
        return self._near(1.3 * means).movedim(-1, 1)

    def encode_text(self, texts: list[str]) -> Tensor:
        """[Q, 17]."""
        return self._near(torch.stack([_cards.colour(HUES[NAMES.index(text)]) for text in texts]))


class Blind(texvlm.Allocator):
    """An allocator that is shown noise: the negative control."""

    def forward(self, features: Tensor, query: Tensor | None = None) -> Tensor:
        """Scores of noise."""
        return super().forward(torch.randn_like(features), query)


@functools.cache
def data(test: bool, boards: int, shuffled: bool = False) -> Cards:
    return Cards(boards, test, shuffled=shuffled)


@functools.cache
def embedding() -> texvlm.Embedding:
    pictures = torch.stack([board.image for board in data(False, 64).boards[:16]])
    return texvlm.Embedding.fit(Colours(), pictures.float() / 255)


def allocator(seed: int, kind: type[texvlm.Allocator] = texvlm.Allocator) -> texvlm.Allocator:
    """One that knows nothing but the mean and the deviation of what it reads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = kind("mlp", TERMS, (), (), hidden=64, cell=CELL)
    return made.fit_normalisation(torch.cat([features_of(made, board.image, CELL) for board in data(False, 64).boards[:32]]))


def setting(row: str, k: int) -> Setting:
    """How the reader of that row gets its pictures."""
    name, _, variant = row.partition(", ")
    options: dict[str, Any] = {"k": k}
    if variant == "thumbnail":
        options["thumbnail"] = "segment"
    elif variant == "after the tower":
        options["mode"] = "prune_post"
    if name == "dense":
        return Setting(k=None)
    if name == "downscale":
        return Setting(k=k, shrinks=True)
    if name == "query":
        return Setting(lambda seed: "query", embedding=embedding(), asks=True, **options)
    made = {
        "random": lambda seed: "random",
        "salience": lambda seed: "salience",
        "learned": allocator,
        "noise": lambda seed: allocator(seed, Blind),
        "oracle": lambda seed: Given(),
        "shuffled": lambda seed: Given(),
    }
    return Setting(made[name], **options)


ROWS = (
    "dense",
    *MAIN,
    "noise",
    "shuffled",
    "random, thumbnail",
    "learned, thumbnail",
    "oracle, thumbnail",
    "learned, after the tower",
    "oracle, after the tower",
)


@dataclass(frozen=True)
class Job:
    """One training of one row."""

    row: str
    k: int
    seed: int
    steps: int
    boards: int
    count: int
    start: str


@dataclass
class Result:
    """What came of it: right answers to the held-out questions, seconds for each, cards kept, and scores of groups before and after."""

    job: Job
    right: Tensor
    seconds: float
    kept: float
    scores: tuple[Tensor, Tensor] | None = None

    @property
    def share(self) -> float:
        """Of the answers, those that are right."""
        return float(self.right.float().mean())


def scores_of(reading: Reading, image: Tensor) -> Tensor:
    """Of all groups of a picture, by a selector that learns."""
    learner = reading.learner
    assert isinstance(learner, texvlm.Allocator)
    with torch.no_grad():
        return learner.eval()(features_of(learner, image, CELL)[None])[0].reshape(-1, image.shape[-1] // CELL)


def work(job: Job) -> Result:
    """Trains and measures a row; in a process of its own, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    learn, test = data(False, job.boards, job.row == "shuffled"), data(True, job.count // len(NAMES), job.row == "shuffled")
    reading = started(torch.load(job.start, weights_only=True), setting(job.row, job.k), job.seed)
    picture = test.boards[0].image
    before = scores_of(reading, picture) if reading.learner is not None else None
    Training(reading, learn, Schedule(job.steps, rate=5e-4, selector_rate=1e-2, seed=job.seed)).run()
    right, seconds = reading.measure(test, job.count)
    looks = reading.setting.mode == "prune_pre" and not reading.setting.shrinks
    kept = reading.kept(test, min(job.count, 160)) if looks else float("nan")
    scores = None if before is None else (before, scores_of(reading, picture))
    return Result(job, right, seconds, kept, scores)


def begin(seed: int, steps: int, boards: int, path: str) -> list[float]:
    """The reader that all rows of a seed begin with."""
    torch.set_num_threads(1)
    training = warm(seed, data(False, boards), steps)
    torch.save(training.reading.model.state_dict(), path)
    return training.losses


def options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Those of this file, and the rest for the harness."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, help="how many (3; with --quick 1)")
    parser.add_argument("--steps", type=int, help="of each row (120; with --quick 20)")
    parser.add_argument("--warm", type=int, help="steps of the reader before (400; with --quick 60)")
    parser.add_argument("--boards", type=int, help="pictures to learn from, each with eight questions (1000; with --quick 100)")
    parser.add_argument("--count", type=int, help="questions to measure by (800; with --quick 80)")
    parser.add_argument("--rows", help=f"separated by ';' (all: {'; '.join(ROWS)})")
    parser.add_argument("--k", dest="budgets", help="budgets, separated by ',' (16,8,32; with --quick 16)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread (2)")
    if "-h" in (argv or sys.argv) or "--help" in (argv or sys.argv):
        parser.print_help()
    args, rest = parser.parse_known_args(argv)
    quick = "--quick" in rest
    for name, full, short in (("seeds", 3, 1), ("steps", 120, 20), ("warm", 400, 60), ("boards", 1000, 100), ("count", 800, 80)):
        setattr(args, name, getattr(args, name) or (short if quick else full))
    usual = BUDGETS[:1] if quick else BUDGETS
    args.budgets = [int(n) for n in args.budgets.split(",")] if args.budgets else list(usual)
    known = ("random", "learned", "oracle") if quick else ROWS
    args.rows = [row.strip() for row in args.rows.split(";")] if args.rows else list(known)
    if strangers := set(args.rows) - set(ROWS):
        raise SystemExit(f"no such rows: {'; '.join(strangers)} (there are: {'; '.join(ROWS)})")
    return args, rest


def trained(args: argparse.Namespace) -> Iterator[Result]:
    """Results as they come."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(args.workers) as pool:
        starts = {seed: str(Path(folder) / f"{seed}.pt") for seed in range(args.seeds)}
        for future in [pool.submit(begin, seed, args.warm, args.boards, path) for seed, path in starts.items()]:
            losses = future.result()
            print(f"  a reader: loss {losses[0]:.2f} to {sum(losses[-10:]) / len(losses[-10:]):.2f}", flush=True)
        jobs = [
            Job(row, k, seed, args.steps, args.boards, args.count, starts[seed])
            for row in args.rows
            for seed in range(args.seeds)
            for k in (args.budgets if row in MAIN else args.budgets[:1])
        ]
        for future in as_completed([pool.submit(work, job) for job in jobs]):
            yield future.result()


def interval(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """95 % of the mean difference of paired answers, by a bootstrap over questions."""
    difference = torch.cat([a.float() - b.float() for a, b in pairs])
    g = torch.Generator().manual_seed(0)
    means = difference[torch.randint(len(difference), (2000, len(difference)), generator=g)].mean(1)
    return float(means.quantile(0.025)), float(means.quantile(0.975))


def shown(row: str, k: int) -> int:
    """The tokens of a picture."""
    return (_cards.SIDE // CELL) ** 2 if row == "dense" else k


def draw(path: Path, image: Tensor, scores: tuple[Tensor, Tensor]) -> None:
    """A held-out picture, and what the learned selector scored its groups before and after, each from its least to its most."""
    from PIL import Image

    maps = [((s - s.min()) / (s.max() - s.min())).kron(torch.ones(CELL, CELL)).expand(3, -1, -1) for s in scores]
    sheet = torch.cat([image.float() / 255, *maps], 2).permute(1, 2, 0)
    Image.fromarray((sheet * 255).round().byte().numpy()).save(path, quality=88)
    print(f"  the picture is at {path}: cards, scores at the beginning, scores at the end")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--model" in argv:
        from texvlm.qwen.finetune import main as finetune

        return finetune(argv)
    args, rest = options(argv)
    bench = Bench(__doc__, rest)
    found: dict[tuple[str, int], list[Result]] = {}
    for done in trained(args):
        found.setdefault((done.job.row, done.job.k), []).append(done)
        job = done.job
        print(
            f"  seed {job.seed}, {job.row}, k = {shown(job.row, job.k)}: {100 * done.share:.1f} %, kept {done.kept:.3f}",
            flush=True,
        )
    for of in found.values():
        of.sort(key=lambda r: r.job.seed)
    accuracy = {key: sum(r.share for r in of) / len(of) for key, of in found.items()}
    print(f"\n  {'':26}{'k':>4}{'right %':>10}{'(seeds)':>22}{'asked card kept':>18}{'ms a question':>16}")
    for row in args.rows:
        for k in args.budgets:
            if (row, k) in found:
                of = found[row, k]
                each = " ".join(f"{100 * r.share:.1f}" for r in of)
                seconds = sorted(r.seconds for r in of)[len(of) // 2]
                kept = sum(r.kept for r in of) / len(of)
                print(f"  {row:26}{shown(row, k):4}{100 * accuracy[row, k]:10.1f}{each:>22}{kept:18.3f}{1e3 * seconds:16.2f}")
                bench.figure(f"{row}, {k}", {"right": [r.share for r in of], "kept": kept, "seconds": seconds})
    first = args.budgets[0]
    of = {row: accuracy[row, k] for row, k in accuracy if k == first}
    if {"learned", "oracle"} <= of.keys():
        bench.gate("learned over the oracle", of["learned"] / of["oracle"], at_least=0.9)
    for row in ("downscale", "salience", "random"):
        if {"learned", row} <= of.keys():
            bench.gate(f"points of learned above {row}", 100 * (of["learned"] - of[row]), at_least=20)
    if {"noise", "random"} <= of.keys():
        bench.gate("points between noise and random", abs(100 * (of["noise"] - of["random"])), at_most=3)
    if "shuffled" in of:
        bench.gate("points between shuffled pixels and chance", abs(100 * (of["shuffled"] - CHANCE)), at_most=3)
    if {"learned", "downscale"} <= of.keys():
        best = max((k for row, k in accuracy if row == "downscale"), key=lambda k: accuracy["downscale", k])  # slower ones too
        low, high = interval([(a.right, b.right) for a, b in zip(found["learned", first], found["downscale", best])])
        print(f"\nlearned at {first} above the best of downscale, at {best}: {100 * low:.1f} to {100 * high:.1f} points (95 %)")
        bench.gate("points of learned above the best of downscale, lower end of 95 %", 100 * low, at_least=0.0)
    for of_row in found.get(("learned", first), [])[:1]:
        if bench.args.json and of_row.scores is not None:
            draw(Path(bench.args.json).with_suffix(".jpg"), data(True, args.count // len(NAMES)).boards[0].image, of_row.scores)
    return bench.finish("; ".join(f"{row} {100 * share:.0f} %" for row, share in of.items()) + f" at {first} of 256 tokens")


if __name__ == "__main__":
    sys.exit(main())
