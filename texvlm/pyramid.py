"""Stem `pyramid`: mipmaps of a picture, their level table, and updates in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, fake, integer, ops, texel_dtype

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike
    from texvlm.texture import Texture

REDUCERS = ("mean", "max", "min", "mode")
BACKENDS = ("auto", "native", "texture", "gl")


def level_count(height: int, width: int) -> int:
    """Levels of a full pyramid, 1 + floor(log2(max(height, width))).

    Counted by comparisons, so that under dynamic shapes `torch.compile` specialises on the power-of-two bracket only.
    """
    height, width, count = integer("height", height), integer("width", width), 1
    while height >= 1 << count or width >= 1 << count:
        count += 1
    return count


def levels_or_all(levels: int | None, height: int, width: int) -> int:
    """The levels argument: how many are asked for, by default those of a full pyramid."""
    return level_count(height, width) if levels is None else integer("levels", levels)


def level_table(height: int, width: int, levels: int) -> list[tuple[int, int, int]]:
    """(offset, height, width) of each level; the offset counts texels of the packed buffer [B, T, C]."""
    if levels > 63:
        raise ValueError(f"levels must be at most 63, as many as any size has, got {levels}")
    table, offset = [], 0
    for level in range(levels):
        h, w = (max(1, n >> level) if isinstance(n, int) else torch.sym_max(1, n >> level) for n in (height, width))
        table.append((offset, h, w))
        offset = offset + h * w
    return table


def texel_count(height: int, width: int, levels: int) -> int:
    """T, the texels of all levels together."""
    offset, h, w = level_table(height, width, levels)[-1] if levels > 0 else (0, 0, 0)
    return offset + h * w


def reducer_names(reducer: str | Sequence[str]) -> list[str]:
    """The reducer argument as a list: one name for all channels, or one for each."""
    if not isinstance(reducer, Iterable):
        raise TypeError(f"reducer must be a name, or one per channel, got {reducer!r}")
    names = [reducer] if isinstance(reducer, str) else list(reducer)
    for name in names:
        if name not in REDUCERS:
            raise ValueError(f"reducer must be one of {', '.join(REDUCERS)} (or one of them per channel), got {name!r}")
    return names


def generate_mipmaps(
    image: ImageLike,
    reducer: str | Sequence[str] = "mean",
    levels: int | None = None,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
) -> Texture:
    """Builds the mip pyramid of a picture: level 0 and every halved level, in one buffer.

    Each level is computed from the *stored* level above it. Even sides: the 2 x 2 box; odd sides, 2n+1 -> n: the polyphase 3-tap
    box with weights (n-i, n, i+1)/(2n+1), which loses no texel and keeps the mean (Guthe and Heckbert, NVIDIA TR-01838, 2005).

    Args:
        image: see `Texture`.
        reducer: "mean", "max", "min", "mode", or one per channel. The gradient of max and min goes to the first extremal texel in
            row-major order; mode (the most frequent value, ties to the lowest) has none.
        levels: how many levels; all by default.
        backend: "auto" or "native": C++ or CUDA kernels. "gl": the graphics driver, through OpenGL (see `texvlm.gl`: reducer mean,
            float32 and float16; odd sides are what the driver makes of them). "texture": our pyramid, sampled through texture hardware
            (emulated on the CPU; see `texvlm.hardware`).
        dtype: of the texels: float32, float64, float16 or bfloat16; by default the picture's, float32 for uint8.

    Returns:
        Texture with data [B, T, C]. Differentiable in a floating-point image; second derivatives for the reducer mean.

    Example:
        >>> import torch, texvlm
        >>> texvlm.generate_mipmaps(torch.rand(2, 3, 64, 48)).data.shape
        torch.Size([2, 4095, 3])
    """
    from texvlm.texture import Texture

    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "gl":
        from texvlm import gl

        return gl.generate(image, reducer, levels, dtype)
    return Texture(image, reducer, levels, dtype, backend="texture" if backend == "texture" else "native")


def update_mipmaps(
    texture: Texture,
    rects: Tensor | Sequence[tuple[int, int, int, int]] | None = None,
    tiles: Tensor | None = None,
    tile: int = 32,
) -> Texture:
    """Builds the levels above a level 0 that is already in the buffer, in place: all, or what depends on rectangles or tiles.

    However many rectangles or tiles a texel depends on, it is written once. The arithmetic is that of `generate_mipmaps`: where level 0
    changed in them alone, the result is bit for bit what a full rebuild gives.

    Args:
        texture: its `data` is changed in place (level 0 is only read). Not differentiable: data must not require a gradient.
        rects: int64 [R, 4] on the CPU, (y0, x0, y1, x1) half-open in level-0 texels, for every picture of the batch. None: everything.
        tiles: instead of rects, bool [B, ceil(H / tile), ceil(W / tile)] on data's device, where it is read: the `dirty` of `dirty_tiles`.
        tile: side of a tile in level-0 texels, at least 8.

    Returns:
        The same texture.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.zeros(1, 8, 8))
        >>> texture.level(0)[..., 2:4, 2:4] = 1
        >>> texvlm.update_mipmaps(texture, [(2, 2, 4, 4)]).level(1)[0, 0, 1, 1].item()
        1.0
    """
    if texture.data.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "update_mipmaps works in place and is not differentiable: call it under torch.no_grad() or on texture.data.detach()"
        )
    if rects is not None and tiles is not None:
        raise ValueError("update_mipmaps takes rects or tiles, not both")
    if rects is not None and not isinstance(rects, Tensor):
        rects = torch.tensor(rects)
        if rects.numel() and (rects.is_floating_point() or rects.is_complex()):
            raise TypeError(f"rects must be whole numbers (y0, x0, y1, x1) of level-0 texels, got {rects.dtype}")
        rects = rects.to(torch.int64).reshape(-1, 4)
    if tiles is not None:
        tile = integer("tile", tile, 8)
    ops.update_mipmaps(texture.data, texture.height, texture.width, texture.reducer, texture.levels, rects, tiles, tile)
    return texture


@fake("generate_mipmaps")
def _(image: Tensor, reducer: list[str], levels: int, dtype: torch.dtype | None = None) -> Tensor:
    batch, channels, height, width = image.shape
    return image.new_empty((batch, texel_count(height, width, levels), channels), dtype=texel_dtype(image, dtype))


@fake("generate_mipmaps_backward")
def _(grad: Tensor, height: int, width: int, reducer: list[str], levels: int, data: Tensor | None = None) -> Tensor:
    return grad.new_empty((grad.shape[0], grad.shape[2], height, width), dtype=acc_dtype(grad.dtype))


@fake("update_mipmaps", elsewhere=("rects",))
def _(data: Tensor, rects: Tensor | None = None) -> None:
    if rects is not None and rects.device.type != "cpu":
        raise ValueError(f"texvlm::update_mipmaps: rects must be on the CPU, got {rects.device}")
