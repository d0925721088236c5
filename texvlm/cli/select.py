"""`select IMAGE`: the kept cells as JSON or CSV, and nothing else on standard output."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from typing import Any

from texvlm.cli import COLUMNS, DEFAULT_PATH, Complaint
from texvlm.cli.image import Picture, read_picture
from texvlm.cli.output import writing


def choose(image: Any, k: int, cell: int, said: list[str] | None = None, **options: Any) -> Any:
    """`texvlm.select` of an image [3, H, W] or a texture, k at most all cells, with its refusals turned into one line.

    What it warns of is added to `said`.
    """
    import texvlm

    height, width = (image.height, image.width) if isinstance(image, texvlm.Texture) else image.shape[-2:]
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            selection = texvlm.select(image, k=min(k, -(-height // cell) * -(-width // cell)), cell=cell, **options)
        if said is not None:
            said += [str(warning.message) for warning in warned]
        return selection
    except (ValueError, TypeError, RuntimeError) as error:
        raise Complaint(str(error).strip().splitlines()[0]) from None


def describe(picture: Picture, selection: Any) -> dict[str, Any]:
    """A selection as plain numbers.

    x, y, width and height are pixels of the picture before `max_size` shrank it (`width` x `height`, upright); `cell` and `grid` are
    those of the picture that was looked at (`seen_width` x `seen_height`).
    """
    rows, columns = (int(n) for n in selection.grid)
    count, cell = int(selection.count[0]), selection.cell
    tops = _edges(rows, cell, picture.height, picture.full[0])
    lefts = _edges(columns, cell, picture.width, picture.full[1])
    cells = []
    kept = (values[0, :count].tolist() for values in (selection.indices, selection.score, selection.lod))
    for index, score, lod in zip(*kept):
        row, column = divmod(index, columns)
        bottom, right = min(rows, row + 2 ** int(lod)), min(columns, column + 2 ** int(lod))
        cells.append(
            {
                "index": index,
                "row": row,
                "col": column,
                "x": lefts[column],
                "y": tops[row],
                "width": lefts[right] - lefts[column],
                "height": tops[bottom] - tops[row],
                "lod": int(lod),
                "score": score,
            }
        )
    return {
        "image": str(picture.path),
        "width": picture.full[1],
        "height": picture.full[0],
        "seen_width": picture.width,
        "seen_height": picture.height,
        "grid": [rows, columns],
        "cell": cell,
        "count": count,
        "cells": cells,
    }


def _edges(cells: int, cell: int, seen: int, full: int) -> list[int]:
    """Where cells begin, and the last one ends, in the full picture: without gaps, to the nearest pixel."""
    return [(2 * min(i * cell, seen) * full + seen) // (2 * seen) for i in range(cells + 1)]


def query_text(args: argparse.Namespace) -> str | None:
    """What --query asks for, single-spaced; None without it."""
    query = None if args.query is None else " ".join(args.query.split())
    if query == "":
        raise Complaint("--query is empty: say what to look for, such as seven")
    return query


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The path and what is looked for, as arguments of `texvlm.select`."""
    query = query_text(args)
    if query is None:
        return {"path": args.path or DEFAULT_PATH}
    import texvlm

    return {"path": args.path or "query", "query": query, "embedding": texvlm.Embedding(texvlm.DigitsEmbedding())}


def run(args: argparse.Namespace) -> int:
    """The command."""
    if args.csv and args.json == "-":
        raise Complaint("--csv and --json - both write to standard output: name a file for --json")
    picture = read_picture(args.image, args.max_size)
    said: list[str] = []
    selection = choose(picture.image, args.k, args.cell, said, **asked(args))
    for line in said:
        print(f"texvlm: {line}", file=sys.stderr)
    found = describe(picture, selection)
    if args.json is not None or not args.csv:
        with writing(args.json or "-") as file:
            file.write(json.dumps(found, indent=1) + "\n")
    if args.csv:
        with writing("-") as file:
            rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            rows.writeheader()
            rows.writerows(found["cells"])
    return 0
