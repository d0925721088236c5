"""`video FILE`: a film of what a stream keeps of a film, the cells of each frame as JSON, and a table of what each stage costs."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from torch import Tensor

from texvlm.cli import FILM, Complaint, plural
from texvlm.cli.output import writing
from texvlm.cli.select import query_text

SUFFIXES = (".mp4", ".mkv", ".mov")
CUT_OFF, INTERRUPTED = 1, 130  # exit statuses


class Bill:
    """What the frames cost, stage by stage, and why some were key frames."""

    def __init__(self) -> None:
        self.frames = 0
        self.stages: dict[str, list[float]] = {}
        self.dirty: list[float] = []
        self.keys: collections.Counter[str] = collections.Counter()
        self.begin = time.perf_counter()

    def add_time(self, stage: str, since: float) -> None:
        """Of a frame's stage, which began then."""
        self.stages.setdefault(stage, []).append(1e3 * (time.perf_counter() - since))

    def add(self, stats: Any) -> None:
        """What a stream says of a frame."""
        self.frames += 1
        for stage, milliseconds in stats.milliseconds.items():
            self.stages.setdefault(stage, []).append(milliseconds)
        if stats.dirty >= 0:
            self.dirty.append(stats.dirty / max(stats.tiles, 1))
        if stats.key is not None:
            self.keys[stats.key] += 1

    @property
    def rate(self) -> float:
        """Frames a second, all in all."""
        return self.frames / max(time.perf_counter() - self.begin, 1e-9)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Of the table: a stage, its mean over all frames, its worst frame, and how many frames had it."""
        order = ("decode", *(name for name in self.stages if name not in ("decode", "draw", "encode")), "draw", "encode")
        found = [(name, self.stages[name]) for name in order if name in self.stages]
        return [(name, f"{sum(ms) / max(self.frames, 1):,.2f}", f"{max(ms):,.2f}", f"{len(ms):,}") for name, ms in found]

    def lines(self) -> list[str]:
        """In words: frames a second, changed tiles, key frames."""
        keys = ", ".join(f"{count:,} {why}" for why, count in self.keys.most_common())
        said = [f"{plural(self.frames, 'frame')}, {self.rate:.1f} a second with decoding and all that is written"]
        if self.dirty:
            said.append(f"{sum(self.dirty) / len(self.dirty):.1%} of the tiles changed in the mean")
        said.append(f"key frames: {keys or 'none'}")
        return said


class CellsFile:
    """The cells of each frame as JSON: one document, one line a frame, which is whole whenever it is closed."""

    def __init__(self, file: IO[str], head: dict[str, Any]) -> None:
        self.file, self.first = file, True
        file.write(f'{{"film": {json.dumps(head)},\n"frames": [')

    def add(self, seconds: float, stats: Any, selection: Any) -> None:
        """One frame."""
        count = int(selection.count[0])
        record = {
            "frame": stats.frame,
            "seconds": round(seconds, 6),
            "key": stats.key,
            "dirty": stats.dirty,
            "tiles": stats.tiles,
            "cells": selection.indices[0, :count].tolist(),
            "lods": selection.lod[0, :count].long().tolist(),
            "scores": [round(score, 6) for score in selection.score[0, :count].tolist()],
        }
        self.file.write(("" if self.first else ",") + "\n" + json.dumps(record, separators=(",", ":")))
        self.first = False

    def close(self, ended: str) -> None:
        """`ended` says how: complete, cut off or interrupted."""
        self.file.write(f'\n],\n"ended": {json.dumps(ended)}}}\n')
        self.file.flush()


def output_of(args: argparse.Namespace) -> Path | None:
    """Where the film goes, None if none is asked for."""
    if args.output is None and args.json is not None:
        return None
    output = Path(args.output or FILM)
    if output.suffix.lower() not in SUFFIXES:
        raise Complaint(f"the output is a film, so its name must end in {', '.join(SUFFIXES)}, got {output}")
    for path in (output, None if args.json in (None, "-") else Path(args.json)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise Complaint(f"no such folder: {path.parent}")
        if path.exists() and Path(args.film).exists() and path.samefile(args.film):
            raise Complaint(f"{path} is the film that is read: give another name to what is written")
    return output


def opened(args: argparse.Namespace) -> Any:
    """The film."""
    from texvlm.video import frames

    if args.film == "-":
        raise Complaint("a film is read from a file, not from standard input")
    try:
        return frames(args.film, args.size, args.every)
    except (OSError, ValueError, ImportError) as error:
        raise Complaint(str(error)) from None


def stream_for(args: argparse.Namespace, film: Any) -> Any:
    """What goes through it."""
    import texvlm

    query = query_text(args)
    embedding = None if query is None else texvlm.Embedding(texvlm.DigitsEmbedding())
    path = args.path or ("salience" if query is None else "query")
    cells = -(-film.height // args.cell) * -(-film.width // args.cell)
    try:
        return texvlm.VideoStream(
            ["red", "green", "blue"],
            k=min(args.k, cells),
            cell=args.cell,
            path=path,
            threshold=args.threshold,
            tile=args.tile,
            measure=args.measure,
            query=query,
            embedding=embedding,
        )
    except (ValueError, TypeError) as error:
        raise Complaint(str(error).strip().splitlines()[0]) from None


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether ctrl-C has been pressed: the first time only asks to stop, so that what is being written is finished."""
    pressed: list[bool] = []

    def stop(*_: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not in the main thread: whoever runs it listens
        yield lambda: False
        return
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(total: int | None, bill: Bill) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's standard error; nothing elsewhere, or without rich. Call it after each frame."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, rate="")
        yield lambda: bar.update(task, completed=bill.frames, rate=f"{bill.rate:.1f} frames/s")


def watch(args: argparse.Namespace, film: Any, stream: Any, output: Path | None, bill: Bill) -> str:
    """Goes through the film. Says how it ended: complete, cut off or interrupted. What is written is closed, however it ends."""
    from texvlm.cli.reel import Panels, Writer

    with ExitStack() as stack:
        ended = ["interrupted"]
        panels = Panels(film.height, film.width, args.cell)
        writer = None if output is None else Writer(output, film.rate)
        if writer is not None:
            stack.callback(writer.close)
        cells = None
        if args.json is not None:
            cells = CellsFile(stack.enter_context(writing(args.json)), _head(args, film, stream))
        if cells is not None:
            stack.callback(lambda: cells.close(ended[0]))
        total = min((n for n in (film.frame_count, args.limit) if n is not None), default=None)
        stopped = stack.enter_context(interruptible())
        tick = stack.enter_context(progress(total, bill))
        for seconds, frame in _decoded(film, args.limit, bill):
            if stopped():
                return ended[0]
            stream.update(frame)
            selection = stream.select()
            bill.add(stream.stats)
            if cells is not None:
                cells.add(seconds, stream.stats, selection)
            if writer is not None:
                start = time.perf_counter()
                picture = panels.draw(frame, selection, _line(seconds, stream.stats, selection))
                bill.add_time("draw", start)
                start = time.perf_counter()
                writer.write(picture, seconds)
                bill.add_time("encode", start)
            tick()
        ended[0] = "cut off" if film.missing else "complete"
        return ended[0]


def _decoded(film: Any, limit: int | None, bill: Bill) -> Iterator[tuple[float, Tensor]]:
    """Frames with their times. What is missing at the end is told by the exit status, and in one line."""
    frames = itertools.islice(film.timed(), limit)
    while True:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = next(frames, None)
            except ValueError as error:
                raise Complaint(str(error)) from None
        if found is None:
            return
        bill.add_time("decode", start)
        yield found


def _head(args: argparse.Namespace, film: Any, stream: Any) -> dict[str, Any]:
    grid = [-(-film.height // args.cell), -(-film.width // args.cell)]
    by = args.path or ("salience" if args.query is None else "query")
    return {
        "path": str(film.path),
        "width": film.width,
        "height": film.height,
        "rate": film.rate,
        "cell": args.cell,
        "grid": grid,
        "k": stream.k,
        "by": by,
    }


def _line(seconds: float, stats: Any, selection: Any) -> str:
    """What the film says below its panels."""
    parts = [f"{seconds:7.2f} s", plural(int(selection.count[0]), "cell")]
    if stats.dirty >= 0:
        parts.append(f"{stats.dirty / max(stats.tiles, 1):.1%} changed")
    parts.append(f"{sum(stats.milliseconds.values()):.1f} ms")
    return "   ".join([*parts, *([f"key frame: {stats.key}"] if stats.key else [])])


def print_bill(bill: Bill, to: TextIO) -> None:
    """The table, plain where rich is not installed, and what it cannot say."""
    titles = ("stage", "ms a frame", "worst", "frames")
    rows = bill.rows()
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in [titles, *rows]:
            print(f"{row[0]:12} {row[1]:>12} {row[2]:>10} {row[3]:>8}", file=to)
    else:
        table = Table(header_style="bold")
        for title in titles:
            table.add_column(title, justify="left" if title == "stage" else "right")
        for row in rows:
            table.add_row(*row)
        Console(file=to).print(table)
    for line in bill.lines():
        print(line, file=to)


def run(args: argparse.Namespace) -> int:
    """The command."""
    output = output_of(args)
    film = opened(args)
    stream = stream_for(args, film)
    bill = Bill()
    with film:
        ended = watch(args, film, stream, output, bill)
    said = sys.stderr if args.json == "-" else sys.stdout
    print_bill(bill, said)
    if film.missing:
        print(f"note: {film.path} is cut off or broken: {plural(film.missing, 'frame')} missing", file=said)
    if ended == "interrupted":
        print(f"note: interrupted after {plural(bill.frames, 'frame')}", file=said)
    if output is not None:
        print(f"the film is at {output.resolve()}", file=said)
    return {"complete": 0, "cut off": CUT_OFF, "interrupted": INTERRUPTED}[ended]
