"""A task to learn selection on in minutes: find the patch of the kind that the query names.

A picture holds one patch of each of `KINDS` kinds, at random places. All are gratings of the same period and contrast in luma, turned at
random, on a ground of any pale colour; a kind is the hue of the light stripes, and the dark ones have the opposite. So no patch stands
out in edges, saliency or text, no channel knows which one is meant, and neither does an embedding: the query is a code word of another
space, and what it looks like has to be learned.

What counts is the overlap (intersection over union) of the kept cells with the patch asked for, over that of the best cells there are
(the oracle) at the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.allocator import Allocator
from texvlm.cascade import topk
from texvlm.channels import CHANNELS, build_channels
from texvlm.features import all_cells, cell_features
from texvlm.pca import AXES, unit
from texvlm.texture import Texture
from texvlm.training.estimators import Choice, hard
from texvlm.training.maps import Sample

KINDS = 12
SIDE, CELL, SLOT, PATCH, PERIOD = 256, 16, 64, 48, 8.0
"""Pixels: of a picture, a cell, the place that a patch may move in, a patch, and the period of its stripes."""
WINDOW = 8
"""Pixels that an embedding looks at, along a side."""
BUDGET = 12
"""Cells that are kept: a patch covers 9 to 16 of the 256."""
HELD_OUT = 1 << 40
"""Pictures that nothing is trained on have seeds from here on."""

LUMA = (0.299, 0.587, 0.114)
CHROMA = ((0.250, -0.1214, -0.0308), (0.125, -0.0116, -0.2682))
"""Colour directions that leave luma as it is, of equal length along a* and b* of CIE L*a*b* around grey: hues differ in nothing else."""


class Picture(NamedTuple):
    """A picture of the task: image [3, SIDE, SIDE] in [0, 1], and the boxes [KINDS, 4] (x0, y0, x1, y1, pixels) of its patches."""

    image: Tensor
    boxes: Tensor


def picture(seed: int) -> Picture:
    """The picture of this seed."""
    g = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> Tensor:
        return torch.rand(size, generator=g)

    image = torch.full((3, SIDE, SIDE), 0.5)
    for octave in range(2, 7):  # uneven ground of all sizes, mostly grey
        blobs = torch.randn(1, 3, SIDE >> octave, SIDE >> octave, generator=g)
        blobs = 0.5 * blobs + 0.5 * blobs.mean(1, keepdim=True)
        image = image + 0.03 * F.interpolate(blobs, size=(SIDE, SIDE), mode="bilinear")[0]
    slots = torch.randperm((SIDE // SLOT) ** 2, generator=g)[:KINDS]
    corner = torch.stack([slots % (SIDE // SLOT), slots // (SIDE // SLOT)], dim=1) * SLOT
    corner = corner + (rand(KINDS, 2) * (SLOT - PATCH + 1)).long()
    at = torch.arange(PATCH) - (PATCH - 1) / 2
    for kind, (x0, y0) in enumerate(corner.tolist()):
        turn, phase = math.pi * float(rand(1)), 2 * math.pi * float(rand(1))
        stripes = (2 * math.pi / PERIOD * (at[:, None] * math.sin(turn) + at * math.cos(turn)) + phase).sin()
        hue = 2 * math.pi * kind / KINDS
        tint = (torch.tensor([math.cos(hue), math.sin(hue)]) @ torch.tensor(CHROMA))[:, None, None]
        # The mean colour is of its own: it would tell kinds apart by a little otherwise, since CIE L*a*b* is not linear.
        ground = (0.5 + 0.2 * (rand(1) - 0.5) + 0.6 * (rand(2) - 0.5) @ torch.tensor(CHROMA))[:, None, None]
        image[:, y0 : y0 + PATCH, x0 : x0 + PATCH] = ground + stripes * (0.15 + 0.7 * tint)
    image = (image + 0.02 * torch.randn(image.shape, generator=g)).clamp(0, 1)
    return Picture(image, torch.cat([corner, corner + PATCH], dim=1))


def texture_embedding(images: Tensor) -> Tensor:
    """What places look like: moments of luma and colour over 8 x 8 pixels, on AXES mixed axes, [B, AXES, h, w], unit length."""
    planes = torch.einsum("ij,bjhw->bihw", torch.cat([torch.tensor([LUMA]), 4 * torch.tensor(CHROMA)]).to(images), images)
    mean = F.avg_pool2d(planes, WINDOW)
    luma, a, b = (planes - F.interpolate(mean, size=planes.shape[2:], mode="bilinear")).unbind(1)
    second = F.avg_pool2d(torch.stack([luma * luma, luma * a, luma * b, a * a, a * b, b * b], dim=1), WINDOW)
    moments = torch.cat([50 * second, mean[:, :1] - 0.5, mean[:, 1:], torch.full_like(mean[:, :1], 0.25)], dim=1)
    axes = torch.linalg.qr(torch.randn(AXES, AXES, generator=torch.Generator().manual_seed(1)))[0][:, : moments.shape[1]]
    return unit(torch.einsum("ij,bjhw->bihw", axes.to(moments), moments), 1)


def code_words() -> Tensor:
    """The query of each kind, [KINDS, AXES], unit length: random, so that nothing in them tells what the kind looks like."""
    return unit(torch.randn(KINDS, AXES, generator=torch.Generator().manual_seed(2)))


class Batch(NamedTuple):
    """Examples of a task.

    Attributes:
        features: [B, N, terms].
        query: [B, D].
        inside: [B, N] in [0, 1], the share of each cell that lies in the box asked for.
    """

    features: Tensor
    query: Tensor
    inside: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device."""
        return Batch(*(t.to(device) for t in self))

    def part(self, number: int, of: int) -> Batch:
        """One of `of` equal parts."""
        size = len(self.features) // of
        return Batch(*(t[number * size : (number + 1) * size] for t in self))


def inside_boxes(boxes: Tensor) -> Tensor:
    """The share of each cell [n, N] that lies in boxes [n, 4]."""
    edge = torch.arange(0, SIDE, CELL)
    across = [
        (torch.minimum(boxes[:, i + 2, None], edge + CELL) - torch.maximum(boxes[:, i, None], edge)).clamp(min=0) / CELL
        for i in (0, 1)
    ]
    return (across[1][:, :, None] * across[0][:, None]).flatten(1)


def textures(seeds: Sequence[int], channels: Sequence[str]) -> tuple[Texture, Tensor]:
    """The pictures of these seeds, as a texture of these channels, and their boxes [n, KINDS, 4]."""
    pictures = [picture(seed) for seed in seeds]
    images = torch.stack([p.image for p in pictures])
    given = {"embedding": texture_embedding(images)} if any(name.startswith("embedding") for name in channels) else {}
    return build_channels(images, channels=channels, given=given), torch.stack([p.boxes for p in pictures])


def _examples(allocator: Allocator, seeds: range, noise: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Features [n, N, terms] of the pictures of these seeds, or noise, and the shares of their cells in boxes [n, KINDS, N]."""
    cells = torch.arange((SIDE // CELL) ** 2)
    features, inside = [], []
    for start in range(0, len(seeds), 32):
        part = seeds[start : start + 32]
        if noise is None:
            texture, boxes = textures(part, allocator.channels)
            features.append(cell_features(texture, cells.expand(len(part), -1), allocator.terms, CELL))
        else:
            boxes = torch.stack([picture(seed).boxes for seed in part])
            features.append(torch.randn(len(part), len(cells), len(allocator.terms), generator=noise))
        inside.append(inside_boxes(boxes.flatten(0, 1)).unflatten(0, (-1, KINDS)))
    return torch.cat(features), torch.cat(inside)


class ProxyTask:
    """The task, for one allocator's terms: pictures to train on and others, held out, to measure on.

    Args:
        allocator: whose terms are read; its `cell` must be CELL.
        pictures: to train on; each can be asked for all KINDS.
        held_out: pictures to measure on, each asked once.
        seed: of the pictures to train on.
        noise: replace features and queries by noise, the negative control: nothing can be learned then.

    Attributes:
        k: BUDGET.
        held_out: Batch.

    Example:
        >>> import texvlm
        >>> from texvlm.training import ProxyTask
        >>> task = ProxyTask(texvlm.Allocator(), pictures=2, held_out=2)
        >>> task.held_out.features.shape, round(task.random(), 2)
        (torch.Size([2, 256, 26]), 0.03)
    """

    def __init__(
        self, allocator: Allocator, pictures: int = 256, held_out: int = 128, seed: int = 0, noise: bool = False
    ) -> None:
        if allocator.cell != CELL:
            raise ValueError(f"allocator must be for cells of {CELL} pixels, got {allocator.cell}")
        self.k = BUDGET
        self.words = code_words()
        self.noise = torch.Generator().manual_seed(seed) if noise else None
        first = seed << 20
        self.features, self.inside = _examples(allocator, range(first, first + pictures), self.noise)
        features, inside = _examples(allocator, range(HELD_OUT, HELD_OUT + held_out), self.noise)
        self.asked = torch.randint(KINDS, (held_out,), generator=torch.Generator().manual_seed(3))
        words = self.words[self.asked] if self.noise is None else torch.randn(held_out, AXES, generator=self.noise)
        self.held_out = Batch(features, words, inside[torch.arange(held_out), self.asked])

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Training examples: pictures, and which of their kinds are asked for, at random."""
        chosen = torch.randint(len(self.features), (count,), generator=generator)
        asked = torch.randint(KINDS, (count,), generator=generator)
        words = self.words[asked] if self.noise is None else torch.randn(count, AXES, generator=generator)
        return Batch(self.features[chosen], words, self.inside[chosen, asked])

    def shuffled(self, seed: int = 0) -> Batch:
        """The held-out pictures, each asked for another of its kinds than the one that counts."""
        other = torch.randint(1, KINDS, self.asked.shape, generator=torch.Generator().manual_seed(seed))
        return self.held_out._replace(query=self.words[(self.asked + other) % KINDS])

    def sample(self, number: int = 0) -> Sample:
        """A held-out picture to draw heat maps of."""
        shown, asked = picture(HELD_OUT + number), int(self.asked[number])
        example = Batch(*(t[number : number + 1] for t in self.held_out))
        box = tuple(shown.boxes[asked].tolist())
        return Sample(shown.image, example.features, example.query, (SIDE // CELL, SIDE // CELL), CELL, box)  # type: ignore[arg-type]

    def figure(self, choice: Choice, batch: Batch) -> Tensor:
        """Intersection over union of what is chosen with the box, over the oracle's, [B]; differentiable in the choice's weights."""
        return self._overlap(choice.read(batch.inside), batch) / self.oracle(batch)

    def oracle(self, batch: Batch) -> Tensor:
        """Intersection over union of the best k cells with the box, [B]."""
        return self._overlap(topk(batch.inside, self.k)[0].mean(1), batch)

    def _overlap(self, mean: Tensor, batch: Batch) -> Tensor:
        """Intersection over union of k cells, `mean` of whose area lies in the box; areas in cells."""
        shared = self.k * mean
        return shared / (self.k + batch.inside.sum(1) - shared)

    def random(self, draws: int = 100) -> float:
        """The figure of k cells at random, on the held-out pictures."""
        g, inside = torch.Generator().manual_seed(0), self.held_out.inside
        keys = torch.rand((draws, *inside.shape), generator=g)
        means = torch.stack([inside.gather(1, topk(key, self.k)[1]).mean(1) for key in keys])
        return float((self._overlap(means, self.held_out) / self.oracle(self.held_out)).mean())

    def channels(self, statistics: Sequence[str] = ("mean", "max", "rms", "variance")) -> dict[str, float]:
        """What each of the 40 channels finds by itself on the held-out pictures: the best of its statistics, most or least first."""
        names = [channel.name for channel in CHANNELS]
        figures: dict[str, list[Tensor]] = {}
        for start in range(0, len(self.asked), 16):
            part = Batch(*(t[start : start + 16] for t in self.held_out))
            texture, _ = textures(range(HELD_OUT + start, HELD_OUT + start + len(part.inside)), names)
            cells = all_cells(texture, CELL)
            for name in names:
                found = cell_features(texture, cells, [f"{s}:{name}" for s in statistics], CELL)
                scores = [sign * column for column in found.unbind(-1) for sign in (1, -1)]
                figures.setdefault(name, []).append(torch.stack([self.figure(hard(x, self.k), part) for x in scores]))
        return {name: float(torch.cat(parts, dim=1).mean(1).amax()) for name, parts in figures.items()}
