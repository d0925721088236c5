"""Pictures whose segments are known, and how well labels agree with segments: for the benchmark and the tests of superpixels.

The measures are those of D. Stutz, A. Hermans and B. Leibe, "Superpixels: an evaluation of the state of the art" (2018).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

KINDS = ("flat", "shaded", "textured", "blurred", "photographed")
"""What fills the segments of a scene. The last one needs the photographs of scikit-image."""

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "brick", "grass", "gravel", "moon")


def smooth_noise(height: int, width: int, cell: int, channels: int, generator: torch.Generator) -> Tensor:
    """Smooth noise [channels, height, width] in [0, 1] with one free value per `cell` pixels."""
    coarse = torch.rand(1, channels, height // cell + 2, width // cell + 2, generator=generator)
    return functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)[0].clamp(0, 1)


def curved_segments(height: int, width: int, count: int, generator: torch.Generator) -> Tensor:
    """A Voronoi diagram [height, width] of `count` sites on bent coordinates: segments with curved borders, some of them ragged."""
    bend = (smooth_noise(height, width, 40, 2, generator) - 0.5) * 60 + (smooth_noise(height, width, 12, 2, generator) - 0.5) * 10
    sites = torch.rand(count, 2, generator=generator) * torch.tensor([height, width])
    weight = torch.rand(count, generator=generator) * 0.6 + 0.7
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    far = (y + bend[0] - sites[:, 0, None, None]) ** 2 + (x + bend[1] - sites[:, 1, None, None]) ** 2
    return (far * weight[:, None, None]).argmin(0)


def photograph(name: str) -> Tensor:
    """A photograph [3, H, W] in [0, 1] that ships with scikit-image."""
    from skimage import data

    array = torch.from_numpy(getattr(data, name)())
    picture = array[..., :3].permute(2, 0, 1) if array.dim() == 3 else array.expand(3, -1, -1)
    return picture.float() / 255


def fill(kind: str, height: int, width: int, generator: torch.Generator) -> Tensor:
    """What one segment of a scene of this kind looks like, [3, height, width]."""

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    colour = torch.rand(3, 1, 1, generator=generator) * 0.8 + 0.1
    if kind in ("flat", "blurred"):
        return colour.expand(3, height, width)
    if kind == "shaded":
        y, x = torch.linspace(-1, 1, height)[:, None], torch.linspace(-1, 1, width)
        return colour + uniform(-0.3, 0.3) * y + uniform(-0.3, 0.3) * x
    if kind == "textured":
        grain = smooth_noise(height, width, int(uniform(2, 9)), 3, generator) - 0.5
        return colour + uniform(0.1, 0.5) * grain
    source = photograph(PHOTOGRAPHS[int(uniform(0, len(PHOTOGRAPHS)))])
    source = source[:, : source.shape[1] // 2 * 2]
    top, left = int(uniform(0, max(1, source.shape[1] - height))), int(uniform(0, max(1, source.shape[2] - width)))
    crop = functional.interpolate(source[None, :, top : top + height, left : left + width], (height, width), mode="bilinear")[0]
    return colour + 0.5 * (crop - crop.mean((1, 2), keepdim=True))


def scene(kind: str, seed: int, height: int = 321, width: int = 481) -> tuple[Tensor, Tensor]:
    """A picture uint8 [3, height, width] and its segments int64 [height, width]: 8 to 30 of them.

    Args:
        kind: of KINDS: flat colours, linear shading, smooth noise, flat colours with blurred borders, or parts of photographs; all with
            the noise of a camera.
        seed: another one, another scene.
        height: of the picture.
        width: of the picture.
    """
    generator = torch.Generator().manual_seed(7919 * seed + KINDS.index(kind))
    segments = curved_segments(height, width, int(torch.randint(8, 31, (), generator=generator)), generator)
    picture = torch.zeros(3, height, width)
    for segment in segments.unique().tolist():
        inside = segments == segment
        picture[:, inside] = fill(kind, height, width, generator)[:, inside]
    if kind == "blurred":
        picture = functional.avg_pool2d(functional.pad(picture[None], (3, 3, 3, 3), mode="replicate"), 7, 1)[0]
    noise = 0.01 + 0.05 * torch.rand((), generator=generator)
    picture = picture + noise * torch.randn(3, height, width, generator=generator)
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8), segments


def overlap(labels: Tensor, segments: Tensor) -> Tensor:
    """How many pixels [labels, segments] have each label and lie in each segment."""
    k, s = int(labels.max()) + 1, int(segments.max()) + 1
    return torch.bincount((labels * s + segments).flatten(), minlength=k * s).view(k, s)


def border(labels: Tensor) -> Tensor:
    """Pixels with a 4-neighbour of another label."""
    out = torch.zeros(labels.shape, dtype=torch.bool)
    down, right = labels[1:] != labels[:-1], labels[:, 1:] != labels[:, :-1]
    out[1:] |= down
    out[:-1] |= down
    out[:, 1:] |= right
    out[:, :-1] |= right
    return out


def achievable_accuracy(labels: Tensor, segments: Tensor) -> float:
    """Achievable segmentation accuracy: the share of pixels that are right if each label gets the segment it overlaps most."""
    return (overlap(labels, segments).amax(1).sum() / labels.numel()).item()


def undersegmentation(labels: Tensor, segments: Tensor) -> float:
    """Under-segmentation error of P. Neubert and P. Protzel (2012): what leaks, the smaller part of each label cut by a segment."""
    shared = overlap(labels, segments)
    return (torch.minimum(shared, shared.sum(1, keepdim=True) - shared).sum() / labels.numel()).item()


def boundary_recall(labels: Tensor, segments: Tensor) -> float:
    """The share of the segments' border pixels with a label's border within 0.25 % of the diagonal (a square window)."""
    wanted = border(segments)
    radius = round(0.0025 * (labels.shape[0] ** 2 + labels.shape[1] ** 2) ** 0.5)
    near = functional.max_pool2d(border(labels)[None].float(), 2 * radius + 1, 1, radius)[0] > 0
    return near[wanted].float().mean().item() if wanted.any() else 1.0


def pieces(labels: Tensor) -> int:
    """How many 4-connected pieces of equal label there are; as many as labels is what a segmentation should have."""
    from scipy import ndimage

    height, width = labels.shape
    grid = torch.zeros(2 * height - 1, 2 * width - 1, dtype=torch.bool)  # pixels, with links to equal neighbours in between
    grid[::2, ::2] = True
    grid[1::2, ::2] = labels[1:] == labels[:-1]
    grid[::2, 1::2] = labels[:, 1:] == labels[:, :-1]
    return int(ndimage.label(grid.numpy())[1])
