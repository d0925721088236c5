"""The tiles of the contact sheet: how each channel is coloured, and what is said of one that has no source."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from texvlm.cli.page import BRIGHT, FAINT, PLAIN, Array, Page, fit

# How each channel is coloured, and its range where that is fixed; the others show their own.
STYLES: dict[str, tuple[str, tuple[float, float] | None]] = {
    "red": ("red", (0, 1)),
    "green": ("green", (0, 1)),
    "blue": ("blue", (0, 1)),
    "high_pass": ("gray", (-1, 1)),
    "low_pass": ("gray", (0, 1)),
    "saliency": ("inferno", None),
    "previous_saliency": ("inferno", None),
    "previous_relevance": ("inferno", (0, 1)),
    "x": ("cividis", (0, 1)),
    "y": ("cividis", (0, 1)),
    "eccentricity": ("cividis", (0, 1)),
    "cluster_distance": ("cividis", None),
    "cluster_size": ("viridis", None),
    "edge_distance": ("viridis", None),
    "boundary": ("gray", (0, 1)),
    "text": ("gray", (0, 1)),
    **{f"embedding_{i}": ("managua", (-1, 1)) for i in range(16)},
}
SIGNED = ("high_pass", *(f"embedding_{i}" for i in range(16)))  # zero is in the middle
CATEGORIES = ("cluster",)

# What this command, or a program, has to hand in for a channel to have a source.
PREVIOUS, QUERY, BOTH = "--previous", "--query", "--previous and --query"
NEEDS = {
    "motion": PREVIOUS,
    "previous_saliency": PREVIOUS,
    "previous_relevance": BOTH,
    **{f"embedding_{i}": QUERY for i in range(16)},
    "fixation_history": "fixations",
    "gaze_history": "gaze",
    "attention": "a model",
    "previous_attention": "a model",
}


def words(name: str) -> str:
    """A channel's name in words."""
    return name.replace("_", " ")


def group(names: Iterable[str]) -> str:
    """Names in one line; the axes of the embedding are one of them."""
    names = list(names)
    axes = [name for name in names if name.startswith("embedding_")]
    if len(axes) > 2:
        span = f"embedding {axes[0].rpartition('_')[2]} to {axes[-1].rpartition('_')[2]}"
        names = [span if name == axes[0] else name for name in names if name == axes[0] or name not in axes]
    return ", ".join(words(name) for name in names)


def absent_lines(absent: Mapping[str, str], width: float) -> list[tuple[str, bool]]:
    """What is missing for which channels, as lines for a column: (text, whether it is a heading)."""
    wanted: dict[str, list[str]] = {}
    for name, why in absent.items():
        need = NEEDS.get(name, why)
        wanted.setdefault(f"{need} would bring" if need.startswith("--") else "a program can give", []).append(name)
    lines: list[tuple[str, bool]] = []
    for heading in sorted(wanted, key=lambda h: (not h.startswith("--"), len(h))):
        lines.append((heading, True))
        lines += [(line, False) for line in textwrap.wrap(group(wanted[heading]), max(20, int(width / 0.083)))]
    return lines


def channel(page: Page, x: float, y: float, size: tuple[float, float], slot: float, name: str, values: Array) -> None:
    """One tile of the contact sheet, with its name and the range it shows."""
    if name in CATEGORIES:
        page.image(x, y, *size, categories(values), smooth=False)
        label(page, x, y + size[1], slot, name, f"{len(np.unique(values))} of them")
        return
    style, bounds = STYLES.get(name, ("magma", None))
    some = values.ravel()[:: max(1, values.size // 250_000)]  # enough for a quantile
    if name in SIGNED:
        reach = max(float(np.quantile(np.abs(some), 0.98)), 1e-6)
        bounds = (-reach, reach)
    elif bounds is None:
        bounds = (0.0, max(float(np.quantile(some, 0.995)), float(values.max()) / 4, 1e-6))
    page.image(x, y, *size, values, cmap=colours(style), vmin=bounds[0], vmax=bounds[1])
    label(page, x, y + size[1], slot, name, span(*bounds) if values.any() else "zero everywhere")


def missing(page: Page, x: float, y: float, size: tuple[float, float], slot: float, name: str, why: str) -> None:
    """The tile of a channel that was asked for and has no source."""
    page.blank(x, y, *size)
    label(page, x, y + size[1], slot, name, f"needs {NEEDS[name]}" if name in NEEDS else why, dim=True)


def flow(page: Page, x: float, y: float, size: tuple[float, float], slot: float, field: Array) -> None:
    """The tile of a flow [2, h, w]: direction as hue, length as brightness."""
    from matplotlib.colors import hsv_to_rgb

    length = np.hypot(field[0], field[1])
    reach = max(float(np.quantile(length, 0.99)), 1e-6)
    hue = (np.arctan2(field[1], field[0]) / (2 * np.pi)) % 1
    pixels = hsv_to_rgb(np.stack([hue, np.full_like(hue, 0.85), np.minimum(length / reach, 1)], -1)).astype(np.float32)
    page.image(x, y, *size, pixels)
    label(page, x, y + size[1], slot, "flow", f"up to {reach:.2g} pixels")


def label(page: Page, x: float, y: float, width: float, name: str, what: str, dim: bool = False) -> None:
    """The two lines below a tile whose lower edge is at y."""
    page.text(x, y + 0.19, words(name), fit(width, 10.5, LONGEST), FAINT if dim else BRIGHT)
    page.text(x, y + 0.36, what, fit(width, 8.5, what), FAINT)


LONGEST = max((words(name) for name in (*STYLES, *NEEDS)), key=len)  # all names are written in one size


def categories(values: Array) -> Array:
    """Ids as colours that differ between neighbours in number: hues at golden angles, three tones."""
    from matplotlib.colors import hsv_to_rgb

    ids = np.rint(values).astype(np.int64)
    every = np.arange(int(ids.max(initial=0)) + 1)
    hsv = np.stack([every * 0.618034 % 1, 0.45 + 0.2 * (every % 2), 0.95 - 0.2 * (every % 3)], -1)
    table: Array = hsv_to_rgb(hsv).astype(np.float32)
    return table[ids]


def colours(style: str) -> Any:
    """A colour map by name, or one from black over a channel's own colour to white."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    own = {"red": "#ff5a4f", "green": "#4fd66a", "blue": "#5a8cff"}
    if style in own:
        return LinearSegmentedColormap.from_list(style, ["#000000", own[style], "#ffffff"])
    if style == "managua":  # from amber over near black to blue, as Matplotlib has it from 3.10 on
        return LinearSegmentedColormap.from_list(style, ["#ffcf67", "#a0523d", "#1d1626", "#43669f", "#81e7ff"])
    return colormaps[style]


def span(low: float, high: float) -> str:
    """A range in words."""
    return f"−{high:.2g} to {high:.2g}" if low < 0 else f"{low:.2g} to {high:.2g}"


def together(names: Sequence[str], total: int) -> str:
    """How many channels a texture has, of all that there are."""
    return f"{len(names)} of the {total} channels" if len(names) < total else f"all {total} channels"


def notes(page: Page, x: float, y: float, lines: Sequence[tuple[str, bool]], step: float) -> None:
    """Lines of small text, the first one's top at y."""
    for index, (line, heading) in enumerate(lines):
        page.text(x, y + index * step + 0.11, line, 9.5, PLAIN if heading else FAINT)
