"""The channels that are a formula of the picture: level 0 of the texture, from its planes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .distance import distance_transform
from .history import enlarge
from .pyramid import generate_mipmaps
from .salience import EDGE_SCALE, edge, luma, motion, replicate, rgb_planes, saliency, sobel, sqrt0

CONTRAST_RADIUS = 4
"""Local contrast is normalised over a box of 2 * CONTRAST_RADIUS + 1 pixels a side."""

CONTRAST_EPS = 0.02
"""Added to the local standard deviation: contrast below this is not brought up."""

CONTRAST_SCALE = 2 * EDGE_SCALE
"""Sobel magnitudes of the normalised luma are divided by this, then cut off at 1."""

BINOMIAL = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)
"""Low-pass weights along each axis."""

EDGE_THRESHOLD = 2.0
"""A pixel is an edge pixel where edge is above this many times its mean over the picture."""

FARTHEST = 65536
"""A fixation is taken to be within so many pictures, so that the squares of its distances are finite."""

CHANNEL_REDUCERS = {
    **dict.fromkeys(range(40), "mean"),
    **dict.fromkeys((3, 4, 7, 17, 37, 38, 39), "max"),
    12: "mode",
    34: "min",
}
"""How the 40 channels are reduced."""


def contrast_edge(light: Tensor) -> Tensor:
    """Return the Sobel magnitude of the locally contrast-normalised luma `[B, H, W]`, in [0, 1].

    Convention: n = (I - mean) / (std + CONTRAST_EPS), mean and population standard deviation over the box,
    borders replicated; min(1, |Sobel n| / CONTRAST_SCALE). The standard deviation has gradient 0 at 0, the
    result above 1.
    """
    return (sobel(normalised(light)) / CONTRAST_SCALE).clamp(max=1)


def normalised(light: Tensor) -> Tensor:
    """Return (I - mean) / (std + CONTRAST_EPS) of `[B, H, W]`; see `contrast_edge`."""
    height, width = light.shape[1:]
    side = 2 * CONTRAST_RADIUS + 1
    padded = replicate(light, CONTRAST_RADIUS)
    box = [padded[:, dy : dy + height, dx : dx + width] for dy in range(side) for dx in range(side)]
    mean = torch.zeros_like(light)
    for value in box:
        mean = mean + value
    mean = mean / side**2
    variance = torch.zeros_like(light)
    for value in box:
        variance = variance + (value - mean) ** 2
    return (light - mean) / (sqrt0(variance / side**2) + CONTRAST_EPS)


def low_pass(light: Tensor) -> Tensor:
    """Return the separable binomial low pass (1, 4, 6, 4, 1)/16 of `[B, H, W]`, borders replicated."""
    height, width = light.shape[1:]
    padded = replicate(light, len(BINOMIAL) // 2)
    rows = torch.stack([w * padded[:, dy : dy + height] for dy, w in enumerate(BINOMIAL)]).sum(0)
    return torch.stack([w * rows[:, :, dx : dx + width] for dx, w in enumerate(BINOMIAL)]).sum(0)


def eccentricity(light: Tensor, fixation: Tensor | None = None) -> Tensor:
    """Return the distance of texel centres from the fixation over that of the farthest corner.

    Args:
        light: `[B, H, W]`, for its size, dtype and device.
        fixation: `[B, 2]` in uv, (0.5, 0.5) by default. One that is not finite gives 0 and gets gradient 0.

    Returns:
        `[B, H, W]`, distances being those of pixels.

    Convention: corners of the picture's rectangle; of two equally far ones the right and the lower one. The
    distance has gradient 0 at 0.
    """
    batch, height, width = light.shape
    size = torch.tensor([width, height], dtype=light.dtype, device=light.device)
    fixation = torch.full_like(size, 0.5).expand(batch, 2) if fixation is None else fixation.to(light)
    finite = fixation.isfinite().all(-1)
    at = torch.where(finite[:, None], fixation, 0.5).clamp(-FARTHEST, FARTHEST) * size
    x = torch.arange(width, device=light.device) + 0.5 - at[:, 0, None, None]
    y = (torch.arange(height, device=light.device) + 0.5)[:, None] - at[:, 1, None, None]
    far = torch.where(size - at >= at, size - at, at)
    distance = sqrt0(x * x + y * y) / sqrt0((far * far).sum(-1))[:, None, None]
    return torch.where(finite[:, None, None], distance, 0)


def edge_distance(strength: Tensor) -> Tensor:
    """Return the distance to the nearest edge pixel over the diagonal, in [0, 1], of edges `[B, H, W]`.

    Convention: edge pixels have `strength` > EDGE_THRESHOLD * mean, the mean taken in float64; without any
    the distance is the diagonal. No gradient.
    """
    height, width = strength.shape[1:]
    exact = strength.detach().double()
    squared, _ = distance_transform(exact > EDGE_THRESHOLD * exact.mean((1, 2), keepdim=True))
    return (squared.double() / (height**2 + width**2)).sqrt().to(strength.dtype)


def object_boundary(strength: Tensor, labels: Tensor) -> Tensor:
    """Return `boundaries` from the edges `[B, H, W]` of a picture, in their dtype."""
    strength = strength.detach()
    mean = strength.double().flatten(1).mean(1)[:, None, None]
    border = torch.zeros_like(labels, dtype=torch.bool)
    down, right = labels[:, 1:] != labels[:, :-1], labels[:, :, 1:] != labels[:, :, :-1]
    border[:, 1:] |= down
    border[:, :-1] |= down
    border[:, :, 1:] |= right
    border[:, :, :-1] |= right
    return (border & (strength.double() > EDGE_THRESHOLD * mean)).to(strength.dtype)


def given_plane(plane: Tensor, height: int, width: int, nearest: bool = False) -> Tensor:
    """Return a given plane `[B, h, w]` at height x width.

    Convention: bilinear between texel centres, borders replicated; nearest takes the texel that holds the
    pixel's centre. Values that are not finite count as 0.
    """
    plane = torch.where(plane.isfinite(), plane, 0)
    if nearest:
        rows, columns = (
            torch.div((2 * torch.arange(fine) + 1) * coarse, 2 * fine, rounding_mode="floor")
            for fine, coarse in zip((height, width), plane.shape[1:], strict=True)
        )
        return plane[:, rows[:, None], columns]
    return enlarge(plane, height, width)


def build_channels(
    image: Tensor,
    channels: Sequence[int],
    levels: int,
    given: Sequence[Tensor] = (),
    given_channels: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    previous: Tensor | None = None,
    fixation: Tensor | None = None,
) -> Tensor:
    """Build a texture of channels from a picture.

    Args:
        image: `[B, C, H, W]`, float or uint8 (divided by 255); grey is repeated, alpha dropped, values that
            are not finite count as 0.
        channels: indices of the 40, in the order wanted; those without a formula here (12-33, 35-39) are zero unless given;
            38 follows from edges and the labels that are given as 12.
        levels: 1 to `level_count(H, W)`.
        dtype: of the result; the image's by default, float32 for uint8.
        previous: the picture before it, of the same shape, for motion and saliency.
        fixation: `[B, 2]` in uv, for the eccentricity.
        given: planes `[B, n, h, w]`, h <= H and w <= W, which replace the formulas.
        given_channels: the channels that the planes of `given` are, in turn.

    Returns:
        `[B, T, len(channels)]`. Planes are computed in float32 (float64 for double) and rounded once.
        Differentiable in the pictures (0-8) and in the fixation (11); channel 34 has no gradient.
    """
    planes = rgb_planes(image)
    light = luma(planes)
    height, width = light.shape[1:]
    centre = [(torch.arange(n, dtype=light.dtype, device=light.device) + 0.5) / n for n in (height, width)]

    def change() -> Tensor:
        return motion(light, None if previous is None else luma(rgb_planes(previous)))

    make: dict[int, Callable[[], Tensor]] = {
        0: lambda: planes[:, 0],
        1: lambda: planes[:, 1],
        2: lambda: planes[:, 2],
        3: lambda: edge(light),
        4: lambda: contrast_edge(light),
        5: lambda: light - low_pass(light),
        6: lambda: low_pass(light),
        7: change,
        8: lambda: saliency(planes, None if previous is None else rgb_planes(previous)),
        9: lambda: centre[1].expand_as(light),
        10: lambda: centre[0][:, None].expand_as(light),
        11: lambda: eccentricity(light, fixation),
        34: lambda: edge_distance(edge(light)),
        38: lambda: object_boundary(edge(light), plane(12)) if 12 in handed else torch.zeros_like(light),
    }
    handed = dict(zip(given_channels, (plane for tensor in given for plane in tensor.unbind(1)), strict=True))

    def plane(channel: int) -> Tensor:
        if channel in handed:
            return given_plane(handed[channel].to(light.dtype), height, width, nearest=CHANNEL_REDUCERS[channel] == "mode")
        return make[channel]() if channel in make else torch.zeros_like(light)

    if dtype is None:
        dtype = image.dtype if image.is_floating_point() else torch.float32
    stacked = torch.stack([plane(channel) for channel in channels], dim=1)
    return generate_mipmaps(stacked, [CHANNEL_REDUCERS[channel] for channel in channels], levels, dtype)


@torch.no_grad()
def update_channels(
    data: Tensor,
    planes: Tensor,
    image: Tensor,
    dirty: Tensor,
    before: Tensor,
    channels: Sequence[int],
    levels: int,
    tile: int,
    fixation: Tensor | None = None,
    first: bool = False,
) -> None:
    """Replace the texture of local channels, and the planes, of the picture before by those of this one.

    Args:
        data: `[B, T, len(channels)]`, replaced.
        planes: `[4, B, H, W]`: luma, edge, contrast-normalised luma and motion of the picture before; those that
            the channels need are replaced.
        image: `[B, 3, H, W]`, float or uint8.
        dirty: bool `[B, rows, columns]`: tiles in which the pictures differ.
        before: the same of the picture before and the one before that.
        channels: of 0 to 7 and 9 to 11.
        levels: of the texture.
        tile: side of a tile.
        fixation: `[B, 2]` in uv.
        first: there is no picture before.

    Convention: all is computed anew; the masks only say what an implementation may leave as it is.
    """
    wanted, light = set(channels), luma(rgb_planes(image))
    if 7 in wanted:
        planes[3] = 0 if first else (light - planes[0]).abs()
    if wanted & {3, 4, 5, 6, 7}:
        planes[0] = light
    if 3 in wanted:
        planes[1] = edge(light)
    if 4 in wanted:
        planes[2] = normalised(light)
    given = ([planes[3][:, None]], [7]) if 7 in wanted else ([], [])
    data.copy_(build_channels(image, channels, levels, *given, dtype=data.dtype, fixation=fixation))
