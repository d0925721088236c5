import torch

import texvlm
from cases import Bad, Case, coords, rand
from cases.sample import MIXED, places, texels


def query(h, w, c, levels=None, n=6, batch=2, shared=False, address="clamp", reducer=("mean",), size=3.0, anisotropy=16):
    def make(dtype, g):
        count = texvlm.level_count(h, w) if levels is None else levels
        data = texels(dtype, g, h, w, c, count, 1 if shared else batch)
        pixels = torch.tensor([w, h], dtype=coords(dtype))
        ddx, ddy = ((rand(g, batch, n, 2, dtype=coords(dtype)) - 0.5) * 2 * size / pixels for _ in range(2))
        return data, places(dtype, g, batch, n, 1.4), ddx, ddy, h, w, list(reducer), count, anisotropy, address

    return make


def thin(dtype, g):
    """Rank 1: both sides along one line, so Pmin is zero up to rounding."""
    data, uv, ddx, _, *rest = query(16, 16, 2)(dtype, g)
    return data, uv, ddx, 0.37 * ddx, *rest


def degenerate(dtype, g):
    data, uv, ddx, ddy, *rest = query(8, 8, 3)(dtype, g)
    ddx[0, 0], ddy[0, 0] = 0, 0
    ddx[0, 1], ddy[0, 1] = torch.tensor([0.3, 0.0]), torch.tensor([0.0, 0.3])  # circles: turned, and mirrored
    ddx[0, 2], ddy[0, 2] = torch.tensor([0.0, 0.3]), torch.tensor([0.3, 0.0])
    ddy[0, 3] = 0
    ddx[0, 4] = 0
    ddx[0, 5], ddy[0, 5] = torch.tensor([1e-30, 0.0]), torch.tensor([0.0, 1e-30])
    return data, uv, ddx, ddy, *rest


def strided(dtype, g):
    data, uv, ddx, ddy, *rest = query(6, 9, 5, shared=True)(dtype, g)
    return data, uv.transpose(0, 1).contiguous().transpose(0, 1)[:, ::2], ddx[:, ::2], ddy[:1, :1].expand(2, 3, 2), *rest


CASES = [
    Case("sample_grad", "16x16x3", query(16, 16, 3), grads=(0, 1, 2, 3), inductor=True),
    *(
        Case("sample_grad", address, query(7, 12, 2, address=address), grads=(0, 1, 2, 3))
        for address in ("clamp", "wrap", "mirror", "border")
    ),
    Case("sample_grad", "small", query(9, 8, 1, size=0.4), grads=(0, 1, 2, 3)),
    Case("sample_grad", "large", query(32, 8, 4, size=12.0, anisotropy=3), grads=(0, 1, 2, 3)),
    Case("sample_grad", "isotropic", query(16, 8, 3, anisotropy=1), grads=(0, 1, 2, 3)),
    Case("sample_grad", "40-channels", query(8, 9, 40, n=3), grads=(0, 1, 2, 3)),
    Case("sample_grad", "70-channels", query(5, 6, 70, n=2)),
    Case("sample_grad", "one-level", query(6, 5, 3, levels=1), grads=(0, 1, 2, 3)),
    Case("sample_grad", "1x9", query(1, 9, 2), grads=(0, 1, 2, 3)),
    Case("sample_grad", "1x1", query(1, 1, 3)),
    Case("sample_grad", "shared", query(8, 6, 3, shared=True), grads=(0, 1, 2, 3)),
    Case("sample_grad", "mixed", query(8, 7, 4, reducer=MIXED), grads=(1, 2, 3)),
    Case("sample_grad", "strided", strided, grads=(0, 1, 2, 3)),
    Case("sample_grad", "thin", thin),
    Case("sample_grad", "degenerate", degenerate),
    Case("sample_grad", "no-queries", query(4, 4, 3, n=0)),
    Case("sample_grad", "empty-batch", query(4, 4, 3, batch=0)),
]


def bad(label, message, **change):
    def make():
        names = ("data", "uv", "ddx", "ddy", "height", "width", "reducer", "levels", "max_anisotropy", "address")
        two = torch.zeros(2, 5, 2)
        values = (torch.zeros(2, 21, 3), two, two.clone(), two.clone(), 4, 4, ["mean"], 3, 16, "clamp")
        return tuple({**dict(zip(names, values, strict=True)), **change}.values())

    return Bad("sample_grad", label, make, message)


BAD = [
    bad("T", r"data must be \[B, T, C\] = \[\*, 25, \*\], got \[2, 21, 3\]", width=5),
    bad("uv-rank", r"uv must be \[B, N, 2\].*got \[5, 2\]", uv=torch.zeros(5, 2)),
    bad("ddx-shape", r"ddx must be \[B, N, 2\] = \[2, 5, 2\], got \[2, 4, 2\]", ddx=torch.zeros(2, 4, 2)),
    bad("ddy-dtype", "ddy must be Float.*got Double", ddy=torch.zeros(2, 5, 2, dtype=torch.double)),
    bad("anisotropy", "max_anisotropy must be from 1 to 1024, got 0", max_anisotropy=0),
    bad("huge-anisotropy", "max_anisotropy must be from 1 to 1024", max_anisotropy=2**40),
    bad("address", "address must be clamp, wrap, mirror or border, got 'repeat'", address="repeat"),
]
