import torch

import texvlm
from cases import Bad, Case, rand

FLOATS = (torch.float32, torch.float64)


def tokens(queries=2, fixations=2, count=5, h=60, w=90, e0=9.0, m0=8.0, levels=None, reach=70, spread=1.2):
    def make(dtype, g):
        fixation = rand(g, queries, fixations, 2, dtype=dtype) * spread - 0.1
        offsets = (rand(g, count, 2, dtype=dtype) - 0.5) * reach
        constants = torch.tensor(m0, dtype=dtype), torch.tensor(e0, dtype=dtype)
        return fixation, offsets, *constants, h, w, levels or texvlm.level_count(h, w)

    return make


def centre(dtype, g):
    """A token on the fixation itself, and a LOD of exactly 0."""
    fixation, offsets, m0, e0, *rest = tokens(m0=8.0, e0=8.0)(dtype, g)
    offsets[1] = 0
    return fixation * 0 + 0.5, offsets, m0, e0, *rest


ALL = (0, 1, 2, 3)
CASES = [
    Case("fovea_tokens", "", tokens(), grads=ALL, dtypes=FLOATS, inductor=True),
    Case("fovea_tokens", "inside", tokens(reach=10, spread=0.8), grads=ALL, dtypes=FLOATS),
    Case("fovea_tokens", "clamped-lod", tokens(levels=2), grads=ALL, dtypes=FLOATS),
    Case("fovea_tokens", "sharp", tokens(m0=20.0), grads=ALL, dtypes=FLOATS),
    Case("fovea_tokens", "centre", centre, dtypes=FLOATS),
    Case("fovea_tokens", "one-fixation", tokens(queries=1, fixations=1, count=1), grads=(0, 2), dtypes=FLOATS),
    Case("fovea_tokens", "no-fixation", tokens(fixations=0), dtypes=FLOATS),
    Case("fovea_tokens", "empty-batch", tokens(queries=0), dtypes=FLOATS),
]

one = torch.ones(())
FIXATION, OFFSETS = torch.full((1, 1, 2), 0.5), torch.zeros(3, 2)
BAD = [
    Bad(
        "fovea_tokens",
        "rank",
        lambda: (FIXATION[0], OFFSETS, one, one, 8, 8, 4),
        r"fixation must be \[B, F, 2\].*got \[1, 2\]",
    ),
    Bad(
        "fovea_tokens",
        "dtype",
        lambda: (FIXATION.half(), OFFSETS, one, one, 8, 8, 4),
        "fixation must be Float or Double, got Half",
    ),
    Bad(
        "fovea_tokens",
        "offsets",
        lambda: (FIXATION, torch.zeros(3, 3), one, one, 8, 8, 4),
        r"offsets must be \[N, 2\]",
    ),
    Bad(
        "fovea_tokens",
        "offsets-dtype",
        lambda: (FIXATION, OFFSETS.double(), one, one, 8, 8, 4),
        "offsets must be Float .as fixation.",
    ),
    Bad("fovea_tokens", "m0", lambda: (FIXATION, OFFSETS, torch.ones(1), one, 8, 8, 4), "m0 must be one value"),
    Bad(
        "fovea_tokens",
        "e0",
        lambda: (FIXATION, OFFSETS, one, one.double(), 8, 8, 4),
        "e0 must be Float .as fixation.*got Double",
    ),
    Bad("fovea_tokens", "levels", lambda: (FIXATION, OFFSETS, one, one, 8, 8, 5), "levels must be from 1 to 4"),
    Bad(
        "fovea_tokens",
        "zero-size",
        lambda: (FIXATION, OFFSETS, one, one, 0, 8, 1),
        "height and width must be at least 1",
    ),
]
