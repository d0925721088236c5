"""Pictures and videos of a batch on their way: their grids, rows of pixels, places in the prompt, and what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from texvlm.packing import pack_cells
from texvlm.qwen.families import Family, Sizes
from texvlm.qwen.selectors import Choice

THUMBNAIL_LEVEL = -1
"""How a batch's record of cells names the groups of a thumbnail, which are counted in its own grid."""


@dataclass(frozen=True)
class Modality:
    """The keys that go with pictures, or with videos."""

    name: str
    pixels: str
    grid: str
    type_id: int

    def token(self, config: Any) -> int:
        """The id that stands for it in a prompt."""
        return int(getattr(config, f"{self.name}_token_id"))


IMAGE = Modality("image", "pixel_values", "image_grid_thw", 1)
VIDEO = Modality("video", "pixel_values_videos", "video_grid_thw", 2)
MODALITIES = (IMAGE, VIDEO)


@dataclass
class Picture:
    """One picture or video of a batch on its way.

    Attributes:
        modality: which.
        grid: frames, rows and columns, in patches.
        rows: its rows of pixels as the processor made them, or None.
        image: the picture itself [3, H, W] as it was handed in, or None.
        sample: whose it is.
        seconds: between two of a video's frames, as the processor says it (Qwen2.5-VL), or None.
        query: what is asked of it, as a vector, where the selector learns to answer.
        places: its tokens' places in the full prompt, int64 [frames * groups].
    """

    modality: Modality
    grid: tuple[int, int, int]
    rows: Tensor | None
    image: Tensor | None
    seconds: float | None = None
    query: Tensor | None = None
    sample: int = -1
    places: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    choices: list[Choice] = field(default_factory=list)
    thumbnail: tuple[int, int] | None = None

    def groups(self, sizes: Sizes) -> int:
        """Of one frame."""
        return self.grid[1] * self.grid[2] // sizes.unit

    def size(self, sizes: Sizes) -> tuple[int, int]:
        """Height and width in pixels, as the tower sees it."""
        return self.grid[1] * sizes.patch, self.grid[2] * sizes.patch


def pack_groups(image: Tensor, cells: Tensor, size: tuple[int, int], sizes: Sizes, family: Family) -> Tensor:
    """`pack_cells` as a model's tower wants it: the rows of these groups of a picture resized to `size`, wherever `cells` are."""
    s = sizes
    return pack_cells(
        image, cells.to(image.device), size, patch=s.patch, merge=s.merge, temporal=s.temporal, mean=family.mean, std=family.std
    )


def unpack_groups(rows: Tensor, sizes: Sizes, family: Family) -> Tensor:
    """The groups that a tower's rows of pixels are of, as tiles [N, C, cell, cell] in [0, 1]: the first of a patch's frames.

    Args:
        rows: [N * merge^2, C * temporal * patch^2]. Bytes, where the device is to normalise them, come back as bytes.
        sizes: of the tower.
        family: how the processor normalised.
    """
    m, p = sizes.merge, sizes.patch
    parts = rows.reshape(-1, m, m, sizes.channels, sizes.temporal, p, p)[:, :, :, :, 0]
    tiles = parts.permute(0, 3, 1, 4, 2, 5).reshape(-1, sizes.channels, sizes.cell, sizes.cell)
    if tiles.dtype == torch.uint8:
        return tiles
    tiles = tiles.float()
    mean, std = (torch.tensor(v, device=rows.device)[:, None, None] for v in (family.mean, family.std))
    return (tiles * std + mean).clamp(0, 1)


def unpack_rows(rows: Tensor, grid: tuple[int, int], sizes: Sizes, family: Family) -> Tensor:
    """A frame [C, H, W] in [0, 1] from a tower's rows of pixels: what the processor saw, after its resizing.

    Args:
        rows: [h * w, C * temporal * patch^2] of the frame.
        grid: h, w in patches.
        sizes: of the tower.
        family: how the processor normalised.
    """
    h, w = grid
    tiles = unpack_groups(rows, sizes, family).unflatten(0, (h // sizes.merge, w // sizes.merge))
    return tiles.permute(2, 0, 3, 1, 4).reshape(sizes.channels, h * sizes.patch, w * sizes.patch)


def target_size(height: int, width: int, cell: int, pixels: tuple[int, int]) -> tuple[int, int]:
    """The size that the processor resizes a picture to: multiples of the cell, its aspect, a number of pixels within bounds.

    Args:
        height: of the picture.
        width: of the picture.
        cell: pixels along a side of a group.
        pixels: the least and the most.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a picture's sides must be within 200 : 1, got {height} x {width}")
    rows, columns = round(height / cell), round(width / cell)
    if rows * columns * cell**2 > pixels[1]:
        shrink = (height * width / pixels[1]) ** 0.5
        rows, columns = max(1, int(height / shrink / cell)), max(1, int(width / shrink / cell))
    elif rows * columns * cell**2 < pixels[0]:
        grow = (pixels[0] / (height * width)) ** 0.5
        rows, columns = -int(-(height * grow) // cell), -int(-(width * grow) // cell)
    return rows * cell, columns * cell


def thumbnail_grid(picture: Picture, budget: int, sizes: Sizes) -> tuple[int, int] | None:
    """Rows and columns of groups of the largest thumbnail of the picture's aspect within a budget; None where there is no room."""
    rows, columns = picture.grid[1] // sizes.merge, picture.grid[2] // sizes.merge
    if budget < 1 or rows * columns <= 1:
        return None
    scale = min(1.0, (budget / (rows * columns)) ** 0.5)
    small = max(1, int(rows * scale)), max(1, int(columns * scale))
    if small[0] * small[1] > budget:  # a very long picture
        small = (1, budget) if columns > rows else (budget, 1)
    return small
