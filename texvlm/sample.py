"""Stem `sample`: texels at any place and any level of detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from texvlm._ext import coordinates, fake, fake_gradients, ops, real

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
        uv: [B, N, 2], (u, v) = (x, y); the picture is [0, 1] x [0, 1], outside of it `address` decides. Any strides. Also [N, 2] and
            [B, H, W, 2] (any number of dimensions between), a batch of 1 for all textures, and ndarrays.
        lod: [B, N] (or as uv has it without its last dimension), or what broadcasts to it, or a number. Never copied.
        filter: "nearest": the nearest texel of the nearest level, floor(clamp(lod) + 0.5). "bilinear": four texels of the nearest
            level. "trilinear": the two levels around lod, each bilinear; the second is not read where lod is a whole number.
        address: what texels outside are: "clamp" the edge, "wrap" periodic, "mirror" reflected with the edge repeated, "border" zero.

    A texel of weight 0 does not count, whatever it holds (NaN, infinity), and its gradient receives nothing; zeros of the address mode
    "border" do not count either. Other values that are not finite propagate as IEEE arithmetic has it. `sample_grad`,
    `extract_patches`, `cell_features` and `warp` keep the same rule.

    Channels with the reducer mode are always the nearest texel of the nearest level. A query with a NaN or infinite coordinate gives
    NaN in all its channels. Coordinates are computed in float32, float64 beside float64 texels.

    Returns:
        [B, N, C] in the texels' dtype; for uv [B, H, W, 2] it is [B, H, W, C], for [N, 2] it is [N, C], or [B, N, C] of a batch of
        textures, each of which is sampled there. Gradients to the texels (but mode channels), to uv (bilinear, trilinear) and to lod
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
    uv, lod, shape = lod_queries(texture.data, uv, lod)
    out = ops.sample_lod(texture.data, uv, lod, texture.height, texture.width, texture.reducer, texture.levels, filter, address)
    return shaped(out, shape)


Shape: TypeAlias = "torch.Size | None"
"""What results have in the place of [B, N]; None: that."""


def places(argument: str, uv: Tensor, data: Tensor) -> tuple[Tensor, Shape]:
    """Places as the ops take them, [B, N, 2] beside `data` [B, T, C], and the shape of results; copied only where the dtype is another."""
    uv = coordinates(argument, uv, data)
    batch = data.shape[0]
    if uv.dim() < 2 or uv.shape[-1] != 2 or (uv.dim() == 3 and (batch == 1 or uv.shape[0] != 1)):
        return uv, None
    if uv.dim() == 2:
        return uv.expand(batch, -1, -1), uv.shape[:1] if batch == 1 else None
    if uv.shape[0] == 1 and batch != 1:
        uv = uv.expand(batch, *uv.shape[1:])
    return (uv, None) if uv.dim() == 3 else (uv.flatten(1, -2), uv.shape[:-1])


def beside(argument: str, value: Tensor, uv: Tensor, shape: Shape, tail: tuple[int, ...]) -> Tensor:
    """What goes with each of the places uv [B, N, 2], in the shape that these were given in, as [B, N, *tail]."""
    wanted = (*(uv.shape[:2] if shape is None else shape), *tail)
    if shape is None and value.shape == wanted:
        return value
    if value.dim() > len(wanted) or any(n not in (1, side) for n, side in zip(value.shape[::-1], wanted[::-1])):
        number = "" if tail else "be a number, or "
        raise ValueError(f"{argument} must {number}broadcast to {list(wanted)}, as the places have it, got {list(value.shape)}")
    return value.expand(wanted).reshape(*uv.shape[:2], *tail)


def shaped(out: Tensor, shape: Shape) -> Tensor:
    """Results [B, N, ...] in the shape of the places that were given."""
    return out if shape is None else out.reshape(*shape, *out.shape[2:])


def lod_queries(data: Tensor, uv: Tensor, lod: Tensor | float, name: str = "uv") -> tuple[Tensor, Tensor, Shape]:
    """Coordinates beside `data`: uv and lod in their dtype, lod as [B, N], and the shape of results."""
    uv, shape = places(name, uv, data)
    if isinstance(lod, Tensor) and shape is None and lod.dtype == uv.dtype and lod.shape == uv.shape[:2]:
        return uv, lod, shape  # as it mostly comes
    if isinstance(lod, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(lod, bool):
        number = lod if type(lod) is float else real("lod", lod)
        return (
            uv,
            torch.full((), number, dtype=uv.dtype, device=uv.device).expand(uv.shape[:2]),
            shape,
        )  # new_full takes twice as long
    if not isinstance(lod, Tensor) and not hasattr(lod, "__array_interface__"):
        raise TypeError(f"lod must be a number or a tensor, got {lod!r}")
    lod = coordinates("lod", lod, data)
    return uv, beside("lod", lod if lod.dim() else lod.to(uv.device), uv, shape, ()), shape


def grad_queries(data: Tensor, uv: Tensor, ddx: Tensor, ddy: Tensor) -> tuple[Tensor, Tensor, Tensor, Shape]:
    """Coordinates and footprints beside `data`, in their dtype, and the shape of results."""
    uv, shape = places("uv", uv, data)
    ddx, ddy = coordinates("ddx", ddx, data), coordinates("ddy", ddy, data)
    return uv, beside("ddx", ddx, uv, shape, (2,)), beside("ddy", ddy, uv, shape, (2,)), shape


@fake("sample_lod")
def _(data: Tensor, uv: Tensor) -> Tensor:
    return data.new_empty((uv.shape[0], uv.shape[1], data.shape[2]))


fake_gradients("sample_lod")
