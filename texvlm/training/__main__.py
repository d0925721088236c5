"""Trains an allocator on the proxy task: python -m texvlm.training proxy, alone or under torchrun."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from texvlm.allocator import FORMS, Allocator
from texvlm.training.estimators import ESTIMATORS
from texvlm.training.loop import SHAPES, Annealing, Settings, Trainer, distributed
from texvlm.training.proxy import ProxyTask

NUMBERS = ("steps", "batch", "warmup", "samples", "seed", "rate", "decay", "clip", "entropy", "balance")
"""Settings that are options of the same name, whole or real as their defaults are."""


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, trains, prints the report."""
    default, cooling = Settings(), Annealing()
    parser = argparse.ArgumentParser(prog="python -m texvlm.training", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", choices=["proxy"])
    parser.add_argument("--form", choices=FORMS, default="mlp", help="of the scorers")
    parser.add_argument("--estimator", choices=list(ESTIMATORS), default=default.estimator)
    for name in NUMBERS:
        number = getattr(default, name)
        parser.add_argument(f"--{name}", type=type(number), default=number)
    parser.add_argument("--temperature", type=float, nargs=2, metavar=("FIRST", "LAST"), default=(cooling.start, cooling.end))
    parser.add_argument("--annealing", choices=list(SHAPES), default=cooling.shape)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default=default.precision)
    parser.add_argument("--pictures", type=int, default=256, help="to train on")
    parser.add_argument("--held-out", type=int, default=128, help="to measure on")
    parser.add_argument("--noise", action="store_true", help="the negative control: features and queries are noise")
    parser.add_argument("--folder", type=Path, help="for checkpoint, report, allocator and heat maps")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in the folder, if there is one")
    args = parser.parse_args(argv)
    if args.resume and args.folder is None:
        parser.error("--resume needs --folder")
    try:
        temperature = Annealing(args.temperature[0], args.temperature[1], args.annealing)
        settings = Settings(
            temperature=temperature, **{name: getattr(args, name) for name in (*NUMBERS, "estimator", "precision")}
        )
    except ValueError as error:
        parser.error(str(error))
    with distributed() as device:
        torch.manual_seed(args.seed)
        allocator = Allocator(args.form)
        task = ProxyTask(allocator, args.pictures, args.held_out, seed=args.seed, noise=args.noise)
        allocator.fit_normalisation(task.features).to(device)
        trainer = Trainer(allocator, task, settings, args.folder, args.every, task.sample())
        report = trainer.fit(args.resume)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
