"""The one picture that `view` writes: the image, what is kept, what a model sees; the pyramid, the channels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from texvlm.cli import plural, tiles
from texvlm.cli.page import BRIGHT, FAINT, HEAD, LABEL, LINE, MARGIN, PLAIN, TILE_GAP, Array, Layout, Page
from texvlm.cli.view import token_of_cells

if TYPE_CHECKING:
    from texvlm.cli.view import Scene

HEAT, DARKEST = "inferno", 0.34  # the part of the colour map that stands out from the dimmed picture
EDGE = 0.2  # inches around a drawing that has a page of its own
ONLY, BOTH = ((0.98, 0.64, 0.26), (0.36, 0.66, 0.98)), (0.92, 0.93, 0.95)  # of cells that one of two paths keeps, or both
WHY = {"salience": "from edges, entropy and saliency", "learned": "what there is to read or look at"}


def draw(scene: Scene, dpi: int) -> bytes:
    """Draws the scene as a PNG."""
    texture, selection, colours = scene.texture, scene.selection, scene.colours
    height, width = scene.picture.height, scene.picture.width
    at = plan(scene)
    page = Page(at.width, at.height, dpi)
    size = (at.image_w, at.image_h)
    picture = rgb(colours.level(0)[0])
    _head(page, scene, at)

    rows, columns = selection.grid
    cells = f"{width} × {height} pixels, {columns} × {rows} cells of {selection.cell} px"
    page.title(*at.panels[0], "The picture", cells)
    page.image(*at.panels[0], *size, picture)
    paths, compared = len(scene.kept), len(scene.kept) > 1
    for kept, spot in zip(scene.kept, at.panels[1:]):
        why = WHY.get(kept.path, kept.path) if scene.query is None else f"relevance to “{_cut(scene.query, 24)}”"
        page.title(*spot, f"What {kept.path} keeps" if compared else "What is kept", f"cells by score, {why}")
        _heat(page, at, kept.selection, spot, picture)
    if compared:
        canvas, what = difference(scene.kept[0].selection, scene.kept[1].selection, picture)
        page.title(*at.panels[3], "Where they differ", what)
        page.image(*at.panels[3], *size, canvas)
    for kept, spot in zip(scene.kept, at.panels[-paths:]):
        page.title(*spot, f"What a model sees by {kept.path}" if compared else "What a model sees", sharpness(kept.selection))
        page.image(*spot, *size, rgb(kept.seen))
    if scene.relevance is not None and at.relevance is not None:
        page.title(*at.relevance, f"Where “{_cut(scene.query or '', 24)}” is", _found(scene.relevance))
        _relevance(page, at, scene, picture)

    texels = f"{plural(colours.levels, 'level')} in one buffer of {plural(texture.data.shape[1], 'texel')}"
    page.title(*at.pyramid, "The pyramid", texels)
    _pyramid(page, at, colours)
    _sheet(page, at, scene)
    return page.png()


def plan(scene: Scene) -> Layout:
    """Where everything of a scene goes."""
    count = len(scene.wanted) + (scene.flow is not None)
    sizes = (scene.picture.width, scene.picture.height, scene.colours.levels)
    at = Layout(*sizes, count, paths=len(scene.kept))
    lines = len(_absent(scene, at)) if scene.unasked else 0
    return Layout(*sizes, count, scene.relevance is not None, lines, len(scene.kept))


def share(count: int, total: int, cell: int) -> str:
    """How much of the picture is sharp."""
    if count == total:
        return "every cell sharp, so nothing is lost" if total > 1 else "the one cell that there is, sharp"
    percent = 100 * count / max(total, 1)
    amount = "less than 1%" if percent < 1 else "more than 99%" if percent > 99 else f"{percent:.0f}%"
    return f"{amount} of the cells sharp, the rest from level {math.log2(cell):.3g}"


def _head(page: Page, scene: Scene, at: Layout) -> None:
    count, grid = int(scene.selection.count[0]), scene.selection.grid
    remark = at.out_of_shape()
    name = _cut(scene.picture.name, 48) + (f"  ·  {remark}" if remark else "")
    page.text(MARGIN, MARGIN + 0.38, "texvlm", 27, BRIGHT, weight="bold")
    page.text(MARGIN + 1.78, MARGIN + 0.38, f"{count:,} of {plural(grid[0] * grid[1], 'cell')}", 18, "#f9a242")
    page.text(page.width - MARGIN, MARGIN + 0.38, name, 11, FAINT, ha="right")
    page.rule(MARGIN + HEAD - 0.4)


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most * 5 // 8] + "…" + text[-(most * 3 // 8 - 1) :]


def rgb(pixels: Any) -> Array:
    """A tensor [3, h, w] as an image [h, w, 3]."""
    array: Array = pixels.detach().float().clamp(0, 1).permute(1, 2, 0).cpu().numpy()
    return array


def luma(picture: Array) -> Array:
    """How bright [h, w, 3] is."""
    light: Array = picture @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    return light


def dimmed(light: Array) -> Array:
    """A dark, bluish picture [h, w, 3] of this brightness, for what stands out from it."""
    canvas: Array = (0.05 + 0.36 * light)[..., None] * np.array([0.92, 0.97, 1.1], dtype=np.float32)
    return canvas


def sharpness(selection: Any) -> str:
    """How much of the picture is sharp, or how many tokens there are of each level."""
    count, (rows, columns) = int(selection.count[0]), selection.grid
    levels = selection.lod[0, :count].long()
    if levels.eq(0).all():
        return share(count, rows * columns, selection.cell)
    many = [f"{int((levels == level).sum()):,} at level {level}" for level in levels.unique().tolist()]
    return "tokens: " + ", ".join(many)


def difference(one: Any, other: Any, picture: Array) -> tuple[Array, str]:
    """The dimmed picture with the cells that one of two selections keeps, or both: a colour for each; and what these mean."""
    first, second = (selection.mask()[0].cpu().numpy() for selection in (one, other))
    cell, (height, width) = one.cell, picture.shape[:2]
    light = luma(picture)
    canvas = dimmed(light)
    colours = [(first & ~second, ONLY[0]), (second & ~first, ONLY[1]), (first & second, BOTH)]
    for mask, colour in colours:
        inside = mask.repeat(cell, 0).repeat(cell, 1)[:height, :width]
        canvas[inside] = np.array(colour, dtype=np.float32) * (0.62 + 0.38 * light[inside][:, None])
    a, b, both = (int(mask.sum()) for mask, _ in colours)
    return canvas, f"cells: {a:,} left alone (orange), {b:,} right alone (blue), {both:,} both"


def heat(selection: Any, picture: Array) -> tuple[Array, float, float]:
    """The dimmed picture with its kept tokens coloured by score, drawn finer than the picture so that the lines between them stay thin.

    Returns:
        An image [fine * h, fine * w, 3], and the least and the largest score.
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    count, cell = int(selection.count[0]), selection.cell
    scores = selection.score[0, :count].detach().float().cpu().numpy()
    low, high = (float(scores.min()), float(scores.max())) if count else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1)

    fine = max(1, round(1600 / max(picture.shape[:2])))
    light = luma(picture).repeat(fine, 0).repeat(fine, 1)
    canvas = dimmed(light)
    token = token_of_cells(selection).numpy()
    hue = np.zeros((count + 1, 3), dtype=np.float32)  # the last one, of no token, is not painted
    hue[:count] = colormaps[HEAT](DARKEST + (1 - DARKEST) * norm(scores))[:, :3]
    (row, y), (column, x) = (np.divmod(np.arange(n), cell * fine) for n in canvas.shape[:2])
    painted = token[row[:, None], column]
    inside = painted >= 0
    if cell * fine > 5:  # leave room for a line between tokens
        ends, stops = (np.ones_like(token, dtype=bool) for _ in range(2))
        ends[:-1], stops[:, :-1] = token[1:] != token[:-1], token[:, 1:] != token[:, :-1]
        at_line = (ends[row[:, None], column] & (y == cell * fine - 1)[:, None]) | (
            stops[row[:, None], column] & (x == cell * fine - 1)
        )
        inside &= ~at_line
    canvas[inside] = hue[painted[inside]] * (0.62 + 0.38 * light[inside][:, None])
    return canvas, low, high


def _heat(page: Page, at: Layout, selection: Any, spot: tuple[float, float], picture: Array) -> None:
    """`heat` on the page, and the scale of its colours below it."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    canvas, low, high = heat(selection, picture)
    page.image(*spot, at.image_w, at.image_h, canvas)

    count = int(selection.count[0])
    shown = ListedColormap(colormaps[HEAT](np.linspace(DARKEST, 1, 256)))
    left, top = spot[0] + 0.62, spot[1] + at.image_h + 0.16
    right = spot[0] + at.panel_w
    page.text(spot[0], top + 0.11, "score", 10, PLAIN)
    page.image(left, top, right - left, 0.12, np.linspace(0, 1, 256, dtype=np.float32)[None], cmap=shown)
    page.text(left, top + 0.32, f"{low:.2f}, the last one kept" if count > 1 else "", 9.5, FAINT)
    page.text(right, top + 0.32, f"{high:.2f}, the best" if count else "", 9.5, FAINT, ha="right")


def _relevance(page: Page, at: Layout, scene: Scene, picture: Array) -> None:
    """The dimmed picture, lit where it answers the query: half of the scale says nothing."""
    from matplotlib import colormaps

    assert scene.relevance is not None and at.relevance is not None
    values = scene.relevance[0].detach().float().cpu().numpy()
    lit = (np.clip(2 * values - 1, 0, 1) ** 2)[..., None]
    glow = colormaps[HEAT](0.4 + 0.6 * lit[..., 0])[..., :3].astype(np.float32)
    light = luma(picture)
    page.image(*at.relevance, at.image_w, at.image_h, (1 - lit) * dimmed(light) + lit * glow * (0.55 + 0.45 * light[..., None]))


def _found(relevance: Any) -> str:
    best = float(relevance.max())
    return f"relevance up to {best:.2f}; 0.5 says nothing"


def draw_pyramid(colours: Any, dpi: int) -> bytes:
    """The pyramid of a texture of three channels, as a PNG of its own."""
    at = Layout(colours.width, colours.height, colours.levels, tiles=1)
    at.pyramid = (EDGE, EDGE)
    boxes = at.levels(_sizes(colours))
    page = Page(max(x + w for x, _, w, _ in boxes) + EDGE, max(y + h for _, y, _, h in boxes) + EDGE, dpi)
    _pyramid(page, at, colours)
    return page.png()


def draw_channels(texture: Any, dpi: int) -> bytes:
    """The contact sheet of all channels of a texture, as a PNG of its own."""
    at = Layout(texture.width, texture.height, texture.levels, texture.channels)
    at.sheet = (EDGE, EDGE)
    width, height = at.columns * (at.slot_w + TILE_GAP) - TILE_GAP, at.rows * (at.tile_h + LABEL) - 0.1
    page = Page(width + 2 * EDGE, height + 2 * EDGE, dpi)
    for index, name in enumerate(texture.names):
        _channel(page, at, index, texture, name)
    return page.png()


def _pyramid(page: Page, at: Layout, colours: Any) -> None:
    """The levels as graphics people draw them: the full size, and the rest in a column at its right, or in a row below it."""
    levels = [rgb(colours.level(level)[0]) for level in range(colours.levels)]
    sizes = _sizes(colours)
    for level, (pixels, (h, w), (x, y, wide, tall)) in enumerate(zip(levels, sizes, at.levels(sizes))):
        page.image(x, y, wide, tall, pixels, smooth=level == 0 or max(h, w) > 32)
        text = f"{w} × {h}"
        if level == 0 and tall > 0.3 and wide > 0.9:
            page.text(x + 0.08, y + tall - 0.09, text, 8.5, BRIGHT, bbox=_plate())
        elif wide > 0.085 * len(text) and tall > 0.3:
            page.text(x + wide - 0.06, y + tall - 0.08, text, 8.5 if wide > 1 else 7, BRIGHT, ha="right", bbox=_plate())


def _sizes(texture: Any) -> list[tuple[int, int]]:
    """(height, width) of each level."""
    shapes = (texture.level(level).shape for level in range(texture.levels))
    return [(int(shape[2]), int(shape[3])) for shape in shapes]


def _plate() -> dict[str, Any]:
    return {"facecolor": "#000000", "alpha": 0.5, "edgecolor": "none", "pad": 2}


def _sheet(page: Page, at: Layout, scene: Scene) -> None:
    """The contact sheet of the channels, and a word on those that have no source here."""
    texture, size = scene.texture, (at.tile_w, at.tile_h)
    megabytes = texture.data.numel() * texture.data.element_size() / 1e6
    what = f"{tiles.together(texture.names, scene.known)} in one texture of {megabytes:,.1f} MB, read together"
    page.title(*at.sheet, "The channels", what)
    for index, name in enumerate(scene.wanted):
        if name in scene.absent:
            tiles.missing(page, *at.tile(index), size, at.slot_w, name, scene.absent[name])
            continue
        _channel(page, at, index, texture, name)
    if scene.flow is not None:
        tiles.flow(page, *at.tile(len(scene.wanted)), size, at.slot_w, scene.flow[0].float().cpu().numpy())
    if scene.unasked:
        page.title(*at.absent, "Not here", f"{plural(len(scene.unasked), 'channel')} without a source")
        tiles.notes(page, *at.absent, _absent(scene, at), LINE)


def _channel(page: Page, at: Layout, index: int, texture: Any, name: str) -> None:
    values = texture.level(0)[0, texture.index(name)].float().cpu().numpy()
    tiles.channel(page, *at.tile(index), (at.tile_w, at.tile_h), at.slot_w, name, values)


def _absent(scene: Scene, at: Layout) -> list[tuple[str, bool]]:
    width = at.panel_w - at.level_w - 2 * 0.34 if at.stacked else at.panel_w
    return tiles.absent_lines(scene.unasked, width)
