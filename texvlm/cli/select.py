"""`select IMAGE`: the kept cells as JSON, and nothing else on standard output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from texvlm.cli import Complaint
from texvlm.cli.image import Picture, read_picture


def choose(image: Any, k: int, cell: int) -> Any:
    """`texvlm.select` with its refusals turned into one line."""
    import texvlm

    try:
        return texvlm.select(image, k=k, cell=cell)
    except (ValueError, TypeError, RuntimeError) as error:
        raise Complaint(str(error).strip().splitlines()[0]) from None


def describe(picture: Picture, selection: Any, cell: int) -> dict[str, Any]:
    """A selection as plain numbers; x, y, width and height are pixels of the picture as it was read."""
    rows, columns = (int(n) for n in selection.grid)
    count = int(selection.count[0])
    cells = []
    for index, score in zip(selection.indices[0, :count].tolist(), selection.score[0, :count].tolist()):
        row, column = divmod(index, columns)
        x, y = column * cell, row * cell
        cells.append(
            {
                "index": index,
                "row": row,
                "col": column,
                "x": x,
                "y": y,
                "width": min(cell, picture.width - x),
                "height": min(cell, picture.height - y),
                "score": score,
            }
        )
    return {
        "image": str(picture.path),
        "width": picture.width,
        "height": picture.height,
        "grid": [rows, columns],
        "cell": cell,
        "count": count,
        "cells": cells,
    }


def run(args: argparse.Namespace) -> int:
    """The command."""
    picture = read_picture(args.image, args.max_size)
    text = json.dumps(describe(picture, choose(picture.image, args.k, args.cell), args.cell), indent=1)
    if args.json == "-":
        print(text, flush=True)
        return 0
    try:
        Path(args.json).write_text(text + "\n")
    except OSError as error:
        raise Complaint(f"cannot write {args.json}: {error.strerror}") from None
    return 0
