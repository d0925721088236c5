"""The page that `view` draws on, and where everything goes on it.

All positions are inches from the top left corner of the page; the page takes its shape from the image's.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from texvlm.cli import Complaint

Array: TypeAlias = npt.NDArray[np.float32]

PAGE, PANEL, RULE = "#0d0f13", "#171a21", "#2a2f3a"
BRIGHT, PLAIN, FAINT = "#f4f5f7", "#b9bfca", "#767e8c"
MARGIN, GAP, TITLE = 0.55, 0.34, 0.62  # of the page; between panels; above a panel for its two lines of text
HEAD = 1.0  # the page's own title
LABEL = 0.58  # below a tile, for its name and range
TILE_GAP = 0.16  # between tiles
SCALE = 0.66  # below the heat map, for the scale of its colours
NARROWEST, TALLEST = 3.9, 8.0  # a panel, so that its text fits above it, and the page on a screen
AREA = 19.0  # square inches of each of the three large panels
WIDE = 2.3  # panels of a wider image are stacked
FLATTEST, SLIMMEST = 16.0, 1 / 12  # beyond these a picture is drawn out of shape
TILE_AREA, TILE_NARROWEST, TILE_TALLEST = 1.35, 1.2, 2.4
SPECK = 0.035  # the least room of a level in the pyramid, so that all of them are seen
LINE = 0.19  # between lines of small text
LARGEST = 120_000_000  # pixels of a page


class Page:
    """A dark page that panels are put on, measured in inches from the top left."""

    def __init__(self, width: float, height: float, dpi: int) -> None:
        if (pixels := width * height * dpi**2) > LARGEST:
            most = int(math.sqrt(LARGEST / (width * height)))
            raise Complaint(
                f"at --dpi {dpi} this page would have {pixels / 1e6:,.0f} million pixels: --dpi {most} is the most for it"
            )
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height, self.dpi = width, height, dpi
        self.figure = Figure(figsize=(width, height), facecolor=PAGE)
        FigureCanvasAgg(self.figure)

    def text(self, x: float, y: float, text: str, size: float, color: str = PLAIN, **how: Any) -> None:
        """A line of text with its baseline at y; a dollar sign in it is one, not TeX."""
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, color=color, parse_math=False, **how)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        """Bare axes with the top left corner at (x, y)."""
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.set_axis_off()
        return axes

    def image(self, x: float, y: float, width: float, height: float, pixels: Array, smooth: bool = True, **how: Any) -> None:
        """An image that fills a box: [h, w, 3 or 4], or [h, w] with a colour map."""
        if smooth:
            pixels = shrunk(pixels, math.ceil(2 * width * self.dpi), math.ceil(2 * height * self.dpi))
        self.axes(x, y, width, height).imshow(
            pixels,
            aspect="auto",
            interpolation="lanczos" if smooth else "nearest",
            interpolation_stage="data",
            **how,
        )

    def blank(self, x: float, y: float, width: float, height: float) -> None:
        """An empty tile."""
        from matplotlib.patches import Rectangle

        corner = (x / self.width, 1 - (y + height) / self.height)
        size = (width / self.width, height / self.height)
        self.figure.add_artist(Rectangle(corner, *size, facecolor=PANEL, edgecolor=RULE, linewidth=0.8))

    def rule(self, y: float) -> None:
        """A thin line across the page."""
        from matplotlib.lines import Line2D

        edge, down = MARGIN / self.width, 1 - y / self.height
        self.figure.add_artist(Line2D([edge, 1 - edge], [down, down], color=RULE, linewidth=1))

    def title(self, x: float, y: float, title: str, subtitle: str) -> None:
        """Two lines above a panel whose top is at y."""
        self.text(x, y - 0.35, title, 15, BRIGHT, weight="bold")
        self.text(x, y - 0.12, subtitle, 10.5, FAINT)

    def png(self) -> bytes:
        """The page as a file."""
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a name in letters that the font lacks
            self.figure.savefig(file, format="png", dpi=self.dpi, facecolor=PAGE, metadata={"Software": "texvlm"})
        return file.getvalue()


class Layout:
    """Where everything goes: three panels abreast, or below one another for a wide image; below them the pyramid and the channels.

    Args:
        width: of the picture, in pixels.
        height: of the picture.
        levels: of its pyramid.
        tiles: how many on the contact sheet.
        searched: whether there is a fourth panel, for relevance.
        lines: of text about channels that were not built.
        paths: 1, or 2 that are compared: then there are six panels, the picture and what each keeps, and below them where they
            differ and what a model sees by each.
    """

    def __init__(
        self, width: int, height: int, levels: int, tiles: int, searched: bool = False, lines: int = 0, paths: int = 1
    ) -> None:
        true = width / height
        self.aspect = aspect = min(max(true, SLIMMEST), FLATTEST)
        self.stretch = aspect / true  # across over down; 1 is in shape
        self.stacked = aspect > WIDE
        self.tiles = tiles
        if self.stacked:
            self.image_w = self.panel_w = min(14.0, math.sqrt(2.2 * AREA * aspect))
        else:
            self.image_w = min(math.sqrt(AREA * aspect), TALLEST * aspect)
            self.panel_w = max(self.image_w, NARROWEST)
        self.image_h = self.image_w / aspect
        inner = self.panel_w if self.stacked else 3 * self.panel_w + 2 * GAP
        self.width = inner + 2 * MARGIN
        x, y = MARGIN, MARGIN + HEAD + TITLE - 0.25
        if self.stacked:
            self.panels = []
            for panel in range(3 * paths):
                self.panels.append((x, y))
                y += self.image_h + GAP + TITLE + (SCALE if 1 <= panel <= paths else 0)
        else:
            self.panels = []
            for row in range(paths):
                self.panels += [(x + i * (self.panel_w + GAP), y) for i in range(3)]
                y += self.image_h + TITLE + (SCALE if row == 0 else GAP)
        self.relevance: tuple[float, float] | None = None
        if self.stacked and searched:
            self.relevance = (x, y)
            y += self.image_h + GAP + TITLE

        # Level 0, and the others in a row below it or in a column at its right: along the longer side they always fit.
        across, down = max(1, width >> 1) / width, max(1, height >> 1) / height
        self.pyramid = (x, y)
        if self.stacked:
            self.level_w = inner * 0.62
            self.level_h = self.level_w / aspect
            bottom = y + self.level_h * (1 + down) + 0.05
            self.absent = (x + self.level_w + 2 * GAP, y)
            y = max(bottom, y + lines * LINE) + GAP + TITLE
            self.sheet, sheet_w = (x, y), inner
        else:
            self.level_w = min(self.image_w, (self.panel_w - 0.05) / (1 + across), 0.75 * TALLEST * aspect)
            self.level_h = self.level_w / aspect
            self.sheet, sheet_w = (x + self.panel_w + GAP, y), inner - self.panel_w - GAP
            y += self.level_h + min(levels, 8) * SPECK / 2
            if searched:
                self.relevance = (x, y + GAP + TITLE)
                y += GAP + TITLE + self.image_h
            bottom = y
            self.absent = (x, y + GAP + TITLE)
            if lines:
                bottom += GAP + TITLE + lines * LINE - 0.1

        slot = max(math.sqrt(TILE_AREA * aspect), TILE_NARROWEST)
        most = max(1, int((sheet_w + TILE_GAP) / (slot + TILE_GAP)))
        self.rows = math.ceil(tiles / most)
        self.columns = math.ceil(tiles / self.rows)
        self.slot_w = min((sheet_w + TILE_GAP) / self.columns - TILE_GAP, 1.6 * slot)
        self.tile_h = min(self.slot_w / aspect, TILE_TALLEST)
        self.tile_w = self.tile_h * aspect
        bottom = max(bottom, self.sheet[1] + self.rows * (self.tile_h + LABEL) - 0.1)
        self.height = bottom + MARGIN - 0.05

    def tile(self, index: int) -> tuple[float, float]:
        """The top left corner of a tile of the contact sheet."""
        row, column = divmod(index, self.columns)
        return self.sheet[0] + column * (self.slot_w + TILE_GAP), self.sheet[1] + row * (self.tile_h + LABEL)

    def levels(self, sizes: list[tuple[int, int]]) -> list[tuple[float, float, float, float]]:
        """The box (x, y, width, height) of each level of the pyramid, (height, width) in texels, from level 0."""
        (height, width), gap = sizes[0], 0.05
        (x, y), boxes = self.pyramid, [(*self.pyramid, self.level_w, self.level_h)]
        place = 0.0
        for h, w in sizes[1:]:
            wide, tall = max(w / width * self.level_w, SPECK), max(h / height * self.level_h, SPECK)
            inside_w, inside_h = wide - min(gap, 0.3 * wide), tall - min(gap, 0.3 * tall)
            if self.stacked:
                boxes.append((x + place, y + self.level_h + gap, inside_w, tall))
                place += wide
            else:
                boxes.append((x + self.level_w + gap, y + place, wide, inside_h))
                place += tall
        return boxes

    def out_of_shape(self) -> str | None:
        """What is to be said of a picture that is drawn out of shape."""
        if 0.99 < self.stretch < 1.01:
            return None
        wider = self.stretch > 1
        return f"drawn {self.stretch if wider else 1 / self.stretch:.3g} times {'wider' if wider else 'taller'} than it is"


def shrunk(pixels: Array, width: int, height: int) -> Array:
    """An image of at most this size, by areas: what a page shows at half of that needs no more."""
    h, w = pixels.shape[:2]
    if h <= height and w <= width:
        return pixels
    planes = torch.from_numpy(np.ascontiguousarray(pixels)).reshape(1, h, w, -1).permute(0, 3, 1, 2)
    small = F.interpolate(planes, (min(h, height), min(w, width)), mode="area")[0].permute(1, 2, 0)
    array: Array = small.reshape(*small.shape[:2], *pixels.shape[2:]).numpy()
    return array


def fit(width: float, size: float, text: str) -> float:
    """A font size with which a text stands in a width."""
    return min(size, 72 * width / (0.58 * max(len(text), 1)))
