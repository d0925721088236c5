"""Pictures of coloured cards with digits, for a small vision-language model, and the words it speaks.

A picture holds eight cards, each of another colour and with a digit of its own, among forty decoys that are cards too: with digits from
the same drawers, in colours that no question names. So variance and edges tell a card from the noise around it, and no card from a decoy;
that takes the question, or having learned which colours are asked for: those of one half of the circle of hues. (Saliency prefers that
half somewhat.)
"""

from __future__ import annotations

import colorsys
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

SIDE, CELL = 256, 16
"""Pixels of a picture and of a group of 2 x 2 patches."""

NAMES = ("red", "orange", "amber", "yellow", "lime", "green", "emerald", "mint")
HUES = tuple(-0.03 + 0.06 * i for i in range(8))
OTHER_HUES = tuple(0.5 + 0.055 * i for i in range(8))
DECOYS = 40

TEST_DIGITS = 397
"""Of scikit-learn's 1797 digits, the last, which no picture of training shows."""


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Ink [1797, 12, 12] in [0, 1] and which digit it is."""
    from sklearn.datasets import load_digits

    found = load_digits()
    ink = torch.from_numpy(found.images).float()[:, None] / 16
    return F.interpolate(ink, (12, 12), mode="bilinear").clamp(0, 1)[:, 0], torch.from_numpy(found.target)


@dataclass(frozen=True)
class Board:
    """A picture of cards.

    Attributes:
        image: uint8 [3, SIDE, SIDE].
        cards: for each colour that is named, its digit.
        cells: for each of them the groups that it touches, that with most of it first.
        decoys: groups that decoys lie in.
    """

    image: Tensor
    cards: list[int]
    cells: list[list[int]]
    decoys: list[int]


def colour(hue: float) -> Tensor:
    """Of a card, [3]."""
    return torch.tensor(colorsys.hsv_to_rgb(hue % 1, 0.65, 0.85))


def draw(number: int, test: bool = False, jitter: int = 0, shuffled: bool = False) -> Board:
    """The board of that number; up to `jitter` pixels off the grid of groups; `shuffled`: the ink of every digit is scattered."""
    g = torch.Generator().manual_seed(2 * number + test)
    rows, count = SIDE // CELL, len(NAMES) + DECOYS
    smooth = F.interpolate(torch.rand(1, 3, rows // 2, rows // 2, generator=g), (SIDE, SIDE), mode="bilinear")[0]
    image = 0.3 + 0.3 * smooth + 0.06 * torch.randn(3, SIDE, SIDE, generator=g)
    # With jitter a card lies in a slot of its own of two groups by two, without in any group.
    step = 2 if jitter else 1
    slots = torch.randperm((rows // step) ** 2, generator=g)[:count]
    top, left = (slots // (rows // step)) * step * CELL, (slots % (rows // step)) * step * CELL
    if jitter:
        shift = torch.randint(0, 2 * jitter + 1, (2, count), generator=g) + (CELL // 2 - jitter)
        top, left = top + shift[0], left + shift[1]
    ink, which = digits()
    last = len(which) - TEST_DIGITS
    chosen = torch.randint(last, len(which), (count,), generator=g) if test else torch.randint(0, last, (count,), generator=g)
    cells: list[list[int]] = []
    for i, (y, x, digit) in enumerate(zip(top.tolist(), left.tolist(), chosen.tolist())):
        hue = HUES[i] if i < len(HUES) else OTHER_HUES[int(torch.randint(len(OTHER_HUES), (), generator=g))]
        card = colour(hue + 0.008 * float(torch.randn((), generator=g)))[:, None, None].expand(3, CELL, CELL).clone()
        scattered = ink[digit].flatten()[torch.randperm(144, generator=g)].reshape(12, 12)
        drawn = scattered if shuffled else ink[digit]
        card[:, 2:14, 2:14] *= 1 - drawn
        image[:, y : y + CELL, x : x + CELL] = card + 0.03 * torch.randn(3, CELL, CELL, generator=g)
        touched = {(y + dy) // CELL * rows + (x + dx) // CELL for dy in (0, CELL - 1) for dx in (0, CELL - 1)}
        middle = (y + CELL // 2) // CELL * rows + (x + CELL // 2) // CELL
        cells.append([middle, *sorted(touched - {middle})])
    known = len(NAMES)
    decoys = [cell for touched in cells[known:] for cell in touched]
    return Board((image.clamp(0, 1) * 255).round().byte(), which[chosen[:known]].tolist(), cells[:known], decoys)


class Cards(Dataset[dict[str, object]]):
    """Questions about boards, as many for each as there are cards.

    Args:
        boards: how many.
        test: digits that training has not seen, and other boards.
        jitter, shuffled: see `draw`.
    """

    def __init__(self, boards: int, test: bool = False, jitter: int = 0, shuffled: bool = False) -> None:
        self.boards = [draw(i, test, jitter, shuffled) for i in range(boards)]

    def __len__(self) -> int:
        return len(self.boards) * len(NAMES)

    def __getitem__(self, index: int) -> dict[str, object]:
        """One example.

        `cards` are all of them, that which is asked for first; `wanted` the groups that answer, `others` those of the other cards and then
        of decoys; `cells` those of all cards, `decoys` those of decoys.
        """
        board, asked = self.boards[index // len(NAMES)], index % len(NAMES)
        rest = [cells for i, cells in enumerate(board.cells) if i != asked]
        return {
            "image": board.image,
            "question": NAMES[asked],
            "cards": [(NAMES[c], board.cards[c]) for c in (asked, *(c for c in range(len(NAMES)) if c != asked))],
            "wanted": board.cells[asked],
            "others": [cell for cells in rest for cell in cells] + board.decoys,
            "cells": [cell for cells in board.cells for cell in cells],
            "decoys": board.decoys,
        }


class Words:
    """Ids of what is asked and said, in the vocabulary of `texvlm.qwen.tiny_model`: colours, then digits."""

    first = 3

    def question(self, name: str) -> list[int]:
        """A colour's id."""
        return [self.first + NAMES.index(name)]

    def answer(self, digit: int) -> list[int]:
        """A digit's id."""
        return [self.first + len(NAMES) + digit]
