import torch

import texvlm
from cases import Bad, Case, coords, rand

H, W, C = 13, 10, 3


def patches(
    c=C,
    batch=1,
    queries=2,
    count=3,
    size=4,
    address="clamp",
    axes=False,
    lod=(0.0, 4.0),
    reducer=None,
    h=H,
    w=W,
    levels=None,
):
    def make(dtype, g):
        count_of_levels = levels or texvlm.level_count(h, w)
        names = reducer or ["mean"]
        image = rand(g, batch, c, h, w, dtype=dtype)
        if "mode" in names:
            image = (image * 4).round() / 4
        data = torch.ops.texvlm.generate_mipmaps(image, names, count_of_levels)
        kind = coords(dtype)
        center = rand(g, queries, count, 2, dtype=kind) * 1.2 - 0.1
        level = rand(g, queries, count, dtype=kind) * (lod[1] - lod[0]) + lod[0]
        matrix = (torch.eye(2) + rand(g, queries, count, 2, 2, dtype=kind) - 0.5).to(kind) if axes else None
        return data, center, level, h, w, names, count_of_levels, size, address, matrix

    return make


def huge(dtype, g):
    args = list(patches(address="clamp", queries=1, count=4)(dtype, g))
    args[1][0, 0], args[1][0, 1, 0], args[2][0, 2], args[2][0, 3] = 1e30, -1e30, 1e30, -1e30
    return tuple(args)


ALL = (0, 1, 2)
CASES = [
    Case("extract_patches", "clamp", patches(), grads=ALL, inductor=True),
    Case("extract_patches", "axes", patches(axes=True), grads=(*ALL, 9), inductor=True),
    *(Case("extract_patches", a, patches(address=a), grads=ALL) for a in ("wrap", "mirror", "border")),
    *(Case("extract_patches", f"axes-{a}", patches(address=a, axes=True), grads=(*ALL, 9)) for a in ("wrap", "mirror", "border")),
    *(Case("extract_patches", f"C{c}", patches(c=c, batch=2), grads=ALL) for c in (1, 4, 5, 19)),
    Case("extract_patches", "texels-only", patches(c=3), grads=(0,)),
    Case("extract_patches", "center-only", patches(c=3, count=2), grads=(1,)),
    # One texel apart: inside, over the border, at an integer LOD above 0. The derivative by an integer LOD is
    # one-sided, so it is tested in test_patches.py.
    Case("extract_patches", "unit", patches(lod=(0, 0), size=5, h=16, w=24), grads=(0, 1)),
    Case("extract_patches", "unit-C1", patches(c=1, lod=(0, 0), size=5, h=16, w=24), grads=(0, 1)),
    Case("extract_patches", "unit-C5", patches(c=5, lod=(1, 1), size=3, h=16, w=24), grads=(0, 1)),
    Case("extract_patches", "unit-16", patches(lod=(0, 0), count=8, size=16, h=40, w=48, levels=1), atol=1e-5),
    Case("extract_patches", "unit-33", patches(c=4, lod=(1, 1), count=8, size=33, h=112, w=96), atol=1e-5),
    Case("extract_patches", "wide-wrap", patches(c=7, size=21, address="wrap", h=64, w=96), atol=1e-5),
    # Mode channels depend on texels and have no gradient: that of the others is compared in test_patches.py.
    Case("extract_patches", "mode", patches(c=4, reducer=["mean", "mode", "max", "mode"]), grads=(1, 2)),
    Case(
        "extract_patches",
        "mode-axes",
        patches(c=2, reducer=["mode", "mean"], axes=True, address="border"),
        grads=(1, 2, 9),
    ),
    Case("extract_patches", "all-mode", patches(c=3, reducer=["mode"], address="mirror")),
    Case("extract_patches", "one-wide", patches(h=9, w=1, size=3), grads=ALL),
    Case("extract_patches", "one-texel", patches(h=1, w=1, size=2, lod=(0, 0)), grads=(0,)),
    Case("extract_patches", "size-1", patches(size=1), grads=ALL),
    Case("extract_patches", "huge", huge),
    Case("extract_patches", "clamped-lod", patches(lod=(-3.0, -1.0)), grads=(0, 1)),
    Case("extract_patches", "no-queries", patches(count=0), grads=()),
    Case("extract_patches", "empty-batch", patches(queries=0), grads=()),
]


def call(**change):
    args = {
        "data": torch.zeros(1, 21, 3),
        "center": torch.full((1, 2, 2), 0.5),
        "lod": torch.zeros(1, 2),
        "height": 4,
        "width": 4,
        "reducer": ["mean"],
        "levels": 3,
        "size": 2,
        "address": "clamp",
        "axes": None,
    }
    return lambda: tuple({**args, **change}.values())


BAD = [
    Bad("extract_patches", "T", call(height=5), r"data must be \[B, T, C\]"),
    Bad("extract_patches", "strided", call(data=torch.zeros(1, 21, 6)[..., ::2]), "data must be contiguous"),
    Bad("extract_patches", "rank", call(center=torch.zeros(2, 2)), r"center must be \[B, N, 2\].*got \[2, 2\]"),
    Bad(
        "extract_patches",
        "count",
        call(lod=torch.zeros(1, 3)),
        r"lod must be \[B, N\] = \[1, 2\], got \[1, 3\]",
    ),
    Bad("extract_patches", "axes", call(axes=torch.zeros(1, 2, 4)), r"axes must be \[B, N, 2, 2\]"),
    Bad(
        "extract_patches",
        "dtype",
        call(center=torch.zeros(1, 2, 2, dtype=torch.float64)),
        "center must be Float.*got Double",
    ),
    Bad(
        "extract_patches",
        "half",
        call(lod=torch.zeros(1, 2, dtype=torch.float16)),
        "lod must be Float.*got Half",
    ),
    Bad(
        "extract_patches",
        "texels",
        call(data=torch.zeros(1, 21, 3, dtype=torch.int32)),
        "data must be float32.*got Int",
    ),
    Bad("extract_patches", "batch", call(data=torch.zeros(3, 21, 3)), "data must be of batch 1 or"),
    Bad("extract_patches", "size-0", call(size=0), "size must be from 1 to 16384, got 0"),
    Bad("extract_patches", "size-huge", call(size=2**40), "size must be from 1 to 16384"),
    Bad(
        "extract_patches",
        "address",
        call(address="repeat"),
        "address must be clamp, wrap, mirror or border, got 'repeat'",
    ),
    Bad("extract_patches", "reducer", call(reducer=["mean", "max"]), "reducer must be one name"),
]
