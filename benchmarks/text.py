"""Which cells of a document photograph hold its text, and how long does finding them take, against MSER, Sobel and an oracle?

The 273 best of 4096 cells on generated photographs of documents (_documents.py) whose fonts, photographs and part of whose clutter
the training never saw: 2048 x 2048 with text of 16 to 60 pixels, 1024 x 1024 with 8 to 30. Coverage is the share of the area inside
the outlines of lines of text; the oracle takes the cells with most of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import texvlm
from benchmarks._documents import coverage, document
from benchmarks._harness import US, Bench, Call

CELLS = 273
Scorer = Callable[[torch.Tensor], torch.Tensor]  # uint8 [3, H, W] to [H, W]


def mser() -> Scorer | None:
    """The share of each place that lies in the bounding boxes of MSER's regions that are neither specks nor a tenth of the picture."""
    try:
        import cv2
        import numpy as np
    except ImportError:
        print("OpenCV is not installed: MSER is left out (pip install opencv-contrib-python-headless)")
        return None

    def score(image: torch.Tensor) -> torch.Tensor:
        grey = cv2.cvtColor(image.permute(1, 2, 0).contiguous().numpy(), cv2.COLOR_RGB2GRAY)
        _, boxes = cv2.MSER_create().detectRegions(grey)
        total = np.zeros(grey.shape, np.float32)
        for x, y, w, h in boxes:
            if w * h < grey.size / 100:
                total[y : y + h, x : x + w] += 1
        return torch.from_numpy(total)

    return score


def mser_alone(image: torch.Tensor) -> Call:
    import cv2

    grey = cv2.cvtColor(image.permute(1, 2, 0).contiguous().numpy(), cv2.COLOR_RGB2GRAY)
    return lambda: cv2.MSER_create().detectRegions(grey)


def main() -> int:
    bench = Bench(__doc__)
    scorers: dict[str, Scorer] = {
        US: lambda image: texvlm.text_regions(image)[0],
        "Sobel": lambda image: texvlm.edges(image)[0],
        "contrast edges": lambda image: texvlm.contrast_edges(image)[0],
    }
    if peer := mser():
        scorers["MSER"] = peer
    answers = []
    for side, cell, sizes in [(2048, 32, (16, 60)), (1024, 16, (8, 30))]:
        kept: dict[str, list[float]] = {}
        for seed in range(4 if bench.quick else 12):
            found = document(20000 + seed, side, sizes)
            overlap = found.overlap(cell)
            kept.setdefault("oracle", []).append(coverage(overlap, overlap, CELLS))
            for name, scorer in scorers.items():
                score = scorer(found.image)[None]
                kept.setdefault(name, []).append(coverage(F.avg_pool2d(score, cell)[0], overlap, CELLS))
                if name == US:
                    kept.setdefault("texvlm, by the largest value", []).append(
                        coverage(F.max_pool2d(score, cell)[0], overlap, CELLS)
                    )
        means = {name: sum(values) / len(values) for name, values in kept.items()}
        means["uniform"] = CELLS / (side // cell) ** 2
        bench.figure(f"coverage {side}", means)
        print(f"\ntext of {sizes[0]} to {sizes[1]} pixels on {side} x {side}: area in the best {CELLS} cells of {cell} pixels")
        for name, value in sorted(means.items(), key=lambda item: -item[1]):
            print(f"  {name:32} {value:.3f}   worst {min(kept.get(name, [value])):.3f}")
        plain = max(means[name] for name in ("Sobel", "MSER") if name in means)
        for how in (US, "texvlm, by the largest value"):
            bench.gate(f"{side}, {how}: over the better of MSER and Sobel", means[how] / plain, at_least=1.6)
            bench.gate(f"{side}, {how}: over the oracle", means[how] / means["oracle"], at_least=0.7)
        answers.append(
            f"{means[US] / means['oracle']:.0%} of the oracle's at {side} ({plain / means['oracle']:.0%} the better peer)"
        )

    found = document(20000)
    image = found.image[None].float() / 255
    with torch.no_grad():
        calls: dict[str, Call] = {US: lambda: texvlm.text_regions(image), "of uint8": lambda: texvlm.text_regions(found.image)}
        calls["mips of the picture"] = lambda: texvlm.generate_mipmaps(image)
        if "MSER" in scorers:
            calls["MSER"] = mser_alone(found.image)
        times = bench.compare("2048 x 2048", calls, moves=4 * 4 * 2048 * 2048, fresh=True, seconds=8)
    speed = ""
    if "MSER" in scorers:
        bench.gate("faster than MSER", times.ratio("MSER"), at_least=5)
        speed = f", {times.ratio('MSER'):.0f} times as fast as MSER"
    return bench.finish(f"text regions hold {'; '.join(answers)}; {1e3 * times.median():.1f} ms for 2048 x 2048{speed}")


if __name__ == "__main__":
    sys.exit(main())
