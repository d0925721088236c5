"""What the page of `app` shows, as functions of a picture and of what was asked: nothing here knows of a browser."""

from __future__ import annotations

import io
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from texvlm.cli import Complaint, parser, plural
from texvlm.cli.drawing import difference, draw_channels, draw_pyramid, heat, rgb, sharpness
from texvlm.cli.gaze import Fixation, homunculus, layout_for, seen_by
from texvlm.cli.image import Picture, read_picture
from texvlm.cli.page import Array
from texvlm.cli.select import asked, choose
from texvlm.cli.tiles import group
from texvlm.cli.view import Sources, as_seen, surroundings, without_source

Image8 = npt.NDArray[np.uint8]
R = TypeVar("R")

SIGHTS = ("cells", "multiscale", "fovea")
"""What a model may see: the kept cells of the path, tokens of mixed levels, or a fovea's."""

LONGEST_SIDE, FRAMES = 640, 300  # of a film that is followed on the page
DPI = 130  # of the drawings that are pages


class Shown(NamedTuple):
    """A picture that is looked at."""

    picture: Picture
    colours: Any  # texvlm.Texture of red, green and blue

    @property
    def pixels(self) -> Array:
        """[H, W, 3] in [0, 1]."""
        return rgb(self.colours.level(0)[0])


class Ask(NamedTuple):
    """What is asked of it."""

    k: int = 273
    cell: int = 16
    path: str | None = None  # None: the default, or query where there is one
    other: str | None = None  # a path to compare it with
    query: str | None = None
    fixation: Fixation = (0.5, 0.5)


class Chosen(NamedTuple):
    """What a path keeps, and how long that took."""

    path: str
    selection: Any  # texvlm.Selection
    milliseconds: float

    @property
    def words(self) -> str:  # noqa: D102
        rows, columns = self.selection.grid
        kept = int(self.selection.count[0])
        return f"**{self.path}** {kept:,} of {plural(rows * columns, 'cell')}, {self.milliseconds:.1f} ms"


def clocked(work: Callable[[], R]) -> tuple[R, float]:
    """A result and the milliseconds that it took."""
    start = time.perf_counter()
    return work(), 1e3 * (time.perf_counter() - start)


def opened(name: str, max_size: int) -> tuple[Shown, str]:
    """A picture, and what is to be said of it: its size, and what was done to it.

    Raises:
        Complaint: with one line that says what is wrong with the file.
    """
    import texvlm

    try:
        picture = read_picture(name, max_size)
    except Complaint as complaint:
        raise Complaint(str(complaint).replace(name, Path(name).name)) from None
    remarks = [remark.removesuffix(" (--max-size)") for remark in picture.remarks]
    return Shown(picture, texvlm.Texture(picture.image)), "; ".join([f"{picture.width} × {picture.height} pixels", *remarks])


def chosen(shown: Shown, ask: Ask) -> list[Chosen]:
    """What one path keeps, or two."""
    query = " ".join(ask.query.split()) if ask.query else None
    first = asked(Namespace(path=ask.path, query=query or None))
    paths = [first["path"], *([ask.other] if ask.other else [])]
    found = []
    for path in paths:
        selection, milliseconds = clocked(lambda: choose(shown.picture.image, ask.k, ask.cell, **{**first, "path": path}))  # noqa: B023
        found.append(Chosen(path, selection, milliseconds))
    return found


def kept(shown: Shown, found: list[Chosen]) -> tuple[list[Image8], str]:
    """The kept cells by score, an image for each path and, of two, one that says where they differ; and what its colours mean."""
    images = [heat(choice.selection, shown.pixels)[0] for choice in found]
    if len(found) == 1:
        return [bytes_of(image) for image in images], "bright: the best by score"
    canvas, what = difference(found[0].selection, found[1].selection, shown.pixels)
    return [bytes_of(image) for image in [*images, canvas]], what


def sight(shown: Shown, found: list[Chosen], ask: Ask, what: str) -> tuple[Image8, str]:
    """What a model sees [H, W, 3] by the first path's cells, by tokens of mixed levels or by a fovea; and how sharp that is."""
    coarse = surroundings(shown.colours, ask.cell)
    if what == "fovea":
        layout = layout_for(ask.k, ask.cell, (shown.colours.height, shown.colours.width))
        seen, milliseconds = clocked(lambda: seen_by(shown.colours, ask.fixation, layout, coarse))
        return bytes_of(rgb(seen)), f"{plural(layout.count, 'token')} around the gaze, {milliseconds:.1f} ms"
    said = ""
    if what == "multiscale":
        mixed = chosen(shown, ask._replace(path="multiscale", other=None))
        said, found = f"; {mixed[0].milliseconds:.1f} ms", mixed
    selection = found[0].selection
    return bytes_of(rgb(as_seen(shown.colours, selection, coarse).clamp(0, 1))), sharpness(selection) + said


def channel_sheet(shown: Shown, ask: Ask) -> tuple[Image8, str]:
    """The channels that have a source here; what took how long, and which have none."""
    import texvlm

    options = asked(Namespace(path=None, query=ask.query or None))
    query, embedding = options.get("query"), options.get("embedding")
    names = [channel.name for channel in texvlm.CHANNELS]
    absent = without_source(names, Sources(None, query, embedding))
    built = [name for name in names if name not in absent]
    fixation = torch.tensor([ask.fixation])

    def build() -> Any:
        return texvlm.build_channels(shown.picture.image, None, query, built, fixation=fixation, embedding=embedding, flow=None)

    texture, milliseconds = clocked(build)
    said = f"{plural(len(built), 'channel')} and their mips, {milliseconds:.1f} ms"
    return decoded(draw_channels(texture, DPI)), said + (f"; without a source here: {group(absent)}" if absent else "")


def pyramid(shown: Shown) -> tuple[Image8, str]:
    """The levels of the picture, and what building them takes."""
    import texvlm

    colours, milliseconds = clocked(lambda: texvlm.Texture(shown.picture.image))
    texels = plural(colours.data.shape[1], "texel")
    return decoded(draw_pyramid(colours, 2 * DPI)), f"{plural(colours.levels, 'level')}, {texels}, {milliseconds:.1f} ms"


def magnified(shown: Shown, ask: Ask) -> tuple[Image8, Image8, str]:
    """The picture with its fixation, and the homunculus."""
    (warped, count), milliseconds = clocked(lambda: homunculus(shown.colours, ask.fixation))
    x, y = (round(place * n) for place, n in zip(ask.fixation, (shown.colours.width, shown.colours.height)))
    return (
        fixated(shown, ask.fixation),
        bytes_of(rgb(warped)),
        f"{plural(count, 'sample')} around x {x}, y {y}, {milliseconds:.1f} ms",
    )


def fixated(shown: Shown, fixation: Fixation) -> Image8:
    """The picture with a cross where it is looked at."""
    pixels = bytes_of(shown.pixels)
    height, width = pixels.shape[:2]
    x, y = (min(round(place * n), n - 1) for place, n in zip(fixation, (width, height)))
    arm, line = max(4, max(height, width) // 30), max(1, max(height, width) // 350)
    for wide, colour in ((line + 2, (0, 0, 0)), (line, (249, 162, 66))):
        near = slice(max(y - wide, 0), y + wide + 1), slice(max(x - wide, 0), x + wide + 1)
        pixels[near[0], max(x - arm, 0) : x + arm + 1] = colour
        pixels[max(y - arm, 0) : y + arm + 1, near[1]] = colour
    return pixels


def film(name: str, output: Path, ask: Ask) -> list[tuple[str, str, str, str]]:
    """Writes the film that `video` writes of a film's first FRAMES frames, and returns its table of milliseconds.

    Raises:
        Complaint: with one line that says what is wrong with the film, or what reads one.
    """
    from texvlm.cli import video

    argv = ["video", name, "-o", str(output), "-k", str(ask.k), "--cell", str(ask.cell), "--limit", str(FRAMES)]
    if ask.path:
        argv += ["--path", ask.path]
    args = parser().parse_args(argv)
    args.query = ask.query or None
    with video.opened(args) as source:
        longest = max(source.height, source.width)
        if longest > LONGEST_SIDE:
            args.size = tuple(max(1, round(n * LONGEST_SIDE / longest)) for n in (source.height, source.width))
    bill = video.Bill()
    with video.opened(args) as source:
        video.watch(args, source, video.stream_for(args, source), output, bill)
    return bill.rows()


def bytes_of(pixels: Array) -> Image8:
    """[h, w, 3] in [0, 1] as bytes."""
    image: Image8 = (255 * pixels + 0.5).clip(0, 255).astype(np.uint8)
    return image


def decoded(png: bytes) -> Image8:
    """A PNG as [h, w, 3]."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
