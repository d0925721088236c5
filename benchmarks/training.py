"""Does training teach an allocator where to look, and does what it learned hold when k cells are kept?"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import texvlm
from benchmarks._harness import Bench
from texvlm.training import ESTIMATORS, Annealing, Choice, ProxyTask, Settings, Trainer
from texvlm.training.proxy import BUDGET, CELL, HELD_OUT, Batch, textures

DEFAULT = next(iter(ESTIMATORS))
SEEDS = (0, 1, 2)
STEPS, CONTROL_STEPS = 1000, 300


def settings(estimator: str, steps: int, seed: int) -> Settings:
    # The scores start at about a tenth of a unit: perturbations of one unit would tell nothing.
    start = 0.5 if estimator == "perturbed" else 1.0
    return Settings(steps, estimator=estimator, temperature=Annealing(start), seed=seed)


def trained(form: str, estimator: str, task: ProxyTask, steps: int, seed: int) -> tuple[Trainer, dict[str, float]]:
    """A trainer that has trained, and its figures on the held-out pictures."""
    torch.manual_seed(seed)
    allocator = texvlm.Allocator(form).fit_normalisation(task.features)
    trainer = Trainer(allocator, task, settings(estimator, steps, seed), every=steps)
    report = trainer.fit(progress=False)
    shuffled = float(trainer.measure(task.shuffled(seed)).mean())
    return trainer, {"hard": report.hard, "soft": report.soft, "shuffled": shuffled, "seconds": report.seconds}


def deployed(allocator: texvlm.Allocator, task: ProxyTask) -> float:
    """The figure of what `texvlm.select` keeps of the held-out pictures."""
    figures = []
    for start in range(0, len(task.asked), 16):
        part = Batch(*(t[start : start + 16] for t in task.held_out))
        first = HELD_OUT + start
        texture, _ = textures(range(first, first + len(part.inside)), allocator.channels)
        kept = texvlm.select(texture, BUDGET, CELL, "learned", part.query, scorer=allocator).indices
        figures.append(task.figure(Choice(kept, torch.full(kept.shape, 1 / BUDGET)), part))
    return float(torch.cat(figures).mean())


def main() -> int:
    bench = Bench(__doc__)
    seeds, steps = (SEEDS[:1], 200) if bench.quick else (SEEDS, STEPS)
    held_out = 64 if bench.quick else 128
    table: dict[str, list[dict[str, float]]] = {}
    prepared, controls, by_select = [], {}, []
    for seed in seeds:
        start = time.perf_counter()
        task = ProxyTask(texvlm.Allocator(), held_out=held_out, seed=seed)
        prepared.append(time.perf_counter() - start)
        noise = ProxyTask(texvlm.Allocator(), held_out=held_out, seed=seed, noise=True)
        for form, estimator in [("linear", DEFAULT), *(("mlp", name) for name in ESTIMATORS)]:
            trainer, figures = trained(form, estimator, task, steps, seed)
            name = f"{form}, {estimator}"
            table.setdefault(name, []).append(figures)
            _, control = trained(form, estimator, noise, min(steps, CONTROL_STEPS), seed)
            controls.setdefault(name, []).append(control["hard"])
            if estimator == DEFAULT:
                by_select.append(abs(deployed(trainer.allocator, task) - figures["hard"]))
            line = f"{figures['hard']:.3f} hard, {figures['soft']:.3f} as trained, {control['hard']:.3f} on noise"
            print(f"  seed {seed}, {name}: {line}, {figures['seconds']:.0f} s", flush=True)
    random = task.random()
    torch.manual_seed(0)
    untrained = Trainer(texvlm.Allocator().fit_normalisation(task.features), task, Settings())
    channels = task.channels()
    best = max(channels, key=lambda name: channels[name])

    print(f"\nintersection over union with the box, over the oracle's, {held_out} held-out pictures, {BUDGET} of 256 cells,")
    print(f"{steps} steps; mean (least) of {len(seeds)} seeds")
    print(f"  {'':26} {'deployed hard':>15} {'as trained':>11} {'other query':>12} {'inputs noise':>13} {'seconds':>8}")
    mean = {name: {key: statistics.fmean(row[key] for row in rows) for key in rows[0]} for name, rows in table.items()}
    for name, rows in table.items():
        m, least = mean[name], min(row["hard"] for row in rows)
        print(
            f"  {name:26} {m['hard']:7.3f} ({least:.3f}) {m['soft']:11.3f} {m['shuffled']:12.3f} "
            f"{statistics.fmean(controls[name]):13.3f} {m['seconds']:8.1f}"
        )
    print(f"  {'untrained':26} {float(untrained.measure().mean()):7.3f}")
    print(f"  {'best channel: ' + best:26} {channels[best]:7.3f}")
    print(f"  {'random':26} {random:7.3f}\n  {'oracle':26} {1:7.3f}\n")
    bench.figure("figures", table)
    bench.figure("inputs replaced by noise", controls)
    bench.figure("channels by themselves", channels)
    bench.figure("random", random)
    bench.figure("seconds to make the pictures", prepared)

    for form in ("linear", "mlp"):
        rows = table[f"{form}, {DEFAULT}"]
        bench.gate(f"{form}: learned, worst seed", min(row["hard"] for row in rows), at_least=0.65)
        bench.gate(f"{form}: gap of soft and hard in points", max(100 * abs(r["soft"] - r["hard"]) for r in rows), at_most=2)
        bench.gate(
            f"{form}: minutes with making the pictures", max(r["seconds"] for r in rows) / 60 + max(prepared) / 60, at_most=10
        )
        bench.gate(f"{form}: another query over random", max(row["shuffled"] for row in rows) - random, at_most=0.05)
    bench.gate("best channel by itself", channels[best], at_most=0.3)
    worst = max(max(values) for values in controls.values())
    bench.gate("any estimator on noise over random, points", 100 * (worst - random), at_most=2)
    bench.gate("select against the trainer, points", 100 * max(by_select), at_most=0.1)
    learned = mean[f"mlp, {DEFAULT}"]
    return bench.finish(
        f"yes: of what the oracle finds, {learned['hard']:.0%} deployed hard and {learned['soft']:.0%} as trained (a weight each: "
        f"{mean[f'linear, {DEFAULT}']['hard']:.0%}); the best channel {channels[best]:.0%}, random {random:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
