"""Megapixel Digits: five digits and hundreds of glyphs that are none on a large canvas of texture or photograph.

After Megapixel MNIST (Katharopoulos and Fleuret 2019; Bergner et al. 2023), with scikit-learn's digits: three of the five share the class
that is the label, two are others. Every glyph lies in a cell of its own, a little off its centre. Glyphs that are no digits (strangers)
are made of digits' quarters, and chosen so that ink and edge energy have the digits' distribution: what stands out tells nothing.

Sources of glyphs, photographs and seeds of training and test have nothing in common.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._photographs import photographs
from texvlm import Texture
from texvlm.digits.canvas import load_digits

CELL = 32
GRID = 64  # cells along a side: 2048 pixels
SIZE = 28  # of a glyph, pixels
LEVELS = 3  # of the mips: cells of 32, 16 and 8 samples a side
JITTER = (CELL - SIZE) // 2
CLASSES = 10
DIGITS, SAME = 5, 3  # on a canvas; of the class that is its label
STRANGERS = 820  # glyphs that are no digits on GRID x GRID cells; smaller canvases have as many a cell
INK = (80, 100)  # grey levels that a glyph is lighter than its ground
GROUND = (30, 155)
CONTRAST = 0.1  # standard deviation of the ground, of the width of GROUND
PHOTOGRAPHS = {
    False: ("brick", "grass", "astronaut", "coffee", "camera", "rocket", "moon", "immunohistochemistry"),
    True: ("gravel", "chelsea", "coins", "motorcycle", "china", "flower"),
}
BANK = 3000  # different strangers of a split, before they are bent
BENT = 8  # of every glyph of the training split: itself and as others might have written it
ROTATION, STRETCH, SLANT = math.radians(12), 0.12, 0.15  # of these, at most


class Bank(NamedTuple):
    """What canvases of a split are made of."""

    digits: Tensor  # uint8 [n, SIZE, SIZE], ink
    labels: Tensor  # [n]
    strangers: Tensor  # uint8 [m, SIZE, SIZE]
    grounds: Tensor  # uint8 [m, GRID CELL, GRID CELL]
    held_out: bool


class Canvases(NamedTuple):
    """A batch of canvases and what is on them."""

    pixels: Tensor  # uint8 [B, 1, side, side]
    labels: Tensor  # [B]
    digits: Tensor  # [B, DIGITS], cells
    strangers: Tensor  # [B, n], cells

    @property
    def grid(self) -> int:
        return self.pixels.shape[-1] // CELL


def energy(ink: Tensor) -> Tensor:
    """Ink and edge energy of glyphs [n, h, w] -> [n, 2]: what a stranger shares with a digit."""
    padded = F.pad(ink, (1, 1, 1, 1))
    down, right = (padded.diff(dim=axis).square().sum((1, 2)) for axis in (1, 2))
    return torch.stack([ink.sum((1, 2)), down + right], dim=1)


def _enlarged(small: Tensor) -> Tensor:
    return F.interpolate(small[:, None], (SIZE, SIZE), mode="bicubic", align_corners=False)[:, 0].clamp(0, 1)


def strangers(digits: Tensor, count: int, g: torch.Generator, tries: int = 16) -> Tensor:
    """Glyphs [count, SIZE, SIZE] whose quarters come from four digits [n, 8, 8], the lower ones above the upper ones.

    Of `tries` it is the one whose ink and edge energy are nearest to those of a digit drawn at random.
    """
    corner = digits.unflatten(1, (2, 4)).unflatten(3, (2, 4)).transpose(2, 3).flatten(1, 2)  # [n, 4, 4, 4]
    wanted = energy(_enlarged(digits))
    scale = wanted.std(0)
    wanted = wanted[torch.randint(len(digits), (count,), generator=g)]
    best = torch.full((count,), torch.inf)
    found = torch.zeros(count, SIZE, SIZE)
    for _ in range(tries):
        source = torch.randint(len(digits), (count, 4), generator=g)
        quarter = corner[source, torch.tensor([2, 3, 0, 1])]
        small = quarter.unflatten(1, (2, 2)).transpose(2, 3).reshape(count, 8, 8)
        glyph = _enlarged(small)
        far = ((energy(glyph) - wanted) / scale).square().sum(1)
        nearer = far < best
        best, found = torch.where(nearer, far, best), torch.where(nearer[:, None, None], glyph, found)
    return found


def _ground(picture: Tensor) -> Tensor:
    """A photograph [3, h, w], mirrored at its borders to the size of a canvas and enlarged twice, as grey levels within GROUND."""
    side = GRID * CELL
    grey = picture.float().mean(0)
    rows, columns = ([i if (at // n) % 2 == 0 else n - 1 - i for at in range(side // 2) for i in [at % n]] for n in grey.shape)
    grey = F.interpolate(grey[rows][:, columns][None, None], (side, side), mode="bilinear", align_corners=False)[0, 0]
    low, high = GROUND
    middle = (grey - grey.mean()) / grey.std().clamp(min=1) * CONTRAST + 0.5
    return (low + (high - low) * middle.clamp(0, 1)).to(torch.uint8)


def bent(ink: Tensor, g: torch.Generator) -> Tensor:
    """Glyphs [n, SIZE, SIZE], each turned, stretched and slanted a little about its middle."""

    def up_to(most: float) -> Tensor:
        return most * (2 * torch.rand(len(ink), generator=g) - 1)

    angle, slant, wide, high = up_to(ROTATION), up_to(SLANT), 1 + up_to(STRETCH), 1 + up_to(STRETCH)
    rows = [wide * angle.cos(), slant - angle.sin(), 0 * angle, angle.sin(), high * angle.cos(), 0 * angle]
    grid = F.affine_grid(torch.stack(rows, 1).unflatten(1, (2, 3)), [len(ink), 1, SIZE, SIZE], align_corners=False)
    return F.grid_sample(ink[:, None], grid, align_corners=False)[:, 0]


def bank(held_out: bool) -> Bank:
    """All there is to make canvases of, of the training split, digits and strangers bent alike, or of the one held out, as they are."""
    g = torch.Generator().manual_seed(int(held_out))
    digits, labels = load_digits(held_out)
    grounds = torch.stack([_ground(picture) for _, picture in photographs(PHOTOGRAPHS[held_out])])
    inks = []
    for ink in (_enlarged(digits), strangers(digits, BANK, g)):
        ways = [ink, *([] if held_out else (bent(ink, g) for _ in range(BENT - 1)))]
        inks.append((255 * torch.cat(ways)).round().to(torch.uint8))
    return Bank(inks[0], labels.repeat(len(inks[0]) // len(labels)), inks[1], grounds, held_out)


def _sources(of: Bank, labels: Tensor, g: torch.Generator) -> Tensor:
    """Which digits lie on canvases with these labels, [B, DIGITS]."""
    others = (labels[:, None] + torch.randint(1, CLASSES, (len(labels), DIGITS - SAME), generator=g)) % CLASSES
    # two equal others would still be fewer than SAME
    classes = torch.cat([labels[:, None].expand(-1, SAME), others], 1)
    order = of.labels.argsort(stable=True)
    count = of.labels.bincount(minlength=CLASSES)
    first = count.cumsum(0) - count
    place = (torch.rand(classes.shape, generator=g) * count[classes]).long()
    return order[first[classes] + place]


def compose(of: Bank, seed: int, count: int, grid: int = GRID) -> Canvases:
    """Canvases of grid x grid cells, the same for the same arguments; labels are as even as `count` allows."""
    g = torch.Generator().manual_seed(2 * seed + of.held_out)
    side, cells = grid * CELL, grid * grid
    extra = round(STRANGERS * cells / GRID**2)
    labels = torch.arange(count)[torch.randperm(count, generator=g)] % CLASSES
    sources = _sources(of, labels, g)
    places = torch.rand(count, cells, generator=g).argsort(1)[:, : DIGITS + extra]
    pixels = torch.empty(count, 1, side, side, dtype=torch.uint8)
    for at in range(count):
        which, top, left, flips = (int(n) for n in (torch.rand(4, generator=g) * torch.tensor([len(of.grounds), 2048, 2048, 8])))
        ground = of.grounds[which]
        rows, columns = (torch.arange(start, start + side) % len(ground) for start in (top, left))
        ground = ground[rows][:, columns]
        ground = ground.flip(0) if flips & 1 else ground
        ground = ground.flip(1) if flips & 2 else ground
        ground = ground.T if flips & 4 else ground
        drawn = torch.cat([of.digits[sources[at]], of.strangers[torch.randint(len(of.strangers), (extra,), generator=g)]])
        low, high = INK
        ink = low + (high - low) * torch.rand(len(drawn), 1, 1, generator=g)
        light = (drawn * (ink / 255)).round().to(torch.uint8)
        shift = torch.randint(0, 2 * JITTER + 1, (2, len(drawn)), generator=g)
        tile = torch.zeros(len(drawn), CELL, CELL, dtype=torch.uint8)
        y, x = (torch.arange(SIZE) + s[:, None] for s in shift)
        tile[torch.arange(len(drawn))[:, None, None], y[:, :, None], x[:, None, :]] = light
        canvas = ground.reshape(grid, CELL, grid, CELL).transpose(1, 2).reshape(cells, CELL, CELL).clone()
        canvas[places[at]] += tile
        pixels[at, 0] = canvas.reshape(grid, grid, CELL, CELL).transpose(1, 2).reshape(side, side)
    return Canvases(pixels, labels, places[:, :DIGITS], places[:, DIGITS:])


def centres(cells: Tensor, grid: int) -> Tensor:
    """Cells [...] of a canvas as uv [..., 2] of their centres."""
    return (torch.stack([cells % grid, cells.div(grid, rounding_mode="floor")], dim=-1) + 0.5) / grid


class Batch(NamedTuple):
    """Canvases as a selector meets them: a mipmapped texture, labels, and the truth for oracles and recall."""

    texture: Texture  # [B, 1, side, side]
    labels: Tensor  # [B]
    digits: Tensor  # [B, DIGITS]
    strangers: Tensor  # [B, n]
    grid: int

    @classmethod
    def of(cls, canvases: Canvases, dtype: torch.dtype = torch.float32) -> Batch:
        """With LEVELS of mips, built once."""
        texture = Texture(canvases.pixels, levels=LEVELS, dtype=dtype)
        return cls(texture, *canvases[1:], canvases.grid)

    def patches(self, cells: Tensor, lod: float = 0.0) -> Tensor:
        """These cells [B, n], with every pixel at LOD 0 and a quarter of them a side at LOD 2: [B, n, 1, size, size], float32."""
        size = round(CELL / 2**lod)
        return self.texture.patches(centres(cells, self.grid), lod, size=size).float()

    def everything(self) -> Tensor:
        """All cells, [B, N]."""
        return torch.arange(self.grid**2).expand(len(self.labels), -1)


def recall(cells: Tensor, wanted: Tensor) -> float:
    """Share of the wanted cells [B, m] that are among cells [B, n]."""
    return float((wanted[:, :, None] == cells[:, None]).any(-1).double().mean())
