"""Stem `packing`: kept cells of a picture as the rows of patches that a vision tower of the Qwen-VL family reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import fake, integer, ops, texel_dtype
from texvlm.pictures import as_image

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def pack_cells(
    image: ImageLike,
    cells: Tensor,
    size: tuple[int, int] | None = None,
    *,
    patch: int = 16,
    merge: int = 2,
    temporal: int = 2,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    rescale: float | None = None,
) -> Tensor:
    """Crops, resizes, normalises and packs cells of a picture: `pixel_values` of what is kept, without making those of the rest.

    A cell is what the tower makes one token of: merge x merge patches, side = patch * merge pixels. Its rows lie one after another,
    patch by patch, each of (channel, time, y, x); a still picture is the same at all times. With all cells in order these are the rows
    of transformers' Qwen2VLImageProcessorPil. Its resize is computed here for the kept cells alone: antialiased bicubic, for uint8
    Pillow's to the last bit (before version 13 Pillow took the two passes in another order where a picture loses many more rows than
    columns, which may differ by a step or two), for floating point that of torch's `interpolate(mode="bicubic", antialias=True)`.

    Args:
        image: see `Texture`, of up to 64 channels and any strides: a level of a texture as a view works. Floating point in [0, 1].
        cells: int64 [K] of a picture [C, H, W], [B, K] of a batch: row-major indices in the grid of height / side x width / side. Or
            [K, 3], [B, K, 3]: (level, row, column) in the grid of a level, where a cell covers (side * 2^level)^2 pixels, from (row,
            column) * side * 2^level on. Its samples are means of 2^level x 2^level pixels, or of those that there are; beyond the picture
            the last is repeated. A cell with a negative entry is rows of zeros. Cells may repeat and overlap.
        size: (height, width) to resize the picture to, multiples of side; None: its own. Cells and levels are of the picture resized.
        patch: side of a patch in pixels; patch * merge is at most 1024.
        merge: patches along the side of a cell.
        temporal: times that a still picture is repeated.
        mean: is subtracted, one number or one for each channel; std: divides, positive.
        std: see mean.
        rescale: values are multiplied by this before; None: 1/255 for uint8, 1 for floating point.

    Returns:
        [K merge^2, C temporal patch^2] of a picture, [B, K merge^2, C temporal patch^2] of a batch: (x * rescale - mean) / std in the
        picture's dtype, float32 for uint8. Linear in a floating point picture, and differentiable in it; second derivatives raise.
        Gradients are the same bits every time, on CUDA too.

    Raises:
        ValueError: a cell beyond the grid (on CUDA, where that would have to wait for the device, it is rows of zeros), a size that is
            no multiple of side, or numbers that do not fit the channels.

    Example:
        >>> import torch, texvlm
        >>> picture = torch.arange(64.).reshape(1, 8, 8)
        >>> rows = texvlm.pack_cells(picture, torch.tensor([3]), patch=2, merge=2, temporal=1, mean=[0.], std=[1.])
        >>> rows
        tensor([[36., 37., 44., 45.],
                [38., 39., 46., 47.],
                [52., 53., 60., 61.],
                [54., 55., 62., 63.]])
    """
    picture = as_image(image)
    batched = isinstance(image, (list, tuple)) or getattr(image, "ndim", 3) == 4
    if not isinstance(cells, Tensor) or cells.dim() not in ((2, 3) if batched else (1, 2)):
        wanted = "[B, K] or [B, K, 3]" if batched else "[K] or [K, 3]"
        raise ValueError(f"cells must be a tensor {wanted}, got {list(cells.shape) if isinstance(cells, Tensor) else cells!r}")
    if size is not None and not (isinstance(size, Sequence) and len(size) == 2):
        raise ValueError(f"size must be (height, width), got {size!r}")
    height, width = picture.shape[2:] if size is None else (integer("size", side, 1) for side in size)
    if rescale is None:
        rescale = 1 / 255 if picture.dtype == torch.uint8 else 1.0
    rows = ops.pack_cells(
        picture,
        cells if batched else cells[None],
        height,
        width,
        integer("patch", patch, 1),
        integer("merge", merge, 1),
        integer("temporal", temporal, 1),
        mean,
        std,
        rescale,
    )
    return rows if batched else rows[0]


@fake("pack_cells")
def _(image: Tensor, cells: Tensor, patch: int, merge: int, temporal: int) -> Tensor:
    shape = (image.shape[0], cells.shape[1] * merge * merge, image.shape[1] * temporal * patch * patch)
    return image.new_empty(shape, dtype=texel_dtype(image))


@fake("pack_cells_backward")
def _(grad: Tensor, image_height: int, image_width: int, patch: int, temporal: int) -> Tensor:
    return grad.new_empty((grad.shape[0], grad.shape[2] // (temporal * patch * patch), image_height, image_width))
