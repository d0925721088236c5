import torch

from cases import Bad, Case, rand

REAL = (torch.float32, torch.float64)


def scores(n, k, temperature, link="logistic", *, batch=3, like=None):
    def make(dtype, g):
        values = 4 * rand(g, batch, n, dtype=dtype) - 2
        return (values if like is None else like(values)), k, temperature, link

    return make


def removed(values):
    strange = values.clone()
    strange[:, ::5], strange[:, 1] = -torch.inf, torch.inf
    return strange


CASES = [
    *(
        Case(
            "soft_topk",
            f"{n}-k-{k}-T-{temperature}-{link}",
            scores(n, k, temperature, link),
            dtypes=REAL,
            grads=(0,),
            inductor=(n, k) == (300, 20),
            atol=1e-4 if k == 299 else 2e-5,  # a float32 sum of 299 has no more digits
        )
        for n, k, temperature in [(9, 3, 1.0), (300, 20, 0.1), (300, 299, 1.0), (70, 1, 0.02), (40, 20, 50.0)]
        for link in ("logistic", "gumbel")
    ),
    *(
        Case("soft_topk", f"{name}-{link}", scores(33, k, 0.3, link, like=like, batch=batch), dtypes=REAL, grads=grads)
        for link in ("logistic", "gumbel")
        for name, k, like, batch, grads in [
            ("none", 0, None, 2, ()),
            ("all", 33, None, 2, ()),
            ("more", 99, None, 2, ()),
            ("flat", 5, torch.zeros_like, 2, (0,)),
            ("ties", 9, lambda v: (2 * v).round(), 2, ()),
            ("removed", 9, removed, 2, ()),
            ("columns", 9, lambda v: v.t().contiguous().t(), 4, (0,)),
            ("empty-batch", 3, None, 0, ()),
        ]
    ),
    Case("soft_topk", "no-scores", lambda dtype, g: (rand(g, 2, 0, dtype=dtype), 0, 1.0), dtypes=REAL),
]

values = torch.zeros(2, 5)
BAD = [
    Bad("soft_topk", "shape", lambda: (values[0], 2, 1.0), r"scores must be \[B, N\]"),
    Bad("soft_topk", "dtype", lambda: (values.half(), 2, 1.0), "scores must be float32 or float64, got Half"),
    Bad("soft_topk", "k", lambda: (values, -1, 1.0), "k must be at least 0, got -1"),
    Bad("soft_topk", "temperature", lambda: (values, 2, 0.0), "temperature must be positive, got 0"),
    Bad("soft_topk", "nan", lambda: (values, 2, float("nan")), "temperature must be positive, got nan"),
    Bad("soft_topk", "link", lambda: (values, 2, 1.0, "probit"), "link must be logistic or gumbel, got probit"),
]
