"""Stem `salience`: what stands out in a picture, from the mips of its colours, edges and motion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from texvlm._ext import acc_dtype, fake, fake_gradients, ops, texel_dtype
from texvlm.texture import as_previous, as_rgb

if TYPE_CHECKING:
    from texvlm.texture import ImageLike


def saliency(image: ImageLike, previous: ImageLike | None = None) -> Tensor:
    """Bottom-up saliency: how rare the colours, edges, directions and motion of a place are in its picture. No centre prior.

    At a mip level of 64 to 127 places a side, CIE L*a*b*, the strength and direction of edges and the change against `previous` are
    smoothed in steps; differences of steps (2, 4) and (3, 5), centre and surround, are whitened over the picture, so that a
    direction in which its places hardly vary is promoted and one in which they all vary is not. The length of the result is divided
    by its maximum and enlarged bilinearly. A map whose maximum is below 1e-4 is flat and counts as zero.

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


@fake("saliency")
def _(image: Tensor, previous: Tensor | None = None) -> Tensor:
    batch, _, height, width = image.shape
    return image.new_empty((batch, height, width), dtype=texel_dtype(image))


fake_gradients("saliency", dtype=acc_dtype)
