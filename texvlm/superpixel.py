"""Stem `superpixel`: connected regions of similar colour, what is known of each, and the borders that edges support."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import fake, integer, ops, real_tensor
from texvlm.pictures import as_rgb

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def superpixels(image: ImageLike, n: int = 50) -> tuple[Tensor, Tensor]:
    """Divide a picture into n connected regions of similar colour whose borders follow its edges.

    SLIC: k-means in (L, a, b, x, y), in which borders move pixel by pixel and no region ever falls apart; from a grid of about 8 n
    cells on a mip of the picture, which are then merged to n by Ward's criterion; then the borders move on the finer mips. All of
    it is integer arithmetic, so labels are the same on all devices and for any number of threads.

    Args:
        image: see `Texture`; grey pictures are repeated to RGB, alpha is dropped. sRGB values in [0, 1] (uint8 is divided by 255);
            values outside are clamped, values that are not finite count as 0.
        n: how many superpixels, at least 1.

    Returns:
        (labels, count): labels int64 [B, H, W] in 0 .. count - 1, roughly from the top left to the bottom right, each of them
        exactly one 4-connected piece; count int64 [B], min(n, H W) for every picture. Not differentiable.

    Raises:
        ValueError: n is below 1, or the picture has no pixels or not 1, 3 or 4 channels.

    Source: R. Achanta et al., "SLIC superpixels compared to state-of-the-art superpixel methods" (2012); J. Yao et al., "Real-time
    coarse-to-fine topologically preserving segmentation" (2015); J. Ward, "Hierarchical grouping to optimize an objective
    function" (1963).

    Example:
        >>> import torch, texvlm
        >>> picture = torch.zeros(3, 48, 64)
        >>> picture[0, 10:30, 20:50] = 1
        >>> labels, count = texvlm.superpixels(picture, n=2)
        >>> count.tolist(), (labels[0] == labels[0, 20, 30]).sum().item()
        ([2], 600)
    """
    return ops.superpixels(as_rgb(image), integer("n", n, 1))


def superpixel_channels(labels: Tensor, n: int) -> Tensor:
    """What the channels cluster, cluster_distance and cluster_size are made of.

    Args:
        labels: int64 [B, H, W], in 0 .. n - 1.
        n: how many labels there can be (a number, so that nothing waits for the device): the n of `superpixels`.

    Returns:
        float32 [B, 3, H, W]: the label; the distance of the pixel from the centroid of its superpixel over the superpixel's radius,
        sqrt(area / pi), that of the disc of the same area; and the share of the picture that the superpixel covers, in (0, 1]. A
        label outside 0 .. n - 1 gives itself, 0 and 0. Not differentiable.

    Raises:
        ValueError: labels are not int64 [B, H, W], or n is below 1.

    Example:
        >>> import torch, texvlm
        >>> labels = torch.tensor([[[0, 0, 0, 1]]])
        >>> planes = texvlm.superpixel_channels(labels, 2)
        >>> planes[0, 2, 0].tolist()
        [0.75, 0.75, 0.75, 0.25]
        >>> planes[0, 1, 0, 1].item()
        0.0
    """
    return ops.superpixel_channels(real_tensor("labels", labels), integer("n", n, 1))


def boundaries(image: ImageLike, n: int = 50, labels: Tensor | None = None) -> Tensor:
    """Object boundaries: borders of superpixels that are supported by an edge.

    Args:
        image: see `superpixels`.
        n: how many superpixels; unused with `labels`.
        labels: int64 [B, H, W] of `superpixels`, or of another segmentation of this picture; computed if left out.

    Returns:
        float32 [B, H, W], 1 for the pixels (on both sides of a border) that have a 4-neighbour of another label and whose Sobel
        magnitude of luma is above twice the picture's mean (the edges of the channel edge_distance, so that dim pictures have
        boundaries too), 0 elsewhere. Not differentiable.

    Raises:
        ValueError: as `superpixels`, or labels are not int64 of the picture's batch and size.

    Example:
        >>> import torch, texvlm
        >>> picture = torch.zeros(3, 16, 16)
        >>> picture[:, :, 8:] = 1
        >>> texvlm.boundaries(picture, n=4)[0, 5].nonzero().flatten().tolist()
        [7, 8]
    """
    picture = as_rgb(image)
    return ops.boundaries(
        picture, ops.superpixels(picture, integer("n", n, 1))[0] if labels is None else real_tensor("labels", labels)
    )


@fake("superpixels")
def _(image: Tensor, n: int) -> tuple[Tensor, Tensor]:
    batch, _, height, width = image.shape
    return image.new_empty((batch, height, width), dtype=torch.int64), image.new_empty((batch,), dtype=torch.int64)


@fake("superpixel_channels")
def _(labels: Tensor, n: int) -> Tensor:
    batch, height, width = labels.shape
    return labels.new_empty((batch, 3, height, width), dtype=torch.float32)


@fake("boundaries")
def _(image: Tensor, labels: Tensor) -> Tensor:
    batch, _, height, width = image.shape
    return image.new_empty((batch, height, width), dtype=torch.float32)
