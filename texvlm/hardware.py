"""Stem `hardware`: sampling through the texture units of a GPU.

The texels go into a layered mipmapped CUDA array, four channels to a layer (float32 and bfloat16 as float4, float16 as half4), and are
fetched with `tex2DLayeredLod` and `tex2DLayeredGrad`. It is a backend that one asks for (`backend="texture"`), never the default:

When it pays. Filling the array reads and writes every texel once, about as much memory traffic as building the pyramid, and the native
    sampler reads the pyramid where it is. So hardware can win only where one texture is sampled many times: a feature map under many
    queries, a static texture, anisotropic footprints. `python -m benchmarks hardware` measures from how much reuse on. Arrays are
    kept and found again by their shape, and filled again only when the texels have changed.
What it costs in accuracy. Weights have 8 fractional bits, and so has the LOD. A sample is off by at most 3/512 of the contrast of the
    texels it blends (1/512 for each axis and for the levels); at multiples of 1/256 of a texel and whole LODs it is exact. Footprints are
    filtered as the hardware sees fit, several percent off ours for long ones. Texels that are not finite can spread to samples
    that give them no weight; on the CPU they do not.
Gradients are those of the exact interpolant, by the native backward kernels: a weight in 8 bits has no useful derivative.
Memory. Arrays lie outside torch's allocator and its statistics: see `texture_cache_stats`. At most $TEXVLM_TEXTURE_CACHE_MB (1024) are
    kept, beside the array in use. A captured CUDA graph keeps the array it writes to until the graph is destroyed; arrays and samplers
    must exist when it is captured, so call once before each capture.
What is not seen. Texels count as unchanged while storage, address and `Tensor._version` are the same. Writes that PyTorch does not
    count (through `.data`, by Triton kernels, by the replay of a CUDA graph) are not noticed: call `empty_texture_cache` after them.
On the CPU the same ops compute what the hardware does, with weights rounded to 8 bits: for tests, and to see what a model loses.

`torch.classes.texvlm.HardwareTexture(data, height, width, reducer, levels, layer_channels=4)` is a handle of one's own, for CUDA tensors
only: `update(data)`, `sample_lod(uv, lod, filter, address)`, `sample_grad(uv, ddx, ddy, max_anisotropy, address)`, `bytes()`, `layers()`.
It has no gradients, cannot be pickled, and does not go through `torch.compile`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from texvlm._ext import _C, fake, ops
from texvlm.sample import grad_queries, lod_queries, shaped

if TYPE_CHECKING:
    from texvlm.texture import Texture


def sample_lod_hardware(
    texture: Texture, uv: Tensor, lod: Tensor | float = 0.0, filter: str = "trilinear", address: str = "clamp"
) -> Tensor:
    """Samples a texture through texture hardware: `texvlm.sample_lod` with weights of 8 fractional bits.

    Args:
        texture: float32, float16 (fetched as such) or bfloat16 (converted to float32) texels. On the CPU the hardware is emulated.
        uv: [B, N, 2]; see `texvlm.sample_lod`, as for the arguments below.
        lod: [B, N], or what broadcasts to it, or a number.
        filter: "nearest" (exact), "bilinear" or "trilinear".
        address: "clamp", "wrap", "mirror" or "border".

    Channels with the reducer mode are exact: the nearest texel of the nearest level.

    Returns:
        [B, N, C] in the texels' dtype, within 3/512 of the local contrast of `texvlm.sample_lod`. Its gradients are those of
        `texvlm.sample_lod`.

    Raises:
        ValueError: for what `texvlm.sample_lod` raises, float64 texels, and sizes beyond the limits of the device.
        RuntimeError: while a CUDA graph is captured, if no array of this shape has been made before.

    Source: CUDA C++ Programming Guide, "Texture Fetching"; Direct3D 11.3 functional specification, 7.18.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.tensor([[[0.0, 256.0]]]))
        >>> uv = torch.tensor([[[0.25 + 100.4 / 512, 0.5]]])  # 100.4 / 256 of the way between the texels
        >>> texvlm.sample_lod_hardware(texture, uv).item()
        100.0
    """
    uv, lod, shape = lod_queries(texture.data, uv, lod)
    out = ops.sample_lod_hardware(
        texture.data, uv, lod, texture.height, texture.width, texture.reducer, texture.levels, filter, address
    )
    return shaped(out, shape)


def sample_grad_hardware(
    texture: Texture, uv: Tensor, ddx: Tensor, ddy: Tensor, max_anisotropy: int = 16, address: str = "clamp"
) -> Tensor:
    """Samples a texture over footprints through texture hardware; see `texvlm.sample_grad`.

    How hardware places its taps is its own affair: over isotropic footprints results are within 3/512 of the local contrast of
    `texvlm.sample_grad`, over long ones a few percent. The emulation on the CPU has the taps of `texvlm.sample_grad`.

    Args:
        texture: float32, float16 or bfloat16 texels; see `sample_lod_hardware`.
        uv: [B, N, 2].
        ddx: [B, N, 2], in uv units per pixel.
        ddy: [B, N, 2].
        max_anisotropy: from 1 to 16.
        address: "clamp", "wrap", "mirror" or "border".

    Returns:
        [B, N, C] in the texels' dtype. Its gradients are those of `texvlm.sample_grad`.

    Raises:
        ValueError: for what `texvlm.sample_grad` raises, a max_anisotropy above 16, float64 texels, and sizes beyond the limits of the
            device.
        RuntimeError: while a CUDA graph is captured, if no array of this shape has been made before.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.arange(64.0).reshape(1, 8, 8))
        >>> uv = torch.full((1, 1, 2), 0.5)
        >>> ddx, ddy = torch.tensor([[[4 / 8, 0.0]]]), torch.tensor([[[0.0, 4 / 8]]])
        >>> texvlm.sample_grad_hardware(texture, uv, ddx, ddy).item()
        31.5
    """
    data = texture.data
    uv, ddx, ddy, shape = grad_queries(data, uv, ddx, ddy)
    out = ops.sample_grad_hardware(
        data, uv, ddx, ddy, texture.height, texture.width, texture.reducer, texture.levels, max_anisotropy, address
    )
    return shaped(out, shape)


def texture_cache_stats() -> dict[str, int]:
    """What the cache of texture arrays holds and has done.

    Returns:
        arrays and bytes that are kept (texels only: the driver adds padding), limit ($TEXVLM_TEXTURE_CACHE_MB in bytes), held (arrays that
        CUDA graphs hold); since the process began: hits (calls that found their texels in place), fills, created, evicted.

    Example:
        >>> import texvlm
        >>> texvlm.texture_cache_stats()["limit"] >> 20
        1024
    """
    return dict(_C.texture_cache_stats())


def empty_texture_cache() -> None:
    """Frees the texture arrays that texvlm keeps, except those that captured CUDA graphs write to."""
    _C.empty_texture_cache()


@fake("sample_lod_hardware")
def _(data: Tensor, uv: Tensor) -> Tensor:
    return data.new_empty((uv.shape[0], uv.shape[1], data.shape[2]))


@fake("sample_grad_hardware")
def _(data: Tensor, uv: Tensor) -> Tensor:
    return data.new_empty((uv.shape[0], uv.shape[1], data.shape[2]))
