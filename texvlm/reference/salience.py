"""Bottom-up saliency: centre-surround differences over mip levels, and the planes that it is made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .laplacian import upsample
from .pyramid import UINT8_SCALE, compute_dtype, generate_mipmaps, level_count, split_levels

LUMA_WEIGHTS = (0.299, 0.587, 0.114)
"""Luma of red, green, blue (ITU-R BT.601)."""

EDGE_SCALE = 4 * math.sqrt(1.25)
"""The largest magnitude that the Sobel operator can give on values in [0, 1]: |(4, 2)|."""

BASE_LEVEL = 2
"""The level whose texels are the places of the map, or the last one of small pictures."""

CENTRES = (0, 1)
"""Centre levels, counted from the base level."""

SURROUNDS = (2, 3)
"""Surround levels, counted from the centre level; past the last level the last level stands in."""

SRGB_LINEAR_END = 0.04045
"""sRGB values up to this are on the linear part of the transfer curve (IEC 61966-2-1)."""

SRGB_TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
"""Linear sRGB to CIE XYZ under D65."""

WHITE = tuple(sum(row) for row in SRGB_TO_XYZ)
"""XYZ of white: the row sums, so that grey has a = b = 0 up to rounding."""

LAB_DELTA = 6 / 29
"""The CIE curve is a cube root above LAB_DELTA^3 and a straight line below."""

LAB_SCALE = 100.0
"""L, a and b are divided by this."""

MAP_FLOOR = 1e-4
"""A map whose maximum is not above this is flat and counts as 0: dividing by the maximum would promote its
rounding
noise to full saliency. One 8-bit step of one pixel is above it, float32 rounding two orders below."""


def rgb_planes(image: Tensor) -> Tensor:
    """Return a picture as `[B, 3, H, W]` in float32 or float64: uint8 / 255, no alpha, grey repeated.

    Args:
        image: `[B, C, H, W]`, C of 1, 3 or 4, float or uint8. Values that are not finite count as 0, with
            gradient 0.
    """
    if image.dim() != 4 or image.shape[1] not in (1, 3, 4):
        raise ValueError(f"image must be [B, 1 or 3 or 4, H, W], got {tuple(image.shape)}")
    scale = UINT8_SCALE if image.dtype == torch.uint8 else 1
    planes = image[:, :3].to(compute_dtype(image.dtype))
    return torch.where(planes.isfinite(), planes, 0).expand(-1, 3, -1, -1) / scale


def sqrt0(value: Tensor) -> Tensor:
    """Return the square root, with gradient 0 at 0."""
    positive = value > 0
    return torch.where(positive, torch.where(positive, value, 1).sqrt(), 0)


def luma(planes: Tensor) -> Tensor:
    """Return 0.299 r + 0.587 g + 0.114 b, `[B, H, W]`, of `[B, 3, H, W]`."""
    red, green, blue = LUMA_WEIGHTS
    return red * planes[:, 0] + green * planes[:, 1] + blue * planes[:, 2]


def replicate(plane: Tensor, radius: int) -> Tensor:
    """Return `[B, H, W]` with `radius` pixels more on each side, copies of the nearest border pixel."""
    height, width = plane.shape[1:]
    rows = torch.arange(-radius, height + radius, device=plane.device).clamp(0, height - 1)
    columns = torch.arange(-radius, width + radius, device=plane.device).clamp(0, width - 1)
    return plane[:, rows[:, None], columns]


def sobel(plane: Tensor) -> Tensor:
    """Return the magnitude of the Sobel gradient (weights 1, 2, 1), unscaled, border replicated, `[B, H, W]`.

    Source: the operator as in Duda and Hart, "Pattern classification and scene analysis", 1973. Its gradient
    is 0 where the magnitude is 0.
    """
    p = replicate(plane, 1)
    down = p[:, :-2] + 2 * p[:, 1:-1] + p[:, 2:]
    along = p[:, :, :-2] + 2 * p[:, :, 1:-1] + p[:, :, 2:]
    gx = down[:, :, 2:] - down[:, :, :-2]
    gy = along[:, 2:] - along[:, :-2]
    return sqrt0(gx * gx + gy * gy)


def edge(light: Tensor) -> Tensor:
    """Return the Sobel magnitude of a luma plane `[B, H, W]` over its largest possible value, in [0, 1]."""
    return sobel(light) / EDGE_SCALE


def motion(light: Tensor, previous: Tensor | None) -> Tensor:
    """Return |light - previous|, gradient 0 where equal; zeros without a previous picture."""
    return torch.zeros_like(light) if previous is None else (light - previous).abs()


def srgb_to_lab(rgb: Tensor) -> Tensor:
    """Return L, a, b over 100 of sRGB values, channels last `[..., 3]`.

    Source: IEC 61966-2-1 (transfer curve), CIE 15:2004 (L*a*b*), white D65.
    """
    low = rgb <= SRGB_LINEAR_END
    curve = ((torch.where(low, 1, rgb) + 0.055) / 1.055) ** 2.4
    linear = torch.where(low, rgb / 12.92, curve)
    matrix = torch.tensor(SRGB_TO_XYZ, dtype=rgb.dtype, device=rgb.device)
    xyz = (linear[..., None, :] * matrix).sum(-1) / torch.tensor(WHITE, dtype=rgb.dtype, device=rgb.device)
    root = xyz > LAB_DELTA**3
    f = torch.where(root, torch.where(root, xyz, 1) ** (1 / 3), xyz / (3 * LAB_DELTA**2) + 4 / 29)
    x, y, z = f.unbind(-1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=-1) / LAB_SCALE


def _over_maximum(plane: Tensor) -> Tensor:
    """Return `[B, h, w]` over its maximum per picture, 0 where flat; gradient to the first maximal texel."""
    flat = plane.flatten(1)
    top = flat.gather(1, flat.detach().argmax(1, keepdim=True))[..., None]
    positive = top > MAP_FLOOR
    return torch.where(positive, plane / torch.where(positive, top, 1), 0)


def saliency(image: Tensor, previous: Tensor | None = None) -> Tensor:
    """Return the bottom-up saliency of a picture.

    Args:
        image: `[B, C, H, W]`, C of 1, 3 or 4, float or uint8.
        previous: the picture before it, of the same shape: adds the motion feature.

    Returns:
        `[B, H, W]` in [0, 1] with maximum near 1 (0 where nothing stands out), in the image's dtype (float32
        for uint8).

    Convention: all in float32 (float64 for double) from full pyramids of sRGB (mean), edge (max) and motion
    (max). At each texel centre of the base level, each of the features intensity |L|, colour |(a, b)|, edge
    and motion is the mean over centres and surrounds of its centre-surround difference, other levels read
    bilinearly. Maps are divided by their maximum (0 where flat, see MAP_FLOOR), weighted by (1 - mean)^2,
    added, divided by the maximum, and upsampled bilinearly. No centre prior. Differentiable in both pictures;
    the norms and |x| have gradient 0 at 0, a maximum is its first texel, row-major.

    Source: Itti, Koch and Niebur, "A model of saliency-based visual attention for rapid scene analysis",
    1998, with the peak promotion of Frintrop's family of models simplified to one global weight.
    """
    dtype = image.dtype if image.is_floating_point() else torch.float32
    planes = rgb_planes(image)
    height, width = planes.shape[2:]
    light = luma(planes)
    local = [edge(light), motion(light, None if previous is None else luma(rgb_planes(previous)))]
    levels = level_count(height, width)
    texture = generate_mipmaps(torch.cat([planes, torch.stack(local, dim=1)], dim=1), ["mean"] * 3 + ["max"] * 2, levels)
    base = min(BASE_LEVEL, levels - 1)
    size = split_levels(texture, height, width, levels)[base].shape[1:3]
    features = []  # per level [B, h, w, (L, a, b, edge, motion)] at the base level's texel centres
    for level in split_levels(texture, height, width, levels):
        lab = torch.cat([srgb_to_lab(level[..., :3]), level[..., 3:]], dim=-1)
        features.append(lab if lab.shape[1:3] == size else upsample(lab, *size))

    total = [torch.zeros_like(features[base][..., 0])] * 4
    for centre in CENTRES:
        for surround in SURROUNDS:
            c = min(base + centre, levels - 1)
            s = min(base + centre + surround, levels - 1)
            light_d, a, b, edge_d, motion_d = (features[c] - features[s]).unbind(-1)
            maps = [light_d.abs(), sqrt0(a * a + b * b), edge_d.abs(), motion_d.abs()]
            total = [t + m for t, m in zip(total, maps)]
    result = torch.zeros_like(total[0])
    for plane in total:
        plane = _over_maximum(plane / (len(CENTRES) * len(SURROUNDS)))
        result = result + plane * ((1 - plane.mean((1, 2), keepdim=True)) ** 2)
    return upsample(_over_maximum(result)[..., None], height, width)[..., 0].to(dtype)
