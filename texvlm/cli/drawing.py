"""The one picture that `view` writes: the image, what is kept, what a model sees; the pyramid, the channels.

All positions are inches from the top left corner of the page; the page takes its shape from the image's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from texvlm.cli.view import Scene

Array: TypeAlias = npt.NDArray[np.float32]

PAGE, PANEL = "#0d0f13", "#171a21"
BRIGHT, PLAIN, FAINT = "#f4f5f7", "#b9bfca", "#767e8c"
HEAT, DARKEST = "inferno", 0.34  # the part of the colour map that stands out from the dimmed picture
MARGIN, GAP, TITLE = 0.55, 0.34, 0.62  # of the page; between panels; above a panel for its two lines of text
HEAD = 1.0  # the page's own title
LABEL = 0.58  # below a tile, for its name and range
TILE_GAP = 0.16  # between tiles
SCALE = 0.66  # below the heat map, for the scale of its colours
NARROWEST = 3.9  # a panel, so that its text fits above it
AREA = 19.0  # square inches of each of the three large panels
WIDE = 2.3  # panels of a wider image are stacked

# How each channel is coloured, and its range where that is fixed; the others show their own.
STYLES: dict[str, tuple[str, tuple[float, float] | None]] = {
    "red": ("red", (0, 1)),
    "green": ("green", (0, 1)),
    "blue": ("blue", (0, 1)),
    "high_pass": ("signed", None),
    "low_pass": ("gray", (0, 1)),
    "saliency": (HEAT, None),
    "x": ("cividis", (0, 1)),
    "y": ("cividis", (0, 1)),
    "eccentricity": ("cividis", (0, 1)),
    "edge_distance": ("viridis", None),
}


class Page:
    """A dark page that panels are put on, measured in inches from the top left."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), facecolor=PAGE)
        FigureCanvasAgg(self.figure)

    def text(self, x: float, y: float, text: str, size: float, color: str = PLAIN, **how: Any) -> None:
        """A line of text with its baseline at y."""
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, color=color, **how)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        """Bare axes with the top left corner at (x, y)."""
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, facecolor=PANEL)
        axes.set_axis_off()
        return axes

    def image(self, x: float, y: float, width: float, height: float, pixels: Array, smooth: bool = True, **how: Any) -> None:
        """An image that fills a box: [h, w, 3 or 4], or [h, w] with a colour map."""
        self.axes(x, y, width, height).imshow(
            pixels,
            aspect="auto",
            interpolation="lanczos" if smooth else "nearest",
            interpolation_stage="data",
            **how,
        )

    def title(self, x: float, y: float, title: str, subtitle: str) -> None:
        """Two lines above a panel whose top is at y."""
        self.text(x, y - 0.35, title, 15, BRIGHT, weight="bold")
        self.text(x, y - 0.12, subtitle, 10.5, FAINT)

    def save(self, path: Path, dpi: int) -> None:
        """Writes the page."""
        self.figure.savefig(path, dpi=dpi, facecolor=PAGE, metadata={"Software": "texvlm"})


class Layout:
    """Where everything goes on the page: three panels abreast, or below one another for a wide image."""

    def __init__(self, aspect: float, channels: int) -> None:
        stacked = aspect > WIDE
        self.panel_w = 14.0 if stacked else max(math.sqrt(AREA * aspect), NARROWEST)
        self.panel_h = self.panel_w / aspect
        inner = self.panel_w if stacked else 3 * self.panel_w + 2 * GAP
        top = MARGIN + HEAD + TITLE - 0.25
        tops = [top, top, top]
        if stacked:
            tops = [top, top + self.panel_h + TITLE, top + 2 * (self.panel_h + TITLE) + SCALE]
        self.panels = [(MARGIN + (0 if stacked else i * (self.panel_w + GAP)), y) for i, y in enumerate(tops)]
        top = tops[-1] + self.panel_h + TITLE + (0 if stacked else SCALE)

        self.pyramid, self.sheet = (MARGIN, top), (MARGIN + self.panel_w + GAP, top)
        self.pyramid_w, sheet_w = self.panel_w, inner - self.panel_w - GAP
        pyramid_h = self.pyramid_w / 1.5 / aspect
        if stacked:
            self.sheet, sheet_w = (MARGIN, top + pyramid_h + TITLE), inner
        self.columns = math.ceil(channels / 2)
        self.tile_w = (sheet_w - (self.columns - 1) * TILE_GAP) / self.columns
        self.tile_h = self.tile_w / aspect
        bottom = max(self.pyramid[1] + pyramid_h, self.sheet[1] + 2 * (self.tile_h + LABEL) - 0.1)
        self.width, self.height = inner + 2 * MARGIN, bottom + MARGIN - 0.05

    def tile(self, index: int) -> tuple[float, float]:
        """The top left corner of a tile of the contact sheet."""
        row, column = divmod(index, self.columns)
        return self.sheet[0] + column * (self.tile_w + TILE_GAP), self.sheet[1] + row * (self.tile_h + LABEL)


def draw(scene: Scene, path: Path, dpi: int) -> None:
    """Draws the scene into a PNG."""
    texture, selection = scene.texture, scene.selection
    height, width = scene.picture.height, scene.picture.width
    # Beyond these a picture is drawn out of shape: a page has its limits.
    at = Layout(min(max(width / height, 1 / 4), 14.0), texture.channels)
    page = Page(at.width, at.height)
    _head(page, scene)

    rows, columns = selection.grid
    count, cell = int(selection.count[0]), selection.cell
    page.title(*at.panels[0], "The picture", f"{width} × {height} pixels, {columns} × {rows} cells of {cell} px")
    page.image(*at.panels[0], at.panel_w, at.panel_h, _rgb(texture.level(0)[0, :3]))
    page.title(*at.panels[1], "What is kept", "cells by score, from edges, entropy and saliency")
    _heat(page, at.panels[1], at.panel_w, at.panel_h, scene)
    share = f"{count / max(rows * columns, 1):.0%} of the cells sharp, the rest from level {math.log2(cell):.3g}"
    page.title(*at.panels[2], "What a model sees", share)
    page.image(*at.panels[2], at.panel_w, at.panel_h, _rgb(scene.seen))

    texels = f"{texture.levels} levels in one buffer of {texture.data.shape[1]:,} texels"
    page.title(*at.pyramid, "The pyramid", texels)
    _pyramid(page, *at.pyramid, at.pyramid_w, at.pyramid_w / 1.5 * at.panel_h / at.panel_w, texture)
    page.title(*at.sheet, "The channels", f"{texture.channels} layers of one texture, read together")
    for index, name in enumerate(texture.names):
        values = texture.level(0)[0, index].float().cpu().numpy()
        _channel(page, *at.tile(index), at.tile_w, at.tile_h, name, values)
    if texture.channels < 2 * at.columns:  # a tile is free
        megabytes = texture.data.numel() * texture.data.element_size() / 1e6
        x, y = at.tile(2 * at.columns - 1)
        for fact in (f"{texture.levels} levels", f"× {texture.channels} channels", f"{megabytes:.1f} MB"):
            y += 0.22
            page.text(x, y, fact, _fit(at.tile_w, 11), PLAIN)
    page.save(path, dpi)


def _head(page: Page, scene: Scene) -> None:
    count, grid = int(scene.selection.count[0]), scene.selection.grid
    name = scene.picture.path.name
    name = name if len(name) <= 48 else name[:30] + "…" + name[-15:]
    page.text(MARGIN, MARGIN + 0.38, "texvlm", 27, BRIGHT, weight="bold")
    page.text(MARGIN + 1.78, MARGIN + 0.38, f"{count} of {grid[0] * grid[1]:,} cells", 18, "#f9a242")
    page.text(page.width - MARGIN, MARGIN + 0.38, name, 11, FAINT, ha="right")
    from matplotlib.lines import Line2D

    y = 1 - (MARGIN + 0.6) / page.height
    edge = MARGIN / page.width
    page.figure.add_artist(Line2D([edge, 1 - edge], [y, y], color="#2a2f3a", linewidth=1))


def _rgb(pixels: Any) -> Array:
    """A tensor [3, h, w] as an image [h, w, 3]."""
    array: Array = pixels.detach().float().clamp(0, 1).permute(1, 2, 0).cpu().numpy()
    return array


def _heat(page: Page, spot: tuple[float, float], width: float, height: float, scene: Scene) -> None:
    """The dimmed picture with its kept cells coloured by score, and the scale of the colours below it."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, Normalize

    selection = scene.selection
    columns = selection.grid[1]
    count, cell = int(selection.count[0]), selection.cell
    scores = selection.score[0, :count].detach().float().cpu().numpy()
    low, high = (float(scores.min()), float(scores.max())) if count else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1)

    # Drawn finer than the picture, so that the lines between cells stay thin.
    fine = max(1, round(1600 / max(scene.picture.width, scene.picture.height)))
    light = _rgb(scene.texture.level(0)[0, :3]) @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    light = light.repeat(fine, 0).repeat(fine, 1)
    canvas = (0.05 + 0.36 * light)[..., None] * np.array([0.92, 0.97, 1.1], dtype=np.float32)
    line = 1 if cell * fine > 5 else 0
    colours = colormaps[HEAT](DARKEST + (1 - DARKEST) * norm(scores))[:, :3].astype(np.float32)
    for index, colour in zip(selection.indices[0, :count].tolist(), colours):
        row, column = divmod(index, columns)
        box = np.s_[
            row * cell * fine : (row + 1) * cell * fine - line,
            column * cell * fine : (column + 1) * cell * fine - line,
        ]
        canvas[box] = colour * (0.62 + 0.38 * light[box][..., None])
    page.image(*spot, width, height, canvas)

    shown = ListedColormap(colormaps[HEAT](np.linspace(DARKEST, 1, 256)))
    left, y = spot[0] + 0.62, spot[1] + height + 0.16
    right = spot[0] + width
    page.text(spot[0], y + 0.11, "score", 10, PLAIN)
    page.image(left, y, right - left, 0.12, np.linspace(0, 1, 256, dtype=np.float32)[None], cmap=shown)
    page.text(left, y + 0.32, f"{low:.2f}, the last one kept", 9.5, FAINT)
    page.text(right, y + 0.32, f"{high:.2f}, the best", 9.5, FAINT, ha="right")


def _pyramid(page: Page, x: float, y: float, width: float, height: float, texture: Any) -> None:
    """The levels as graphics people draw them: the full size, and the rest stacked at its right."""
    gap = 0.05
    scale = (width - gap) / 1.5 / texture.width  # inches per texel, across and down
    down = height / texture.height
    page.image(x, y, texture.width * scale, height, _rgb(texture.level(0)[0, :3]))
    page.text(x + 0.08, y + height - 0.09, f"{texture.width} × {texture.height}", 8.5, BRIGHT, bbox=_plate())
    left, top = x + texture.width * scale + gap, y
    for level in range(1, texture.levels):
        pixels = _rgb(texture.level(level)[0, :3])
        h, w = pixels.shape[:2]
        wide, tall = w * scale, max(h * down - gap, h * down * 0.7)
        if tall < 0.012 or top + tall > y + height:
            break
        page.image(left, top, wide, tall, pixels, smooth=max(h, w) > 32)
        if wide > 0.55 and tall > 0.3:
            page.text(
                left + wide - 0.06,
                top + tall - 0.08,
                f"{w} × {h}",
                8.5 if wide > 1 else 7,
                BRIGHT,
                ha="right",
                bbox=_plate(),
            )
        top += tall + gap


def _plate() -> dict[str, Any]:
    return {"facecolor": "#000000", "alpha": 0.5, "edgecolor": "none", "pad": 2}


def _channel(page: Page, x: float, y: float, width: float, height: float, name: str, values: Array) -> None:
    """One tile of the contact sheet, with its name and the range it shows."""
    from matplotlib import colormaps
    from matplotlib.colors import Colormap, LinearSegmentedColormap

    cmap: Colormap
    style, bounds = STYLES.get(name, ("magma", None))
    if style in ("red", "green", "blue"):
        colour = {"red": "#ff5a4f", "green": "#4fd66a", "blue": "#5a8cff"}[style]
        cmap = LinearSegmentedColormap.from_list(style, ["#000000", colour, "#ffffff"])
    elif style == "signed":
        cmap = colormaps["gray"]
        reach = max(float(np.quantile(np.abs(values), 0.98)), 1e-6)
        bounds = (-reach, reach)
    else:
        cmap = colormaps[style]
    if bounds is None:
        bounds = (0.0, max(float(np.quantile(values, 0.995)), 1e-6))
    empty = not values.any()
    page.image(x, y, width, height, values, cmap=cmap, vmin=bounds[0], vmax=bounds[1])
    page.text(x, y + height + 0.19, name.replace("_", " "), _fit(width, 10.5), PLAIN if empty else BRIGHT)
    if empty:
        page.text(
            x,
            y + height + 0.36,
            "no frame before" if name == "motion" else "empty",
            _fit(width, 8.5),
            FAINT,
        )
    else:
        page.text(x, y + height + 0.36, _range(*bounds), _fit(width, 8.5), FAINT)


def _fit(width: float, size: float) -> float:
    """A font size that lets some 13 letters stand in a width."""
    return min(size, 9 * width)


def _range(low: float, high: float) -> str:
    return f"−{high:.2f} to {high:.2f}" if low < 0 else f"{low:g} to {high:.2f}".replace(".00", "")
