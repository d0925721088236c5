"""How much of a document can be read when a budget of tokens shows only parts of it sharply?

Photographs of documents (_documents.py) are shown as a budget of k tokens allows, and RapidOCR reads them: blocks at full or reduced
size over the picture downscaled 8 times, whose own tokens come on top (2048 x 2048 in cells of 32 pixels: 64). "Downscaled" gets the
total, k and those, for the whole picture. Figures are characters recalled, over those recalled from the whole picture; differences
are paired by picture, with 95 % intervals of Student's t.

Development looks at seeds from 30000; what is reported comes from 40000 on.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

import texvlm
from benchmarks._documents import Document, document
from benchmarks._harness import US, Bench, Call
from benchmarks._reading import COARSE, Block, Reader, blocks_of, coarse_tokens, downscaled, recall, shown
from benchmarks.text import mser
from texvlm.allocation import node_values
from texvlm.channel_sources import COLOURS
from texvlm.learned import VALUE_CHANNELS, ValueNet

Path = Callable[[torch.Tensor, int, int], list[Block]]  # uint8 [3, H, W], k, cell
Oracle = Callable[[Document, int, int], list[Block]]

SCALES = [(2048, 32, (16, 60)), (1024, 16, (8, 30))]
BUDGETS = (64, 137, 273, 512, 1024)
FULL, DOWNSCALED = "full", "downscaled, equal total"
ONE, MIXED, DETECTOR = "anisotropic_text", "multiscale", "RapidOCR's detector"
LEARNED, LEARNED_MIXED = "learned", "learned multiscale"
SELECT = ("salience", "five_stage", "adaptive", "predictive", ONE, MIXED, LEARNED)  # paths that need nothing but a picture
WANTED = {
    2048: {
        (ONE, 273): 0.92,
        (ONE, 512): 0.99,
        (MIXED, 137): 0.9,
        (MIXED, 273): 0.97,
        (LEARNED, 273): 0.94,
        (LEARNED, 512): 0.99,
        (LEARNED_MIXED, 137): 0.93,
        (LEARNED_MIXED, 273): 0.98,
    },
    1024: {(MIXED, 273): 0.85, (MIXED, 512): 0.95},
}


def cells(indices: torch.Tensor, columns: int, cell: int) -> list[Block]:
    """Cells by their row-major indices, as blocks of level 0."""
    return [(i // columns * cell, i % columns * cell, cell, 0) for i in indices.tolist() if i >= 0]


def ranked(score: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The k cells with the largest mean of a plane [H, W]; the scores of the last picture are kept."""
    last: list[Any] = [None, None]

    def best(image: torch.Tensor, k: int, cell: int) -> list[Block]:
        if last[0] is not image:
            last[:] = image, score(image)
        means = F.avg_pool2d(last[1][None].float(), cell, ceil_mode=True)[0]
        return cells(means.flatten().sort(descending=True, stable=True).indices[:k], means.shape[1], cell)

    return best


def by_chance(image: torch.Tensor, k: int, cell: int) -> list[Block]:
    rows, columns = (-(-n // cell) for n in image.shape[1:])
    generator = torch.Generator().manual_seed(int(image[:, ::64, ::64].sum()))
    return cells(torch.randperm(rows * columns, generator=generator)[:k], columns, cell)


def central(image: torch.Tensor) -> torch.Tensor:
    y, x = (torch.arange(n) - (n - 1) / 2 for n in image.shape[1:])
    return -(y[:, None] ** 2 + x**2)


def by_select(path: str, **options: Any) -> Path:
    """A path of `texvlm.select`."""
    return lambda image, k, cell: blocks_of(texvlm.select(image, k, cell, path, **options))


def paths() -> dict[str, Path]:
    """The ways to select; a new one is one line."""
    found: dict[str, Path] = {
        "random": by_chance,
        "centre": ranked(central),
        "Sobel": ranked(lambda image: texvlm.edges(image)[0]),
        "channel 39": ranked(lambda image: texvlm.text_regions(image)[0]),
        **{path: by_select(path) for path in SELECT},
        LEARNED_MIXED: by_select(MIXED, scorer="default"),
    }
    if peer := mser():
        found["MSER"] = ranked(peer)
    return found


def detector(reader: Reader) -> Path:
    """The detector of the reader itself, on the whole picture at full size."""

    def plane(image: torch.Tensor) -> torch.Tensor:
        mask = Image.new("1", (image.shape[2], image.shape[1]))
        for outline in reader.detect(image):
            ImageDraw.Draw(mask).polygon([tuple(p) for p in outline], fill=1)
        return torch.from_numpy(np.array(mask))

    return ranked(plane)


def oracle(found: Document, k: int, cell: int) -> list[Block]:
    """The cells with most of the true lines in them."""
    overlap = found.overlap(cell)
    return cells(overlap.flatten().sort(descending=True, stable=True).indices[:k], overlap.shape[1], cell)


READABLE = 10
"""Pixels that a font must have, for the oracle with levels."""


def oracle_with_levels(found: Document, k: int, cell: int) -> list[Block]:
    """Each true line at the coarsest level at which its font has READABLE pixels, as the blocks that its middle 70 % touches.

    Where the budget is short, the line that is largest as it is shown goes one level up; where some is left, the smallest goes one
    down. Blocks of different lines may overlap.
    """
    touched = []
    for corners in found.polygons:
        across = np.linspace(0.15, 0.85, 24)[:, None, None]
        along = np.linspace(0, 1, 200)[None, :, None]
        points = corners[0] + along * (corners[1] - corners[0]) + across * (corners[3] - corners[0])
        inside = np.clip(points.reshape(-1, 2), 0, found.mask.shape[0] - 1).astype(int)
        touched.append([{(y, x) for x, y in inside // (cell << level)} for level in range(COARSE)] + [set()])
    size = [float(np.linalg.norm(corners[3] - corners[0])) for corners in found.polygons]
    level = [min(COARSE - 1, max(0, int(math.log2(max(1, s / READABLE))))) for s in size]

    def cost(at: list[int]) -> int:
        return len({(lv, *place) for line, lv in zip(touched, at) for place in line[lv]})

    while cost(level) > k:
        largest = max((i for i in range(len(size)) if level[i] < COARSE), key=lambda i: size[i] / 2 ** level[i])
        level[largest] += 1
    for i in sorted(range(len(size)), key=lambda i: size[i] / 2 ** level[i]):
        finer = [lv - (j == i) for j, lv in enumerate(level)]
        if level[i] > 0 and cost(finer) <= k:
            level = finer
    blocks = {(lv, int(y), int(x)) for line, lv in zip(touched, level) for y, x in line[lv]}
    return [(y * (cell << lv), x * (cell << lv), cell << lv, lv) for lv, y, x in blocks]


def quantile(freedom: int) -> float:
    """Of Student's t, for two-sided 95 %."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def paired(a: list[float], b: list[float]) -> tuple[float, float]:
    """The mean of a - b, and half of its 95 % interval."""
    difference = np.subtract(a, b)
    if len(difference) < 2:
        return float(difference.mean()), math.inf
    return float(difference.mean()), quantile(len(difference) - 1) * float(difference.std(ddof=1)) / math.sqrt(len(difference))


def bar(seeds: Iterable[int], total: int, title: str) -> Iterator[int]:
    """A progress bar, where there is a terminal and rich."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from seeds
        return
    console = Console(stderr=True)
    yield from track(seeds, title, total=total, console=console, disable=not console.is_terminal, transient=True)


View = Callable[[Document, int, int], torch.Tensor]  # a document, k, cell: the picture that the reader is given


def views(reader: Reader) -> dict[str, View]:
    """All rows of the table."""
    truths: dict[str, Oracle] = {"oracle": oracle, "oracle with levels": oracle_with_levels}
    found: dict[str, View] = {
        DOWNSCALED: lambda d, k, cell: downscaled(d.image, k + coarse_tokens(d.image.shape[1], cell), cell),
    }
    for name, choose in {**paths(), DETECTOR: detector(reader)}.items():
        found[name] = lambda d, k, cell, choose=choose: shown(d.image, checked(choose(d.image, k, cell), k))
    for name, know in truths.items():
        found[name] = lambda d, k, cell, know=know: shown(d.image, checked(know(d, k, cell), k))
    return found


def readings(
    reader: Reader, scale: tuple[int, int, tuple[int, int]], seeds: range, budgets: list[int], rows: list[str] | None
) -> dict[tuple[str, int], list[float]]:
    """Characters recalled by row and budget, one figure per picture; the row `full` has budget 0."""
    side, cell, sizes = scale
    known = views(reader)
    if strangers := set(rows or ()) - set(known):
        raise SystemExit(f"no such rows: {'; '.join(strangers)} (there are: {'; '.join(known)})")
    asked = {name: view for name, view in known.items() if rows is None or name in rows or name == DOWNSCALED}
    result: dict[tuple[str, int], list[float]] = {}
    for seed in bar(seeds, len(seeds), f"{side} x {side}"):
        found = document(seed, side, sizes)
        result.setdefault((FULL, 0), []).append(recall(found, *reader.read(found.image)))
        for k in budgets:
            for name, view in asked.items():
                result.setdefault((name, k), []).append(recall(found, *reader.read(view(found, k, cell))))
    return result


def checked(blocks: list[Block], k: int) -> list[Block]:
    if len(set(blocks)) > k:
        raise AssertionError(f"{len(blocks)} blocks for a budget of {k}")
    return blocks


def table(title: str, result: dict[tuple[str, int], list[float]], budgets: list[int]) -> None:
    """Relative recall, and below it the paired difference to downscaling with its interval."""
    full = result[FULL, 0]
    print(f"\n{title}: {len(full)} pictures, the whole read {np.mean(full):.3f}; share of that, (difference to downscaling)")
    print(f"  {'tokens':28}" + "".join(f"{k:^24}" for k in budgets))
    names = dict.fromkeys(name for name, k in result if k)
    for name in sorted(names, key=lambda n: -np.mean([np.mean(result[n, k]) for k in budgets])):
        line = ""
        for k in budgets:
            mean, half = paired(result[name, k], result[DOWNSCALED, k])
            line += f"{np.mean(result[name, k]) / np.mean(full):8.3f} " + (
                "" if name == DOWNSCALED else f"({mean:+.3f} +- {half:.3f})"
            )
        print(f"  {name:28}{line}")


def judge(bench: Bench, side: int, result: dict[tuple[str, int], list[float]]) -> None:
    """The gates of a scale, those for which there are figures."""
    for (name, k), least in WANTED[side].items():
        if (name, k) in result:
            bench.gate(f"{side}, {name}, {k} tokens", float(np.mean(result[name, k]) / np.mean(result[FULL, 0])), at_least=least)
            mean, half = paired(result[name, k], result[DOWNSCALED, k])
            bench.gate("  more than downscaled: lower end of the interval", mean - half, at_least=0)


def cost(bench: Bench, reader: Reader) -> str:
    """The values of all tokens against one detection."""
    pixels = document(30000).image
    image = pixels[None].float() / 255
    colours, texture = (texvlm.build_channels(image, channels=list(names)) for names in (COLOURS, VALUE_CHANNELS))
    net = ValueNet.from_pretrained("default").requires_grad_(False)
    calls: dict[str, Call] = {
        US: lambda: node_values(colours, 32, 4),
        LEARNED: lambda: node_values(texture, 32, 4, worth=net),
        DETECTOR: lambda: reader.run(pixels, read=False),
    }
    times = bench.compare("values of all tokens of 2048 x 2048, four levels", calls)
    bench.gate("as fast as RapidOCR's detector, times", times.ratio(DETECTOR), at_least=20)
    bench.gate("learned, likewise", times.ratio(DETECTOR, LEARNED), at_least=20)
    return f"{1e3 * times.median():.0f} ms for the values, {1 / times.ratio(DETECTOR):.1%} of one detection"


def options() -> tuple[argparse.Namespace, list[str]]:
    """Those of this file, and the rest for the harness."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--pictures", type=int, help="how many per scale (12; with --quick 3)")
    parser.add_argument("--rows", help="names of rows, separated by ';' (all)")
    parser.add_argument("--budgets", help="numbers of tokens, separated by ',' (64,137,273,512,1024; with --quick 137,273,512)")
    parser.add_argument("--sides", help="of the pictures, separated by ',' (2048,1024)")
    parser.add_argument("--seed", type=int, default=40000, help="the first one (40000, held out; 30000 for development)")
    if "-h" in sys.argv or "--help" in sys.argv:
        parser.print_help()
    return parser.parse_known_args()


def main() -> int:
    args, rest = options()
    bench = Bench(__doc__, rest)
    try:
        reader = Reader(bench.args.threads)
    except ImportError:
        return bench.finish("unknown: RapidOCR is not installed (pip install rapidocr onnxruntime)")
    pictures = args.pictures or (3 if bench.quick else 12)
    budgets = [int(k) for k in args.budgets.split(",")] if args.budgets else [137, 273, 512] if bench.quick else list(BUDGETS)
    rows = [row.strip() for row in args.rows.split(";")] if args.rows else None
    sides = [int(n) for n in args.sides.split(",")] if args.sides else [side for side, _, _ in SCALES]
    answers = []
    for scale in SCALES:
        if scale[0] not in sides:
            continue
        result = readings(reader, scale, range(args.seed, args.seed + pictures), budgets, rows)
        side, cell, sizes = scale
        table(f"{side} x {side}, cells of {cell}, text of {sizes[0]} to {sizes[1]} pixels", result, budgets)
        judge(bench, side, result)
        k = 273 if 273 in budgets else budgets[0]
        share = {
            name: np.mean(result[name, k]) / np.mean(result[FULL, 0])
            for name in (LEARNED_MIXED, MIXED, DOWNSCALED)
            if (name, k) in result
        }
        answers += [f"{side}: {', '.join(f'{v:.0%} ({name})' for name, v in share.items())} with {k} tokens"]
        bench.figure(f"recall {side}", {f"{name}, {k}": values for (name, k), values in result.items()})
    answers.append(cost(bench, reader))
    return bench.finish("; ".join(answers))


if __name__ == "__main__":
    sys.exit(main())
