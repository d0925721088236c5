import torch

from cases import Bad, Case, rand


def mask(h, w, share, batch=2):
    return lambda dtype, g: (rand(g, batch, h, w) < share,)


def strided(dtype, g):
    return ((rand(g, 2, 12, 9) < 0.1).permute(0, 2, 1)[:, ::2],)


CASES = [
    *(
        Case(
            "distance_transform",
            f"{h}x{w}-{share}",
            mask(h, w, share),
            dtypes=(torch.float32,),
            exact=True,
            inductor=(h, w) == (9, 12),
        )
        for h, w, share in [(9, 12, 0.1), (1, 20, 0.2), (17, 1, 0.1), (33, 40, 0.02), (5, 1100, 0.001), (6, 7, 0.0), (4, 5, 1.1)]
    ),
    Case("distance_transform", "strided", strided, dtypes=(torch.float32,), exact=True),
    *(
        Case(
            "distance_transform",
            f"jfa-{h}x{w}",
            lambda dtype, g, h=h, w=w, s=s: (rand(g, 2, h, w) < s, "jfa"),
            dtypes=(torch.float32,),
            exact=True,
        )
        for h, w, s in [(40, 33, 0.02), (1, 70, 0.1), (1, 1, 1.0), (6, 7, 0.0)]
    ),
    Case("distance_transform", "empty-batch", mask(3, 4, 0.5, batch=0), dtypes=(torch.float32,), exact=True),
]

BAD = [
    Bad(
        "distance_transform",
        "method",
        lambda: (torch.zeros(1, 3, 3, dtype=torch.bool), "fast"),
        "method must be exact or jfa, got 'fast'",
    ),
    Bad("distance_transform", "dtype", lambda: (torch.zeros(1, 3, 3),), "mask must be Bool, got Float"),
    Bad("distance_transform", "rank", lambda: (torch.zeros(3, 3, dtype=torch.bool),), r"mask must be \[B, H, W\].*got \[3, 3\]"),
    Bad(
        "distance_transform",
        "zero-size",
        lambda: (torch.zeros(1, 0, 3, dtype=torch.bool),),
        "height and width must be at least 1",
    ),
]
