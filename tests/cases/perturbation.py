import torch

from cases import Bad, Case, rand

REAL = (torch.float32, torch.float64)


def scores(n, k, samples, sigma=0.5, seed=3, *, batch=2, like=None):
    def make(dtype, g):
        values = rand(g, batch, n, dtype=dtype)
        return (values if like is None else like(values)), k, samples, sigma, seed

    return make


CASES = [
    Case("perturbed_topk", "9-3", scores(9, 3, 5), dtypes=REAL, inductor=True),
    Case("perturbed_topk", "40-7", scores(40, 7, 11, seed=-(1 << 60)), dtypes=REAL),
    Case("perturbed_topk", "one-sample", scores(13, 4, 1), dtypes=REAL),
    Case("perturbed_topk", "none", scores(13, 0, 3), dtypes=REAL),
    Case("perturbed_topk", "more", scores(6, 9, 3), dtypes=REAL),
    Case("perturbed_topk", "columns", scores(14, 3, 4, like=lambda v: v.t().contiguous().t()), dtypes=REAL),
    Case("perturbed_topk", "empty-batch", scores(14, 3, 4, batch=0), dtypes=REAL),
]

values = torch.zeros(2, 5)
BAD = [
    Bad("perturbed_topk", "shape", lambda: (values[0], 2, 3, 1.0, 0), r"scores must be \[B, N\]"),
    Bad("perturbed_topk", "dtype", lambda: (values.half(), 2, 3, 1.0, 0), "scores must be float32 or float64, got Half"),
    Bad("perturbed_topk", "k", lambda: (values, -1, 3, 1.0, 0), "k must be at least 0, got -1"),
    Bad("perturbed_topk", "samples", lambda: (values, 2, 0, 1.0, 0), "samples must be at least 1, got 0"),
    Bad("perturbed_topk", "sigma", lambda: (values, 2, 3, 0.0, 0), "sigma must be positive, got 0"),
]
