"""`view IMAGE`: one picture of what texvlm sees and keeps, and a table of what each stage cost."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import torch
from torch import Tensor

from texvlm.cli import DEFAULT_PATH, Complaint, plural
from texvlm.cli.image import Picture, read_picture
from texvlm.cli.output import is_plain, writing
from texvlm.cli.select import choose, query_text
from texvlm.learned import VALUE_CHANNELS
from texvlm.paths import SCORE_CHANNELS

REPEATS, PATIENCE = 5, 1.0  # calls of each stage, fewer where they take longer than this many seconds together
R = TypeVar("R")


class Stage(NamedTuple):
    """What one stage did and cost."""

    name: str
    result: str
    milliseconds: float
    megabytes: float | None  # of what it hands on


class Kept(NamedTuple):
    """What a path keeps of the picture."""

    path: str
    selection: Any  # texvlm.Selection
    seen: Tensor  # [3, H, W] in [0, 1]: kept tokens at their level, the rest coarse


class Scene(NamedTuple):
    """All that is drawn."""

    picture: Picture
    colours: Any  # texvlm.Texture of red, green and blue
    texture: Any  # texvlm.Texture of the channels that were built
    wanted: list[str]  # the channels that get a tile; those in `absent` an empty one
    absent: dict[str, str]  # and why
    unasked: dict[str, str]  # channels that nobody named and that have no source here, and why
    known: int  # how many channels there are
    kept: list[Kept]  # by one path, or by two that are compared
    query: str | None = None
    relevance: Tensor | None = None  # [1, H, W]
    flow: Tensor | None = None  # [1, 2, H, W]

    @property
    def selection(self) -> Any:
        """What the first path keeps, a texvlm.Selection."""
        return self.kept[0].selection


class Sources(NamedTuple):
    """What channels may be made of, besides the picture."""

    previous: Picture | None = None
    query: str | None = None
    embedding: Any = None  # texvlm.Embedding


def timed(work: Callable[[], R]) -> tuple[R, float]:
    """The result of `work` and the median time of some calls in milliseconds, after one to warm up."""
    began = time.perf_counter()
    result = work()
    times: list[float] = []
    while len(times) < REPEATS and (not times or time.perf_counter() - began < PATIENCE):
        start = time.perf_counter()
        result = work()
        times.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times)


def channel_names(text: str) -> list[str]:
    """`--channels`, a list with commas of what `build_channels` takes as names and numbers, as names."""
    from texvlm.channels import CHANNELS, channel_indices

    words = dict.fromkeys(text.replace(",", " ").split())
    if not words:
        raise Complaint("--channels names none")
    try:
        return [CHANNELS[index].name for index in channel_indices([int(w) if w.isdecimal() else w for w in words])]
    except ValueError as error:
        raise Complaint(f"--channels: {error}") from None


def without_source(names: list[str], sources: Sources) -> dict[str, str]:
    """Which of these channels have no source, and why, as the metadata of a tiny texture says."""
    import texvlm

    tiny = torch.zeros(3, 8, 8)
    previous = None if sources.previous is None else before(tiny, sources)
    texture = texvlm.build_channels(tiny, previous, sources.query, names, embedding=sources.embedding, flow=None)
    notes = {name: str(texture.meta[name]) for name in names}
    return {name: note.removeprefix("absent: ") for name, note in notes.items() if note.startswith("absent")}


def before(image: Tensor, sources: Sources) -> Any:
    """The texture of a previous picture: what the next one takes from it."""
    import texvlm

    names = ["red", "green", "blue", "saliency"]
    if sources.embedding is not None and sources.query is not None:
        names += [f"embedding_{i}" for i in range(16)]
    return texvlm.build_channels(image, None, sources.query, names, embedding=sources.embedding, levels=1)


def texel_centres(height: int, width: int) -> Tensor:
    """The centres of all level-0 texels as uv [1, H * W, 2]."""
    v, u = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack([u, v], dim=-1).view(1, -1, 2)


def kept_by(
    path: str, scored: Any, k: int, cell: int, options: dict[str, Any], colours: Any, coarse: Tensor
) -> tuple[Kept, list[Stage]]:
    """What a path keeps of an image or a texture, and what that costs; `coarse` [3, H, W] is under the tokens."""
    choose(scored, k, cell, path=path, **options)  # it refuses what it refuses, before it is timed
    selection, select_ms = timed(lambda: choose(scored, k, cell, path=path, **options))
    count, (rows, columns) = int(selection.count[0]), selection.grid
    tokens, tokens_ms = timed(lambda: selection.tokens(colours).patches)
    cells = f"{count:,} of {plural(rows * columns, 'cell')}"
    patches = f"{count:,} patch{'' if count == 1 else 'es'} {cell} x {cell} x 3"
    stages = [
        Stage("cascade", cells, select_ms, _megabytes(selection.indices, selection.score)),
        Stage("tokens", patches, tokens_ms, _megabytes(tokens)),
    ]
    return Kept(path, selection, as_seen(colours, selection, coarse).clamp(0, 1)), stages


READS = {"salience": SCORE_CHANNELS, "learned": VALUE_CHANNELS}
"""Paths that are given the texture where it has these channels; the others make their own of the picture."""


def look(
    picture: Picture,
    k: int,
    cell: int,
    channels: str = "all",
    sources: Sources | None = None,
    paths: Sequence[str] | None = None,
) -> tuple[Scene, list[Stage]]:
    """Runs the stages on a picture; every one is the public function that a program would call."""
    import texvlm

    sources = sources or Sources()
    paths = paths or [DEFAULT_PATH if sources.query is None else "query"]
    image, height, width = picture.image, picture.height, picture.width
    names = channel_names(channels)
    absent = without_source(names, sources)
    built = [name for name in names if name not in absent]
    if not built:
        raise Complaint(f"--channels: none of these has a source here: {names[0]} is absent ({absent[names[0]]})")
    stages = []

    previous, flow = None, None
    if sources.previous is not None:
        earlier = sources.previous.image
        if earlier.dtype != image.dtype:
            image, earlier = (t.float() / 255 if t.dtype == torch.uint8 else t for t in (image, earlier))
        previous, previous_ms = timed(lambda: before(earlier, sources))
        stages.append(Stage("previous", "the frame before, its saliency", previous_ms, _megabytes(previous.data)))
        (flow, occlusion), flow_ms = timed(lambda: texvlm.optical_flow(earlier, image))
        hidden = f"{float(occlusion.float().mean()):.0%} of it occluded"
        stages.append(Stage("flow", hidden, flow_ms, _megabytes(flow)))
    field = None if flow is None else (flow, occlusion)

    def build() -> Any:
        return texvlm.build_channels(image, previous, sources.query, built, embedding=sources.embedding, flow=field)

    texture, build_ms = timed(build)
    what = f"{plural(texture.channels, 'channel')}, {plural(texture.levels, 'level')}"
    stages.append(Stage("channels + pyramid", what, build_ms, _megabytes(texture.data)))

    relevance = None
    if sources.query is not None:
        axes = [f"embedding_{i}" for i in range(16)]
        answers = texture
        if not set(axes) <= set(built):
            answers = texvlm.build_channels(image, None, sources.query, axes, embedding=sources.embedding, levels=1)
        relevance, ms = timed(lambda: texvlm.relevance(answers))
        stages.append(Stage("relevance", f"up to {float(relevance.max()):.2f}", ms, _megabytes(relevance)))
    colours = texvlm.Texture(picture.image)
    coarse, coarse_ms = timed(lambda: surroundings(colours, cell))
    kept = []
    for path in paths:
        ready = sources.query is None and path in READS and set(READS[path]) <= set(built)
        options = {} if sources.query is None else {"query": sources.query, "embedding": sources.embedding}
        found, costs = kept_by(path, texture if ready else image, k, cell, options, colours, coarse)
        kept.append(found)
        stages += [cost._replace(result=f"{path}: {cost.result}") for cost in costs] if len(paths) > 1 else costs
    stages.append(
        Stage("surroundings", f"{plural(height * width, 'sample')} at LOD {coarse_level(cell)}", coarse_ms, _megabytes(coarse))
    )
    everything = channels.strip() == "all"
    return Scene(
        picture,
        colours,
        texture,
        wanted=built if everything else names,
        absent={} if everything else absent,
        unasked=absent if everything else {},
        known=len(texvlm.CHANNELS),
        kept=kept,
        query=sources.query,
        relevance=relevance,
        flow=flow,
    ), stages


def coarse_level(cell: int) -> int:
    """At which a whole cell is about one texel."""
    return (cell - 1).bit_length()


def surroundings(colours: Any, cell: int) -> Tensor:
    """The picture [3, H, W] as coarse as where no cell is kept."""
    return at_level(colours, coarse_level(cell))


def at_level(colours: Any, level: int) -> Tensor:
    """The picture [3, H, W] at its full size, read from a level."""
    height, width = colours.height, colours.width
    sampled: Tensor = colours.sample(texel_centres(height, width), float(level))
    return sampled[0].T.reshape(3, height, width)


def token_of_cells(selection: Any) -> Tensor:
    """Which of the first picture's tokens shows each cell, int64 [rows, columns]; the finest where several do, -1 where none does."""
    rows, columns = selection.grid
    found = torch.full((rows, columns), -1, dtype=torch.int64)
    count = int(selection.count[0])
    indices, levels = selection.indices[0, :count].tolist(), selection.lod[0, :count].tolist()
    for token in sorted(range(count), key=lambda t: -levels[t]):
        (row, column), side = divmod(indices[token], columns), 2 ** int(levels[token])
        found[row : row + side, column : column + side] = token
    return found


def as_seen(colours: Any, selection: Any, coarse: Tensor) -> Tensor:
    """The picture [3, H, W] with the kept tokens at their level over the coarse one."""
    height, width = coarse.shape[1:]
    token = token_of_cells(selection)
    lod = torch.where(token < 0, -1.0, selection.lod[0].cpu()[token.clamp(min=0)] if selection.lod.shape[1] else -1.0)
    level = lod.repeat_interleave(selection.cell, 0).repeat_interleave(selection.cell, 1)[:height, :width]
    seen = torch.where(level == 0, colours.level(0)[0], coarse)
    for coarser in range(1, int(lod.max()) + 1):
        seen = torch.where(level == coarser, at_level(colours, coarser), seen)
    return seen


def handed_in(args: argparse.Namespace, picture: Picture) -> Sources:
    """What the options bring."""
    previous = None
    if args.previous is not None:
        previous = read_picture(args.previous, args.max_size)
        if previous.image.shape != picture.image.shape:
            sizes = [f"{p.full[1]} x {p.full[0]}" for p in (picture, previous)]
            raise Complaint(f"--previous must be as large as the picture, {sizes[0]}, got {sizes[1]}")
    query = query_text(args)
    if query is None and args.embedding is None:
        return Sources(previous)
    import texvlm

    return Sources(previous, query, texvlm.Embedding(texvlm.DigitsEmbedding()))


def run(args: argparse.Namespace) -> int:
    """The command."""
    output, piped = Path(args.output), args.output == "-"
    if piped and sys.stdout is not None and sys.stdout.isatty():
        raise Complaint("-o - writes a PNG to standard output, which is a terminal here: texvlm view photo.jpg -o - > out.png")
    if not piped and output.suffix.lower() != ".png" and is_plain(output):
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
    from texvlm.cli.drawing import draw, plan

    sources = handed_in(args, picture)
    if args.path is not None and len(args.path) > 2:
        raise Complaint(f"--path takes one path, or two to compare, got {len(args.path)}")
    scene, stages = look(picture, args.k, args.cell, args.channels, sources, args.path)

    start = time.perf_counter()
    png = draw(scene, args.dpi)
    with writing(args.output, "wb") as file:
        file.write(png)
    drawn = Stage("draw", "a PNG" if piped else output.name, 1e3 * (time.perf_counter() - start), len(png) / 1e6)

    said = sys.stderr if piped else sys.stdout
    print_table([read, *stages, drawn], said)
    total = scene.selection.grid[0] * scene.selection.grid[1]
    if args.k > total:
        all_of_them = "it is kept" if total == 1 else "all are kept"
        cells = plural(total, "cell")
        picture.remarks.append(f"the picture has {cells} of {args.cell} px, fewer than k = {args.k}: {all_of_them}")
    if sources.query is not None:
        picture.remarks.append("the digits embedding knows the digits 0 to 9, about 12 to 110 pixels high, and nothing else")
    if scene.absent:
        without = "; ".join(f"{name.replace('_', ' ')} ({why})" for name, why in scene.absent.items())
        picture.remarks.append(f"zero for want of a source: {without}")
    if remark := plan(scene).out_of_shape():
        picture.remarks.append(f"the picture is {remark}")
    for remark in picture.remarks:
        print(f"note: {remark}", file=said)
    if not piped:
        print(f"the picture is at {output.resolve()}")
    return 0


def print_table(stages: list[Stage], to: TextIO) -> None:
    """What each stage did and cost; a plain table where rich is not installed."""
    note = (
        f"milliseconds: median of up to {REPEATS} calls on {plural(torch.get_num_threads(), 'CPU thread')} (read, draw: one);"
        " megabytes: what it hands on"
    )
    rows = [(s.name, s.result, f"{s.milliseconds:,.2f}", "" if s.megabytes is None else f"{s.megabytes:,.2f}") for s in stages]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for name, result, ms, mb in [("stage", "result", "ms", "MB"), *rows]:
            print(f"{name:20} {result:32} {ms:>10} {mb:>9}", file=to)
        print(note, file=to)
        return
    table = Table(caption=note, caption_justify="left", header_style="bold")
    for title, justify in (("stage", "left"), ("result", "left"), ("ms", "right"), ("MB", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    Console(file=to).print(table)


def _megabytes(*tensors: Tensor) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / 1e6
