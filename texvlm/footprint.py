"""Stem `footprint`: anisotropic sampling, a pixel's footprint as a row of taps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from texvlm._ext import fake, fake_gradients, ops
from texvlm.sample import grad_queries, shaped

if TYPE_CHECKING:
    from texvlm.texture import Texture


def sample_grad(
    texture: Texture, uv: Tensor, ddx: Tensor, ddy: Tensor, max_anisotropy: int = 16, address: str = "clamp"
) -> Tensor:
    """Samples a texture over footprints: what one pixel of the result covers, however long and thin.

    With dx = ddx (W, H) and dy = ddy (W, H) in level-0 pixels, Pmax and Pmin the singular values of [dx dy] and A = max_anisotropy:
    LOD = log2 max(Pmin, Pmax / A), clamped to [0, levels - 1]; N = ceil(Pmax 2^-LOD (1 - 1e-5)), clamped to [1, A], trilinear taps of
    equal weight at (i + 0.5) / N - 0.5 along the major axis, which has length Pmax (Direct3D 11.3, 7.18.11, with singular vectors).

    Args:
        texture: texels of batch B, or of batch 1, which all queries share.
        uv: [B, N, 2], the centres, (u, v) = (x, y) in [0, 1]. Any strides, as ddx and ddy. Also [N, 2], [B, H, W, 2], a batch of 1 and
            ndarrays, and results in their shape: see `sample_lod`.
        ddx: [B, N, 2], or what broadcasts to uv's shape: how uv changes from a pixel to its right neighbour.
        ddy: [B, N, 2], how uv changes from a pixel to the one below.
        max_anisotropy: the most taps for one footprint, 1 to 1024. 1 is isotropic.
        address: "clamp", "wrap", "mirror" or "border", for each tap by itself; see `sample_lod`, as for texels
            of weight 0, which do not count.

    Channels with the reducer mode are the nearest texel at uv of the level nearest to the LOD. A query with a NaN or infinite
    coordinate or footprint (also in pixels) gives NaN in all its channels.

    Returns:
        [B, N, C] in the texels' dtype. Gradients to the texels (but mode channels), to uv, and to ddx and ddy through the places of
        the taps and the LOD; N is piecewise constant, a circular footprint has its axis along ddx and no gradient for its rotation, a
        zero footprint is one tap at LOD 0. Zero gradients for queries that are not finite. Second derivatives raise. On CUDA they
        are reproducible under torch.use_deterministic_algorithms, as those of sample_lod.

    Raises:
        ValueError: for shapes, dtypes, devices, names or a max_anisotropy that do not fit.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.arange(64.0).reshape(1, 8, 8))
        >>> uv = torch.full((1, 1, 2), 0.5)
        >>> ddx, ddy = torch.tensor([[[4 / 8, 0.0]]]), torch.tensor([[[0.0, 1 / 8]]])
        >>> texvlm.sample_grad(texture, uv, ddx, ddy).item()
        31.5
    """
    data = texture.data
    uv, ddx, ddy, shape = grad_queries(data, uv, ddx, ddy)
    out = ops.sample_grad(
        data, uv, ddx, ddy, texture.height, texture.width, texture.reducer, texture.levels, max_anisotropy, address
    )
    return shaped(out, shape)


@fake("sample_grad")
def _(data: Tensor, uv: Tensor) -> Tensor:
    return data.new_empty((uv.shape[0], uv.shape[1], data.shape[2]))


fake_gradients("sample_grad")
