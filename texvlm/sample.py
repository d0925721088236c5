"""Stem `sample`: texels at any place and any level of detail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, fake, fake_gradients, ops, real_tensor

if TYPE_CHECKING:
    from texvlm.texture import Texture

FILTERS = ("nearest", "bilinear", "trilinear")
ADDRESS_MODES = ("clamp", "wrap", "mirror", "border")


def sample_lod(
    texture: Texture, uv: Tensor, lod: Tensor | float = 0.0, filter: str = "trilinear", address: str = "clamp"
) -> Tensor:
    """Samples a texture at given places and an explicit level of detail.

    Texel (i, j) of level l has its centre at u = (j + 0.5) / width_l, v = (i + 0.5) / height_l (as `align_corners=False`). Level
    lod = 0 is full size; lod is continuous and clamped to [0, levels - 1].

    Args:
        texture: texels of batch B, or of batch 1, which all queries share.
        uv: [B, N, 2], (u, v) = (x, y); the picture is [0, 1] x [0, 1], outside of it `address` decides. Any strides.
        lod: [B, N], or what broadcasts to it, or a number. Never copied.
        filter: "nearest": the nearest texel of the nearest level, floor(clamp(lod) + 0.5). "bilinear": four texels of the nearest
            level. "trilinear": the two levels around lod, each bilinear; the second is not read where lod is a whole number.
        address: what texels outside are: "clamp" the edge, "wrap" periodic, "mirror" reflected with the edge repeated, "border" zero.

    A texel of weight 0 does not count, whatever it holds (NaN, infinity), and its gradient receives nothing; zeros of the address mode
    "border" do not count either. Other values that are not finite propagate as IEEE arithmetic has it. `sample_grad`,
    `extract_patches`, `cell_features` and `warp` keep the same rule.

    Channels with the reducer mode are always the nearest texel of the nearest level. A query with a NaN or infinite coordinate gives
    NaN in all its channels. Coordinates are computed in float32, float64 beside float64 texels.

    Returns:
        [B, N, C] in the texels' dtype. Gradients to the texels (but mode channels), to uv (bilinear, trilinear) and to lod
        (trilinear; zero outside [0, levels - 1]); at cell edges and whole LODs those of the right side; zero for queries that are not
        finite. Second derivatives raise. CPU results do not depend on the number of threads. On CUDA the gradient of the texels is
        summed by atomics; under torch.use_deterministic_algorithms in fixed point, with the same bits in every run, to
        (number of queries)^2 * max |gradient| * 2^-60 at worst.

    Raises:
        ValueError: for shapes, dtypes, devices or names that do not fit.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.arange(16.0).reshape(1, 4, 4))
        >>> uv = torch.tensor([[[0.125, 0.125], [0.5, 0.5]]])
        >>> texvlm.sample_lod(texture, uv).squeeze(-1)
        tensor([[0.0000, 7.5000]])
        >>> texvlm.sample_lod(texture, uv, lod=2.0).squeeze(-1)
        tensor([[7.5000, 7.5000]])
    """
    uv, lod = lod_queries(texture.data, uv, lod)
    return ops.sample_lod(texture.data, uv, lod, texture.height, texture.width, texture.reducer, texture.levels, filter, address)


def lod_queries(data: Tensor, uv: Tensor, lod: Tensor | float, name: str = "uv") -> tuple[Tensor, Tensor]:
    """Coordinates beside `data`: uv and lod in their dtype, lod as [B, N]; copied only where the dtype is another."""
    dtype = acc_dtype(data.dtype)
    uv = real_tensor(name, uv, dtype)
    shape = uv.shape[:2]
    if not isinstance(lod, Tensor):
        if isinstance(lod, bool) or not isinstance(lod, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"lod must be a number or a tensor, got {lod!r}")
        lod = torch.full((), lod, dtype=dtype, device=uv.device).expand(shape)  # new_full takes twice as long
    elif lod.dtype != dtype or lod.shape != shape:
        if lod.dim() > len(shape) or any(n not in (1, wanted) for n, wanted in zip(lod.shape[::-1], shape[::-1])):
            raise ValueError(f"lod must be a number, or broadcast to {list(shape)}, [B, N] of uv, got {list(lod.shape)}")
        lod = (lod if lod.dim() else lod.to(uv.device)).to(dtype).expand(shape)
    return uv, lod


def grad_queries(data: Tensor, uv: Tensor, ddx: Tensor, ddy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates and footprints beside `data`: in their dtype, copied only where it is another."""
    dtype = acc_dtype(data.dtype)
    return real_tensor("uv", uv, dtype), real_tensor("ddx", ddx, dtype), real_tensor("ddy", ddy, dtype)


@fake("sample_lod")
def _(data: Tensor, uv: Tensor) -> Tensor:
    return data.new_empty((uv.shape[0], uv.shape[1], data.shape[2]))


fake_gradients("sample_lod")
