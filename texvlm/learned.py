"""What tokens are worth, learned: a small network over the cells and levels of a picture, for the path "learned" of `select`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from texvlm._ext import integer
from texvlm.allocation import UNIT, colours
from texvlm.channel_sources import COLOURS
from texvlm.features import all_cells, cell_features
from texvlm.pretrained import Pretrained
from texvlm.quadtree import tree_shapes
from texvlm.reading import COARSE, GRID, Lines, sums
from texvlm.texture import Texture

VALUE_CHANNELS = (*COLOURS, "saliency")
"""What the network reads of a texture, by name."""

SAMPLES = 16
"""Along the side of a cell, at most: at that, half, a quarter and an eighth of them its contrast is measured."""

CONTRASTS = 4

PLANES = CONTRASTS + 17
"""Of each cell, see `planes`."""

INPUTS = PLANES + 6
"""Of each node."""

LEAST = 2.0**-12
"""Of what a token is worth per UNIT x UNIT pixels, the least that is told from nothing."""

SPREAD = 10.0
"""Logarithms to base 2 are divided by this, so that what the network reads lies within about [-1, 1]."""


def _log(value: Tensor, least: float) -> Tensor:
    """0 for 0, and about 1 for 1: values from `least` on are told apart by their ratio."""
    return torch.log2(1 + value / least) / -math.log2(least)


def _pooled(plane: Tensor) -> Tensor:
    """Means over 2 x 2 nodes, of those that there are: [B, C, h, w] -> [B, C, ceil(h / 2), ceil(w / 2)]."""
    return F.avg_pool2d(plane, 2, ceil_mode=True)


def planes(texture: Texture, lines: Lines, cell: int) -> Tensor:
    """What the network reads of each cell, [B, PLANES, rows, columns] in float32, mostly within [-1, 1].

    The logarithm of its contrast (standard deviation of red, green and blue) at four numbers of samples and of its mean difference
    along rows; the entropy of its luma; its mean colour, and that less the picture's; mean and largest saliency; how much of it is
    text, how sure that is, and the height of its lines; how much of each of its quarters is text.
    """
    rows, columns = (-(-n // cell) for n in (texture.height, texture.width))
    cells = all_cells(texture, cell)
    samples = [max(1, min(cell, SAMPLES) >> i) for i in range(CONTRASTS)]
    variances = [f"variance:{name}" for name in COLOURS]
    others = ["entropy", *(f"mean:{name}" for name in COLOURS), "mean:saliency", "max:saliency"]
    found, few = [], cells.new_empty(0)
    for i, count in enumerate(samples):
        terms = cell_features(texture, cells, variances + (others if i == 1 else []), cell, count).float()
        found.append(_log(terms[..., :3].sum(-1).clamp(min=0).sqrt(), 1 / 256))
        few = terms[..., 3:] if i == 1 else few
    entropy, colour, saliency = few[..., :1], few[..., 1:4], few[..., 4:6]
    apart = colour - colour.mean(1, keepdim=True)
    of_cells = torch.cat([torch.stack(found, dim=-1), entropy, colour - 0.5, apart, saliency], dim=-1).transpose(1, 2)
    stroke = F.avg_pool2d(lines.strokes, (GRID // 2, GRID // 8))[:, 0, : lines.text.shape[1], : lines.text.shape[2]]
    sure = lines.text * lines.sure()
    of_grid = [stroke, lines.text, sure, sure * torch.log2(lines.height / GRID)]
    area = sums(torch.ones_like(lines.text), cell, rows, columns).clamp(min=1e-6)
    means = torch.stack([sums(plane, cell, rows, columns) / area for plane in of_grid], dim=1)
    stroke, text = _log(means[:, :1], 1 / 256), means[:, 1:]
    quarters = text[:, :1].expand(-1, 4, -1, -1)
    if cell % 2 == 0:
        halves = sums(lines.text, cell // 2, 2 * rows, 2 * columns)[:, None] * (GRID / (cell // 2)) ** 2
        quarters = F.pixel_unshuffle(halves, 2)
    found_planes = [of_cells.unflatten(2, (rows, columns)), stroke, text, quarters]
    return torch.cat(found_planes, dim=1).nan_to_num(0.0, 0.0, 0.0)


class ValueNet(Pretrained):
    """Says what a token of each place and level of a picture is worth to who reads it, and to who looks at it.

    A network of three convolutions 3 x 3, the same on all levels of the quadtree over cells and on the coarser ones above it up to a
    single node: what is found on a level goes up to the next coarser one, and from there down again. It corrects the logarithm of
    `reading.text_values`, the text that becomes readable by a token, and tells how much of what people look at becomes visible by it.

    Args:
        hidden: channels between the convolutions.

    Example:
        >>> import torch, texvlm
        >>> net = texvlm.learned.ValueNet.from_pretrained("default")
        >>> texture = texvlm.build_channels(torch.rand(3, 64, 96), channels=["red", "green", "blue", "saliency"])
        >>> detail, text = net(texture, cell=16, levels=3)
        >>> [tuple(v.shape) for v in detail]
        [(1, 4, 6), (1, 2, 3), (1, 1, 2)]
    """

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.config = {"hidden": hidden}
        self.up = nn.Conv2d(INPUTS + hidden, hidden, 3, padding=1)
        self.down = nn.Conv2d(2 * hidden, hidden, 3, padding=1)
        self.last = nn.Conv2d(hidden, 2, 1)
        for parameter in self.last.parameters():  # at first as the text values say
            nn.init.zeros_(parameter)

    def inputs(self, texture: Texture, cell: int) -> tuple[list[Tensor], list[Tensor]]:
        """What the network reads of each node of all levels up to a single one, [B, INPUTS, rows_l, columns_l], and the text values.

        No gradient. The text values are those of the levels below COARSE, [B, rows_l, columns_l], per UNIT x UNIT pixels.
        """
        cell = integer("cell", cell)
        with torch.no_grad():
            lines = Lines.of(colours(texture))
            plane = planes(texture, lines, cell)
            values = lines.values(cell, COARSE, 2.0)
            found, densities = [], []
            for level in range(64):
                rows, columns = plane.shape[2:]
                area = float((cell << level) / UNIT) ** 2
                if level < COARSE:
                    densities.append(values[level] / area)
                text = _log(densities[level] if level < COARSE else torch.zeros_like(plane[:, 0]), LEAST)
                y, x = (torch.linspace(-1, 1, n + 2, device=plane.device)[1:-1] ** 2 for n in (rows, columns))
                places = [y[:, None].expand(rows, columns), x.expand(rows, columns)]
                numbers = [level / COARSE, (cell << level) / max(texture.height, texture.width), 1.0]
                places += [torch.full_like(places[0], min(number, 2.0)) for number in numbers]
                rest = torch.stack(places).expand(len(plane), -1, -1, -1)
                found.append(torch.cat([plane, text[:, None], rest.to(plane)], dim=1))
                if level >= COARSE and rows <= 1 and columns <= 1:
                    break
                plane = _pooled(plane)
        return found, densities

    def logs(self, inputs: list[Tensor]) -> list[Tensor]:
        """What the network makes of `inputs`, for each level below COARSE: [B, 2, rows_l, columns_l], corrections in octaves."""
        found = [inputs[0].new_zeros(len(inputs[0]), self.up.out_channels, *inputs[0].shape[2:])]
        for level, own in enumerate(inputs):
            below = _pooled(found[-1]) if level else found.pop()
            found.append(_convolved(self.up, torch.cat([own, below], dim=1)).relu())
        above = torch.zeros_like(found[-1])
        outputs = []
        for level in reversed(range(len(found))):
            rows, columns = found[level].shape[2:]
            if level < len(found) - 1:
                above = above.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)[:, :, :rows, :columns]
            above = _convolved(self.down, torch.cat([found[level], above], dim=1)).relu()
            if level < COARSE:
                outputs.append(_convolved(self.last, above))
        return outputs[::-1]

    def densities(self, inputs: list[Tensor], text: list[Tensor]) -> list[Tensor]:
        """What tokens are worth per UNIT x UNIT pixels, [B, 2 (picture, text), rows_l, columns_l] of the levels below COARSE."""
        found = []
        for log, prior in zip(self.logs(inputs), text):
            picture = torch.exp2((SPREAD * log[:, 0] - 8).clamp(max=4.0))
            written = ((prior + LEAST) * torch.exp2((SPREAD * log[:, 1]).clamp(max=SPREAD)) - LEAST).clamp(min=0)
            found.append(torch.stack([picture, written], dim=1))
        return found

    def forward(self, texture: Texture, cell: int, levels: int = COARSE + 1) -> tuple[list[Tensor], list[Tensor]]:
        """What each token is worth, for `quadtree_cut`.

        Args:
            texture: with red, green, blue and saliency.
            cell: side of a cell in pixels.
            levels: of the quadtree; tokens from level 3 on are worth 0, as the whole picture is seen so anyway.

        Returns:
            What becomes visible and what becomes readable by it, each [B, rows_l, columns_l] of each level, float32, at least 0.
            Differentiable in the weights, not in the picture.
        """
        inputs, text = self.inputs(texture, cell)
        found = self.densities(inputs, text)
        rows, columns = inputs[0].shape[2:]
        shapes = tree_shapes(rows, columns, levels)
        values: tuple[list[Tensor], list[Tensor]] = ([], [])
        for level, shape in enumerate(shapes):
            for which, of_level in enumerate(values):
                if level < COARSE:
                    of_level.append(found[level][:, which] * float((cell << level) / UNIT) ** 2)
                else:
                    of_level.append(inputs[0].new_zeros(len(inputs[0]), *shape))
        return values


def _convolved(layer: nn.Conv2d, value: Tensor) -> Tensor:
    """The layer, on a CPU in float64: there float32 goes through oneDNN, whose sums depend on the number of threads."""
    if value.device.type != "cpu" or (torch.is_grad_enabled() and layer.weight.requires_grad):  # training needs no equal sums
        return layer(value)
    bias = None if layer.bias is None else layer.bias.double()
    return F.conv2d(value.double(), layer.weight.double(), bias, padding=layer.kernel_size[0] // 2).to(value.dtype)


_READ: dict[str, ValueNet] = {}


def _read(name: str, device: str) -> str:
    key = f"{name} on {device}"
    if key not in _READ:
        _READ[key] = ValueNet.from_pretrained(name).to(device).requires_grad_(False)
    return key


# Files are read while a graph is traced, not in it. This is all that torch.compiler.assume_constant_result does, but for an import of
# the compiler, a second that everybody would pay.
_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shared_net(scorer: ValueNet | str, device: torch.device) -> ValueNet:
    """The network itself, or the one of this folder or shipped name ("default"), read once for each device."""
    return _READ[_read(scorer, str(device))] if isinstance(scorer, str) else scorer
