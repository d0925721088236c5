"""What an allocator looks at, drawn: the picture, its scores as heat, and the cells that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.cascade import topk

if TYPE_CHECKING:
    from PIL import Image


class Sample(NamedTuple):
    """A picture to draw.

    Attributes:
        image: [3, H, W] in [0, 1].
        features: [1, N, terms], of its cells.
        query: [1, D].
        grid: rows and columns of cells.
        cell: their side in pixels.
        box: x0, y0, x1, y1 in pixels, what is looked for; or None.
    """

    image: Tensor
    features: Tensor
    query: Tensor
    grid: tuple[int, int]
    cell: int
    box: tuple[int, int, int, int] | None = None


def _heat(x: Tensor) -> Tensor:
    """Black, red, yellow, white for 0 to 1: [...] -> [3, ...]."""
    return torch.stack([3 * x, 3 * x - 1, 3 * x - 2]).clamp(0, 1)


def heat_map(sample: Sample, scores: Tensor, k: int, scale: int = 2) -> Image.Image:
    """Three pictures side by side: the picture with what is looked for, the scores [N] as heat, and the picture with only k cells lit.

    Needs Pillow (`pip install texvlm[demo]`).
    """
    from PIL import Image, ImageDraw

    size = sample.image.shape[1:]
    rows, columns = sample.grid

    def enlarged(cells: Tensor) -> Tensor:
        return cells.repeat_interleave(sample.cell, -2).repeat_interleave(sample.cell, -1)[..., : size[0], : size[1]]

    low, high = scores.min(), scores.max()
    heat = _heat(enlarged(((scores - low) / (high - low).clamp(min=1e-9)).view(rows, columns)))
    kept = torch.zeros(rows * columns).scatter(0, topk(scores, k)[1], 1.0).view(rows, columns)
    lit = sample.image * (0.25 + 0.75 * enlarged(kept))
    panels = F.pad(torch.stack([sample.image, heat, lit]), (0, 4), value=1.0)
    page = (torch.cat(list(panels), dim=2)[:, :, :-4] * 255).round().byte().permute(1, 2, 0)
    image = Image.fromarray(page.numpy()).resize((scale * page.shape[1], scale * page.shape[0]), Image.Resampling.NEAREST)
    if sample.box is not None:
        draw = ImageDraw.Draw(image)
        for panel in range(3):
            left = panel * (size[1] + 4)
            x0, y0, x1, y1 = sample.box
            corners = (scale * (left + x0), scale * y0, scale * (left + x1), scale * y1)
            draw.rectangle(corners, outline="white" if panel else "red", width=scale)
    return image
