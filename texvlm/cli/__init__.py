"""The command line: one module per command, each imported only when its command is asked for.

A command is a function `run(args) -> int` (the exit status). What a person can mend is raised as
`Complaint` and printed as one line, without a traceback; everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from texvlm import __version__

SELECT_PATHS = ("salience", "query", "anisotropic_text", "five_stage", "adaptive", "learned", "predictive", "multiscale")
"""Those that need no more than a picture, or a picture and a query."""


DEFAULT_PATH = "learned"
"""Without a query."""

COLUMNS = {
    "index": "of the cell, row by row: row * columns of the grid + col",
    "row": "from the top, of cells",
    "col": "from the left, of cells",
    "x": "left edge, in pixels",
    "y": "upper edge, in pixels",
    "width": "in pixels",
    "height": "in pixels",
    "lod": "level: a token of level l covers 2**l x 2**l cells, this one the upper left of them",
    "score": "by which it was chosen",
}
"""Of what `select` says of a cell, in JSON and in CSV."""

FILM = "texvlm-video.mp4"

CHANNEL_COLUMNS = """columns, and the fields of the JSON's list:

  index        its number, for --channels and channels= as good as its name
  name
  needs        besides a picture: an option of view, or what build_channels takes under the same name; a model gives it by given=
  reducer      mips: mean, max, min or mode of the texels below
  film         what VideoStream does with it: exact in each frame, lagged (made at key frames and moved along the flow between),
               carried (moved along the flow, and made anew where that fails), or given from outside
  description  what it shows
  range        in the JSON: [least, largest], null where there is no largest
  halo         in the JSON: how many pixels away a texel still depends on, null where on the whole picture or on something else

names of several: all; minimal, those that need no more than pictures; embedding, its 16 axes"""

CELLS = """the JSON is {"film": {...}, "frames": [{...}, ...], "ended": "..."}, a line a frame:

  film    path, width and height (as looked at), rate, cell, grid [rows, columns], k, by (the path)
  frames  frame    its number, from 0
          seconds  when it is shown
          key      why all was computed anew, or null
          dirty    how many tiles changed, of how many tiles
          cells    best first; cell c is in row c // columns and column c % columns of the grid
          lods     a token of level l covers 2**l x 2**l cells, c the upper left one
          scores   of the cells
  ended   "complete", "cut off" or "interrupted"

exit status: 0; 1 where FILE is cut off, and 130 after ctrl-C, with what there was written whole; 2 where FILE or an argument is wrong"""


class Complaint(Exception):
    """Something that the person at the keyboard can mend: printed as one line, exit status 2."""


def positive(text: str) -> int:
    """An argument that counts something: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def between(low: int, high: int) -> Callable[[str], int]:
    """An argument from `low` to `high`."""

    def bounded(text: str) -> int:
        value = positive(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, got {value}")
        return value

    return bounded


def fraction(text: str) -> float:
    """An argument in [0, 1], such as 0.01 or 4/255."""
    number, slash, of = text.partition("/")
    try:
        value = float(number) / (float(of) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"must be a number such as 0.01 or 4/255, got {text!r}") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def size(text: str) -> tuple[int, int]:
    """An argument such as 360x640."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be height x width in pixels, such as 360x640, got {text!r}")
    return int(parts[0]), int(parts[1])


def budget(text: str) -> int | str:
    """An argument that is a number of tokens, or auto."""
    return text if text == "auto" else positive(text)


def plural(count: int, noun: str) -> str:
    """A number of things: 1 cell, 1,504 cells."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    top = argparse.ArgumentParser(prog="texvlm", description="Mipmapped, foveated textures for vision-language models.")
    top.add_argument("--version", action="version", version=f"texvlm {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("doctor", help="versions, devices, CUDA and GL: what works, what is missing, how to get it")

    view = commands.add_parser("view", help="one picture of what texvlm sees in an image and which cells it keeps")
    view.add_argument(
        "-o",
        "--output",
        default="texvlm-view.png",
        metavar="OUT.png",
        help="where to write it (%(default)s); - is standard output",
    )
    view.add_argument("--dpi", type=between(20, 1200), default=160, help="pixels per inch of the drawing (%(default)s)")
    view.add_argument(
        "--channels",
        default="all",
        metavar="NAMES",
        help="which to build and draw: all that have a source here (the default), or names and numbers with commas between them, "
        "minimal and embedding among them: see texvlm channels",
    )
    view.add_argument("--previous", metavar="IMAGE", help="the frame before, as large: brings motion, flow and what was salient")
    view.add_argument("--query", metavar="TEXT", help="what to look for, such as seven: the cells are then kept by relevance")
    view.add_argument(
        "--path",
        nargs="+",
        choices=SELECT_PATHS,
        metavar="PATH",
        help=f"after IMAGE: how cells are kept ({DEFAULT_PATH}, or query where there is one), or two paths to compare side by side: "
        f"{', '.join(SELECT_PATHS)}",
    )
    view.add_argument(
        "--embedding", choices=("digits",), help="what reads the query: digits (the default) ships with texvlm, knows 0 to 9 only"
    )

    select = commands.add_parser(
        "select",
        help="the kept cells as JSON or CSV",
        description="The kept cells, best first. Pixels are those of the picture in its file, upright, also where --max-size shrinks it.",
        epilog='of each cell, as columns of the CSV and in the JSON\'s "cells":\n\n'
        + "".join(f"  {name:8}{what}\n" for name, what in COLUMNS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_choice(select)
    select.add_argument("--json", metavar="FILE", help="write the JSON there; - is standard output (the default without --csv)")
    select.add_argument("--csv", action="store_true", help="a table on standard output: a header, and a row for each cell")

    for command, largest in ((view, 2048), (select, 0)):
        command.add_argument("image", metavar="IMAGE", help="any picture that Pillow reads; - is standard input")
        command.add_argument("-k", type=positive, default=273, help="how many cells to keep, at most all (%(default)s)")
        command.add_argument("--cell", type=positive, default=16, metavar="PX", help="side of a cell in pixels (%(default)s)")
        command.add_argument(
            "--max-size",
            type=positive,
            default=largest or None,
            metavar="PX",
            help=f"shrink a picture whose longer side exceeds this ({largest or 'never'}), and read one of any size",
        )

    channels = commands.add_parser(
        "channels",
        help="the channels that there are: what they show and what they need",
        description="The channels: their numbers and names, what each needs, how texels become one on the next level (mips), what "
        "happens to it from frame to frame of a film, and what it shows.",
        epilog=CHANNEL_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    channels.add_argument("--json", nargs="?", const="-", metavar="FILE", help="as JSON; - is standard output (the default)")

    _add_video(commands)
    _add_index(commands)
    chat = commands.add_parser(
        "chat",
        help="questions about pictures to a Qwen-VL that sees what a budget keeps of them",
        description="Questions to a Qwen with eyes (Qwen2-VL to Qwen3.5), which gets the kept parts of pictures only: cut before its "
        "vision tower. Several turns on one cache. Questions are lines of standard input, until it ends or one is empty; answers go to "
        "standard output, what each turn kept and took to standard error.",
    )
    chat.add_argument("--model", metavar="NAME", help="on the Hub or in a folder, such as Qwen/Qwen3-VL-2B-Instruct")
    chat.add_argument(
        "--tiny",
        nargs="?",
        const="qwen3_vl",
        metavar="FAMILY",
        help="a random tiny model instead, to see that all works (qwen3_vl)",
    )
    chat.add_argument("--image", action="append", required=True, metavar="FILE", help="a picture; more of them with more --image")
    chat.add_argument(
        "--ask", action="append", metavar="TEXT", help="a question, instead of standard input; more with more --ask"
    )
    chat.add_argument(
        "--budget", type=budget, default=273, metavar="K", help="tokens that a picture keeps, or auto (%(default)s)"
    )
    chat.add_argument(
        "--path",
        choices=(*SELECT_PATHS, "random", "uniform"),
        help=f"how they are chosen ({DEFAULT_PATH}, or query where there is one)",
    )
    chat.add_argument(
        "--query", metavar="TEXT", help="what to look for, 0 to 9 as a word or a digit: tokens are kept by relevance"
    )
    chat.add_argument("--thumbnail", choices=("segment", "joint"), help="a coarse picture too, inside the budget")
    chat.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="of an answer (%(default)s)")
    chat.add_argument("--max-size", type=positive, metavar="PX", help="shrink a picture whose longer side exceeds this (never)")
    chat.add_argument("--show", metavar="OUT.png", help="write what the model sees of the pictures")
    chat.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one (the default)")

    app = commands.add_parser(
        "app",
        help="a page in the browser to try it: pictures of yours, budgets, paths, a gaze, films",
        description="Serves a page on this machine and opens it in the browser: drop a picture, move the budget, compare paths, click "
        "where the gaze shall be. Nothing leaves the machine. Ctrl-C ends it.",
    )
    app.add_argument("--port", type=between(1, 65535), default=7860, metavar="N", help="where it listens (%(default)s)")
    app.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="0.0.0.0 is for all who reach this machine (%(default)s)"
    )
    app.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    app.add_argument(
        "--max-size",
        type=positive,
        default=1024,
        metavar="PX",
        help="shrink a picture whose longer side exceeds this (%(default)s)",
    )

    _add_bench(commands)
    return top


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """How cells are chosen, which `texvlm.cli.select.asked` reads."""
    parser.add_argument(
        "--path",
        choices=SELECT_PATHS,
        help=f"how they are chosen ({DEFAULT_PATH}, or query where there is one): see texvlm.select",
    )
    parser.add_argument(
        "--query", metavar="TEXT", help="what to look for, 0 to 9 as a word or a digit: the cells are then kept by relevance"
    )


def _add_bench(commands: Any) -> None:
    from texvlm.cli import bench

    what = "the benchmarks of a checkout, each in a process of its own"
    parser = commands.add_parser(
        "bench", help=what, description=f"{what[0].upper()}{what[1:]}: what each stage costs beside its peers."
    )
    known = ", ".join(bench.names()) or "all; they are part of the source, so this runs in a checkout only"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; gates are printed all the same")
    parser.add_argument("--json", metavar="FOLDER", type=Path, help="write all figures there, one NAME.json each")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch and OpenCV (theirs)")
    parser.add_argument("--strict", action="store_true", help="exit status 1 when a gate is missed")


def _add_video(commands: Any) -> None:
    parser = commands.add_parser(
        "video",
        help="a film of what is kept of a film, and what each frame costs where only what changed is computed",
        description="Follows a film: only what changed from frame to frame is computed. Writes a film of four panels\n"
        "(what is kept, the film, scores, what a model sees) and prints what each stage took.",
        epilog=CELLS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("film", metavar="FILE", help="a film, an animation, or a folder of pictures in the order of their names")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT.mp4",
        help=f"the film to write ({FILM}; with --json and without -o: none); .mkv and .mov too",
    )
    parser.add_argument("--json", metavar="FILE", help="write the cells of each frame, see below; - is standard output")
    parser.add_argument("-k", type=positive, default=273, help="how many cells to keep, at most all (%(default)s)")
    parser.add_argument("--cell", type=positive, default=16, metavar="PX", help="side of a cell in pixels (%(default)s)")
    parser.add_argument(
        "--path",
        choices=("video", *SELECT_PATHS),
        help="how they are chosen (salience, or query where there is one); video keeps them from flickering: see texvlm.select",
    )
    parser.add_argument(
        "--query", metavar="TEXT", help="what to look for, 0 to 9 as a word or a digit: cells are kept by relevance"
    )
    parser.add_argument(
        "--threshold",
        type=fraction,
        default=0.0,
        metavar="X",
        help="the difference that is no change, in [0, 1]: 0 computes anew whatever differs, 4/255 passes over noise (%(default)s)",
    )
    parser.add_argument(
        "--measure",
        choices=("largest", "mean"),
        default="largest",
        help="of what: the largest difference of a value, or the mean of 8 x 8 pixels, which a sensor's noise hardly moves (%(default)s)",
    )
    parser.add_argument(
        "--tile",
        type=between(8, 256),
        default=32,
        metavar="PX",
        help="side of what is compared and computed as a whole (%(default)s)",
    )
    parser.add_argument("--every", type=positive, metavar="N", help="each n-th frame only")
    parser.add_argument("--size", type=size, metavar="HxW", help="height x width to resize to, while decoding")
    parser.add_argument("--limit", type=positive, metavar="N", help="stop after so many frames")


def _add_index(commands: Any) -> None:
    parser = commands.add_parser(
        "index",
        help="what each of many pictures keeps, as Parquet",
        description="Reads many pictures on all cores and writes what each keeps as Parquet: path, error, height, width, rows, columns, "
        "cells, levels, scores. A broken picture is a row with an error. The same command goes on where it was stopped or killed.",
    )
    parser.add_argument(
        "pictures", metavar="PICTURES", help="a folder, with all below it, or a pattern in quotes: 'photos/**/*.jpg'"
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="where the Parquet files go")
    parser.add_argument(
        "--budget", type=positive, default=273, metavar="K", help="how many cells to keep, at most all (%(default)s)"
    )
    parser.add_argument("--cell", type=positive, default=16, metavar="PX", help="side of a cell in pixels (%(default)s)")
    _add_choice(parser)
    parser.add_argument("--tokens", action="store_true", help="a column with the pixels of the cells too")
    parser.add_argument("--max-size", type=positive, metavar="PX", help="shrink a picture whose longer side exceeds this (never)")
    parser.add_argument(
        "--engine",
        choices=("auto", "pool", "ray"),
        default="auto",
        help="what runs it: pool is processes here, ray a cluster; auto is Ray where RAY_ADDRESS names one (%(default)s)",
    )
    parser.add_argument("--workers", type=positive, metavar="N", help="how many processes (as many as cores)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    from texvlm.cli.output import give_up, refused

    name = "texvlm"
    try:
        try:
            args = parser().parse_args(argv)
            name = f"texvlm {args.command}"
            status: int = importlib.import_module(f"texvlm.cli.{args.command}").run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what is refused can be told here, and no longer when Python ends
    except Complaint as complaint:
        print(f"{name}: {complaint}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `texvlm select photo.jpg | head`
        give_up()
        return 1
    except OSError as error:
        if not refused(error):
            raise
        give_up()
        print(f"{name}: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
