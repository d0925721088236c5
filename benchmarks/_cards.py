"""Pictures of coloured cards with a digit or a printed word, for a small vision-language model, and the words it speaks.

A picture holds eight cards, each of another colour and with something of its own on it, among decoys that are cards too: with digits and
words from the same drawers, in colours that no question names. The two kinds of colours alternate around the circle of hues, so variance,
edges, saliency and warmth tell a card from the noise around it, and no card from a decoy; that takes the question, or having learned which
colours are asked for.
"""

from __future__ import annotations

import colorsys
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

CELL = 16
"""Pixels of a group of 2 x 2 patches."""

NAMES = ("red", "orange", "lime", "green", "cyan", "azure", "violet", "purple")
HUES = tuple(i / 16 for i in range(16) if i % 4 < 2)
OTHER_HUES = tuple(i / 16 for i in range(16) if i % 4 >= 2)

PRINTED = ("up", "no", "in", "ox", "we", "by", "do", "at", "is", "go")
SIGNS = (*map(str, range(10)), *PRINTED)
"""What is on cards: handwritten digits, and printed words."""

TEST_DIGITS = 397
"""Of scikit-learn's 1797 digits, the last, which no picture of training shows."""

FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "STIXGeneral.ttf",
    "STIXGeneralBol.ttf",
    "cmss10.ttf",
)
TEST_FONTS = ("", "DejaVuSansMono-Bold.ttf", "DejaVuSerif-Italic.ttf", "cmr10.ttf")
"""Those that no picture of training shows; "" is Pillow's own."""

COVERED = 0.28
"""The mean of all ink, so that how much there is does not tell what it says."""


@dataclass(frozen=True)
class Kind:
    """What pictures are like.

    Attributes:
        side: in pixels.
        levels: cards are CELL * 2^l pixels wide, for l below this, and lie where a token of that level shows them whole.
        jitter: pixels that cards lie off the grid of groups, at most; of one level only.
        shuffled: whether the ink of each card is scattered.
    """

    side: int = 256
    levels: int = 1
    jitter: int = 0
    shuffled: bool = False

    @property
    def groups(self) -> int:
        """Along a side."""
        return self.side // CELL

    def card_levels(self) -> list[int]:
        """Of each card: three small, three of twice the width and two of four times, where there are three levels."""
        return [i * self.levels // len(NAMES) for i in range(len(NAMES))]

    @property
    def decoys(self) -> int:
        """For each card: five in a picture of 256 groups, or two where cards are large."""
        return 2 if self.levels > 1 else 5 * (self.side // 256) ** 2


Token = tuple[int, int]
"""Cell and level."""


@dataclass(frozen=True)
class Board:
    """A picture of cards.

    Attributes:
        image: uint8 [3, side, side].
        signs: of each card, the number in `SIGNS` of what is on it.
        cells: of each card and decoy, the groups that it lies in, that with most of it first.
        tokens: of each, the token that shows it whole (or the most of it).
    """

    image: Tensor
    signs: list[int]
    cells: list[list[Token]]
    tokens: list[list[Token]]


def colour(hue: float) -> Tensor:
    """Of a card, [3]."""
    return torch.tensor(colorsys.hsv_to_rgb(hue % 1, 0.65, 0.85))


def printed(text: str, font: str, side: int = 96) -> Tensor:
    """A word as wide or as high as a square, [side, side] in [0, 1]."""
    from PIL import Image, ImageDraw

    from benchmarks._documents import load_font

    image = Image.new("L", (4 * side, 2 * side))
    ImageDraw.Draw(image).text((side, side // 2), text, 255, load_font(font, side // 2))
    ink = image.crop(image.getbbox())
    scale = side / max(ink.size)
    ink = ink.resize((max(1, round(ink.width * scale)), max(1, round(ink.height * scale))), Image.Resampling.BICUBIC)
    out = Image.new("L", (side, side))
    out.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return torch.frombuffer(bytearray(out.tobytes()), dtype=torch.uint8).reshape(side, side).float() / 255


@functools.cache
def inks(side: int, test: bool) -> tuple[Tensor, Tensor]:
    """Ink [n, side, side] in [0, 1] and what it says [n]: digits, then words, those of training or those of test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    part = slice(-TEST_DIGITS, None) if test else slice(-TEST_DIGITS)
    digits = torch.from_numpy(found.images[part]).float()[:, None] / 16
    words = torch.stack([printed(text, font) for font in (TEST_FONTS if test else FONTS) for text in PRINTED])[:, None]
    drawn = [F.interpolate(kind, (side, side), mode="bilinear", antialias=True)[:, 0].clamp(0, 1) for kind in (digits, words)]
    ink = torch.cat([d * (COVERED / d.mean((1, 2), keepdim=True)) for d in drawn]).clamp(0, 1)
    says = torch.cat([torch.from_numpy(found.target[part]), 10 + torch.arange(len(words)) % len(PRINTED)])
    return ink, says


def places(kind: Kind, levels: Sequence[int], g: torch.Generator) -> list[tuple[int, int]]:
    """Upper left corners in pixels of cards of these levels, which do not touch each other's groups but by jitter."""
    if kind.jitter:  # a slot of 2 x 2 groups for each, so that shifted ones keep apart
        slots = torch.randperm((kind.groups // 2) ** 2, generator=g)[: len(levels)]
        corner = torch.stack([slots // (kind.groups // 2), slots % (kind.groups // 2)], 1) * 2 * CELL
        corner += torch.randint(0, 2, (2,), generator=g) * CELL
        shift = torch.randint(-kind.jitter, kind.jitter + 1, (len(levels), 2), generator=g)
        return [(y, x) for y, x in (corner + shift).clamp(0, kind.side - CELL).tolist()]
    free = torch.ones(kind.groups, kind.groups, dtype=torch.bool)
    found: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(levels)), key=lambda i: -levels[i]):
        wide = 1 << levels[i]
        whole = free.unfold(0, wide, wide).unfold(1, wide, wide).all(-1).all(-1).nonzero()
        y, x = (whole[int(torch.randint(len(whole), (), generator=g))] * wide).tolist()
        free[y : y + wide, x : x + wide] = False
        found[i] = (y * CELL, x * CELL)
    return [found[i] for i in range(len(levels))]


def draw(number: int, test: bool = False, kind: Kind = Kind()) -> Board:
    """The board of that number."""
    g = torch.Generator().manual_seed(2 * number + test)
    smooth = F.interpolate(
        torch.rand(1, 3, kind.groups // 2, kind.groups // 2, generator=g), (kind.side, kind.side), mode="bilinear"
    )[0]
    image = 0.3 + 0.3 * smooth + 0.06 * torch.randn(3, kind.side, kind.side, generator=g)
    order = torch.randperm(len(NAMES), generator=g).tolist()
    own = [kind.card_levels()[i] for i in order]
    levels = own + kind.decoys * own
    cells, tokens, signs = [], [], []
    for i, ((y, x), level) in enumerate(zip(places(kind, levels, g), levels)):
        hue = HUES[i] if i < len(HUES) else OTHER_HUES[int(torch.randint(len(OTHER_HUES), (), generator=g))]
        wide, margin = CELL << level, 2 << level
        ink, says = inks(wide - 2 * margin, test)
        # As many words as digits, though fewer of them are there.
        sign = int(torch.randint(len(SIGNS), (), generator=g))
        known = (says == sign).nonzero()[:, 0]
        drawn = ink[known[int(torch.randint(len(known), (), generator=g))]]
        scattered = torch.randperm(drawn.numel(), generator=g)  # drawn always, so that boards differ in nothing else
        if kind.shuffled:
            drawn = drawn.flatten()[scattered].reshape(drawn.shape)
        card = colour(hue + 0.008 * float(torch.randn((), generator=g)))[:, None, None].expand(3, wide, wide).clone()
        card[:, margin:-margin, margin:-margin] *= 1 - drawn
        image[:, y : y + wide, x : x + wide] = card + 0.03 * torch.randn(3, wide, wide, generator=g)
        rows, columns = (range(at // CELL, (at + wide - 1) // CELL + 1) for at in (y, x))
        touched = [r * kind.groups + c for r in rows for c in columns]
        middle = (y + CELL // 2) // CELL * kind.groups + (x + CELL // 2) // CELL
        cells.append([(cell, 0) for cell in sorted(touched, key=lambda cell: cell != middle)])
        tokens.append([(middle, level)])
        signs.append(sign)
    return Board((image.clamp(0, 1) * 255).round().byte(), signs[: len(NAMES)], cells, tokens)


class Cards(Dataset[dict[str, object]]):
    """Questions about boards, as many for each as there are cards.

    Args:
        boards: how many.
        test: digits and fonts that training has not seen, and other boards.
        kind: see there.
    """

    def __init__(self, boards: int, test: bool = False, kind: Kind = Kind()) -> None:
        self.kind = kind
        self.boards = [draw(i, test, kind) for i in range(boards)]

    def __len__(self) -> int:
        return len(self.boards) * len(NAMES)

    def __getitem__(self, index: int) -> dict[str, object]:
        """One example: image, question, all `cards` (colour, sign), that which is asked for first, and of each its `cells` and `tokens`.

        These go on with those of the decoys.
        """
        board, asked = self.boards[index // len(NAMES)], index % len(NAMES)
        order = [asked, *(card for card in range(len(NAMES)) if card != asked)]
        every = [*order, *range(len(NAMES), len(board.cells))]
        return {
            "image": board.image,
            "question": NAMES[asked],
            "cards": [(NAMES[card], board.signs[card]) for card in order],
            "cells": [board.cells[card] for card in every],
            "tokens": [board.tokens[card] for card in every],
        }


class Words:
    """Ids of what is asked and said, in the vocabulary of `texvlm.qwen.tiny_model`: colours, then signs."""

    first = 3

    def question(self, name: str) -> list[int]:
        """A colour's id."""
        return [self.first + NAMES.index(name)]

    def answer(self, sign: int) -> list[int]:
        """A sign's id."""
        return [self.first + len(NAMES) + sign]
