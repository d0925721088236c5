"""How fast is a mip chain of 1024 x 1024 against OpenCV's, torch's, and a copy of the bytes it must move?

Levels above 0 by `update_mipmaps` into a warm buffer, and whole pyramids by `generate_mipmaps` from NCHW
(level 0 written too). OpenCV writes into preallocated levels; torch's pooling cannot. All fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

import texvlm
from benchmarks._harness import US, Bench

SIDE = 1024
LEVELS = texvlm.level_count(SIDE, SIDE)


def opencv_chains(image: torch.Tensor) -> dict:
    """INTER_AREA and pyrDown chains of [C, H, W] into preallocated levels; nothing without OpenCV."""
    try:
        import cv2
        import numpy as np
    except ImportError:
        print("OpenCV is not installed: its rows are left out (pip install opencv-python-headless)")
        return {}
    level0 = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    levels = [level0] + [np.empty((max(1, SIDE >> i), max(1, SIDE >> i), level0.shape[2]), np.float32) for i in range(1, LEVELS)]

    def area() -> None:
        for above, below in pairwise(levels):
            cv2.resize(above, below.shape[1::-1], below, interpolation=cv2.INTER_AREA)

    def pyr_down() -> None:
        for above, below in pairwise(levels):
            cv2.pyrDown(above, below, below.shape[1::-1])

    return {"cv2.resize INTER_AREA": area, "cv2.pyrDown": pyr_down}


def pool_chain(level0: torch.Tensor):
    """avg_pool2d level by level: the levels above 0."""

    def run() -> list[torch.Tensor]:
        levels = [level0]
        while levels[-1].shape[-1] > 1:
            levels.append(torch.nn.functional.avg_pool2d(levels[-1], 2))
        return levels

    return run


def gradients(forward: Callable[[torch.Tensor], Sequence[torch.Tensor]], image: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Of the picture, from the same gradient of every level."""
    leaf = image.clone().requires_grad_()
    incoming = [torch.ones_like(level) for level in forward(leaf)]
    return lambda: torch.autograd.grad(forward(leaf), leaf, incoming)[0]


def main() -> int:
    bench = Bench(__doc__)
    texel_bytes = 4 * texvlm.Texture(torch.zeros(1, 1, SIDE, SIDE)).data.shape[1]  # of a whole pyramid, one channel
    level0_bytes = 4 * SIDE * SIDE
    copies = []

    for channels in (3, 40):
        image = torch.rand(1, channels, SIDE, SIDE)
        last = image.contiguous(memory_format=torch.channels_last)
        texture = texvlm.Texture(image)
        calls = {US: lambda t=texture: texvlm.update_mipmaps(t)}
        if channels == 3:
            calls |= opencv_chains(image[0])
        calls |= {"avg_pool2d NCHW": pool_chain(image), "avg_pool2d channels_last": pool_chain(last)}
        # level 0 is read and the others are written; what is read again of them was written just before
        times = bench.compare(f"update_mipmaps, C = {channels}, warm buffer", calls, moves=texel_bytes * channels)
        if "cv2.pyrDown" in calls:
            bench.gate("C = 3: faster than INTER_AREA", times.ratio("cv2.resize INTER_AREA"), at_least=2.0)
            bench.gate("C = 3: no slower than pyrDown", times.ratio("cv2.pyrDown"), at_least=1.0)
        if channels == 40:
            pools = times.best("avg_pool2d NCHW", "avg_pool2d channels_last")
            bench.gate(f"C = 40: faster than the best torch chain ({pools})", times.ratio(pools), at_least=1.5)
        bench.gate(f"update_mipmaps, C = {channels}: against the copy", times.against_copy, at_most=1.5)
        copies.append(times.against_copy)

        calls = {
            US: lambda i=image: torch.ops.texvlm.generate_mipmaps(i, ["mean"], LEVELS),
            "avg_pool2d NCHW": pool_chain(image),
        }
        title = f"generate_mipmaps from NCHW, C = {channels}"
        times = bench.compare(title, calls, moves=(level0_bytes + texel_bytes) * channels, fresh=True)
        if channels == 3:
            bench.gate("C = 3 from NCHW: faster than avg_pool2d", times.ratio("avg_pool2d NCHW"), at_least=3.0)
        bench.gate(f"generate_mipmaps, C = {channels}: against the copy", times.against_copy, at_most=1.5)
        copies.append(times.against_copy)

        calls = {US: lambda i=last: texvlm.generate_mipmaps(i), "avg_pool2d channels_last": pool_chain(last)}
        title = f"generate_mipmaps from channels_last, from Python, C = {channels}"
        times = bench.compare(title, calls, moves=(level0_bytes + texel_bytes) * channels, fresh=True)
        if channels == 40:
            bench.gate("C = 40 from channels_last: faster than avg_pool2d", times.ratio("avg_pool2d channels_last"), at_least=1.2)

        calls = {
            US: gradients(lambda i: [texvlm.generate_mipmaps(i).data], image),
            "avg_pool2d NCHW": gradients(lambda i: pool_chain(i)(), image),
            "avg_pool2d channels_last": gradients(lambda i: pool_chain(i)(), last),
        }
        times = bench.compare(f"generate_mipmaps forward and backward, C = {channels}", calls)
        pools = times.best("avg_pool2d NCHW", "avg_pool2d channels_last")
        bench.gate(f"gradients, C = {channels}: faster than the best torch chain ({pools})", times.ratio(pools), at_least=2.0)

    return bench.finish(f"A mip chain takes {min(copies):.2f} to {max(copies):.2f} times the copy of its bytes.")


if __name__ == "__main__":
    sys.exit(main())
