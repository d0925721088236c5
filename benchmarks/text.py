"""Which cells of a document photograph hold its text, and how long does finding them take, against MSER, Sobel and an oracle?

The 273 best of 4096 cells on generated photographs of documents (_documents.py) whose fonts, photographs and part of whose clutter
the training never saw: 2048 x 2048 with text of 16 to 60 pixels, 1024 x 1024 with 8 to 30. Coverage is the share of the area inside
the outlines of lines of text; the oracle takes the cells with most of it. Then what nothing was trained on: Greek and Cyrillic at
any angle in other fonts over other photographs, the same straight on photographs, and pictures without text that have strokes in rows
or in a tangle (training draws circles and strokes of its own; stars, zigzags and spirals are in none).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

import texvlm
from benchmarks._documents import _photo, coverage, document
from benchmarks._harness import US, Bench, Call
from benchmarks._text_scenes import captions

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


def circles(rng: np.random.Generator) -> Image.Image:
    """Rows of outlined circles, as regular as letters."""
    image, step = Image.new("RGB", (512, 512), "white"), int(rng.integers(12, 40))
    draw, r, thick = ImageDraw.Draw(image), step * 0.4, int(rng.integers(1, 4))
    for y in range(step, 512 - step, int(step * 1.5)):
        for x in range(step, 512 - step, step):
            draw.ellipse((x - r, y - r, x + r, y + r), outline="black", width=thick)
    return image


def strokes(rng: np.random.Generator) -> Image.Image:
    """Short strokes of all directions."""
    image, length = Image.new("RGB", (512, 512), "white"), rng.uniform(8, 24)
    draw, thick = ImageDraw.Draw(image), int(rng.integers(1, 4))
    for x, y, turn in zip(*rng.uniform(0, 512, (2, 600)), rng.uniform(0, np.pi, 600)):
        draw.line([(x, y), (x + length * np.cos(turn), y + length * np.sin(turn))], fill="black", width=thick)
    return image


def figures(rng: np.random.Generator, outline: Callable[[float], tuple[float, float]], pitch: float) -> Image.Image:
    """Rows of one outline, given by a curve over [0, 1] in the square [-1, 1]."""
    image, step, thick = Image.new("RGB", (512, 512), "white"), int(rng.integers(16, 48)), int(rng.integers(1, 4))
    draw, r = ImageDraw.Draw(image), step * 0.45
    for y in range(step, 512 - step, int(step * pitch)):
        for x in range(step, 512 - step, step):
            points = [outline(i / 30) for i in range(31)]
            draw.line([(x + r * u, y + r * v) for u, v in points], fill="black", width=thick)
    return image


def star(t: float) -> tuple[float, float]:
    r = 1 if round(30 * t) // 3 % 2 == 0 else 0.4
    turn = 2 * math.pi * (round(30 * t) // 3) / 10
    return r * math.sin(turn), -r * math.cos(turn)


def spiral(t: float) -> tuple[float, float]:
    return t * math.cos(12 * t), t * math.sin(12 * t)


def zigzag(t: float) -> tuple[float, float]:
    return 2.2 * t - 1.1, 2 * abs(3 * t % 2 - 1) - 1


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def no_text() -> dict[str, list[torch.Tensor]]:
    """Pictures without text, none from training: of the textures, the half that was not in it."""
    photos = {name: tensor(_photo(name)) for name in ("china", "flower", "coffee", "grass", "gravel", "brick")}
    for name in ("grass", "gravel", "brick"):
        photos[name] = photos[name][..., photos[name].shape[2] // 2 :]
    drawn = {"rows of circles": circles, "short strokes": strokes}
    rows = {name: [tensor(draw(np.random.default_rng(seed))) for seed in range(8)] for name, draw in drawn.items()}
    outlines = {"rows of stars": (star, 1.5), "rows of spirals": (spiral, 1.3), "zigzags": (zigzag, 1.6)}
    for name, (outline, pitch) in outlines.items():
        rows[name] = [tensor(figures(np.random.default_rng(seed), outline, pitch)) for seed in range(8)]
    return {**rows, **{name: [photo] for name, photo in photos.items()}}


def unseen(bench: Bench, scorers: dict[str, Scorer]) -> None:
    """Any angle, and where there is nothing to find."""
    print(
        f"\ntext of 10 to 40 pixels on 1024 x 1024, in no training: area in the best {CELLS} cells of 16 pixels over the oracle's"
    )
    angles = (0, 15, 30, 45, 60, 75, 90, 135, 180)
    print(f"  {'degrees':32}" + "".join(f"{a:7d}" for a in angles))
    documents = {
        a: [document(seed, 1024, (10, 40), "unseen", angle=(a, a)) for seed in range(40000, 40003 if bench.quick else 40012)]
        for a in angles
    }
    for name, scorer in scorers.items():
        row = {}
        for angle, shown in documents.items():
            kept = [(coverage(F.avg_pool2d(scorer(d.image)[None], 16)[0], d.overlap(16), CELLS), d.overlap(16)) for d in shown]
            row[angle] = sum(k for k, _ in kept) / sum(coverage(o, o, CELLS) for _, o in kept)
        bench.figure(f"coverage over the oracle's by angle, {name}", row)
        print(f"  {name:32}" + "".join(f"{v:7.2f}" for v in row.values()))
        if name == US:
            bench.gate("any angle, over the oracle", min(row.values()), at_least=0.85)
    count = 4 if bench.quick else 16
    print(f"\nwords straight on photographs, 10 to 40 pixels on 1024 x 1024, in no training: the same, {count} pictures each")
    for most in (20, 180):
        on_photos = [captions(seed, 1024, "unseen", (10, 40), most) for seed in range(70000, 70000 + count)]
        for name, scorer in scorers.items():
            held = sum(coverage(F.avg_pool2d(scorer(d.image)[None], 16)[0], d.overlap(16), CELLS) for d in on_photos)
            value = held / sum(coverage(d.overlap(16), d.overlap(16), CELLS) for d in on_photos)
            bench.figure(f"coverage over the oracle's on photographs, {most} degrees at most, {name}", value)
            print(f"  {f'{most} degrees at most, {name}':32}{value:7.2f}")
    print("\nwhere there is no text: mean and largest value of the map")
    for name, images in no_text().items():
        maps = [texvlm.text_regions(image) for image in images]
        mean, peak = (sum(float(f(m)) for m in maps) / len(maps) for f in (torch.mean, torch.amax))
        bench.figure(f"without text, {name}", {"mean": mean, "peak": peak})
        print(f"  {name:32}{mean:7.2f}{peak:7.2f}")
    china = tensor(_photo("china"))
    whole, last = texvlm.text_regions(china)[0, 384:400], texvlm.text_regions(china[:, :401])[0, 384:401]
    bench.figure(
        "last rows of a picture one row longer than its cells", {"of 401": float(last.mean()), "of 427": float(whole.mean())}
    )
    print(f"  china's rows from 384 on, cut to 401: {float(last.mean()):.2f}; in the whole picture: {float(whole.mean()):.2f}")


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

    unseen(bench, scorers)
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
