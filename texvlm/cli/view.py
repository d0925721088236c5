"""`view IMAGE`: one picture of what texvlm sees and keeps, and a table of what each stage cost."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from texvlm.cli import Complaint
from texvlm.cli.image import Picture, read_picture
from texvlm.cli.select import choose

REPEATS = 5
R = TypeVar("R")


class Stage(NamedTuple):
    """What one stage did and cost."""

    name: str
    result: str
    milliseconds: float
    megabytes: float | None  # of what it hands on


class Scene(NamedTuple):
    """All that is drawn."""

    picture: Picture
    texture: Any  # texvlm.Texture of the minimal channels
    selection: Any  # texvlm.Selection
    seen: Tensor  # [3, H, W] in [0, 1]: kept cells sharp, the rest coarse


def timed(work: Callable[[], R]) -> tuple[R, float]:
    """The result of `work` and the median time of some calls in milliseconds, after one to warm up."""
    result = work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = work()
        times.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times)


def texel_centres(height: int, width: int) -> Tensor:
    """The centres of all level-0 texels as uv [1, H * W, 2]."""
    v, u = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack([u, v], dim=-1).view(1, -1, 2)


def cell_centres(selection: Any, height: int, width: int) -> Tensor:
    """The centres of the kept cells of the first picture as uv [1, count, 2]."""
    index = selection.indices[:1, : int(selection.count[0])]
    columns = selection.grid[1]
    x = (index % columns + 0.5) * selection.cell / width
    y = (index.div(columns, rounding_mode="floor") + 0.5) * selection.cell / height
    return torch.stack([x, y], dim=-1)


def kept_mask(selection: Any, height: int, width: int) -> Tensor:
    """Bool [H, W]: the pixels of the kept cells of the first picture."""
    rows, columns = selection.grid
    kept = torch.zeros(rows * columns, dtype=torch.bool)
    kept[selection.indices[0, : int(selection.count[0])]] = True
    pixels = kept.view(rows, columns).repeat_interleave(selection.cell, 0).repeat_interleave(selection.cell, 1)
    return pixels[:height, :width]


def look(picture: Picture, k: int, cell: int) -> tuple[Scene, list[Stage]]:
    """Runs the stages on a picture; every one is the public function that a program would call."""
    import texvlm

    height, width = picture.height, picture.width
    texture, build_ms = timed(lambda: texvlm.build_channels(picture.image, channels="minimal"))
    selection = choose(texture, k, cell)
    selection, select_ms = timed(lambda: choose(texture, k, cell))
    centres = cell_centres(selection, height, width)
    colours = texvlm.Texture(picture.image)
    tokens, tokens_ms = timed(lambda: colours.patches(centres, 0.0, size=cell))
    uv, lod = texel_centres(height, width), (cell - 1).bit_length()
    coarse, coarse_ms = timed(lambda: colours.sample(uv, float(lod)))

    sharp = colours.level(0)[0]
    seen = torch.where(kept_mask(selection, height, width), sharp, coarse[0].T.reshape(3, height, width))
    rows, columns = selection.grid
    count = int(selection.count[0])
    stages = [
        Stage(
            "channels + pyramid",
            f"{texture.channels} channels, {texture.levels} levels",
            build_ms,
            _megabytes(texture.data),
        ),
        Stage(
            "cascade",
            f"{count:,} of {rows * columns:,} cells",
            select_ms,
            _megabytes(selection.indices, selection.score),
        ),
        Stage("tokens", f"{count:,} patches {cell} x {cell} x 3", tokens_ms, _megabytes(tokens)),
        Stage("surroundings", f"{height * width:,} samples at LOD {lod}", coarse_ms, _megabytes(coarse)),
    ]
    return Scene(picture, texture, selection, seen.clamp(0, 1)), stages


def run(args: argparse.Namespace) -> int:
    """The command."""
    output = Path(args.output)
    if output.suffix.lower() != ".png":
        raise Complaint(f"the output is a PNG, so its name must end in .png, got {output}")
    if not output.parent.is_dir():
        raise Complaint(f"no such folder: {output.parent}")
    try:
        import matplotlib  # noqa: F401  - said now rather than after the work
    except ImportError:
        raise Complaint("drawing needs Matplotlib: pip install matplotlib") from None

    start = time.perf_counter()
    picture = read_picture(args.image, args.max_size)
    read = Stage(
        "read",
        f"{picture.width} x {picture.height}",
        1e3 * (time.perf_counter() - start),
        _megabytes(picture.image),
    )
    scene, stages = look(picture, args.k, args.cell)

    from texvlm.cli.drawing import draw

    start = time.perf_counter()
    try:
        draw(scene, output, args.dpi)
    except OSError as error:
        raise Complaint(f"cannot write {output}: {error.strerror or error}") from None
    drawn = Stage("draw", output.name, 1e3 * (time.perf_counter() - start), output.stat().st_size / 1e6)

    print_table([read, *stages, drawn])
    total = scene.selection.grid[0] * scene.selection.grid[1]
    if args.k > total:
        picture.remarks.append(f"the picture has {total} cells of {args.cell} px, fewer than k = {args.k}: all are kept")
    for remark in picture.remarks:
        print(f"note: {remark}")
    print(f"the picture is at {output.resolve()}")
    return 0


def print_table(stages: list[Stage]) -> None:
    """What each stage did and cost; a plain table where rich is not installed."""
    note = (
        f"milliseconds: median of {REPEATS} calls on {torch.get_num_threads()} CPU threads (read, draw: one);"
        " megabytes: what it hands on"
    )
    rows = [(s.name, s.result, f"{s.milliseconds:,.2f}", "" if s.megabytes is None else f"{s.megabytes:,.2f}") for s in stages]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for name, result, ms, mb in [("stage", "result", "ms", "MB"), *rows]:
            print(f"{name:20} {result:32} {ms:>10} {mb:>9}")
        print(note)
        return
    table = Table(caption=note, caption_justify="left", header_style="bold")
    for title, justify in (("stage", "left"), ("result", "left"), ("ms", "right"), ("MB", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _megabytes(*tensors: Tensor) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / 1e6
