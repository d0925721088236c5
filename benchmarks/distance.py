"""How fast is the exact distance transform of 1024 x 1024 against SciPy, OpenCV, and a copy of its bytes?

Squared distances and indices as int64 (ours), float64 distances (SciPy), float32 distances (OpenCV, DIST_MASK_PRECISE, no index). Masks:
the edge pixels of a textured picture, scattered points, and a single point, where a search along rows has far to go.
"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench, Call
from texvlm import reference

SIDE = 1024
BYTES = SIDE * SIDE * (1 + 4 + 4 + 8 + 8)  # the mask, the column pass written and read, two int64 results


def textured(side: int) -> torch.Tensor:
    """A random picture [1, 3, side, side] with detail at all scales."""
    total = torch.zeros(1, 3, side, side)
    for octave in range(8):
        noise = torch.rand(1, 3, side >> octave, side >> octave)
        total += torch.nn.functional.interpolate(noise, (side, side), mode="bilinear") * 4.0 ** (octave - 8)
    return total / total.amax()


def masks() -> dict[str, torch.Tensor]:
    """Name to mask [1, SIDE, SIDE]."""
    edge = texvlm.build_channels(textured(SIDE), channels=["edge"], levels=1).level(0)[:, 0]
    point = torch.zeros(1, SIDE, SIDE, dtype=torch.bool)
    point[0, SIDE // 3, SIDE // 5] = True
    return {
        "edges of a picture": edge > 2 * edge.mean(),
        "3 pixels in 10": torch.rand(1, SIDE, SIDE) < 0.3,
        "1 pixel in 1000": torch.rand(1, SIDE, SIDE) < 1e-3,
        "1 pixel in 100,000": torch.rand(1, SIDE, SIDE) < 1e-5,
        "one pixel": point,
    }


def peers(mask: torch.Tensor) -> dict[str, Call]:
    """The exact transforms that are installed."""
    calls: dict[str, Call] = {}
    outside = ~mask[0].numpy()
    try:
        import cv2
        import numpy as np

        source = outside.astype(np.uint8)
        calls["OpenCV PRECISE"] = lambda: cv2.distanceTransform(source, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    except ImportError:
        print("OpenCV is not installed: its row is left out (pip install opencv-python-headless)")
    try:
        from scipy import ndimage

        calls["SciPy edt with indices"] = lambda: ndimage.distance_transform_edt(outside, return_indices=True)
        calls["SciPy edt"] = lambda: ndimage.distance_transform_edt(outside)
    except ImportError:
        print("SciPy is not installed: its rows are left out (pip install scipy)")
    return calls


def main() -> int:
    bench = Bench(__doc__)
    ratios = {}
    for name, mask in masks().items():
        calls = {US: lambda m=mask: texvlm.distance_transform(m), **peers(mask)}
        if name == "edges of a picture":
            calls["texvlm, jump flooding"] = lambda m=mask: texvlm.distance_transform(m, method="jfa")
        times = bench.compare(f"{name}: {int(mask.sum())} True pixels", calls, moves=BYTES, fresh=True)
        for peer in calls:
            if not peer.startswith(US):
                ratios.setdefault(peer, []).append(times.ratio(peer))
        exact = calls.get("SciPy edt")
        if exact is not None:
            wrong = int((calls[US]()[0][0] != torch.from_numpy(exact()).square().round().long()).sum())
            bench.gate("pixels that differ from SciPy", wrong, at_most=0)
        for peer, wanted in (("OpenCV PRECISE", 1.5), ("SciPy edt", 10)):
            if peer in calls:
                bench.gate(f"times as fast as {peer}", times.ratio(peer), at_least=wanted)
        if name == "edges of a picture":
            bench.gate("milliseconds", 1e3 * times.median(), at_most=15)
    small = masks()["1 pixel in 1000"][:, :256, :256]
    times = bench.compare(
        "256 x 256", {US: lambda: texvlm.distance_transform(small), "reference": lambda: reference.distance_transform(small)}
    )
    found = ", ".join(f"{min(r):.1f} to {max(r):.1f} times as fast as {peer}" for peer, r in ratios.items())
    return bench.finish(f"exact, with indices: {found}; {times.ratio('reference'):.0f} times as fast as the reference")


if __name__ == "__main__":
    sys.exit(main())
