"""The dual encoder: a small convolutional net over a mip chain for pictures, a small net over letters for texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from texvlm.pca import steady_einsum

STRIDE = 8  # pixels between features
WIDTH = 64  # of the joint space
LEVELS = 3  # mips looked at, each for one octave of sizes
OCTAVE = (11.5, 32.0)  # pixels of a digit's height that a level answers for; octaves overlap
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_SPACE, _STRANGE = len(LETTERS) + 1, len(LETTERS) + 2
_MAX_LETTERS = 64
_EPS = 0.03  # contrast below which ground is left flat
WEIGHTS = Path(__file__).with_name("weights.npz")


def conv(inputs: int, outputs: int, size: int, stride: int = 1, folded: bool = False) -> nn.Sequential:
    """Convolution, batch norm, ReLU. Folded: the norm is part of the convolution, as the weights are stored."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=folded)
    return nn.Sequential(layer, nn.Identity() if folded else nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class ImageTower(nn.Module):
    """Grey pictures [B, 1, H, W], H and W multiples of 32 -> features [B, WIDTH, H / 8, W / 8], not normalised.

    One net looks at the picture and at its halves and quarters, so that it need only know one octave of sizes; beside the features it
    says how sure it is that a digit of its octave is there, and the levels are blended by the softmax of that.
    """

    def __init__(self, folded: bool = False) -> None:
        super().__init__()
        shapes = ((1, 24, 5, 2), (24, 32, 3, 1), (32, 48, 3, 2), (48, 48, 3, 1), (48, 64, 3, 2), (64, 64, 3, 1))
        self.net = nn.Sequential(*(conv(*shape, folded=folded) for shape in shapes))
        self.head = nn.Conv2d(64, WIDTH + 1, 1)

    def look(self, grey: Tensor) -> tuple[Tensor, Tensor]:
        """One level alone: unit features, and the logit of there being a digit of this level's octave, [B, 1, h, w]."""
        weight, bias = self.head.weight[:, :, 0, 0], self.head.bias
        assert bias is not None
        out = steady_einsum("kd,bdhw->bkhw", weight, self.net(_even_contrast(grey))) + bias[:, None, None]
        return F.normalize(out[:, :-1], dim=1), out[:, -1:]

    def forward(self, grey: Tensor) -> Tensor:  # noqa: D102
        size = (grey.shape[2] // STRIDE, grey.shape[3] // STRIDE)
        features, sure = [], []
        for level in range(LEVELS):
            both = torch.cat(self.look(grey), 1)
            both = F.interpolate(both, size, mode="bilinear", align_corners=False) if level else both
            features.append(both[:, :-1])
            sure.append(both[:, -1:])
            grey = F.avg_pool2d(grey, 2)
        weight = torch.stack(sure).double().softmax(0).to(grey.dtype)  # exp in float32 ends otherwise where a thread's part ends
        return (torch.stack(features) * weight).sum(0)


class TextTower(nn.Module):
    """Letters [Q, length] -> [Q, WIDTH], not normalised. It reads: two convolutions over letters, their maximum, a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 3, 24, padding_idx=0)
        self.first = nn.Conv1d(24, 64, 5, padding=2)
        self.second = nn.Conv1d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, WIDTH)

    def forward(self, letters: Tensor) -> Tensor:  # noqa: D102
        there = (letters > 0)[:, None]
        hidden = F.relu(self.first(self.letters(letters).transpose(1, 2))) * there
        hidden = F.relu(self.second(hidden)) * there
        return self.head(hidden.amax(-1))


def spell(texts: Sequence[str], device: torch.device | None = None) -> Tensor:
    """Texts as letters [Q, longest]: lower case, one blank between words and at both ends, 0 after the end."""
    rows = []
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"texts must be strings, got {type(text).__name__}")
        words = " " + " ".join(text.lower().split())[: _MAX_LETTERS - 2] + " "
        rows.append([_SPACE if c == " " else LETTERS.find(c) + 1 or _STRANGE for c in words])
    longest = max((len(row) for row in rows), default=1)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64, device=device).view(
        len(rows), longest
    )


def grey_of(pictures: Tensor) -> Tensor:
    """Luma [B, 1, H', W'] with H, W filled up to multiples of 32 by repeating the border."""
    red, green, blue = pictures.unbind(1)
    grey = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
    unit = STRIDE * 2 ** (LEVELS - 1)
    down, right = -grey.shape[2] % unit, -grey.shape[3] % unit
    return F.pad(grey, (0, right, 0, down), mode="replicate") if down or right else grey


def _even_contrast(grey: Tensor) -> Tensor:
    """Local mean 0 and deviation 1 over about 40 pixels: light on dark and faint digits look alike up to their sign."""

    def smooth(x: Tensor) -> Tensor:
        coarse = F.avg_pool2d(F.avg_pool2d(x, STRIDE), 5, 1, 2, count_include_pad=False)
        return F.interpolate(coarse, x.shape[2:], mode="bilinear", align_corners=False)

    mean = smooth(grey)
    centred = grey - mean
    return centred / (smooth(centred.square()).sqrt() + _EPS)
