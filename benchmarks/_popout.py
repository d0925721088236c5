"""Seeded pop-out displays: grids of items of which one is odd, as in experiments on visual search.

Source of the classes: A. Treisman and G. Gelade, "A feature-integration theory of attention" (1980), and, for the missing feature,
A. Treisman and J. Souther, "Search asymmetry" (1985).
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

CLASSES = ("colour", "orientation", "size", "missing")


@dataclass
class Display:
    """A picture and the centre (x, y) of its odd item, in pixels; pitch is the distance between neighbouring items."""

    image: torch.Tensor  # uint8 [3, H, W]
    x: float
    y: float
    pitch: float

    def hit(self, salience: torch.Tensor) -> bool:
        """Whether the highest place of a map [H, W] is on the odd item: nearer to its centre than half the pitch."""
        y, x = divmod(int(salience.argmax()), salience.shape[1])
        return math.hypot(x + 0.5 - self.x, y + 0.5 - self.y) < 0.5 * self.pitch


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    return tuple(round(255 * v) for v in colorsys.hsv_to_rgb(hue % 1, saturation, value))  # type: ignore[return-value]


def _item(
    draw: ImageDraw.ImageDraw, kind: str, x: float, y: float, size: float, angle: float, colour: tuple, feature: bool
) -> None:
    """One item. `feature`: the tail of a Q, the gap's bar of a plus, the line through a square."""
    r = size / 2
    c, s = math.cos(angle), math.sin(angle)

    def turned(*points: tuple[float, float]) -> list[tuple[float, float]]:
        return [(x + r * (u * c - v * s), y + r * (u * s + v * c)) for u, v in points]

    stroke = max(2, int(size / 7))
    if kind == "bar":
        draw.polygon(turned((-1, -0.25), (1, -0.25), (1, 0.25), (-1, 0.25)), fill=colour)
    elif kind == "disc":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "square":
        draw.polygon(turned((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)), fill=colour)
    elif kind == "triangle":
        draw.polygon(turned((0, -1), (0.9, 0.8), (-0.9, 0.8)), fill=colour)
    elif kind == "ring":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=stroke)
        if feature:  # a Q's tail
            draw.line(turned((0.2, 0.2), (1.15, 1.15)), fill=colour, width=stroke)
    elif kind == "barred":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=stroke)
        if feature:
            draw.line(turned((0, -1.25), (0, 0.1)), fill=colour, width=stroke)
    elif kind == "plus":
        draw.line(turned((-1, 0), (1, 0)), fill=colour, width=stroke)
        if feature:
            draw.line(turned((0, -1), (0, 1)), fill=colour, width=stroke)


def display(kind: str, seed: int, side: int | None = None) -> Display:
    """A display of one of CLASSES.

    Args:
        kind: of the odd item's difference: another hue; turned by 45 to 90 degrees; 1.6 to 2.2 times as large or as small; without
            the feature that all others have.
        seed: of shape, colours, number of items, jitter, background and place.
        side: pixels a side; 384 to 768 by default.
    """
    rng = np.random.default_rng([seed, CLASSES.index(kind)])
    side = int(rng.integers(384, 769)) if side is None else side
    count = int(rng.integers(5, 10))
    pitch = side / count
    size = pitch * rng.uniform(0.4, 0.62)
    hue, dark = rng.random(), rng.random() < 0.5
    ground = rng.uniform(0, 0.25) if dark else rng.uniform(0.75, 1)
    value = min(1, ground + rng.uniform(0.45, 0.75)) if dark else max(0, ground - rng.uniform(0.45, 0.75))
    tint = rng.uniform(0.4, 1) if kind == "colour" or rng.random() < 0.5 else 0
    plain = _rgb(hue, tint, value)
    shapes = {
        "colour": ("bar", "disc", "square", "triangle", "ring"),
        "orientation": ("bar",),
        "size": ("bar", "disc", "square", "triangle", "ring"),
        "missing": ("ring", "barred", "plus"),
    }[kind]
    shape = shapes[rng.integers(len(shapes))]
    angle = rng.uniform(0, math.pi)
    jitter = rng.uniform(0, 0.12) * pitch
    odd = tuple(int(v) for v in rng.integers(0, count, 2))
    grow = rng.uniform(1.6, 2.2)
    if kind == "size":
        size = size / grow if rng.random() < 0.5 else min(size, 0.75 * pitch / grow)
        larger = rng.random() < 0.7
        size, odd_size = (size, size * grow) if larger else (min(size * grow, 0.62 * pitch), size)
    else:
        odd_size = size
    other = _rgb(hue + rng.uniform(0.25, 0.75), tint, value) if kind == "colour" else plain
    turn = rng.uniform(math.pi / 4, math.pi / 2) * (1 if rng.random() < 0.5 else -1) if kind == "orientation" else 0
    scale = 3  # drawn larger, then reduced: smooth outlines
    image = Image.new("RGB", (side * scale, side * scale), _rgb(rng.random(), rng.uniform(0, 0.15), ground))
    draw = ImageDraw.Draw(image)
    at = (0.0, 0.0)
    for row in range(count):
        for column in range(count):
            x, y = ((i + 0.5) * pitch + rng.uniform(-1, 1) * jitter for i in (column, row))
            is_odd = (row, column) == odd
            if is_odd:
                at = (x, y)
            _item(
                draw,
                shape,
                x * scale,
                y * scale,
                (odd_size if is_odd else size) * scale,
                angle + (turn if is_odd else 0),
                other if is_odd else plain,
                kind == "missing" and not is_odd,
            )
    small = np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float32)
    noise = rng.standard_normal((side, side, 1), np.float32) * rng.uniform(0, 4)
    pixels = torch.from_numpy(np.clip(small + noise, 0, 255).astype(np.uint8)).permute(2, 0, 1).contiguous()
    return Display(pixels, *at, pitch)
