import math

import torch

from cases import FLOATS, Bad, Case, coords

REAL = FLOATS[:2]
Q, K, V, KEYS, VALUES, COUNT, WEIGHT, PREFIX_K, PREFIX_V = 0, 1, 2, 3, 4, 5, 17, 18, 19
TENSORS = (Q, K, V, KEYS, VALUES, COUNT)


def normal(g, *shape, dtype):
    """Drawn in float64 so that all dtypes see the same values."""
    return torch.randn(*shape, dtype=torch.float64, generator=g).to(dtype)


def weights(g, batch, rows, columns, kind, dtype):
    """Logarithms of weights. "holes": some are -inf, the first place of each cell is not. "bare": whole cells, and all of the last row."""
    if kind is None:
        return None
    log = normal(g, batch, rows, columns, dtype=coords(dtype))
    if kind == "holes":
        gone = torch.rand(rows, columns, generator=g) < 0.6
        gone[::2, ::2] = False
        log[:, gone] = -math.inf
    if kind == "bare":
        log[:, : rows // 2] = -math.inf
        log[..., -1] = -math.inf
    return log.flatten(1)


def packed(rows, columns, levels, weight=None, batch=2, heads=2, width=4, like=None):
    def make(dtype, g):
        k, v = (normal(g, batch, heads, rows * columns, width, dtype=dtype) for _ in "kv")
        log = weights(g, batch, rows, columns, weight, dtype)
        return (*(like or tuple)((k, v)), rows, columns, levels, log)

    return make


def of_one_key(tensors):
    return tuple(t[:, :, :1].expand(t.shape).contiguous() for t in tensors)


def transposed(tensors):
    """Strided: the heads of a place lie side by side."""
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)


def recorded_pack(*args):
    """The reference, with a count that autograd sees though nothing has a weight: the op marks all results that can have gradients."""
    from texvlm import reference

    keys, values, log_count, *rest = reference.attention_pack(*args)
    return keys, values, log_count + keys[..., :0].sum(), *rest


def attend(
    rows,
    columns,
    levels,
    counts,
    tile=(2, 2),
    *,
    heads=2,
    kv_heads=1,
    batch=1,
    width=4,
    queries=None,
    weight=None,
    prefix=0,
    importance="spread",
    mass=True,
    given=False,
    like=None,
    scale=0.6,
):
    """Arguments whose cells are packed by the reference; `given`: with what the reference chooses."""

    def make(dtype, g):
        from texvlm import reference

        places = rows * columns
        q = normal(g, batch, heads, places if queries is None else queries, width, dtype=dtype)
        k, v = (normal(g, batch, kv_heads, places, width, dtype=dtype) for _ in "kv")
        q, k, v = (like or tuple)((q, k, v))
        log = weights(g, batch, rows, columns, weight, dtype)
        cells = reference.attention_pack(k, v, rows, columns, levels, log)
        beside = (normal(g, batch, kv_heads, prefix, width, dtype=dtype) for _ in "kv") if prefix else (None, None)
        args = (q, k, v, *cells, rows, columns, levels, counts, scale, list(tile), importance, mass, log, *beside)
        return (*args, reference.hierarchical_attention(*args)[2] if given else None)

    return make


def apart(tensors):
    """Four cells of 4 x 4 places that no rounding ranks otherwise: they differ in how far their keys spread, by factors."""
    q, k, v = tensors
    grid = torch.arange(64).reshape(8, 8)
    for i, factor in enumerate((0.25, 1.0, 0.06, 4.0)):
        k[:, :, grid[i // 2 * 4 :, i % 2 * 4 :][:4, :4].flatten()] *= factor
    return q * 0.02, k, v


def infinitely_far(tensors):
    """Keys that no query attends to, and whose cells have no finite mean."""
    q, k, v = tensors
    k[:, :, 3, 1] = k[:, :, 20, 1] = -math.inf
    q[..., 1] = q[..., 1].abs() + 0.1
    return q, k, v


ATTEND = "hierarchical_attention"
CASES = [
    *(
        Case("attention_pack", label, make, reference=recorded_pack, grads=grads, inductor=label == "5x7")
        for label, make, grads in [
            ("5x7", packed(5, 7, [2, 1], "plain"), (0, 1, 5)),
            ("1x13", packed(1, 13, [3, 2], "holes", width=5), (0, 1, 5)),
            ("9x6", packed(9, 6, [3, 2, 1], "holes", heads=1, width=3), (0, 1, 5)),
            ("no-weights", packed(6, 5, [2], batch=1), (0, 1)),
            ("coarser-than-the-grid", packed(3, 5, [5, 4, 1], batch=1), (0, 1)),
            ("one-place", packed(1, 1, [1], "plain"), (0, 1, 5)),
            ("no-levels", packed(3, 4, [], "plain", batch=1), (0, 1, 5)),
            ("strided", packed(4, 6, [1], like=transposed), (0, 1)),
            ("wide", packed(13, 10, [3, 2], "plain", width=24, batch=1), ()),
            ("wider", packed(9, 17, [2], "holes", width=67), ()),
            ("bare", packed(9, 6, [2, 1], "bare"), ()),
            ("one-key", packed(6, 6, [1], "plain", like=of_one_key), ()),
            ("empty-batch", packed(4, 4, [1], "plain", batch=0), ()),
        ]
    ),
    # Half types may be multiplied in their own precision, where others would be chosen: they are given a choice, or one that is clear.
    *(
        Case(ATTEND, label, make, grads=grads, dtypes=dtypes, inductor=label == "5x7")
        for label, make, grads, dtypes in [
            ("5x7", attend(5, 7, [2, 1], [1, 2]), TENSORS, REAL),
            ("1x13", attend(1, 13, [3, 2], [1, 2], (1, 8), width=5, prefix=2), (*TENSORS, PREFIX_K, PREFIX_V), REAL),
            ("9x6", attend(9, 6, [3, 2], [1, 2], (4, 2), heads=2, kv_heads=2, weight="plain", width=3), (*TENSORS, WEIGHT), REAL),
            ("grouped", attend(3, 5, [1], [2], heads=4, kv_heads=2, batch=2, weight="holes"), (*TENSORS, WEIGHT), REAL),
            (
                "three-levels",
                attend(9, 6, [3, 2, 1], [2, 3, 3], (4, 4), weight="holes", prefix=1, width=3, heads=1),
                (*TENSORS, WEIGHT, PREFIX_K, PREFIX_V),
                REAL,
            ),
            ("tile-8x8", attend(9, 10, [2], [3], (8, 8), width=3, heads=1), TENSORS, REAL),
            ("alone", attend(5, 7, [2, 1], [1, 2], (1, 1), queries=6, heads=3, weight="holes"), (*TENSORS, WEIGHT), REAL),
            ("alone-17", attend(9, 6, [2], [2], (1, 1), queries=17, prefix=3, width=7), (*TENSORS, PREFIX_K, PREFIX_V), REAL),
            ("alone-on-the-grid", attend(4, 5, [1], [2], (1, 1)), TENSORS, REAL),
            ("by-mass", attend(5, 7, [2, 1], [1, 2], importance="mass", batch=2), TENSORS, REAL),
            ("by-bound", attend(5, 7, [2, 1], [1, 2], importance="bound", batch=2), TENSORS, REAL),
            ("alone-by-mass", attend(5, 7, [2, 1], [2, 3], (1, 1), queries=9, importance="mass"), (), REAL),
            ("alone-by-bound", attend(5, 7, [2, 1], [2, 3], (1, 1), queries=9, importance="bound"), (), REAL),
            (
                "given",
                attend(5, 7, [2, 1], [2, 3], weight="holes", prefix=1, given=True),
                (*TENSORS, WEIGHT, PREFIX_K, PREFIX_V),
                FLOATS,
            ),
            (
                "given-alone",
                attend(5, 7, [2, 1], [2, 3], (1, 1), queries=6, weight="plain", given=True),
                (*TENSORS, WEIGHT),
                FLOATS,
            ),
            ("all-split", attend(5, 6, [2, 1], [4, 9], weight="plain", width=5), (*TENSORS, WEIGHT), FLOATS),
            ("none-split", attend(5, 6, [1], [0], mass=False), TENSORS, FLOATS),
            ("dense", attend(4, 5, [], [], weight="holes", prefix=2), (*TENSORS, WEIGHT, PREFIX_K, PREFIX_V), FLOATS),
            ("dense-alone", attend(4, 5, [], [], (1, 1), queries=3, mass=False), TENSORS, FLOATS),
            ("one-place", attend(1, 1, [1], [1], (8, 8), heads=1), TENSORS, FLOATS),
            ("one-query", attend(6, 6, [1], [3], (1, 1), queries=1, given=True, width=24), TENSORS, FLOATS),
            ("apart", attend(8, 8, [2], [1], (8, 8), like=apart), (), FLOATS),
            (
                "apart-alone",
                attend(8, 8, [2], [1], (1, 1), queries=20, like=lambda t: (t[0] * 0.02, *apart((t[0], *t[1:]))[1:])),
                (),
                FLOATS,
            ),
            (
                "wide",
                attend(17, 19, [3, 2], [4, 7], (8, 8), width=24, heads=4, kv_heads=2, batch=2, weight="holes", scale=0.2),
                (),
                REAL,
            ),
            ("wider", attend(16, 12, [2], [3], (4, 16), width=67, prefix=5, scale=0.1), (), REAL),
            ("given-wider", attend(16, 12, [2], [3], (8, 8), width=67, prefix=5, scale=0.1, given=True), (), FLOATS),
            ("wide-alone", attend(24, 20, [3, 2], [2, 5], (1, 1), width=64, queries=70, heads=4, prefix=1, scale=0.1), (), REAL),
            ("strided", attend(4, 6, [1], [2], heads=4, kv_heads=2, like=transposed), TENSORS, REAL),
            (
                "infinitely-far-alone",
                attend(8, 8, [2, 1], [2, 3], (1, 1), queries=9, like=infinitely_far, importance="bound"),
                (),
                REAL,
            ),
            ("bare", attend(9, 6, [2, 1], [3, 4], weight="bare"), (), REAL),
            ("bare-prefix", attend(9, 6, [2, 1], [3, 4], weight="bare", prefix=2, batch=2), (), REAL),
            ("infinitely-far", attend(8, 8, [2, 1], [2, 3], (4, 4), like=infinitely_far), (), REAL),
            ("empty-batch", attend(4, 4, [1], [2], batch=0, prefix=1), (), FLOATS),
            ("no-queries", attend(4, 4, [1], [2], (1, 1), queries=0), (), FLOATS),
        ]
    ),
]

rows = torch.zeros(2, 2, 20, 4)
log = torch.zeros(2, 20)


def pack(k=rows, v=rows, height=4, width=5, levels=(1,), log_weight=None):
    return k, v, height, width, list(levels), log_weight


def ask(
    q=None, k=rows, v=rows, *, cells=None, height=4, width=5, levels=(1,), counts=(2,), tile=(2, 2), importance="spread", **rest
):
    means = (
        torch.zeros(2, 2, 6, 4),
        torch.zeros(2, 2, 6, 4),
        torch.zeros(2, 6),
        torch.zeros(2, 2, 6, 2),
        *(torch.zeros(2, 2, 6, 4),) * 2,
    )
    means = tuple((cells or {}).get(i, t) for i, t in enumerate(means))
    q = torch.zeros(2, 4, 20, 4) if q is None else q
    last = (rest.get(name) for name in ("log_weight", "prefix_k", "prefix_v", "choice"))
    return q, k, v, *means, height, width, list(levels), list(counts), 0.5, list(tile), importance, False, *last


def refused(op, argument):
    return rf"texvlm::{op}: [^:]*\b{argument}\b[^:]* must"


BAD = [
    *(
        Bad("attention_pack", label, make, refused("attention_pack", argument))
        for label, argument, make in [
            ("places", "k", lambda: pack(k=rows[:, :, 1:], v=rows[:, :, 1:])),
            ("rank", "k", lambda: pack(k=rows[0], v=rows[0])),
            ("integers", "k", lambda: pack(k=rows.int(), v=rows.int())),
            ("values", "v", lambda: pack(v=rows[..., :3])),
            ("dtypes", "v", lambda: pack(v=rows.half())),
            ("no-heads", "k", lambda: pack(k=rows[:, :0], v=rows[:, :0])),
            ("no-grid", "grid", lambda: pack(height=0)),
            ("equal-levels", "levels", lambda: pack(levels=(2, 2))),
            ("rising-levels", "levels", lambda: pack(levels=(1, 2))),
            ("level-0", "levels", lambda: pack(levels=(1, 0))),
            ("weights", "log_weight", lambda: pack(log_weight=log[:, 1:])),
            ("weights-rank", "log_weight", lambda: pack(log_weight=log[0])),
            ("weights-dtype", "log_weight", lambda: pack(log_weight=log.double())),
        ]
    ),
    *(
        Bad(ATTEND, label, make, refused(ATTEND, argument))
        for label, argument, make in [
            ("q-width", "q", lambda: ask(torch.zeros(2, 4, 20, 5))),
            ("q-batch", "q", lambda: ask(torch.zeros(1, 4, 20, 4))),
            ("q-rank", "q", lambda: ask(torch.zeros(2, 20, 4))),
            ("q-heads", "q", lambda: ask(torch.zeros(2, 3, 20, 4))),
            ("q-grid", "q", lambda: ask(torch.zeros(2, 4, 19, 4))),
            ("k-places", "k", lambda: ask(k=rows[:, :, 1:])),
            ("k-dtype", "q", lambda: ask(k=rows.half(), v=rows.half())),
            ("v-width", "v", lambda: ask(v=rows[..., :3])),
            ("v-dtype", "v", lambda: ask(v=rows.double())),
            ("integers", "k", lambda: ask(torch.zeros(2, 4, 20, 4).int(), rows.int(), rows.int())),
            ("no-grid", "grid", lambda: ask(height=0)),
            ("levels", "levels", lambda: ask(levels=(1, 1), counts=(2, 2))),
            ("level-0", "levels", lambda: ask(levels=(0,))),
            ("counts", "counts", lambda: ask(counts=(2, 2))),
            ("no-counts", "counts", lambda: ask(counts=())),
            ("many-counts", "counts", lambda: ask(counts=(7,))),
            ("negative-counts", "counts", lambda: ask(counts=(-1,))),
            ("large-tile", "query_tile", lambda: ask(tile=(8, 9))),
            ("no-tile", "query_tile", lambda: ask(tile=(0, 8))),
            ("one-number", "query_tile", lambda: ask(tile=(4,))),
            ("importance", "importance", lambda: ask(importance="bonds")),
            ("keys", "keys", lambda: ask(cells={0: torch.zeros(2, 2, 5, 4)})),
            ("keys-dtype", "keys", lambda: ask(cells={0: torch.zeros(2, 2, 6, 4).double()})),
            ("values", "values", lambda: ask(cells={1: torch.zeros(2, 2, 6, 3)})),
            ("log-count", "log_count", lambda: ask(cells={2: torch.zeros(2, 2, 6)})),
            ("spread", "spread", lambda: ask(cells={3: torch.zeros(2, 2, 6)})),
            ("low", "low", lambda: ask(cells={4: torch.zeros(2, 1, 6, 4)})),
            ("high", "high", lambda: ask(cells={5: torch.zeros(2, 2, 6)})),
            ("weights", "log_weight", lambda: ask(log_weight=log[:, 1:])),
            ("weights-dtype", "log_weight", lambda: ask(log_weight=log.half())),
            ("prefix-heads", "prefix_k", lambda: ask(prefix_k=torch.zeros(2, 4, 1, 4), prefix_v=torch.zeros(2, 4, 1, 4))),
            ("prefix-dtype", "prefix_k", lambda: ask(prefix_k=rows.half(), prefix_v=rows.half())),
            ("prefix-lengths", "prefix_v", lambda: ask(prefix_k=rows, prefix_v=rows[:, :, 1:])),
            ("prefix-alone", "prefix_v", lambda: ask(prefix_k=rows)),
            ("choice", "choice", lambda: ask(choice=torch.zeros(2, 4, 6, 3, dtype=torch.int32))),
            ("choice-tiles", "choice", lambda: ask(choice=torch.zeros(2, 4, 5, 2, dtype=torch.int32))),
            ("choice-dtype", "choice", lambda: ask(choice=torch.zeros(2, 4, 6, 2, dtype=torch.int64))),
        ]
    ),
]
