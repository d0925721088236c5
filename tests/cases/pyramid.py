import torch

import texvlm
from cases import Bad, Case, coords, rand


def image(h, w, c, reducer, batch=2, levels=None):
    def make(dtype, g):
        count = texvlm.level_count(h, w) if levels is None else levels
        values = rand(g, batch, c, h, w, dtype=dtype)
        if "mode" in reducer:
            values = (values * 4).round() / 4  # so that values repeat
        return values, reducer, count

    return make


def packed(h, w, c, reducer, batch=2):
    def make(dtype, g):
        levels = texvlm.level_count(h, w)
        data = torch.ops.texvlm.generate_mipmaps(rand(g, batch, c, h, w, dtype=dtype), ["mean"], levels)
        return data, h, w, reducer, levels

    return make


def strided(dtype, g):
    return rand(g, 2, 9, 6, 5, dtype=dtype).permute(0, 3, 1, 2)[:, ::2, 1:, :], ["mean"], 3


def broadcast(dtype, g):
    return rand(g, 1, 1, 6, 1, dtype=dtype).expand(2, 3, 6, 7), ["mean"], 3


def uint8(dtype, g):
    return (rand(g, 1, 3, 7, 10) * 255).to(torch.uint8), ["mean"], 4, dtype


def reference_backward(grad, h, w, reducer, levels, data=None):
    """The adjoint by autograd through the reference; data holds level 0."""
    from texvlm import reference

    level0 = torch.zeros_like(grad[:, : h * w]) if data is None else data[:, : h * w]
    picture = level0.unflatten(1, (h, w)).permute(0, 3, 1, 2).detach().requires_grad_()
    with torch.enable_grad():
        out = reference.generate_mipmaps(picture, reducer, levels)
    return torch.autograd.grad(out, picture, grad, create_graph=grad.requires_grad)[0].to(coords(grad.dtype))


def touched(h, w, c, reducer, batch=2, rects=None, tile=0):
    """A pyramid that is wrong above level 0, so that it shows which texels are written."""

    def make(dtype, g):
        data, *shape = packed(h, w, c, reducer, batch)(dtype, g)
        data[:, h * w :] = -1
        tiles = torch.rand(batch, -(-h // tile), -(-w // tile), generator=g) < 0.2 if tile else None
        return data, *shape, rects if rects is None else torch.tensor(rects), tiles, tile

    return make


def reference_update(data, *rest):
    from texvlm import reference

    reference.update_mipmaps(data, *rest)
    return data


CASES = [
    *(
        Case("generate_mipmaps", f"{h}x{w}x{c}-{reducer[0]}", image(h, w, c, reducer), grads=(0,), inductor=(h, w) == (8, 8))
        for h, w, c, reducer in [
            (8, 8, 3, ["mean"]),
            (7, 5, 1, ["mean"]),
            (1, 9, 4, ["mean"]),
            (6, 1, 5, ["mean"]),
            (1, 1, 2, ["mean"]),
            (5, 6, 3, ["max"]),
            (6, 7, 2, ["min"]),
        ]
    ),
    Case("generate_mipmaps", "mixed", image(7, 6, 3, ["mean", "max", "min"]), grads=(0,)),
    Case("generate_mipmaps", "mixed-mode", image(7, 6, 4, ["mean", "max", "min", "mode"])),
    Case("generate_mipmaps", "mode", image(9, 8, 2, ["mode"])),
    Case("generate_mipmaps", "two-levels", image(8, 6, 3, ["mean"], levels=2), grads=(0,)),
    Case("generate_mipmaps", "strided", strided, grads=(0,)),
    Case("generate_mipmaps", "stride-0", broadcast),
    Case("generate_mipmaps", "uint8", uint8),
    Case("generate_mipmaps", "empty-batch", image(4, 4, 3, ["mean"], batch=0)),
    Case("generate_mipmaps_backward", "mean", packed(7, 6, 3, ["mean"]), grads=(0,), reference=reference_backward),
    Case("update_mipmaps", "mean", packed(7, 6, 3, ["mean"]), reference=reference_update, mutates=(0,)),
    Case("update_mipmaps", "max", packed(8, 6, 40, ["max"]), reference=reference_update, mutates=(0,)),
    *(
        Case("update_mipmaps", label, touched(*shape, **where), reference=reference_update, mutates=(0,))
        for label, shape, where in [
            ("rects", (19, 22, 3, ["mean"]), {"rects": [[2, 3, 9, 11], [5, 7, 12, 22], [18, 0, 19, 1], [4, 4, 4, 9]]}),
            ("no-rects", (9, 8, 2, ["mean"]), {"rects": [[1, 1, 1, 1]]}),
            ("tiles-8", (53, 71, 3, ["mean"]), {"tile": 8}),
            ("tiles-mixed", (45, 37, 13, ["mean", "max", "min"] * 4 + ["mode"]), {"tile": 8}),
            ("tiles-16", (70, 129, 1, ["mean"]), {"tile": 16, "batch": 3}),
            ("tiles-narrow", (1, 60, 9, ["max"]), {"tile": 8}),
            ("tiles-large", (20, 30, 4, ["mean"]), {"tile": 64, "batch": 5}),
        ]
    ),
]

data = torch.zeros(1, 21, 3)
BAD = [
    Bad("generate_mipmaps", "rank", lambda: (torch.rand(3, 4, 4), ["mean"], 1), r"image must be \[B, C, H, W\].*got \[3, 4, 4\]"),
    Bad(
        "generate_mipmaps",
        "dtype",
        lambda: (torch.ones(1, 3, 4, 4, dtype=torch.int32), ["mean"], 1),
        "image must be float32.*got Int",
    ),
    Bad(
        "generate_mipmaps",
        "zero-size",
        lambda: (torch.rand(1, 3, 0, 4), ["mean"], 1),
        "height and width must be at least 1.*0 x 4",
    ),
    Bad("generate_mipmaps", "levels", lambda: (torch.rand(1, 3, 4, 4), ["mean"], 4), "levels must be from 1 to 3.*got 4"),
    Bad("generate_mipmaps", "huge-levels", lambda: (torch.rand(1, 3, 4, 4), ["mean"], 2**40), "levels must be from 1 to 3"),
    Bad("generate_mipmaps", "negative-levels", lambda: (torch.rand(1, 3, 4, 4), ["mean"], -1), "levels must be from 1 to 3"),
    Bad(
        "generate_mipmaps",
        "reducer",
        lambda: (torch.rand(1, 3, 4, 4), ["median"], 1),
        "reducer must be mean, max, min or mode, got 'median'",
    ),
    Bad(
        "generate_mipmaps",
        "reducers",
        lambda: (torch.rand(1, 3, 4, 4), ["mean", "max"], 1),
        "reducer must be one name, or one for each of the 3",
    ),
    Bad("update_mipmaps", "T", lambda: (data, 4, 5, ["mean"], 3), r"data must be \[B, T, C\] = \[\*, 25, \*\], got \[1, 21, 3\]"),
    Bad("update_mipmaps", "strided", lambda: (torch.zeros(1, 21, 6)[..., ::2], 4, 4, ["mean"], 3), "data must be contiguous"),
    Bad("update_mipmaps", "rects", lambda: (data, 4, 4, ["mean"], 3, torch.tensor([[0, 0, 5, 4]])), "rects must be inside 4 x 4"),
    Bad(
        "update_mipmaps",
        "both",
        lambda: (data, 4, 4, ["mean"], 3, torch.zeros(1, 4).long(), torch.ones(1, 1, 1).bool(), 8),
        "give rects or tiles, not both",
    ),
    Bad("update_mipmaps", "tile", lambda: (data, 4, 4, ["mean"], 3, None, torch.ones(1, 1, 1).bool(), 4), "tile must be from 8"),
    Bad(
        "update_mipmaps",
        "tiles",
        lambda: (data, 4, 4, ["mean"], 3, None, torch.ones(1, 2, 1).bool(), 8),
        r"tiles must be \[B, ceil\(H / tile\), ceil\(W / tile\)\] = \[1, 1, 1\], got \[1, 2, 1\]",
    ),
    Bad("update_mipmaps", "tiles-dtype", lambda: (data, 4, 4, ["mean"], 3, None, torch.ones(1, 1, 1), 8), "tiles must be Bool"),
    Bad("update_mipmaps", "rects-dtype", lambda: (data, 4, 4, ["mean"], 3, torch.zeros(1, 4)), "rects must be Long"),
    Bad(
        "generate_mipmaps_backward",
        "data-shape",
        lambda: (data, 4, 4, ["max"], 3, torch.zeros(1, 21, 0)),
        r"data must be of the shape of grad, \[1, 21, 3\], got \[1, 21, 0\]",
    ),
    Bad("generate_mipmaps_backward", "no-data", lambda: (data, 4, 4, ["max"], 3), "data .the pyramid. is needed"),
]
