"""Bottom-up saliency: whitened centre-surround differences over levels, and the planes that it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .laplacian import upsample
from .pyramid import UINT8_SCALE, compute_dtype, generate_mipmaps, level_count, split_levels

LUMA_WEIGHTS = (0.299, 0.587, 0.114)
"""Luma of red, green, blue (ITU-R BT.601)."""

MOST_LUMA = 1e15
"""Pixels count as no more in luma: the squares of what is made from it are then finite."""

EDGE_SCALE = 4 * math.sqrt(1.25)
"""The largest magnitude that the Sobel operator can give on values in [0, 1]: |(4, 2)|."""

TOP_SIDE = 64
"""The map is made at the level whose larger side is at least this and below twice this, or at level 0 of smaller pictures."""

FINEST = 2
"""Gradients are taken this many levels below the map, or at level 0."""

SCALES = 5
"""Steps of the a-trous transform."""

PAIRS = ((2, 4), (3, 5))
"""Centre and surround: steps of the a-trous transform."""

BINOMIAL_TAPS = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)
"""The filter of the a-trous transform along each axis."""

TURN_FLOOR = 1e-2
"""Gradients below this have no orientation."""

WHITEN_FLOOR = 1e-6
"""Added to the variances of differences: those of 1e-3 and below, a quarter of an 8-bit step, are noise."""

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
rounding noise to full saliency."""


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
    """Return 0.299 r + 0.587 g + 0.114 b, `[B, H, W]`, of `[B, 3, H, W]`, each cut off at MOST_LUMA."""
    red, green, blue = LUMA_WEIGHTS
    planes = planes.clamp(-MOST_LUMA, MOST_LUMA)
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


def colour_features(rgb: Tensor, previous: Tensor | None) -> Tensor:
    """Return the colours, oriented edges and change of a level, `[B, 7, h, w]`, of sRGB `[B, 3, h, w]`.

    Edges are those of all colours together: with (gx, gy) the Sobel gradient of each over 8 and xx, yy, xy the
    sums of gx^2, gy^2, gx gy, their strength is m = sqrt(xx + yy), their orientation the double angle
    (xx - yy, 2 xy) / (m + TURN_FLOOR).

    Source: Di Zenzo, "A note on the gradient of a multi-image", 1986.
    """
    batch, _, height, width = rgb.shape
    p = replicate(rgb.flatten(0, 1), 1).reshape(batch, 3, height + 2, width + 2) / 8
    down = p[:, :, :-2] + 2 * p[:, :, 1:-1] + p[:, :, 2:]
    along = p[..., :-2] + 2 * p[..., 1:-1] + p[..., 2:]
    gx, gy = down[..., 2:] - down[..., :-2], along[:, :, 2:] - along[:, :, :-2]
    xx, yy, xy = (product.sum(1) for product in (gx * gx, gy * gy, gx * gy))
    strength = sqrt0(xx + yy)
    turn = strength + TURN_FLOOR
    change = motion(luma(rgb), None if previous is None else luma(previous))
    return torch.cat([rgb, torch.stack([strength, (xx - yy) / turn, 2 * xy / turn, change], dim=1)], dim=1)


def atrous(planes: Tensor, gap: int) -> Tensor:
    """Return `[B, N, h, w]` smoothed along both axes by BINOMIAL_TAPS, `gap` texels apart, borders replicated."""
    for dim in (3, 2):
        size = planes.shape[dim]
        places = torch.arange(size, device=planes.device)
        taps = [(places + (k - 2) * gap).clamp(0, size - 1) for k in range(5)]
        planes = torch.stack([w * planes.index_select(dim, t) for w, t in zip(BINOMIAL_TAPS, taps)]).sum(0)
    return planes


def rarity(planes: Tensor) -> Tensor:
    """Return the squared Mahalanobis distance `[B, h, w]` of each place's vector from the mean of its picture.

    Args:
        planes: `[B, N, h, w]`. WHITEN_FLOOR is added to the variances. In float64.
    """
    vectors = planes.double().flatten(2).transpose(1, 2)
    vectors = vectors - vectors.mean(1, keepdim=True)
    covariance = vectors.transpose(1, 2) @ vectors / vectors.shape[1]
    floor = WHITEN_FLOOR * torch.eye(planes.shape[1], dtype=torch.float64, device=planes.device)
    white = torch.linalg.solve(covariance + floor, vectors.transpose(1, 2))
    return (vectors.transpose(1, 2) * white).sum(1).reshape(planes[:, 0].shape)


def saliency(image: Tensor, previous: Tensor | None = None) -> Tensor:
    """Return the bottom-up saliency of a picture.

    Args:
        image: `[B, C, H, W]`, C of 1, 3 or 4, float or uint8.
        previous: the picture before it, of the same shape: adds the motion feature.

    Returns:
        `[B, H, W]` in [0, 1] with maximum near 1 (0 where nothing stands out), in the image's dtype (float32
        for uint8).

    Convention: all in float32 (float64 for double), the covariance in float64. The base level is the one whose
    larger side is in [TOP_SIDE, 2 TOP_SIDE), or level 0 of smaller pictures. Colours, oriented edges and motion
    are taken up to FINEST levels below it and reduced (mean) to it, colours then turned
    into Lab; each step of the a-trous transform smooths the one before with twice the gap. For each of PAIRS
    the differences of two steps are whitened over the picture; the length of all of them together, over its
    maximum, is upsampled bilinearly. No centre prior. Differentiable in both pictures: norms and |x| have
    gradient 0 at 0, a maximum is its first texel, row-major.

    Source: features and centre-surround differences of Itti, Koch and Niebur, "A model of saliency-based visual
    attention for rapid scene analysis", 1998; whitening in place of peak promotion as in Garcia-Diaz,
    Fdez-Vidal, Pardo and Dosil, "Saliency from hierarchical adaptation through decorrelation and variance
    normalization", 2012.
    """
    dtype = image.dtype if image.is_floating_point() else torch.float32
    height, width = image.shape[2:]
    fine, base = _levels(height, width)
    now, before = colour_level(image, fine), None if previous is None else colour_level(previous, fine)
    length = _map(generate_mipmaps(colour_features(now, before), ["mean"], base - fine + 1), now.shape[2:], base - fine)
    return upsample(length[..., None], height, width)[..., 0].to(dtype)


def _levels(height: int, width: int) -> tuple[int, int]:
    """Return the level that gradients are taken from, and the level of the map."""
    last = level_count(height, width) - 1
    base = max(0, last - level_count(TOP_SIDE, 1) + 1)
    return max(0, base - FINEST), base


def colour_level(picture: Tensor, level: int) -> Tensor:
    """Return a level of a picture's colours, `[B, 3, h, w]`."""
    planes = rgb_planes(picture)
    height, width = planes.shape[2:]
    texture = generate_mipmaps(planes, ["mean"], level + 1)
    return split_levels(texture, height, width, level + 1)[level].permute(0, 3, 1, 2)


def _map(features: Tensor, size: Sequence[int], level: int) -> Tensor:
    """Return the map `[B, h, w]` from the pyramid of the features, whose finest level is of this size."""
    feature = split_levels(features, size[0], size[1], level + 1)[level]
    feature = torch.cat([srgb_to_lab(feature[..., :3]), feature[..., 3:]], dim=-1)
    steps = [feature.permute(0, 3, 1, 2)]
    for k in range(SCALES):
        steps.append(atrous(steps[-1], 2**k))
    return _over_maximum(
        sqrt0(torch.stack([rarity(steps[c] - steps[s]) for c, s in PAIRS]).sum(0).clamp(min=0)).to(features.dtype)
    )


def _as_planes(texture: Tensor) -> Tensor:
    """Return `[B, T, C]` as textures `[B C, T, 1]` of one channel."""
    return texture.transpose(1, 2).reshape(-1, texture.shape[1], 1)


@torch.no_grad()
def update_saliency(
    image: Tensor, colours: Tensor, features: Tensor, dirty: Tensor, before: Tensor, tile: int, first: bool = False
) -> Tensor:
    """Compute the map of a picture, `[B, h, w]`, and replace what is remembered of the one before.

    Args:
        image: `[B, 3, H, W]`, float or uint8.
        colours: `[3 B, T, 1]`, levels 1 to `fine` of the picture before (level 0 where that is all there is).
        features: `[7 B, T', 1]`, the pyramid of its features.
        dirty: bool `[B, rows, columns]`: tiles in which the pictures differ.
        before: the same of the picture before and the one before that.
        tile: side of a tile.
        first: there is no picture before.

    Convention: all is computed anew; the masks only say what an implementation may leave as it is.
    """
    height, width = image.shape[2:]
    fine, base = _levels(height, width)
    now, texture = colour_level(image, fine), generate_mipmaps(rgb_planes(image), ["mean"], fine + 1)
    count = now.shape[2] * now.shape[3]
    old = None if first else colours[:, -count:].reshape(now.shape).clone()
    colours.copy_(_as_planes(texture[:, height * width :] if fine > 0 else texture))
    pyramid = generate_mipmaps(colour_features(now, old), ["mean"], base - fine + 1)
    features.copy_(_as_planes(pyramid))
    return _map(pyramid, now.shape[2:], base - fine)
