"""How fast are the bands of a 1024 x 1024 picture, and the picture of its bands, against chains of OpenCV and torch?

Bands of a pyramid that is there; pyramid and bands from the picture; the pyramid of the bands; forward + backward of the first. OpenCV
enlarges and shrinks with its 5 x 5 Gaussian into preallocated levels, torch with `interpolate` and `avg_pool2d`, whose results are
ours. fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn.functional import avg_pool2d, interpolate

import texvlm
from benchmarks._harness import US, Bench, Call

SIDE = 1024
LEVELS = texvlm.level_count(SIDE, SIDE)
BANDS, WHOLE, BACK = "bands of a pyramid", "pyramid and bands of a picture", "pyramid of the bands"
NCHW, LAST, OPENCV = "torch NCHW", "torch channels_last", "OpenCV pyrDown, pyrUp"


def shrunk(image: torch.Tensor) -> list[torch.Tensor]:
    levels = [image]
    while levels[-1].shape[-1] > 1:
        levels.append(avg_pool2d(levels[-1], 2))
    return levels


def enlarged(level: torch.Tensor) -> torch.Tensor:
    return interpolate(level, scale_factor=2, mode="bilinear", align_corners=False)


def bands_of(levels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [fine - enlarged(coarse) for fine, coarse in pairwise(levels)] + [levels[-1]]


def levels_of(bands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    levels = [bands[-1]]
    for band in reversed(bands[:-1]):
        levels.append(band + enlarged(levels[-1]))
    return levels[::-1]


def opencv(image: torch.Tensor) -> dict[str, Call]:
    """The same three of [C, H, W] with OpenCV, by the title of their table; nothing without it."""
    try:
        import cv2
        import numpy as np
    except ImportError:
        print("OpenCV is not installed: its rows are left out (pip install opencv-python-headless)")
        return {}
    cv2.setNumThreads(torch.get_num_threads())
    picture = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    levels, bands, again, up = ([np.empty((SIDE >> i, SIDE >> i, 3), np.float32) for i in range(LEVELS)] for _ in range(4))
    levels[0] = picture

    def down() -> None:
        for above, below in pairwise(levels):
            cv2.pyrDown(above, below, below.shape[1::-1])

    def split() -> None:
        for i in range(LEVELS - 1):
            cv2.pyrUp(levels[i + 1], up[i], up[i].shape[1::-1])
            cv2.subtract(levels[i], up[i], bands[i])
        bands[-1][:] = levels[-1]

    def both() -> None:
        down()
        split()

    def join() -> None:
        again[-1][:] = bands[-1]
        for i in range(LEVELS - 2, -1, -1):
            cv2.pyrUp(again[i + 1], up[i], up[i].shape[1::-1])
            cv2.add(bands[i], up[i], again[i])

    both()
    return {BANDS: split, WHOLE: both, BACK: join}


def compare(bench: Bench, channels: int) -> dict[str, float]:
    """Each table's ratio to the best peer."""
    image = torch.rand(1, channels, SIDE, SIDE)
    texture = texvlm.Texture(image)
    bands = texvlm.laplacian_decompose(texture)
    peers = opencv(image[0]) if channels == 3 else {}
    calls: dict[str, dict[str, Call]] = {
        BANDS: {US: lambda: texvlm.laplacian_decompose(texture)},
        WHOLE: {US: lambda: texvlm.laplacian_decompose(texvlm.generate_mipmaps(image))},
        BACK: {US: lambda: texvlm.laplacian_reconstruct(bands)},
    }
    for name, layout in ((NCHW, torch.contiguous_format), (LAST, torch.channels_last)):
        picture = image.contiguous(memory_format=layout)
        levels = shrunk(picture)
        split = bands_of(levels)
        calls[BANDS][name] = lambda levels=levels: bands_of(levels)
        calls[WHOLE][name] = lambda picture=picture: bands_of(shrunk(picture))
        calls[BACK][name] = lambda split=split: levels_of(split)
    difference = max((a - b).abs().max().item() for a, b in zip((bands.level(i) for i in range(LEVELS)), split, strict=True))
    bench.gate(f"C = {channels}: largest difference from torch / 1e-5", difference / 1e-5, at_most=1.0)
    ratios = {}
    size = texture.data.nbytes
    for title, rows in calls.items():
        if title in peers:
            rows[OPENCV] = peers[title]
        moves = 2 * size if title != WHOLE else image.nbytes + 2 * size
        times = bench.compare(f"{title}, C = {channels}", rows, moves=moves, fresh=True)
        ratios[title] = times.ratio(times.best())
        bench.gate(f"{title}, C = {channels}: times as fast as {times.best()}", ratios[title], at_least=1.0)
    return ratios


def backward(bench: Bench, channels: int) -> float:
    texture = texvlm.Texture(torch.rand(1, channels, SIDE, SIDE))
    leaf = texture.data.requires_grad_()
    mine, weights = texture.replace(leaf), torch.rand(texture.data.shape)
    calls: dict[str, Call] = {US: lambda: torch.autograd.grad(texvlm.laplacian_decompose(mine).data, leaf, weights)}
    for name, layout in ((NCHW, torch.contiguous_format), (LAST, torch.channels_last)):
        levels = [texture.level(i).detach().clone(memory_format=layout).requires_grad_() for i in range(LEVELS)]
        incoming = [torch.rand_like(level) for level in levels]
        calls[name] = lambda levels=levels, incoming=incoming: torch.autograd.grad(bands_of(levels), levels, incoming)
    times = bench.compare(f"forward + backward of the bands, C = {channels}", calls)
    bench.gate(f"forward + backward, C = {channels}: times as fast as {times.best()}", times.ratio(times.best()), at_least=1.0)
    return times.ratio(times.best())


def main() -> int:
    bench = Bench(__doc__)
    found = {channels: compare(bench, channels) for channels in (3, 40)}
    back = {channels: backward(bench, channels) for channels in (3, 40)}
    return bench.finish(
        "Over the best peer, at C = 3 and 40: "
        + ", ".join(f"{title} {found[3][title]:.1f}x and {found[40][title]:.1f}x" for title in (BANDS, WHOLE, BACK))
        + f", forward + backward {back[3]:.1f}x and {back[40]:.1f}x."
    )


if __name__ == "__main__":
    sys.exit(main())
