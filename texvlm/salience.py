"""Stem `salience`: what stands out in a picture, from the mips of its colours, edges and motion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from texvlm._ext import acc_dtype, fake, fake_gradients, integer, ops, real_tensor, texel_dtype
from texvlm.pictures import as_previous, as_rgb
from texvlm.pyramid import level_count, texel_count

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def saliency(image: ImageLike, previous: ImageLike | None = None) -> Tensor:
    """Bottom-up saliency: how rare the colours, edges, directions and motion of a place are in its picture. No centre prior.

    At a mip level of 64 to 127 places along the longer side (level 0 of smaller pictures), CIE L*a*b*, the strength and direction of
    edges and the change against `previous` are smoothed in steps; differences of steps (2, 4) and (3, 5), centre and surround, are
    whitened over the picture, so that a direction in which its places hardly vary is promoted and one in which they all vary is not.
    The length of the result is divided by its maximum and enlarged bilinearly. A map whose maximum is below 1e-4 is flat and counts
    as zero.

    Args:
        image: see `Texture`; grey pictures are repeated to RGB, alpha is dropped. sRGB values in [0, 1] (uint8 is divided by 255);
            values that are not finite count as 0.
        previous: the picture before it, of the same shape and dtype; without it the motion map is zero.

    Returns:
        [B, H, W] in [0, 1], in the picture's dtype (float32 for uint8); all zeros where nothing stands out. Differentiable in both
        pictures: |x| and square roots have gradient 0 at 0, a maximum passes its gradient to the first maximal place, row-major.
        Second derivatives raise.

    Source: features of Itti, Koch and Niebur, "A model of saliency-based visual attention for rapid scene analysis" (1998);
    whitening of Garcia-Diaz, Fdez-Vidal, Pardo and Dosil, "Saliency from hierarchical adaptation through decorrelation and variance
    normalization" (2012).

    Example:
        >>> import torch, texvlm
        >>> picture = torch.zeros(3, 64, 64)
        >>> picture[0, 40:48, 16:24] = 1
        >>> divmod(texvlm.saliency(picture).argmax().item(), 64)[0] in range(36, 52)
        True
    """
    picture = as_rgb(image)
    return ops.saliency(picture, None if previous is None else as_previous(previous, picture))


def _levels(height: int, width: int) -> tuple[int, int]:
    """The level that gradients are taken from, and the level of the map (csrc/salience.cpp has the same)."""
    last = level_count(height, width) - 1
    base = max(0, last - 6)
    return max(0, base - 2), base


def saliency_state(image: Tensor) -> tuple[Tensor, Tensor]:
    """What `update_saliency` remembers of a picture: its colours [3 B, T, 1] and features [7 B, T', 1], texels of one channel, not filled.

    Args:
        image: [B, 3, H, W], for its size, device and dtype: float64 beside a double picture, else float32.
    """
    if real_tensor("image", image).dim() != 4 or 0 in image.shape[2:]:
        raise ValueError(f"image must be [B, 3, H, W] and not empty, got {list(image.shape)}")
    batch, _, height, width = image.shape
    fine, base = _levels(height, width)
    colours = texel_count(max(1, height // 2), max(1, width // 2), fine) if fine > 0 else height * width
    features = texel_count(max(1, height >> fine), max(1, width >> fine), base - fine + 1)
    dtype = acc_dtype(image.dtype)
    return image.new_empty((3 * batch, colours, 1), dtype=dtype), image.new_empty((7 * batch, features, 1), dtype=dtype)


def update_saliency(
    image: Tensor, colours: Tensor, features: Tensor, dirty: Tensor, before: Tensor, tile: int = 32, *, first: bool = False
) -> Tensor:
    """The map of saliency of the next picture, from the colours and features of the one before, which are brought up to date in place.

    Only what depends on tiles that changed is computed of those; whitening and maximum, which need the whole picture, are taken on the
    map, whose longer side has 64 to 127 places. The result is bit for bit the map under channel 8 of
    `build_channels(image, previous=the picture before, flow=None)`; `torch.ops.texvlm.enlarge(map, H, W)` is `saliency(image, previous)`.

    Args:
        image: [B, 3, H, W], uint8 or floating point. Outside dirty tiles it equals the picture before.
        colours: from `saliency_state`; changed in place, as are features.
        features: from `saliency_state`.
        dirty: bool [B, ceil(H / tile), ceil(W / tile)], contiguous: the tiles in which the picture changed (see `dirty_tiles`).
        before: the same of the picture before: there, where nothing is dirty any more, the change returns to 0.
        tile: side of a tile in pixels, at least 8.
        first: colours and features hold nothing yet: all is computed, and nothing moves.

    Returns:
        [B, h, w] in [0, 1], float32 (float64 beside a double picture). No gradient: a tensor that requires one raises.

    Example:
        >>> import torch, texvlm
        >>> picture, dirty = torch.rand(1, 3, 64, 96), torch.zeros(1, 2, 3, dtype=torch.bool)
        >>> state = texvlm.saliency_state(picture)
        >>> texvlm.update_saliency(picture, *state, dirty, dirty, first=True).shape
        torch.Size([1, 64, 96])
    """
    return ops.update_saliency(image, colours, features, dirty, before, integer("tile", tile, 8), first)


@fake("saliency")
def _(image: Tensor, previous: Tensor | None = None) -> Tensor:
    batch, _, height, width = image.shape
    return image.new_empty((batch, height, width), dtype=texel_dtype(image))


fake_gradients("saliency", dtype=acc_dtype)


@fake("update_saliency")
def _(image: Tensor) -> Tensor:
    batch, _, height, width = image.shape
    _, base = _levels(height, width)
    return image.new_empty((batch, max(1, height >> base), max(1, width >> base)), dtype=acc_dtype(image.dtype))
