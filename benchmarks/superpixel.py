"""Are our superpixels better and faster than those of OpenCV and scikit-image?

About 50 of a picture. Quality: achievable segmentation accuracy (ASA), under-segmentation error (UE, Neubert and Protzel) and boundary
recall (BR) on scenes whose segments are known, with the number of superpixels and of connected pieces that there really are. OpenCV's
SLIC needs the contrib modules (opencv-contrib-python-headless).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch

import texvlm
from benchmarks import _segments as segments
from benchmarks._harness import US, Bench

N = 50
SCENES = 8  # of each kind
Method = Callable[[np.ndarray], torch.Tensor]


def ours(picture: np.ndarray) -> torch.Tensor:
    return texvlm.superpixels(picture, N)[0][0]


def peers() -> dict[str, Method]:
    """Functions of a uint8 picture [H, W, 3] to labels [H, W]."""
    found: dict[str, Method] = {}
    try:
        import cv2

        def opencv(ruler: float, algorithm: int) -> Method:
            def run(picture: np.ndarray) -> torch.Tensor:
                side = round((picture.shape[0] * picture.shape[1] / N) ** 0.5)
                lab = cv2.cvtColor(picture, cv2.COLOR_RGB2LAB)
                slic = cv2.ximgproc.createSuperpixelSLIC(lab, algorithm, side, ruler)
                slic.iterate(10)
                slic.enforceLabelConnectivity(25)
                return torch.from_numpy(slic.getLabels()).long()

            return run

        found["OpenCV SLIC, ruler 10"] = opencv(10.0, cv2.ximgproc.SLIC)
        found["OpenCV SLIC, ruler 40"] = opencv(40.0, cv2.ximgproc.SLIC)
        found["OpenCV SLICO"] = opencv(10.0, cv2.ximgproc.SLICO)
    except (ImportError, AttributeError):
        print(
            "OpenCV with its contrib modules is not installed: its rows are left out (pip install opencv-contrib-python-headless)"
        )
    try:
        from skimage.segmentation import slic

        def scikit(**options: float) -> Method:
            return lambda picture: torch.from_numpy(slic(picture, N, start_label=0, **options)).long()

        found["scikit-image slic"] = scikit()
        found["scikit-image slic, tuned"] = scikit(compactness=20, sigma=1, min_size_factor=0.1)
    except ImportError:
        print("scikit-image is not installed: its rows are left out (pip install scikit-image)")
    return found


def quality(methods: dict[str, Method], kind: str, count: int) -> dict[str, list[float]]:
    """Per method the means of ASA, UE, BR, labels and pieces over the scenes of a kind."""
    rows: dict[str, list[list[float]]] = {name: [] for name in methods}
    for seed in range(count):
        picture, truth = segments.scene(kind, seed)
        array = picture.permute(1, 2, 0).contiguous().numpy()
        for name, method in methods.items():
            labels = method(array)
            rows[name].append(
                [
                    segments.achievable_accuracy(labels, truth),
                    segments.undersegmentation(labels, truth),
                    segments.boundary_recall(labels, truth),
                    len(labels.unique()),
                    segments.pieces(labels),
                ]
            )
    return {name: [statistics.fmean(column) for column in zip(*found)] for name, found in rows.items()}


def main() -> int:
    bench = Bench(__doc__)
    methods: dict[str, Method] = {US: ours, **peers()}
    kinds = segments.KINDS if "scikit-image slic" in methods else segments.KINDS[:-1]
    rivals = [name for name in methods if name.startswith("OpenCV SLIC,")]
    worst_asa, worst_ue, worst_count, extra = 1.0, 9.0, 0.0, 0.0
    for kind in kinds:
        rows = quality(methods, kind, 2 if bench.quick else SCENES)
        bench.figure(f"quality, {kind}", rows)
        print(f"\n{kind}: {'':20} {'ASA':>7} {'UE':>7} {'BR':>7} {'labels':>7} {'pieces':>7}")
        for name, (asa, ue, br, labels, pieces) in rows.items():
            print(f"  {name:28} {asa:7.3f} {ue:7.3f} {br:7.3f} {labels:7.1f} {pieces:7.1f}", flush=True)
        for name in rivals:
            worst_asa = min(worst_asa, rows[US][0] - rows[name][0])
            worst_ue = min(worst_ue, rows[name][1] - rows[US][1])
        worst_count = max(worst_count, abs(rows[US][3] - N))
        extra = max(extra, rows[US][4] - rows[US][3])
    bench.gate("labels that are missing or too many", worst_count, at_most=0.1 * N)
    bench.gate("pieces beyond one per label", extra, at_most=0)
    if rivals:
        bench.gate("ASA above OpenCV SLIC's (the worst kind)", worst_asa, at_least=0)
        bench.gate("UE below OpenCV SLIC's (the worst kind)", worst_ue, at_least=0)
    ratios: dict[str, list[float]] = {}
    for height, width in ((321, 481), (1024, 1024)):
        picture = segments.scene("textured", 0, height, width)[0].permute(1, 2, 0).contiguous().numpy()
        calls = {name: (lambda m=method: m(picture)) for name, method in methods.items() if not name.endswith("SLICO")}
        times = bench.compare(f"{height} x {width}", calls, seconds=4)
        for name in calls:
            if name != US:
                ratios.setdefault(name, []).append(times.ratio(name))
        if len(calls) > 1:
            bench.gate("times as fast as the fastest peer", times.ratio(times.best()), at_least=5)
    labels = texvlm.superpixels(picture, N)[0]
    image = torch.from_numpy(picture).permute(2, 0, 1)[None]
    bench.compare(
        "1024 x 1024, from the labels",
        {
            "channels 12 to 14": lambda: texvlm.superpixel_channels(labels, N),
            "boundaries": lambda: texvlm.boundaries(image, labels=labels),
        },
    )
    found = ", ".join(f"{min(r):.0f} to {max(r):.0f} times as fast as {peer}" for peer, r in ratios.items())
    return bench.finish(
        f"yes: {N} of {N} connected superpixels; ASA {worst_asa:+.3f} and UE {-worst_ue:+.3f} against OpenCV SLIC at worst; {found}"
    )


if __name__ == "__main__":
    sys.exit(main())
