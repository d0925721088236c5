import torch

from cases import Bad, Case, rand
from texvlm.quadtree import tree_shapes


def tree(rows, columns, levels, k, *, batch=2, like=None):
    def make(dtype, g):
        shapes = tree_shapes(rows, columns, levels)
        values = torch.cat([rand(g, batch, h * w, dtype=dtype) * 1.7**level for level, (h, w) in enumerate(shapes)], dim=1)
        return (values if like is None else like(values)), rows, columns, levels, k

    return make


def special(values):
    strange = values.clone()
    strange[:, ::5], strange[:, 1::7], strange[:, 2::9] = torch.nan, torch.inf, -torch.inf
    return strange


REAL = (torch.float32, torch.float64)

CASES = [
    *(
        Case("quadtree_cut", f"{h}x{w}-levels-{levels}-k-{k}", tree(h, w, levels, k), dtypes=REAL, inductor=(h, k) == (8, 10))
        for h, w, levels, k in [
            (8, 8, 3, 10),
            (8, 8, 4, 0),
            (8, 8, 4, 1),
            (7, 5, 3, 6),
            (7, 5, 4, 34),
            (7, 5, 4, 35),
            (7, 5, 4, 99),
            (1, 9, 4, 4),
            (9, 1, 5, 3),
            (1, 1, 3, 1),
            (2, 2, 2, 2),
            (3, 3, 1, 4),
            (16, 16, 4, 40),
            (33, 20, 4, 137),
        ]
    ),
    Case("quadtree_cut", "flat", tree(6, 6, 3, 11, like=torch.ones_like), dtypes=REAL),
    Case("quadtree_cut", "zeros", tree(6, 6, 3, 11, like=torch.zeros_like), dtypes=REAL),
    Case("quadtree_cut", "negative", tree(6, 7, 3, 20, like=lambda v: -v), dtypes=REAL),
    Case("quadtree_cut", "ties", tree(9, 8, 4, 21, like=lambda v: (4 * v).round()), dtypes=REAL),
    Case("quadtree_cut", "special", tree(9, 8, 4, 21, like=special), dtypes=REAL),
    Case("quadtree_cut", "strided", tree(8, 8, 3, 9, like=lambda v: v.t().contiguous().t()), dtypes=REAL),
    Case("quadtree_cut", "empty-batch", tree(8, 8, 3, 9, batch=0), dtypes=REAL),
]

values = torch.zeros(1, 21)
BAD = [
    Bad("quadtree_cut", "nodes", lambda: (values, 4, 5, 3, 2), r"values must be \[B, nodes\] = \[\*, 28\]"),
    Bad("quadtree_cut", "dtype", lambda: (values.half(), 4, 4, 3, 2), "values must be float32 or float64, got Half"),
    Bad("quadtree_cut", "k", lambda: (values, 4, 4, 3, -1), "k must be at least 0, got -1"),
    Bad("quadtree_cut", "levels", lambda: (values, 4, 4, 17, 1), "levels must be from 1 to 16"),
    Bad("quadtree_cut", "rows", lambda: (values, 0, 4, 3, 1), "rows must be at least 1"),
    Bad("quadtree_cut", "huge", lambda: (values, 1 << 31, 1 << 31, 3, 1), "rows must be fewer than"),
]
