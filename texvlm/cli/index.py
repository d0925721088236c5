"""`index PICTURES -o OUT`: what each of many pictures keeps, as Parquet."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from texvlm.cli import Complaint, plural
from texvlm.cli.select import asked


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error; nothing elsewhere, or without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda done, total: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task, begun = bar.add_task("", total=None, rate=""), time.perf_counter()

        def show(done: int, total: int) -> None:
            rate = done / (time.perf_counter() - begun)
            bar.update(task, completed=done, total=total, rate=f"{rate:.1f} pictures/s")

        yield show


def run(args: argparse.Namespace) -> int:
    """The command."""
    from texvlm.data import index

    begun = time.perf_counter()
    try:
        with progress() as show:
            found = index(
                args.pictures,
                args.output,
                args.budget,
                args.cell,
                **asked(args),
                tokens=args.tokens,
                max_size=args.max_size,
                engine=args.engine,
                workers=args.workers,
                progress=show,
            )
    except (ValueError, ImportError, OSError) as error:
        raise Complaint(str(error).strip().splitlines()[0]) from None
    seconds = time.perf_counter() - begun
    said = [f"{plural(found.done, 'picture')} in {seconds:.1f} s" + f" ({found.done / seconds:.1f} a second)" * bool(found.done)]
    said += [f"{found.broken:,} broken: see the column error"] if found.broken else []
    said += [f"{found.there:,} had been there"] if found.there else []
    print(f"{args.output}: {'; '.join(said)}")
    return 0
