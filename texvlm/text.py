"""Stem `text`: where a picture has writing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._constants import constant
from texvlm._ext import fake, ops, texel_dtype
from texvlm.pictures import as_rgb

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def _read(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float16).float()


_TRAINED = _read(Path(__file__).with_name("text_weights.f16"))


def trained_weights(device: torch.device) -> Tensor:
    """The weights that come with the package, float32 [11569], on this device."""
    return constant(_TRAINED, torch.float32, device)


def text_regions(image: ImageLike, weights: Tensor | None = None) -> Tensor:
    """Where a picture has writing, as a soft mask. It says nothing about what is written.

    Strokes are measured in cells of 16 pixels at four mip levels (which directions edges have, how sparse they are, whether each has
    its opposite beside it, how dark or light thin lines are), and a network of four small convolutions weighs these against the cells
    around, at most 48 pixels away. The value of a cell is trained to be the share of it that lies inside the outline of a line of
    text, so cells may be ranked by their mean as well as by their largest value. Made for writing of 8 to 80 pixels a line, at any
    angle, dark on light and light on dark. Rows of small figures, each as a letter could be, are taken for writing too.

    Args:
        image: see `Texture`; grey pictures are repeated to RGB, alpha is dropped. sRGB values in [0, 1] (uint8 is divided by 255);
            values that are not finite count as 0, luma is cut off to [0, 1].
        weights: of the network, float32 [11569] on the picture's device; by default the ones that come with the package
            (benchmarks/_train_text.py in the repository trains them).

    Returns:
        [B, H, W] in [0, 1], in the picture's dtype (float32 for uint8): bilinear between the centres of cells; exactly 0 where the
        picture is constant. No gradient: a differentiable call raises on the way back.

    Example:
        >>> import torch, texvlm
        >>> texvlm.text_regions(torch.full((3, 64, 96), 0.5)).amax().item()
        0.0
    """
    picture = as_rgb(image)
    return ops.text_regions(picture, trained_weights(picture.device) if weights is None else weights)


@fake("text_regions")
def _(image: Tensor, weights: Tensor) -> Tensor:
    batch, _, height, width = image.shape
    return image.new_empty((batch, height, width), dtype=texel_dtype(image))
