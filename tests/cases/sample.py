import torch

import texvlm
from cases import Bad, Case, coords, rand

MIXED = ["mean", "max", "min", "mode"]
GRADS = {"nearest": (0,), "bilinear": (0, 1), "trilinear": (0, 1, 2)}


def texels(dtype, g, h, w, c, levels, batch):
    image = rand(g, batch, c, h, w, dtype=dtype)
    return torch.ops.texvlm.generate_mipmaps(image, ["mean"], levels)


def places(dtype, g, b, n, spread=1.0):
    """Anywhere around the picture, at random, so not on the edges of cells."""
    return (rand(g, b, n, 2, dtype=coords(dtype)) - 0.5) * spread + 0.5


def query(h, w, c, levels=None, n=7, batch=2, shared=False, filter="trilinear", address="clamp", reducer=("mean",), spread=1.6):
    def make(dtype, g):
        count = texvlm.level_count(h, w) if levels is None else levels
        data = texels(dtype, g, h, w, c, count, 1 if shared else batch)
        lod = rand(g, batch, n, dtype=coords(dtype)) * (count + 1) - 1
        return data, places(dtype, g, batch, n, spread), lod, h, w, list(reducer), count, filter, address

    return make


def strided(dtype, g):
    data, uv, lod, *rest = query(6, 9, 5, shared=True, n=5)(dtype, g)
    return data, uv.flip(-1).contiguous().transpose(0, 1).contiguous().transpose(0, 1)[:, ::2], lod[:1, :1].expand(2, 3), *rest


def far_away(dtype, g):
    data, uv, lod, *rest = query(5, 6, 3, n=6)(dtype, g)
    uv[0, 1, 0], uv[1, 2, 1], uv[1, 3, 0] = 1e18, -1e18, 3.4e38
    lod[0, 3], lod[1, 4] = 1e30, -1e30
    return data, uv, lod, *rest


CASES = [
    Case("sample_lod", "8x8x3", query(8, 8, 3), grads=(0, 1, 2), inductor=True),
    *(
        Case("sample_lod", f"{filter}-{address}", query(7, 5, 2, filter=filter, address=address), grads=GRADS[filter])
        for filter in ("nearest", "bilinear", "trilinear")
        for address in ("clamp", "wrap", "mirror", "border")
    ),
    Case("sample_lod", "one-channel", query(6, 9, 1, n=70), grads=(0, 1, 2)),
    Case("sample_lod", "four-channels", query(9, 6, 4), grads=(0, 1, 2)),
    Case("sample_lod", "40-channels", query(6, 5, 40, n=3), grads=(0, 1, 2)),
    Case("sample_lod", "one-level", query(6, 5, 3, levels=1), grads=(0, 1, 2)),
    Case("sample_lod", "1x9", query(1, 9, 2), grads=(0, 1, 2)),
    Case("sample_lod", "1x1", query(1, 1, 3), grads=(0, 1, 2)),
    Case("sample_lod", "shared", query(5, 6, 3, shared=True), grads=(0, 1, 2)),
    Case("sample_lod", "mixed", query(6, 7, 4, reducer=MIXED), grads=(1, 2)),
    Case("sample_lod", "mixed-40", query(6, 7, 40, n=3, reducer=MIXED * 10, address="border"), grads=(1, 2)),
    Case("sample_lod", "mode", query(6, 7, 3, reducer=["mode"])),
    Case("sample_lod", "strided", strided, grads=(0, 1, 2)),
    Case("sample_lod", "far-away", far_away),
    Case("sample_lod", "no-queries", query(4, 4, 3, n=0)),
    Case("sample_lod", "empty-batch", query(4, 4, 3, batch=0)),
    Case("sample_lod", "empty-batch-shared", query(4, 4, 3, batch=0, shared=True)),
]


def bad(label, message, **change):
    def make():
        names = ("data", "uv", "lod", "height", "width", "reducer", "levels", "filter", "address")
        values = (torch.zeros(2, 21, 3), torch.zeros(2, 5, 2), torch.zeros(2, 5), 4, 4, ["mean"], 3, "trilinear", "clamp")
        return tuple({**dict(zip(names, values, strict=True)), **change}.values())

    return Bad("sample_lod", label, make, message)


BAD = [
    bad("T", r"data must be \[B, T, C\] = \[\*, 25, \*\], got \[2, 21, 3\]", width=5),
    bad("uv-rank", r"uv must be \[B, N, 2\].*got \[5, 2\]", uv=torch.zeros(5, 2)),
    bad("uv-size", r"uv must be \[B, N, 2\].*got \[2, 5, 3\]", uv=torch.zeros(2, 5, 3)),
    bad("uv-dtype", "uv must be Float.*got Half", uv=torch.zeros(2, 5, 2, dtype=torch.half)),
    bad("uv-double", "uv must be Float.*got Double", uv=torch.zeros(2, 5, 2, dtype=torch.double)),
    bad("lod-shape", r"lod must be \[B, N\] = \[2, 5\], got \[2, 4\]", lod=torch.zeros(2, 4)),
    bad("batch", "data must be of batch 1 or of the batch of uv", uv=torch.zeros(3, 5, 2), lod=torch.zeros(3, 5)),
    bad("filter", "filter must be nearest, bilinear or trilinear, got 'cubic'", filter="cubic"),
    bad("address", "address must be clamp, wrap, mirror or border, got 'repeat'", address="repeat"),
    bad("levels", "levels must be from 1 to 3", levels=4),
    bad("reducer", "reducer must be one name, or one for each of the 3", reducer=["mean", "max"]),
    bad("strided", "data must be contiguous", data=torch.zeros(2, 21, 6)[..., ::2]),
]
