"""Does choosing where to look help a vision-language model that is trained with the choice, from nothing?

A Qwen3-VL of half a million weights answers what the card of a colour says, in pictures full of cards of other colours (`_cards.py`), at 8,
16 and 32 tokens of 256, with cards of three sizes, and at 32 of 1024. A reader is trained once a seed; each row goes on from there with its
own, for as many steps. `--model FOLDER --data LINES.jsonl` instead trains a selector through a checkpoint of one's own (see
`texvlm.qwen.finetune`).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import texvlm
from benchmarks import _cards
from benchmarks._cards import CELL, HUES, NAMES, OTHER_HUES, SIGNS, Cards, Kind
from benchmarks._harness import Bench
from benchmarks._tiny_reader import Given, Reading, Schedule, Setting, Training, started, warm
from texvlm.channel_sources import COLOURS
from texvlm.qwen.selectors import features_of

CHANCE = 1 / len(SIGNS)
TERMS = ("rms:edge", "entropy", *(f"{what}:{name}" for what in ("mean", "variance") for name in COLOURS))
BUDGET, BUDGETS = 16, (16, 8, 32)
LEVELS = 3

ALIGNED, CARDS = Kind(), Kind(jitter=2)
SIZES, LARGE = Kind(levels=LEVELS), Kind(512, jitter=2)
CURRICULUM = (ALIGNED, ALIGNED, CARDS, SIZES, CARDS, SIZES, CARDS, SIZES)
"""What the reader that all begin with learns on, one after another."""


PROCESSES = multiprocessing.get_context("spawn")
"""Forked ones would wait for ever where OpenMP has run before."""


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


class Shelf:
    """The pictures, drawn once and kept in a folder, for all processes.

    Args:
        folder: where.
        boards: pictures of a kind to learn from; a quarter as many of the large.
        count: questions to measure by.
    """

    def __init__(self, folder: Path, boards: int, count: int) -> None:
        self.folder, self.boards, self.count = folder, boards, count

    def fill(self, kind: Kind, test: bool) -> None:
        """Draws them, where they are not there."""
        path = self._path(kind, test)
        if not path.exists():
            learned = max(1, self.boards * 256**2 // kind.side**2)
            torch.save(Cards(-(-self.count // len(NAMES)) if test else learned, test, kind), path)

    def __call__(self, kind: Kind, test: bool = False) -> Cards:
        """Those of a kind."""
        return _read(self._path(kind, test))

    def _path(self, kind: Kind, test: bool) -> Path:
        return self.folder / f"{kind.side}-{kind.levels}-{kind.jitter}-{kind.shuffled}-{test}.pt"


@functools.cache
def _read(path: Path) -> Cards:
    found: Cards = torch.load(path, weights_only=False, mmap=True)
    return found


@functools.cache
def embedding() -> texvlm.Embedding:
    pictures = torch.stack([_cards.draw(i, kind=CARDS).image for i in range(16)])
    return texvlm.Embedding.fit(Colours(), pictures.float() / 255)


def allocator(seed: int, kind: Kind = CARDS, levels: int = 1, of: type[texvlm.Allocator] = texvlm.Allocator) -> texvlm.Allocator:
    """One that knows no more than the mean and the deviation of what it reads, with weights of chance."""
    terms = TERMS if levels == 1 else (*TERMS, "level")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = of("mlp", terms, (), (), hidden=64, cell=CELL, levels=levels)
    return made.fit_normalisation(evidence(kind, made.terms, levels))


@functools.cache
def evidence(kind: Kind, terms: tuple[str, ...], levels: int) -> Tensor:
    """Features of some pictures to learn from."""
    reads = texvlm.Allocator("linear", terms, (), (), cell=CELL, levels=levels)
    return torch.cat([features_of(reads, _cards.draw(i, kind=kind).image, CELL) for i in range(16)])


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        setting: how its reader gets pictures, but for k.
        kind: what they are like.
        budgets: at which it is measured.
    """

    setting: Setting
    kind: Kind = CARDS
    budgets: tuple[int, ...] = (BUDGET,)


def _learned(kind: Kind = CARDS, levels: int = 1, **options: Any) -> Setting:
    return Setting(lambda seed: allocator(seed, kind, levels), **options)


def _oracle(**options: Any) -> Setting:
    return Setting(lambda seed: Given(), **options)


def _named(path: str, **options: Any) -> Setting:
    return Setting(lambda seed: path, **options)


def _query(**options: Any) -> Setting:
    return _named("query", embedding=embedding, asks=True, **options)


SHRUNK = Setting(shrinks=True)
THUMBNAIL, AFTER = {"thumbnail": "segment"}, {"mode": "prune_post"}
LARGE_BUDGET = (32,)

ROWS = {
    "dense": Row(Setting(k=None)),
    "downscale": Row(SHRUNK, budgets=(*BUDGETS, 64)),
    "random": Row(_named("random"), budgets=BUDGETS),
    "salience": Row(_named("salience"), budgets=BUDGETS),
    "query": Row(_query(), budgets=BUDGETS),
    "learned": Row(_learned(), budgets=BUDGETS),
    "oracle": Row(_oracle(), budgets=BUDGETS),
    "learned from noise": Row(Setting(lambda seed: allocator(seed, of=Blind))),
    "oracle, ink scattered": Row(_oracle(), replace(CARDS, shuffled=True)),
    "random, thumbnail": Row(_named("random", **THUMBNAIL)),
    "salience, thumbnail": Row(_named("salience", **THUMBNAIL)),
    "query, thumbnail": Row(_query(**THUMBNAIL)),
    "learned, thumbnail": Row(_learned(**THUMBNAIL)),
    "oracle, thumbnail": Row(_oracle(**THUMBNAIL)),
    "learned, after the tower": Row(_learned(**AFTER)),
    "oracle, after the tower": Row(_oracle(**AFTER)),
    "three sizes: downscale": Row(SHRUNK, SIZES),
    "three sizes: learned": Row(_learned(SIZES), SIZES),
    "three sizes: learned multiscale": Row(_learned(SIZES, LEVELS), SIZES, (16, 8)),
    "three sizes: oracle": Row(_oracle(), SIZES),
    "three sizes: oracle, levels": Row(_oracle(coarse=True), SIZES, (16, 8)),
    "1024 groups: downscale": Row(SHRUNK, LARGE, LARGE_BUDGET),
    "1024 groups: random": Row(_named("random"), LARGE, LARGE_BUDGET),
    "1024 groups: learned": Row(_learned(LARGE), LARGE, LARGE_BUDGET),
    "1024 groups: oracle": Row(_oracle(), LARGE, LARGE_BUDGET),
}
QUICK = ("random", "learned", "oracle", "three sizes: learned multiscale")


@dataclass(frozen=True)
class Job:
    """One training of one row."""

    row: str
    k: int
    seed: int
    steps: int
    shelf: Shelf
    start: Path

    @property
    def setting(self) -> Setting:
        """How its reader gets its pictures."""
        setting = ROWS[self.row].setting
        return setting if setting.k is None else replace(setting, k=self.k)

    @property
    def tokens(self) -> int:
        """Of a picture."""
        return ROWS[self.row].kind.groups ** 2 if self.setting.k is None else self.k


@dataclass
class Result:
    """What came of it.

    Attributes:
        right: answers to the held-out questions, bool.
        kept: how much of the cards that are asked for.
        scores: of the groups of a held-out picture before and after, where a selector learns.
    """

    job: Job
    right: Tensor
    kept: float
    scores: tuple[Tensor, Tensor] | None = None

    @property
    def share(self) -> float:
        """Of the answers, those that are right."""
        return float(self.right.float().mean())


def scores_of(reading: Reading, image: Tensor) -> Tensor | None:
    """Of all groups of a picture, by a selector that learns."""
    learner = reading.learner
    if not isinstance(learner, texvlm.Allocator) or learner.levels > 1:
        return None
    with torch.no_grad():
        return learner.eval()(features_of(learner, image, CELL)[None])[0].reshape(-1, image.shape[-1] // CELL)


def work(job: Job) -> Result:
    """Trains and measures a row; in a process of its own, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    kind = ROWS[job.row].kind
    learn, test = job.shelf(kind), job.shelf(kind, test=True)
    reading = started(torch.load(job.start, weights_only=True), job.setting, job.seed)
    picture = test.boards[0].image
    before = scores_of(reading, picture)
    Training(reading, [learn], Schedule(job.steps, rate=5e-4, selector_rate=2e-2, seed=job.seed)).run()
    right, kept, _ = reading.measure(test, job.shelf.count)
    after = scores_of(reading, picture)
    return Result(job, right, kept, None if before is None or after is None else (before, after))


def seconds(job: Job) -> float:
    """For each question, choosing included: the best of three; with nothing beside it, on one thread."""
    torch.set_num_threads(1)
    reading = started(torch.load(job.start, weights_only=True), job.setting, job.seed)
    test, count = job.shelf(ROWS[job.row].kind, test=True), min(job.shelf.count, 64)
    return min(reading.measure(test, count)[2] for _ in range(3))


def begin(seed: int, steps: int, shelf: Shelf, path: Path) -> list[float]:
    """The reader that all rows of a seed begin with."""
    torch.set_num_threads(1)
    training = warm(seed, [shelf(kind) for kind in CURRICULUM], steps)
    torch.save(training.reading.model.state_dict(), path)
    return training.losses


def options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Those of this file, and the rest for the harness."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, help="how many (3; with --quick 1)")
    parser.add_argument("--steps", type=int, help="of each row (90; with --quick 15)")
    parser.add_argument("--warm", type=int, help="steps of the reader before (480; with --quick 48)")
    parser.add_argument(
        "--boards", type=int, help="pictures of a kind to learn from, each with eight questions (800; with --quick 60)"
    )
    parser.add_argument("--count", type=int, help="questions to measure by (400; with --quick 80)")
    parser.add_argument("--rows", help=f"separated by ';' (all: {'; '.join(ROWS)})")
    parser.add_argument("--k", dest="budgets", help="only these budgets, separated by ','")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread (2)")
    if "-h" in (argv or sys.argv) or "--help" in (argv or sys.argv):
        parser.print_help()
    args, rest = parser.parse_known_args(argv)
    quick = "--quick" in rest
    for name, full, short in (("seeds", 3, 1), ("steps", 90, 15), ("warm", 480, 48), ("boards", 800, 60), ("count", 400, 80)):
        setattr(args, name, getattr(args, name) or (short if quick else full))
    usual = (BUDGET,) if quick else None
    args.budgets = tuple(int(n) for n in args.budgets.split(",")) if args.budgets else usual
    args.rows = [row.strip() for row in args.rows.split(";")] if args.rows else list(QUICK if quick else ROWS)
    if strangers := set(args.rows) - set(ROWS):
        raise SystemExit(f"no such rows: {'; '.join(strangers)} (there are: {'; '.join(ROWS)})")
    return args, rest


def jobs_of(args: argparse.Namespace, folder: Path) -> list[Job]:
    """All trainings, the longest first."""
    shelf = Shelf(folder, args.boards, args.count)
    found = [
        Job(row, k, seed, args.steps, shelf, folder / f"{seed}.pt")
        for row in args.rows
        for k in ROWS[row].budgets
        if args.budgets is None or k in args.budgets
        for seed in range(args.seeds)
    ]
    return sorted(found, key=lambda job: -job.tokens * (4 if job.setting.dense else 1))


def trained(args: argparse.Namespace, jobs: list[Job]) -> Iterator[Result]:
    """Results as they come."""
    shelf = jobs[0].shelf
    kinds = {ROWS[job.row].kind for job in jobs}
    with ProcessPoolExecutor(args.workers, PROCESSES) as pool:
        drawing = [pool.submit(shelf.fill, kind, test) for kind in {*kinds, *CURRICULUM} for test in (False, True)]
        for drawn in drawing:
            drawn.result()
        starts = {job.seed: job.start for job in jobs}
        begun = {pool.submit(begin, seed, args.warm, shelf, path): seed for seed, path in starts.items()}
        working = []
        for ready in as_completed(begun):  # rows of the first readers are trained beside the last reader
            losses = ready.result()
            print(f"  a reader: loss {losses[0]:.2f} to {sum(losses[-10:]) / len(losses[-10:]):.2f}", flush=True)
            working += [pool.submit(work, job) for job in jobs if job.seed == begun[ready]]
        for number, future in enumerate(as_completed(working), 1):
            done = future.result()
            job = done.job
            print(
                f"  {number} of {len(jobs)}: {job.row}, {job.tokens} tokens, seed {job.seed}: {100 * done.share:.1f} %, "
                f"kept {done.kept:.3f}",
                flush=True,
            )
            yield done


def interval(values: list[Tensor]) -> tuple[float, float]:
    """95 % of the mean, by a bootstrap over questions (and with them seeds)."""
    every = torch.cat([value.float() for value in values])
    g = torch.Generator().manual_seed(0)
    means = every[torch.randint(len(every), (2000, len(every)), generator=g)].mean(1)
    return float(means.quantile(0.025)), float(means.quantile(0.975))


@dataclass
class Line:
    """A row at a budget, over the seeds."""

    row: str
    k: int
    results: list[Result]
    seconds: float

    @property
    def share(self) -> float:
        """Of right answers."""
        return sum(r.share for r in self.results) / len(self.results)

    @property
    def kept(self) -> float:
        """How much of the cards that are asked for."""
        return sum(r.kept for r in self.results) / len(self.results)

    @property
    def tokens(self) -> int:
        """Of a picture."""
        return self.results[0].job.tokens

    def above(self, other: Line) -> tuple[float, float]:
        """95 % of the difference, paired question by question and seed by seed."""
        return interval([a.right.float() - b.right.float() for a, b in zip(self.results, other.results)])


def table(lines: list[Line], bench: Bench) -> None:
    """Prints all lines and hands the figures over."""
    print(f"\n  {'':34}{'tokens':>6}{'right %':>9}{'95 %':>15}{'(seeds)':>20}{'kept':>7}{'ms a question':>15}")
    for line in lines:
        low, high = interval([r.right for r in line.results])
        each = " ".join(f"{100 * r.share:.1f}" for r in line.results)
        print(
            f"  {line.row:34}{line.tokens:6}{100 * line.share:9.1f}{f'{100 * low:.1f} to {100 * high:.1f}':>15}{each:>20}"
            f"{line.kept:7.3f}{1e3 * line.seconds:15.2f}"
        )
        right = [r.share for r in line.results]
        figures = {"tokens": line.tokens, "right": right, "low": low, "high": high, "kept": line.kept, "seconds": line.seconds}
        bench.figure(f"{line.row}, {line.k}", figures)


def judge(lines: list[Line], bench: Bench) -> None:
    """What it must show, of what was run."""
    found = {(line.row, line.k): line for line in lines}
    share = {key: 100 * line.share for key, line in found.items()}

    def gate(what: str, rows: tuple[str, ...], figure: Callable[..., float], **bound: float) -> None:
        keys = [(row, BUDGET) for row in rows]
        if all(key in share for key in keys):
            bench.gate(what, figure(*(share[key] for key in keys)), **bound)

    gate("learned over the oracle", ("learned", "oracle"), lambda a, b: a / b, at_least=0.9)
    for row in ("downscale", "salience", "random"):
        gate(f"points of learned above {row}", ("learned", row), lambda a, b: a - b, at_least=20)
    gate("points between noise and random", ("learned from noise", "random"), lambda a, b: abs(a - b), at_most=3)
    gate("points between scattered ink and chance", ("oracle, ink scattered",), lambda a: abs(a - 100 * CHANCE), at_most=3)
    sizes = "three sizes: learned"
    gate("three sizes: points of multiscale above one level", (f"{sizes} multiscale", sizes), lambda a, b: a - b, at_least=5)
    mine = found.get(("learned", BUDGET))
    # At equal time: of the shrunk pictures that take as long, or longer, the quickest (of all the one with the most tokens, if none does).
    shrunk = sorted((line for line in lines if line.row == "downscale"), key=lambda line: line.k)
    if mine is not None and shrunk:
        peer = next((line for line in shrunk if line.seconds >= mine.seconds), shrunk[-1])
        low, high = mine.above(peer)
        print(
            f"\n  learned, {1e3 * mine.seconds:.2f} ms a question, above {peer.k} tokens of a shrunk picture, {1e3 * peer.seconds:.2f} ms: "
            f"{100 * low:.1f} to {100 * high:.1f} points (95 %)"
        )
        bench.gate("points of learned above downscale at equal time, lower end of 95 %", 100 * low, at_least=0.0)


def draw(path: Path, lines: list[Line], picture: Tensor) -> None:
    """Right answers against time, and where a learned selector looks before and after."""
    import matplotlib.pyplot as plt

    figure, (left, *right) = plt.subplots(1, 4, figsize=(16, 4.2), width_ratios=(1.9, 1, 1, 1), layout="constrained")
    names = list(
        dict.fromkeys(
            line.row for line in lines if ROWS[line.row].kind == CARDS and "," not in line.row and "noise" not in line.row
        )
    )
    for number, name in enumerate(names):
        mine = sorted((line for line in lines if line.row == name), key=lambda line: line.seconds)
        at, share = [1e3 * line.seconds for line in mine], [100 * line.share for line in mine]
        reach = torch.tensor([interval([r.right for r in line.results]) for line in mine]).T * 100
        errors = (reach - torch.tensor(share)).abs().numpy()
        left.errorbar(at, share, errors, fmt="o-", color=f"C{number}", capsize=2, lw=1, ms=4, label=name)
        for line, x, y in zip(mine, at, share):
            left.annotate(str(line.tokens), (x, y), xytext=(3, 4), textcoords="offset points", fontsize=7)
    left.axhline(100 * CHANCE, color="0.7", lw=1, ls=":")
    left.set(xscale="log", xlabel="ms a question, choosing included (one thread)", ylabel="right answers (%)", ylim=(0, 102))
    left.legend(fontsize=8, frameon=False)
    left.set_title("held-out digits and fonts; numbers are tokens", fontsize=10)
    scores = next((r.scores for line in lines if line.row == "learned" for r in line.results if r.scores is not None), None)
    for axis, shown, title in zip(
        right, (picture.permute(1, 2, 0), *(scores or ())), ("a held-out picture", "scores at the beginning", "scores at the end")
    ):
        axis.imshow(shown.numpy())
        axis.set_title(title, fontsize=10)
    for axis in right:
        axis.axis("off")
    figure.savefig(path, dpi=80)
    plt.close(figure)
    print(f"  the picture is at {path}")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--model" in argv:
        from texvlm.qwen.finetune import main as finetune

        return finetune(argv)
    args, rest = options(argv)
    bench = Bench(__doc__, rest)
    with tempfile.TemporaryDirectory() as folder:
        jobs = jobs_of(args, Path(folder))
        found: dict[tuple[str, int], list[Result]] = {}
        for done in trained(args, jobs):
            found.setdefault((done.job.row, done.job.k), []).append(done)
        lines = []
        with ProcessPoolExecutor(1, PROCESSES) as pool:
            for row in args.rows:
                for k in ROWS[row].budgets:
                    if of := sorted(found.get((row, k), []), key=lambda r: r.job.seed):
                        lines.append(Line(row, k, of, pool.submit(seconds, of[0].job).result()))
        picture = jobs[0].shelf(CARDS, test=True).boards[0].image
    table(lines, bench)
    judge(lines, bench)
    if bench.args.json:
        draw(Path(bench.args.json).with_suffix(".png"), lines, picture)
    of = "; ".join(f"{line.row} {100 * line.share:.0f} %" for line in lines if line.k == BUDGET and ROWS[line.row].kind == CARDS)
    return bench.finish(f"{of} at {BUDGET} of 256 tokens")


if __name__ == "__main__":
    sys.exit(main())
