"""Stem `patches`: square patches of a texture at any centre, level of detail and orientation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from texvlm._ext import coordinates, fake, fake_gradients, integer, ops
from texvlm.sample import beside, lod_queries, shaped

if TYPE_CHECKING:
    from texvlm.texture import Texture


def extract_patches(
    texture: Texture,
    center_uv: Tensor,
    lod: Tensor | float = 0.0,
    size: int = 16,
    axes: Tensor | None = None,
    address: str = "clamp",
) -> Tensor:
    """Cuts square patches out of a texture.

    Sample (i, j), row i and column j, lies ((j, i) - (size - 1) / 2) * 2^lod level-0 pixels off the centre
    and is trilinear at `lod`: neighbouring samples are 2^lod level-0 texels apart. At LOD 0 a patch around
    the centre of size x size texels is these texels.

    Args:
        texture: of batch B, or of batch 1, shared by all queries (its gradient is summed). Channels with the
            reducer "mode" are read from the nearest texel of the nearest level.
        center_uv: [B, N, 2], (u, v); [0, 1] is the picture, outside of it the address mode decides. Also [N, 2], [B, H, W, 2], a
            batch of 1 and ndarrays, and results in their shape: see `sample_lod`.
        lod: [B, N], or what broadcasts to it, or a number. Clamped to [0, levels - 1], for the samples and for their spacing.
        size: samples along a side, 1 to 16384.
        axes: [B, N, 2, 2], maps sample offsets in pixels; its columns are the images of the x and y unit
            vectors (rotation, stretch, shear). The LOD of the samples does not depend on it.
        address: "clamp", "wrap", "mirror" or "border" (zero).

    Texels of weight 0 do not count, whatever they hold: see `sample_lod`.

    Returns:
        [B, N, C, size, size] in the texels' dtype, contiguous.

    Gradients go to the texels, center_uv, axes, and to lod through both the blend of levels and the spacing; at cell edges and
    integer LODs those of the right side, to lod zero where it is clamped. Second derivatives raise. A patch with a NaN or infinite
    centre, LOD or axes is NaN, adds nothing to any gradient and gets gradient zero. On CUDA they are reproducible under
    torch.use_deterministic_algorithms, as those of sample_lod.

    Example:
        >>> import torch, texvlm
        >>> image = torch.arange(64.).reshape(1, 8, 8)
        >>> texture = texvlm.Texture(image)
        >>> patches = texvlm.extract_patches(texture, torch.tensor([[[0.25, 0.75]]]), size=4)
        >>> torch.equal(patches[0, 0], image[:, 4:8, 0:4])
        True
    """
    center_uv, lod, shape = lod_queries(texture.data, center_uv, lod, "center_uv")
    if axes is not None:
        axes = beside("axes", coordinates("axes", axes, texture.data), center_uv, shape, (2, 2))
    out = ops.extract_patches(
        texture.data,
        center_uv,
        lod,
        texture.height,
        texture.width,
        texture.reducer,
        texture.levels,
        integer("size", size),
        address,
        axes,
    )
    return shaped(out, shape)


@fake("extract_patches")
def _(data: Tensor, center: Tensor, size: int) -> Tensor:
    return data.new_empty((center.shape[0], center.shape[1], data.shape[2], size, size))


fake_gradients("extract_patches")
