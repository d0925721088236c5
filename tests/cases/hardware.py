"""Hardware sampling rounds positions to 1/256 of a texel, so points stay off the middle between two such steps.

No `grads`: the gradients are those of other ops, on purpose not those of the rounded values. tests/test_hardware.py looks at them.
"""

import torch

import texvlm
from cases import Bad, Case, rand
from cases.sample import MIXED, texels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MARGIN = 0.03  # of a step


def off_steps(x):
    """Whether rounding x to multiples of 1/256 does not depend on its last digits."""
    return ((x.double() * 256) % 1 - 0.5).abs() > MARGIN


def settled(uv, h, w, levels):
    """Whether uv [..., 2] is off the steps in every level."""
    ok = torch.ones(uv.shape[:-1], dtype=torch.bool)
    for _, rows, columns in texvlm.pyramid.level_table(h, w, levels):
        ok &= off_steps(uv.double() * torch.tensor([columns, rows]) - 0.5).all(-1)
    return ok


def draw(make, accept):
    """make(), and again for what is not accepted."""
    values = make()
    for _ in range(500):
        refused = ~accept(values)
        if not refused.any():
            return values
        values = torch.where(refused.reshape(refused.shape + (1,) * (values.dim() - refused.dim())), make(), values)
    raise AssertionError("no such points")


def places(g, batch, n, h, w, levels, spread):
    return draw(lambda: (rand(g, batch, n, 2) - 0.5) * spread + 0.5, lambda uv: settled(uv, h, w, levels))


def query(h, w, c, levels=None, n=7, batch=2, shared=False, filter="trilinear", address="clamp", reducer=("mean",), spread=1.6):
    def make(dtype, g):
        count = texvlm.level_count(h, w) if levels is None else levels
        data = texels(dtype, g, h, w, c, count, 1 if shared else batch)
        lod = draw(lambda: rand(g, batch, n) * (count + 1) - 1, off_steps)
        return data, places(g, batch, n, h, w, count, spread), lod, h, w, list(reducer), count, filter, address

    return make


def strided(dtype, g):
    data, uv, lod, *rest = query(6, 9, 5, shared=True, n=5)(dtype, g)
    return data, uv.transpose(0, 1).contiguous().transpose(0, 1)[:, ::2], lod[:1, :1].expand(2, 3), *rest


def footprints(h, w, c, n=6, batch=2, shared=False, address="clamp", reducer=("mean",), anisotropy=16):
    """Squares of 2^k texels, whose LOD is k in any arithmetic. (How hardware samples others is its own affair.)"""

    def make(dtype, g):
        count = texvlm.level_count(h, w)
        data = texels(dtype, g, h, w, c, count, 1 if shared else batch)
        side = 2.0 ** torch.randint(-1, count + 1, (batch, n), generator=g)
        zero = torch.zeros_like(side)
        ddx, ddy = torch.stack([side / w, zero], -1), torch.stack([zero, side / h], -1)
        uv = places(g, batch, n, h, w, count, 1.4)
        return data, uv, ddx, ddy, h, w, list(reducer), count, anisotropy, address

    return make


CASES = [
    Case("sample_lod_hardware", "8x8x3", query(8, 8, 3), dtypes=DTYPES, inductor=True),
    *(
        Case("sample_lod_hardware", f"{filter}-{address}", query(7, 5, 2, filter=filter, address=address), dtypes=DTYPES)
        for filter in ("nearest", "bilinear", "trilinear")
        for address in ("clamp", "wrap", "mirror", "border")
    ),
    Case("sample_lod_hardware", "one-channel", query(6, 9, 1, n=70), dtypes=DTYPES),
    Case("sample_lod_hardware", "four-channels", query(9, 6, 4), dtypes=DTYPES),
    Case("sample_lod_hardware", "40-channels", query(6, 5, 40, n=3), dtypes=DTYPES),
    Case("sample_lod_hardware", "one-level", query(6, 5, 3, levels=1), dtypes=DTYPES),
    Case("sample_lod_hardware", "1x9", query(1, 9, 2), dtypes=DTYPES),
    Case("sample_lod_hardware", "1x1", query(1, 1, 3), dtypes=DTYPES),
    Case("sample_lod_hardware", "large", query(65, 83, 5, n=200), dtypes=DTYPES),
    Case("sample_lod_hardware", "shared", query(5, 6, 3, shared=True), dtypes=DTYPES),
    Case("sample_lod_hardware", "mixed", query(6, 7, 4, reducer=MIXED), dtypes=DTYPES),
    Case("sample_lod_hardware", "mixed-40", query(6, 7, 40, n=3, reducer=MIXED * 10, address="border"), dtypes=DTYPES),
    Case("sample_lod_hardware", "mode", query(6, 7, 3, reducer=["mode"]), dtypes=DTYPES),
    Case("sample_lod_hardware", "strided", strided, dtypes=DTYPES),
    Case("sample_lod_hardware", "no-queries", query(4, 4, 3, n=0), dtypes=DTYPES),
    Case("sample_lod_hardware", "empty-batch", query(4, 4, 3, batch=0), dtypes=DTYPES),
    Case("sample_grad_hardware", "16x16x3", footprints(16, 16, 3), dtypes=DTYPES, inductor=True),
    *(
        Case("sample_grad_hardware", address, footprints(8, 16, 2, address=address), dtypes=DTYPES)
        for address in ("clamp", "wrap", "mirror", "border")
    ),
    Case("sample_grad_hardware", "isotropic", footprints(16, 8, 3, anisotropy=1), dtypes=DTYPES),
    Case("sample_grad_hardware", "40-channels", footprints(8, 8, 40, n=3), dtypes=DTYPES),
    Case("sample_grad_hardware", "shared", footprints(8, 4, 3, shared=True), dtypes=DTYPES),
    Case("sample_grad_hardware", "mixed", footprints(8, 8, 4, reducer=MIXED), dtypes=DTYPES),
    Case("sample_grad_hardware", "no-queries", footprints(4, 4, 3, n=0), dtypes=DTYPES),
]


def bad(op, label, message, **change):
    def make():
        two = torch.zeros(2, 5, 2)
        values = {"data": torch.zeros(2, 21, 3), "uv": two}
        if op == "sample_lod_hardware":
            values |= {"lod": torch.zeros(2, 5), "height": 4, "width": 4, "reducer": ["mean"], "levels": 3}
            values |= {"filter": "trilinear", "address": "clamp"}
        else:
            values |= {"ddx": two.clone(), "ddy": two.clone(), "height": 4, "width": 4, "reducer": ["mean"], "levels": 3}
            values |= {"max_anisotropy": 16, "address": "clamp"}
        return tuple({**values, **change}.values())

    return Bad(op, label, make, message)


BAD = [
    bad("sample_lod_hardware", "double", "no float64.*got Double", data=torch.zeros(2, 21, 3, dtype=torch.double)),
    bad("sample_lod_hardware", "T", r"data must be \[B, T, C\] = \[\*, 25, \*\], got \[2, 21, 3\]", width=5),
    bad("sample_lod_hardware", "uv-dtype", "uv must be Float.*got Half", uv=torch.zeros(2, 5, 2, dtype=torch.half)),
    bad("sample_lod_hardware", "lod-shape", r"lod must be \[B, N\] = \[2, 5\], got \[2, 4\]", lod=torch.zeros(2, 4)),
    bad("sample_lod_hardware", "filter", "filter must be nearest, bilinear or trilinear, got 'cubic'", filter="cubic"),
    bad("sample_lod_hardware", "address", "address must be clamp, wrap, mirror or border, got 'repeat'", address="repeat"),
    bad("sample_grad_hardware", "double", "no float64.*got Double", data=torch.zeros(2, 21, 3, dtype=torch.double)),
    bad("sample_grad_hardware", "anisotropy", "max_anisotropy must be from 1 to 16, got 17", max_anisotropy=17),
    bad("sample_grad_hardware", "no-anisotropy", "max_anisotropy must be from 1 to 16, got 0", max_anisotropy=0),
    bad("sample_grad_hardware", "ddx-shape", r"ddx must be \[B, N, 2\] = \[2, 5, 2\], got \[2, 4, 2\]", ddx=torch.zeros(2, 4, 2)),
]
