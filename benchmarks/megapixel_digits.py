"""Does a selector that is trained through its reader find five digits among 4096 cells, and which estimator trains it best?

Megapixel Digits (_megapixel.py): canvases of 2048 x 2048, five digits and 820 glyphs that are none and stand out as much. A scorer sees
a mip of every cell, 8 x 8 samples; a reader sees k cells sharply and names the class of three of the five (_selectors.py). The label
is all that either is taught by. In the default row the reader also tells the scorer what it sees in these and some other cells, which
are read in training alone; the row "untaught" is the same estimator without that. All rows get the same processor time of training, on
canvases that grow from 8 x 8 to 64 x 64 cells, and are measured deployed: exactly the best k cells, on sources, photographs and seeds
that training never saw. Rows without training are read by the oracle's reader, which is to their advantage.

Development looked at seed 100, on other canvases of the same held-out glyphs and photographs; seeds 0, 1, 2 are reported. A row takes
--seconds, and as there are some forty a seed, all of them most of an hour.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks._harness import Bench
from benchmarks._megapixel import DIGITS, GRID, Bank, Batch, bank, recall
from benchmarks._megapixel_rows import (
    DEFAULT,
    DOWNSCALE,
    FIXED,
    FULL,
    NOISE,
    ORACLE,
    RANDOM,
    TRAINED,
    Data,
    Score,
    data,
    fixed,
    measured,
    megabytes,
    train,
    untrained,
)
from benchmarks._selectors import ESTIMATORS, PEERS


class Result(NamedTuple):
    """One row of one seed at one budget."""

    row: str
    k: int
    seed: int
    score: Score
    steps: int = 0
    milliseconds: float = 0.0
    megabytes: float | None = None


def announce(cells: dict[str, list[Tensor]], test: list[Batch], budgets: Sequence[int], bench: Bench) -> None:
    """What rows without training find; downscale and the oracle are trained and printed next, before any selector is."""
    print(f"\nbefore training: recall of the {DIGITS} digits (of the other glyphs) by k of {GRID * GRID} cells")
    for row, found in cells.items():
        line = f"  {row:18}"
        for k in budgets:
            both = [
                statistics.fmean(recall(best[:, :k], getattr(batch, what)) for best, batch in zip(found, test))
                for what in ("digits", "strangers")
            ]
            line += f"   k = {k}: {both[0]:.3f} ({both[1]:.3f})"
            bench.figures.setdefault("recall before training", {}).setdefault(f"{row}, {k}", []).append(both)
        print(line, flush=True)


def trained_rows(of: tuple[Bank, Bank], args: argparse.Namespace, bench: Bench) -> Iterator[Result]:
    """Trains and measures everything that is asked for, one after another: first what says whether a budget counts."""
    for seed in args.seeds:
        found = data(*of, seed, args.canvases, args.share)
        cells = untrained(found.test, max(args.budgets), seed)
        announce(cells, found.test, args.budgets, bench)

        def row(name: str, k: int, seed: int = seed, found: Data = found) -> tuple[Result, nn.Module]:
            control = name.endswith(NOISE)
            model, steps, milliseconds = train(name, k, seed, found.pools, args.seconds, args.steps)
            score = measured(model, found.test, not control, 4 if control else 1)
            memory = megabytes(model, found.pools[-1][0]) if seed == args.seeds[0] and not control else None
            return Result(name, k, seed, score, steps, milliseconds, memory), model.reader

        for k in args.budgets:
            yield row(DOWNSCALE, k)[0]
            best, reader = row(ORACLE, k)
            yield best
            for name in FIXED:
                yield Result(name, k, seed, fixed(reader, cells[name], found.test, k))
        for k in args.budgets:
            controls = args.controls if seed in args.seeds[: args.control_seeds] else []
            for name in (*args.rows, *(name + NOISE for name in controls)):
                if name != FULL or k == args.budgets[0]:  # that has no budget
                    yield row(name, k)[0]


def mean(results: list[Result], row: str, k: int, what: str = "accuracy") -> float | None:
    values = [getattr(r.score, what) for r in results if r.row == row and (r.k == k or row == FULL)]
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def table(results: list[Result], k: int) -> dict[str, dict[str, Any]]:
    """Prints the rows of a budget, best first, and returns them."""
    names = dict.fromkeys(r.row for r in results if r.k == k or r.row == FULL)
    shown: dict[str, dict[str, Any]] = {}
    for name in sorted(names, key=lambda n: -(mean(results, n, k) or 0)):
        of = [r for r in results if r.row == name and (r.k == k or name == FULL)]
        accuracy = [100 * r.score.accuracy for r in of]
        shown[name] = {
            "accuracy": statistics.fmean(accuracy),
            "seeds": accuracy,
            "spread": statistics.stdev(accuracy) if len(accuracy) > 1 else None,
            **{what: mean(results, name, k, what) for what in ("recall", "soft", "relaxed")},
            "steps": round(statistics.fmean(r.steps for r in of)),
            "ms_per_step": statistics.fmean(r.milliseconds for r in of),
            "peak_MB": next((r.megabytes for r in of if r.megabytes is not None), None),
        }
    print(f"\nk = {k} of {GRID * GRID} cells; accuracy in %, its standard deviation over seeds, recall of digits at k")
    print(f"  {'':28}{'accuracy':>9}{'+-':>6}{'recall':>8}{'soft':>7}{'relaxed':>9}{'steps':>7}{'ms/step':>9}{'peak MB':>9}")

    def number(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None else f"{scale * value:.{digits}f}"

    for name, of_row in shown.items():
        trained = of_row["steps"] > 0
        print(
            f"  {name:28}{of_row['accuracy']:9.1f}{number(of_row['spread'], 1):>6}{number(of_row['recall'], 3):>8}"
            f"{number(of_row['soft'], 1, 100):>7}{number(of_row['relaxed'], 1, 100):>9}"
            + (f"{of_row['steps']:7}{of_row['ms_per_step']:9.0f}{number(of_row['peak_MB'], 0):>9}" if trained else "")
        )
    return shown


def judge(bench: Bench, rows: dict[str, dict[str, Any]], k: int) -> str:
    """The gates of a budget; what won, in a line."""

    def of(name: str) -> float:
        return float(rows[name]["accuracy"])

    baselines = [name for name in (*FIXED, DOWNSCALE) if name in rows]
    best = max(baselines, key=of)
    margin = of(ORACLE) - of(best)
    counts = bench.gate(f"k = {k}: the oracle over the best fixed row ({best}), points", margin, at_least=15)
    if DEFAULT in rows:
        bench.gate(f"k = {k}: {DEFAULT} over the best fixed row, points", of(DEFAULT) - of(best), at_least=5)
        bench.gate(f"k = {k}: {DEFAULT} below the oracle, points", of(ORACLE) - of(DEFAULT), at_most=3)
        if peers := [name for name in PEERS if name in rows]:
            rival = max(peers, key=of)
            bench.gate(f"k = {k}: {DEFAULT} over the best peer ({rival}), points", of(DEFAULT) - of(rival), at_least=0)
        gap = abs(100 * rows[DEFAULT]["soft"] - of(DEFAULT))
        bench.gate(f"k = {k}: between {DEFAULT} as trained and as deployed, points", gap, at_most=2)
    if controls := [name for name in rows if name.endswith(NOISE)]:
        worst = max(controls, key=of)
        bench.gate(f"k = {k}: {worst} over random, points", of(worst) - of(RANDOM), at_most=2)
    winner = max((name for name in rows if name in ESTIMATORS), key=of, default=ORACLE)
    line = f"k = {k}: {winner} {of(winner):.1f} %, oracle {of(ORACLE):.1f}, best fixed {best} {of(best):.1f}"
    return line if counts else f"{line} (does not count)"


def options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Those of this file, and the rest for the harness."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--seeds", help="separated by ',' (0,1,2; with --quick 0)")
    parser.add_argument("--seconds", type=float, help="processor time of training a row (20; with --quick 4)")
    parser.add_argument("--steps", type=int, help="of each of the four stages, instead of --seconds")
    parser.add_argument("--rows", help=f"trained rows beside {DOWNSCALE} and {ORACLE}, separated by ';' (all; with --quick four)")
    parser.add_argument(
        "--controls", help="trained selectors that also see noise, separated by ';' (all; with --quick the default)"
    )
    parser.add_argument("--control-seeds", type=int, default=3, help="of how many seeds (all)")
    parser.add_argument("--k", dest="budgets", help="cells, separated by ',' (10,32; with --quick 32)")
    parser.add_argument("--canvases", type=int, help="of the test, per seed (200; with --quick 40)")
    if "-h" in (argv or sys.argv) or "--help" in (argv or sys.argv):
        parser.print_help()
    args, rest = parser.parse_known_args(argv)
    quick = "--quick" in rest

    def numbers(text: str | None, full: str, short: str) -> list[int]:
        return [int(n) for n in (text or (short if quick else full)).split(",")]

    def names(text: str | None, full: Sequence[str], short: Sequence[str]) -> list[str]:
        asked = list(short if quick else full) if text is None else [name.strip() for name in text.split(";") if name.strip()]
        if strangers := set(asked) - set(TRAINED):
            raise SystemExit(f"no such rows: {'; '.join(strangers)} (there are: {'; '.join(TRAINED)})")
        return [name for name in asked if name not in (DOWNSCALE, ORACLE)]

    args.seeds, args.budgets = numbers(args.seeds, "0,1,2", "0"), numbers(args.budgets, "10,32", "32")
    args.rows = names(args.rows, TRAINED, (FULL, DEFAULT, *PEERS))
    args.controls = [name for name in names(args.controls, list(ESTIMATORS), (DEFAULT,)) if name in ESTIMATORS]
    args.seconds = args.seconds or (4.0 if quick else 20.0)
    args.canvases = args.canvases or (40 if quick else 200)
    args.share = 0.15 if quick else 1.0
    return args, rest


def progress(results: Iterator[Result], total: int) -> Iterator[Result]:
    """A bar where there is a terminal and rich, otherwise a line each."""
    try:
        from rich.console import Console
        from rich.progress import track

        if (console := Console(stderr=True)).is_terminal:
            yield from track(results, "training", total=total, console=console, transient=True)
            return
    except ImportError:
        pass
    for done in results:
        found = "" if done.score.recall is None else f", recall {done.score.recall:.3f}"
        print(f"  seed {done.seed}, k = {done.k}, {done.row}: {100 * done.score.accuracy:.1f} %{found}", flush=True)
        yield done


def main(argv: list[str] | None = None) -> int:
    args, rest = options(argv)
    bench = Bench(__doc__, rest)
    try:
        banks = bank(False), bank(True)
    except ImportError as missing:
        return bench.finish(f"unknown: {missing}")
    each = len(args.budgets) * (2 + len(FIXED) + len(args.rows)) - (FULL in args.rows) * (len(args.budgets) - 1)
    controls = len(args.budgets) * len(args.controls) * min(len(args.seeds), args.control_seeds)
    results: list[Result] = []
    try:
        for done in progress(trained_rows(banks, args, bench), len(args.seeds) * each + controls):
            results.append(done)
    except KeyboardInterrupt:
        print("\ninterrupted: what follows is of what was done by then")
    answers = []
    for k in args.budgets:
        rows = table(results, k)
        if not {ORACLE, DOWNSCALE, *FIXED} <= set(rows):
            continue
        bench.figure(f"k = {k}", rows)
        answers.append(judge(bench, rows, k))
    bench.figure("protocol", {name: getattr(args, name) for name in ("seeds", "seconds", "steps", "canvases", "budgets")})
    return bench.finish("; ".join(answers))


if __name__ == "__main__":
    sys.exit(main())
