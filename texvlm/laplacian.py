"""Stem `laplacian`: a pyramid as bands of detail, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from texvlm._ext import acc_dtype, fake, ops

if TYPE_CHECKING:
    from texvlm.texture import Texture


def laplacian_decompose(texture: Texture) -> Texture:
    """Splits a pyramid into bands: each level less the enlarged next coarser one, the last as it is.

    Enlarging samples the coarse level at the texel centres of the fine one, with clamp (Burt and Adelson,
    "The Laplacian pyramid as a compact image code", 1983, with bilinear expansion). Every channel is treated
    alike, whatever its reducer.

    Args:
        texture: any size, odd ones too.

    Returns:
        Texture of the same size whose level l is band l, same dtype. Linear: gradients of every order.

    Example:
        >>> import torch, texvlm
        >>> bands = texvlm.laplacian_decompose(texvlm.Texture(torch.ones(3, 20, 12)))
        >>> [bands.level(l).abs().max().item() for l in range(bands.levels)]
        [0.0, 0.0, 0.0, 0.0, 1.0]
    """
    return texture.replace(ops.laplacian_decompose(texture.data, texture.height, texture.width, texture.levels))


def laplacian_reconstruct(bands: Texture) -> Texture:
    """Builds a pyramid from its bands: the inverse of `laplacian_decompose`, exact up to rounding.

    Args:
        bands: level l is band l. They may have been changed in between: level 0 of the result is then the
            picture with these bands.

    Returns:
        Texture of the same size and dtype; each level is made from the stored level below it. Linear:
        gradients of every order.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.rand(3, 20, 13))
        >>> again = texvlm.laplacian_reconstruct(texvlm.laplacian_decompose(texture))
        >>> torch.allclose(again.data, texture.data, atol=1e-6)
        True
    """
    return bands.replace(ops.laplacian_reconstruct(bands.data, bands.height, bands.width, bands.levels))


@fake("laplacian_decompose")
def _(data: Tensor, height: int, width: int, levels: int) -> Tensor:
    return data.new_empty(data.shape)


@fake("laplacian_reconstruct")
def _(bands: Tensor, height: int, width: int, levels: int) -> Tensor:
    return bands.new_empty(bands.shape)


@fake("laplacian_decompose_backward")
def _(grad: Tensor, height: int, width: int, levels: int) -> Tensor:
    return grad.new_empty(grad.shape, dtype=acc_dtype(grad.dtype))


@fake("laplacian_reconstruct_backward")
def _(grad: Tensor, height: int, width: int, levels: int) -> Tensor:
    return grad.new_empty(grad.shape, dtype=acc_dtype(grad.dtype))
