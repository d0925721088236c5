import torch

import texvlm
from cases import Bad, Case, coords, rand

REDUCERS = ["mean", "mean", "mean", "max", "mean"]
TERMS = ["rms", "entropy", "mean"], [3, 0, 4]
SMOOTH = ["mean", "max", "min", "variance", "rms", "entropy", "cosine"], [4, 3, 2, 4, 3, 0, 1]
ALL = ["mean", "max", "min", "variance", "rms", "entropy", "residual", "cosine"], [4, 3, 2, 4, 3, 0, 0, 1]


def cells_of(h, w, cell, samples, terms=TERMS, *, batch=2, shared=False, reducer=None, channels=5, lights=None, weights=None):
    def make(dtype, g):
        levels = texvlm.level_count(h, w)
        names = reducer or REDUCERS
        picture = rand(g, 1 if shared else batch, channels, h, w, dtype=dtype)
        if "mode" in names:
            picture = (picture * 8).round() / 8
        data = torch.ops.texvlm.generate_mipmaps(picture, names, levels)
        total = -(-h // cell) * -(-w // cell)
        cells = torch.randint(total, (batch, min(total, 9)), generator=g)
        query = (rand(g, 1 if shared else batch, 3, dtype=coords(dtype)) - 0.3,) if "cosine" in terms[0] else ()
        if weights:
            return data, cells, h, w, names, levels, cell, samples, *terms, *(query or (None,)), [0, 1, 2], weights
        if lights:
            return data, cells, h, w, names, levels, cell, samples, *terms, *(query or (None,)), lights
        return data, cells, h, w, names, levels, cell, samples, *terms, *query

    return make


CASES = [
    *(
        Case(
            "cell_features", f"{h}x{w}-cell-{cell}-samples-{s}", cells_of(h, w, cell, s), atol=1e-5, inductor=(s, cell) == (4, 8)
        )
        for h, w, cell, s in [
            (32, 32, 8, 1),
            (32, 32, 8, 4),
            (32, 32, 8, 8),
            (32, 48, 16, 16),  # 256 samples
            (37, 29, 8, 1),
            (37, 29, 8, 4),
            (37, 29, 8, 8),
            (60, 50, 28, 1),
            (60, 50, 28, 4),
            (60, 50, 28, 28),
            (33, 64, 5, 3),
            (34, 20, 17, 17),
            (7, 9, 1, 1),
            (6, 5, 20, 20),
            (1, 1, 16, 4),
            (1, 50, 16, 1),
        ]
    ),
    *(
        case
        for h, w, cell, s in [(16, 12, 4, 4), (13, 9, 5, 2), (11, 6, 4, 3), (9, 7, 3, 1), (5, 4, 8, 3)]
        for case in (
            Case(
                "cell_features",
                f"smooth-{h}x{w}-cell-{cell}-samples-{s}",
                cells_of(h, w, cell, s, SMOOTH),
                grads=(0, 10),
                atol=1e-4,
            ),
            Case("cell_features", f"all-terms-{h}x{w}-cell-{cell}-samples-{s}", cells_of(h, w, cell, s, ALL), atol=1e-4),
        )
    ),
    Case("cell_features", "more-samples-than-pixels", cells_of(8, 8, 2, 3, SMOOTH), grads=(0, 10), atol=1e-4),
    Case("cell_features", "shared", cells_of(12, 16, 4, 2, SMOOTH, shared=True), grads=(0, 10), atol=1e-4),
    Case("cell_features", "40-channels", cells_of(16, 16, 4, 4, channels=40, reducer=["mean"]), grads=(0,), atol=1e-5),
    Case("cell_features", "mode", cells_of(24, 20, 8, 4, reducer=["mean", "mode", "mean", "mode", "max"]), atol=1e-5),
    Case("cell_features", "other-lights", cells_of(12, 16, 4, 2, lights=[4, 0, 2]), grads=(0,), atol=1e-5),
    Case("cell_features", "weighed", cells_of(37, 29, 8, 4, weights=[1.0, 0.5, -2.0]), grads=(0,), atol=1e-5),
    Case(
        "cell_features",
        "weighed-smooth",
        cells_of(16, 12, 4, 4, SMOOTH, weights=[1.0, 0.5, -2.0, 0.0, 3.0, 1.5, -1.0]),
        grads=(0, 10),
        atol=1e-4,
    ),
    Case("cell_features", "no-terms", cells_of(8, 8, 4, 1, ([], []))),
    Case("cell_features", "empty-batch", cells_of(8, 8, 4, 1, batch=0)),
]

data = torch.zeros(1, 21, 5)
cells = torch.zeros(1, 2, dtype=torch.int64)


def bad(**changes):
    named = {"data": data, "cells": cells, "h": 4, "w": 4, "reducer": ["mean"], "levels": 3, "cell": 2, "samples": 1}
    named |= {"terms": ["mean", "entropy"], "channels": [4, 0], "query": None} | changes
    return lambda: tuple(named.values())


BAD = [
    Bad("cell_features", "cells-dtype", bad(cells=cells.int()), "cells must be Long"),
    Bad("cell_features", "cells-rank", bad(cells=cells[0]), r"cells must be \[B, n\]"),
    Bad(
        "cell_features",
        "batch",
        bad(data=data.expand(2, -1, -1).contiguous()),
        "data must be of batch 1 or of the batch of cells",
    ),
    Bad("cell_features", "cell", bad(cell=0), "cell must be from 1"),
    Bad("cell_features", "samples", bad(samples=0), "samples must be from 1"),
    Bad("cell_features", "huge-samples", bad(samples=2**40), "samples must be from 1"),
    Bad("cell_features", "channels", bad(channels=[5, 0]), "channels must be from 0 to 4 for the term mean, got 5"),
    Bad("cell_features", "lights", lambda: (*bad()(), [0, 1, 5]), "lights must be from 0 to 4, got 5"),
    Bad("cell_features", "few-lights", lambda: (*bad()(), [0, 1]), "lights must be the 3 channels red, green and blue, got 2"),
    Bad("cell_features", "few-channels", bad(channels=[0]), r"channels must be one for each term \(2\), got 1"),
    Bad("cell_features", "term", bad(terms=["mean", "median"]), "terms must be mean, max, .*, got 'median'"),
    Bad("cell_features", "many-terms", bad(terms=["mean"] * 33, channels=[0] * 33), "terms must be at most 32"),
    Bad(
        "cell_features",
        "few-weights",
        lambda: (*bad()(), [0, 1, 2], [1.0]),
        r"weights must be none, or one for each term \(2\), got 1",
    ),
    Bad("cell_features", "no-query", bad(terms=["mean", "cosine"]), "query must be given for the term cosine"),
    Bad("cell_features", "query-shape", bad(query=torch.zeros(3)), r"query must be \[B, D\]"),
    Bad("cell_features", "query-batch", bad(query=torch.zeros(2, 3)), "query must be of batch 1 or of the batch of cells"),
    Bad("cell_features", "T", bad(levels=2), r"data must be \[B, T, C\]"),
]
