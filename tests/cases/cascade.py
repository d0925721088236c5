import torch

from cases import Bad, Case, rand


def scores(n, k, batch=2):
    return lambda dtype, g: (rand(g, batch, n, dtype=dtype), k)


def ties(dtype, g):
    return (rand(g, 3, 40, dtype=torch.float64) * 4).round().to(dtype), 17


def special(dtype, g):
    # NaN is in tests/test_cascade.py: opcheck takes equal results with NaN for different ones
    values = torch.tensor([0.0, -0.0, 1e-7, float("inf"), -float("inf"), 1.0, -1e-7, -0.0, 0.0, 1.0])
    return values.to(dtype).expand(2, 10), 10


def strided(dtype, g):
    return rand(g, 30, 2, dtype=dtype).t()[:, ::2], 7


def of_cells(dtype, g):  # ties, and cells of any strides
    places = torch.randint(9999, (30, 4), generator=g).t()[::2]
    return (rand(g, 2, 30, dtype=torch.float64) * 6).round().to(dtype), 11, places


def reference_backward(grad, indices, count):
    return torch.zeros(grad.shape[0], count, dtype=grad.dtype).scatter(1, indices, grad)


def mask_of(n, batch=2, share=0.5):
    return lambda dtype, g: (torch.rand(batch, n, generator=g) < share,)


def strided_mask(dtype, g):
    return ((torch.rand(30, 6, generator=g) < 0.5).t()[:, ::2],)


def one_mask(dtype, g):
    return ((torch.rand(1, 40, generator=g) < 0.5).expand(3, 40),)


def backward(dtype, g):
    indices = torch.stack([torch.randperm(9, generator=g)[:4] for _ in range(2)])
    return rand(g, 2, 4, dtype=dtype), indices, 9


ONE = (torch.float32,)  # a mask has no dtype to vary
LONG = (1 << 15) + 77  # rows beyond the one-launch way of CUDA

CASES = [
    Case("select_topk", "9-of-20", scores(20, 9), grads=(0,), exact=True, inductor=True),
    Case("select_topk", "all", scores(7, 7), grads=(0,), exact=True),
    Case("select_topk", "more-than-there-are", scores(5, 12), grads=(0,), exact=True),
    Case("select_topk", "none", scores(5, 0), exact=True),
    Case("select_topk", "273-of-4096", scores(4096, 273), exact=True),
    Case("select_topk", "ties", ties, exact=True),
    Case("select_topk", "special", special, exact=True),
    Case("select_topk", "strided", strided, grads=(0,), exact=True),
    Case("select_topk", "empty-batch", scores(5, 2, batch=0), exact=True),
    Case("select_topk", "empty-row", scores(0, 2), exact=True),
    Case("select_topk", "273-of-a-long-row", scores(LONG, 273), exact=True),
    Case("select_topk", "3000-of-4096", scores(4096, 3000, batch=3), exact=True),
    Case("select_topk", "all-of-a-long-row", scores(LONG, LONG, batch=1), exact=True),
    Case("keep_topk", "9-of-20", scores(20, 9), exact=True, inductor=True),
    Case("keep_topk", "all", scores(7, 7), exact=True),
    Case("keep_topk", "more-than-there-are", scores(5, 12), exact=True),
    Case("keep_topk", "none", scores(5, 0), exact=True),
    Case("keep_topk", "ties", ties, exact=True),
    Case("keep_topk", "special", special, exact=True),
    Case("keep_topk", "strided", strided, exact=True),
    Case("keep_topk", "of-cells", of_cells, exact=True),
    Case("keep_topk", "all-of-cells", lambda dtype, g: (*of_cells(dtype, g)[:1], 30, of_cells(dtype, g)[2]), exact=True),
    Case("keep_topk", "empty-batch", scores(5, 2, batch=0), exact=True),
    Case("keep_topk", "empty-row", scores(0, 2), exact=True),
    Case("keep_topk", "273-of-a-long-row", scores(LONG, 273), exact=True),
    Case("keep_topk", "3000-of-4096", scores(4096, 3000, batch=3), exact=True),
    Case("keep_topk", "all-of-a-long-row", scores(LONG, LONG, batch=1), exact=True),
    Case("compact", "half-of-100", mask_of(100), exact=True, dtypes=ONE, inductor=True),
    Case("compact", "tiles", mask_of(5000, share=0.1), exact=True, dtypes=ONE),
    Case("compact", "one-tile", mask_of(2048, batch=3), exact=True, dtypes=ONE),
    Case("compact", "none", mask_of(300, share=0.0), exact=True, dtypes=ONE),
    Case("compact", "all", mask_of(2049, share=1.1), exact=True, dtypes=ONE),
    Case("compact", "strided", strided_mask, exact=True, dtypes=ONE),
    Case("compact", "expanded", one_mask, exact=True, dtypes=ONE),
    Case("compact", "empty-batch", mask_of(7, batch=0), exact=True, dtypes=ONE),
    Case("compact", "empty-row", mask_of(0), exact=True, dtypes=ONE),
    Case("select_topk_backward", "4-to-9", backward, grads=(0,), reference=reference_backward, exact=True),
]

cells = torch.zeros(1, 2, dtype=torch.int64)

BAD = [
    Bad("compact", "rank", lambda: (torch.ones(4, dtype=torch.bool),), r"mask must be \[B, N\].*got \[4\]"),
    Bad("compact", "dtype", lambda: (torch.ones(1, 4),), "mask must be Bool"),
    Bad("select_topk", "rank", lambda: (torch.rand(4), 1), r"scores must be \[B, N\].*got \[4\]"),
    Bad(
        "select_topk",
        "dtype",
        lambda: (torch.ones(1, 4, dtype=torch.int64), 1),
        "scores must be float32.*got Long",
    ),
    Bad("keep_topk", "negative-k", lambda: (torch.rand(1, 4), -1), "k must be at least 0, got -1"),
    Bad("keep_topk", "cells-shape", lambda: (torch.rand(1, 4), 1, cells), r"cells must be \[B, N\] = \[1, 4\]"),
    Bad("keep_topk", "cells-dtype", lambda: (torch.rand(1, 4), 1, torch.zeros(1, 4)), "cells must be Long"),
    Bad("select_topk", "negative-k", lambda: (torch.rand(1, 4), -1), "k must be at least 0, got -1"),
    Bad(
        "select_topk_backward",
        "shape",
        lambda: (torch.rand(1, 4), cells, 9),
        r"indices must be \[B, k\] = \[1, 4\]",
    ),
    Bad("select_topk_backward", "count", lambda: (torch.rand(1, 2), cells, 1), "count must be at least k = 2"),
]
