"""How long do the 13 minimal channels of 1024 x 1024 take, step by step, against the reference and a copy of their bytes?

RGB fp32 in, texture fp32 out, all levels. Steps timed by themselves compute the luma and edges that they share with the others.
"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench, Call, peak_memory
from benchmarks.distance import textured
from texvlm import reference

SIDE = 1024
FLOAT = 4
LEVELS = texvlm.level_count(SIDE, SIDE)
TEXELS = texvlm.pyramid.texel_count(SIDE, SIDE, LEVELS)
LOCAL = [i for i in texvlm.MINIMAL if i not in (8, 34)]


def build(image: torch.Tensor, channels: list[int], levels: int, **keywords: torch.Tensor) -> Call:
    return lambda: torch.ops.texvlm.build_channels(image, channels, levels, [], [], **keywords)


def opencv_local(image: torch.Tensor) -> Call | None:
    """The planes of edge, contrast, low and high pass with OpenCV, each into an array of its own; no texels."""
    try:
        import cv2
        import numpy as np
    except ImportError:
        print("OpenCV is not installed: its row is left out (pip install opencv-python-headless)")
        return None
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    luma = np.ascontiguousarray((image[0] * weights).sum(0).numpy())
    border = cv2.BORDER_REPLICATE

    def magnitude(plane: np.ndarray) -> np.ndarray:
        x = cv2.Sobel(plane, cv2.CV_32F, 1, 0, borderType=border)
        return cv2.magnitude(x, cv2.Sobel(plane, cv2.CV_32F, 0, 1, borderType=border))

    def run() -> tuple:
        mean = cv2.blur(luma, (9, 9), borderType=border)
        variance = np.maximum(cv2.blur(luma * luma, (9, 9), borderType=border) - mean * mean, 0)
        low = cv2.sepFilter2D(luma, cv2.CV_32F, *([np.array([1, 4, 6, 4, 1], np.float32) / 16] * 2), borderType=border)
        return magnitude(luma), magnitude((luma - mean) / (np.sqrt(variance) + 0.02)), low, luma - low

    return run


def main() -> int:
    bench = Bench(__doc__)
    image = textured(SIDE)
    previous = image.roll(3, dims=3)
    minimal = list(texvlm.MINIMAL)
    level0 = FLOAT * SIDE * SIDE
    with torch.no_grad():
        calls = {US: build(image, LOCAL, 1)}
        if peer := opencv_local(image):
            calls["OpenCV, 4 of them as planes"] = peer
        moves = (3 + len(LOCAL)) * level0
        local = bench.compare("local pass: 0-7 and 9-11 into level 0", calls, moves=moves, fresh=True)
        bench.gate("local pass, milliseconds", 1e3 * local.median(), at_most=5)

        data = build(image, minimal, LEVELS)()
        reducer = [texvlm.CHANNELS[i].reducer for i in minimal]
        calls = {
            US: build(image, minimal, LEVELS),
            "channel 34 by itself": build(image, [34], 1),
            "saliency by itself": lambda: torch.ops.texvlm.saliency(image),
            "mips by themselves": lambda: torch.ops.texvlm.update_mipmaps(data, SIDE, SIDE, reducer, LEVELS),
        }
        moves = 3 * level0 + FLOAT * len(minimal) * TEXELS
        steps = bench.compare("all 13 channels, all levels, and its steps", calls, moves=moves, fresh=True)
        distance, salience, mips = (1e3 * steps.median(name) for name in list(calls)[1:])
        for name, value, limit in [("distance", distance, 15), ("saliency", salience, 4), ("mips", mips, 4)]:
            bench.gate(f"{name}, milliseconds", value, at_most=limit)

        whole = {US: build(image, minimal, LEVELS), "reference": lambda: reference.build_channels(image, minimal, LEVELS)}
        times = bench.compare("against the reference", whole)
        bench.gate("faster than the reference", times.ratio("reference"), at_least=5)
        variants = {
            US: build(image, minimal, LEVELS),
            "with a previous picture": build(image, minimal, LEVELS, previous=previous),
            "uint8 picture": build((image * 255).to(torch.uint8), minimal, LEVELS),
            "fp16 texels": build(image, minimal, LEVELS, dtype=torch.float16),
        }
        bench.compare("variants", variants)
        peak = peak_memory(build(image, minimal, LEVELS))
        if peak is not None:
            bench.gate("peak memory over the texture's", peak / (FLOAT * len(minimal) * TEXELS), at_most=1.5)

    picture = image.clone().requires_grad_()
    data = torch.ops.texvlm.build_channels(picture, minimal, LEVELS, [], [])
    grad = torch.ones_like(data)
    back = bench.compare("backward, all 13", {US: lambda: torch.autograd.grad(data, picture, grad, retain_graph=True)})
    return bench.finish(
        f"{1e3 * times.median():.1f} ms for all 13 channels and levels, {times.ratio('reference'):.0f} times as fast as the reference "
        f"and {steps.against_copy:.1f} times a copy of the bytes; the local pass takes {1e3 * local.median():.1f} ms, "
        f"the distance {distance:.1f}, saliency {salience:.1f}, the mips {mips:.1f}; backward {1e3 * back.median():.0f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
