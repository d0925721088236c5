import torch

import texvlm
from cases import Bad, Case, coords, rand

MINIMAL = [*range(12), 34]


def held(dtype, channels=MINIMAL):
    """The channels that texels of this dtype can hold: bfloat16 is refused for x, y and cluster."""
    return [c for c in channels if dtype != torch.bfloat16 or c not in (9, 10, 12)]


def picture(h, w, channels, batch=2, levels=None, moving=False, fixed=False):
    def make(dtype, g):
        count = texvlm.level_count(h, w) if levels is None else levels
        image = rand(g, batch, 3, h, w, dtype=dtype)
        previous = rand(g, batch, 3, h, w, dtype=dtype) if moving else None
        fixation = rand(g, batch, 2, dtype=coords(dtype)) if fixed else None
        return image, held(dtype, channels), count, [], [], None, previous, fixation

    return make


def strided(dtype, g):
    return rand(g, 2, 9, 26, 3, dtype=dtype).permute(0, 3, 1, 2)[..., ::2], held(dtype), 4, [], []


def uint8(dtype, g):
    image, previous = ((rand(g, 2, 3, 10, 17) * 255).to(torch.uint8) for _ in range(2))
    return image, held(dtype), 5, [], [], dtype, previous


def stored(dtype, g):
    return rand(g, 1, 3, 11, 9), held(dtype), 4, [], [], dtype


def given(dtype, g):
    planes = [rand(g, 2, 2, 3, 4, dtype=dtype), rand(g, 2, 1, 9, 12, dtype=dtype), rand(g, 2, 1, 1, 12, dtype=dtype)]
    ids = torch.randint(7, (2, 1, 4, 5), generator=g).to(dtype)
    return rand(g, 2, 3, 9, 12, dtype=dtype), held(dtype, [18, 3, 12, 8, 33, 5, 39, 13]), 3, [*planes, ids], [18, 33, 3, 39, 12]


def given_few(dtype, g):
    return rand(g, 1, 3, 33, 40, dtype=dtype), [0, 18, 33], 1, [rand(g, 1, 2, 1, 2, dtype=dtype)], [18, 33]


def given_not_finite(dtype, g):
    plane = rand(g, 1, 2, 3, 4, dtype=dtype)
    plane[0, 0, 1, 1], plane[0, 1, 2, 3] = float("nan"), float("inf")
    return rand(g, 1, 3, 7, 8, dtype=dtype), [0, 15, 16], 2, [plane], [15, 16]


def not_finite(dtype, g):
    image = rand(g, 1, 3, 9, 12, dtype=dtype)
    image[0, 1, 3, 4], image[0, 0, 7, 7], image[0, 2, 0, 0] = float("nan"), float("inf"), -float("inf")
    return image, held(dtype), 4, [], [], None, image.clone(), torch.tensor([[float("nan"), 0.5]], dtype=coords(dtype))


def flat(dtype, g):
    return torch.full((1, 3, 9, 12), 0.25, dtype=dtype), held(dtype), 4, [], []


def labelled(h, w, coarse=None):
    """A picture with an edge, and labels of it, of its own size or of another."""

    def make(dtype, g):
        image = rand(g, 2, 3, h, w, dtype=dtype) * 0.1
        image[..., w // 3 :] += 0.6
        labels = torch.randint(3, (2, 1, *(coarse or (h, w))), generator=g).to(dtype)
        return image, [38, 34, 3], 2, [labels], [12]

    return make


def changed_tiles(g, image, tile, share=0.3):
    """Tiles that are dirty, and the picture with other values in them."""
    (batch, _, h, w), other = image.shape, rand(g, *image.shape)
    tiles = torch.rand(batch, -(-h // tile), -(-w // tile), generator=g) < share
    other = (other * 255).to(torch.uint8) if image.dtype == torch.uint8 else other.to(image.dtype)
    inside = tiles.repeat_interleave(tile, 1).repeat_interleave(tile, 2)[:, None, :h, :w]
    return tiles, torch.where(inside, other, image)


def updated(h, w, channels, tile=8, batch=2, bytes=False, levels=None, fixed=False, first=False):
    """The state after two pictures, made by the reference, and a third one."""

    def make(dtype, g):
        from texvlm import reference

        count, ids = texvlm.level_count(h, w) if levels is None else levels, held(dtype, channels)
        image = rand(g, batch, 3, h, w, dtype=dtype)
        image = (image * 255).to(torch.uint8) if bytes else image
        fixation = rand(g, batch, 2, dtype=coords(image.dtype)) if fixed else None
        data = torch.zeros(batch, texvlm.pyramid.texel_count(h, w, count), len(ids), dtype=dtype)
        planes = torch.zeros(4, batch, h, w, dtype=coords(image.dtype))
        before, then = changed_tiles(g, image, tile)
        dirty, now = changed_tiles(g, then, tile)
        if not first:
            reference.update_channels(data, planes, image, before, before, ids, count, tile, fixation, True)
            reference.update_channels(data, planes, then, before, before, ids, count, tile, fixation)
        return data, planes, now, dirty, before, ids, count, tile, fixation, first

    return make


def reference_update(data, planes, *rest):
    from texvlm import reference

    reference.update_channels(data, planes, *rest)
    return data, planes


LOCAL = list(texvlm.LOCAL)
CASES = [
    *(
        Case("update_channels", label, make, reference=reference_update, mutates=(0, 1), atol=5e-5)
        for label, make in [
            ("all-33x47", updated(33, 47, LOCAL, fixed=True)),
            ("first", updated(20, 25, LOCAL, first=True)),
            ("bytes-64x81", updated(64, 81, LOCAL, tile=16, batch=3, bytes=True)),
            ("contrast-50x70", updated(50, 70, [4, 1], tile=16)),
            ("motion-40x9", updated(40, 9, [7])),
            ("passes-1x60", updated(1, 60, [6, 5])),
            ("edge-one-level", updated(40, 44, [3, 0], levels=1)),
            ("large-tiles", updated(30, 20, LOCAL, tile=64, batch=4)),
            ("empty-batch", updated(16, 16, LOCAL, batch=0)),
        ]
    ),
    Case(
        "build_channels",
        "minimal-9x12",
        picture(9, 12, MINIMAL, moving=True, fixed=True),
        grads=(0, 6, 7),
        atol=5e-5,
        inductor=True,
    ),
    Case("build_channels", "boundary-14x19", labelled(14, 19), grads=(0,), atol=5e-5),
    Case("build_channels", "boundary-of-coarse-labels", labelled(16, 20, (4, 5)), atol=5e-5),
    Case(
        "build_channels",
        "boundary-without-labels",
        lambda dtype, g: (rand(g, 1, 3, 9, 8, dtype=dtype), [38, 0], 2, [], []),
        atol=5e-5,
    ),
    Case("build_channels", "given-9x12", given, grads=(0, (3, 0), (3, 1), (3, 2)), atol=5e-5),
    Case("build_channels", "given-few", given_few, grads=((3, 0),), atol=5e-5),  # hundreds of pixels read a texel
    Case("build_channels", "given-not-finite", given_not_finite, atol=5e-5),
    Case("build_channels", "minimal-12x10", picture(12, 10, MINIMAL), grads=(0,), atol=5e-5),
    Case("build_channels", "minimal-33x70", picture(33, 70, MINIMAL, moving=True), atol=5e-5),
    Case("build_channels", "minimal-128x140", picture(128, 140, MINIMAL, moving=True, fixed=True), atol=5e-5),
    Case(
        "build_channels", "minimal-1x11", picture(1, 11, MINIMAL, moving=True), grads=(0, 6), atol=1e-4
    ),  # a map of two texels: ill-conditioned
    Case("build_channels", "minimal-10x1", picture(10, 1, MINIMAL), grads=(0,), atol=5e-5),
    Case("build_channels", "minimal-1x1", picture(1, 1, MINIMAL), atol=5e-5),
    *(
        Case("build_channels", f"{name}-7x9", picture(7, 9, channels, moving=True, fixed=True), grads=grads, atol=5e-5)
        for name, channels, grads in [
            ("colours", [2, 0], (0,)),
            ("edge", [3], (0,)),
            ("contrast", [4], (0,)),
            ("passes", [6, 5], (0,)),
            ("high", [5], (0,)),
            ("motion", [7], (0, 6)),
            ("saliency", [8], (0, 6)),
            ("eccentricity", [11], (7,)),
            ("select", [0, 1, 2, 3, 8], (0, 6)),
        ]
    ),
    Case("build_channels", "no-gradient", picture(7, 9, [34, 9, 10])),
    Case("build_channels", "two-levels", picture(8, 6, [3, 0, 34], levels=2), grads=(0,)),
    Case("build_channels", "one-level", picture(8, 6, [4, 6], levels=1), grads=(0,)),
    Case("build_channels", "strided", strided, grads=(0,), atol=5e-5),
    Case("build_channels", "uint8", uint8, atol=5e-5),
    Case("build_channels", "stored", stored, atol=5e-5),
    Case("build_channels", "not-finite", not_finite, grads=(), atol=5e-5),
    Case("build_channels", "flat", flat, atol=5e-5),
    Case("build_channels", "empty-batch", picture(8, 8, MINIMAL, batch=0)),
]

image = torch.rand(1, 3, 8, 8)
mask = torch.ones(1, 1, 1, dtype=torch.bool)


def state(channels=(0, 3), data=torch.float32, planes=torch.float32, masks=(mask, mask), tile=8, picture=image):
    """Arguments of update_channels."""
    return (
        torch.zeros(1, 85, len(channels), dtype=data),
        torch.zeros(4, 1, 8, 8, dtype=planes),
        picture,
        *masks,
        list(channels),
        4,
        tile,
    )


BAD = [
    Bad(
        "update_channels",
        "global",
        lambda: state((0, 8)),
        "channels must be of those that pixels nearby decide: 0 to 7 and 9 to 11",
    ),
    Bad("update_channels", "twice", lambda: state((3, 3)), "channels must be distinct"),
    Bad("update_channels", "bfloat16-x", lambda: state((9,), torch.bfloat16), "data must be float32, float64 or float16 for"),
    Bad("update_channels", "planes", lambda: state(planes=torch.float64), "planes must be Float .the arithmetic's., got Double"),
    Bad("update_channels", "tile", lambda: state(tile=7), "tile must be from 8 to .*got 7"),
    Bad("update_channels", "mask", lambda: state(masks=(mask, mask.expand(1, 2, 1))), "before must be .*got .1, 2, 1."),
    Bad("update_channels", "mask-dtype", lambda: state(masks=(mask.int(), mask)), "dirty must be Bool, got Int"),
    Bad("update_channels", "size", lambda: state(picture=torch.rand(1, 3, 8, 9)), r"data must be \[B, T, C\]"),
    Bad("update_channels", "batch", lambda: state(picture=torch.rand(2, 3, 8, 8)), r"data must be \[B, T, len\(channels\)\]"),
    Bad(
        "build_channels",
        "grey",
        lambda: (torch.rand(1, 1, 8, 8), [0], 1, [], []),
        r"image must be \[B, 3, H, W\].*got \[1, 1, 8, 8\]",
    ),
    Bad(
        "build_channels",
        "bfloat16-x",
        lambda: (image, [0, 9], 1, [], [], torch.bfloat16),
        "dtype must be float32, float64 or float16 for the channels x, y and cluster",
    ),
    Bad("build_channels", "dtype", lambda: (image.int(), [0], 1, [], []), "image must be float32.*got Int"),
    Bad("build_channels", "unknown", lambda: (image, [0, 40], 1, [], []), "channels must be distinct indices from 0 to 39"),
    Bad("build_channels", "negative", lambda: (image, [-1], 1, [], []), "channels must be distinct indices from 0 to 39"),
    Bad("build_channels", "twice", lambda: (image, [3, 3], 1, [], []), "channels must be distinct"),
    Bad("build_channels", "none", lambda: (image, [], 1, [], []), "channels must be 1 to 64 indices"),
    Bad("build_channels", "levels", lambda: (image, [0], 5, [], []), "levels must be from 1 to 4.*got 5"),
    Bad("build_channels", "texels", lambda: (image, [0], 1, [], [], torch.int32), "dtype must be float32"),
    Bad(
        "build_channels",
        "previous",
        lambda: (image, [7], 1, [], [], None, torch.rand(2, 3, 8, 8)),
        "previous must be of the shape of image",
    ),
    Bad(
        "build_channels",
        "given",
        lambda: (image, [15], 1, [torch.rand(1, 1, 9, 8)], [15]),
        r"given\[0\] must be at least 1 x 1 and at most as large as the picture",
    ),
    Bad(
        "build_channels",
        "given-count",
        lambda: (image, [15], 1, [torch.rand(1, 2, 8, 8)], [15]),
        "given_channels must be one index per given plane, 2, got 1",
    ),
    Bad(
        "build_channels",
        "given-twice",
        lambda: (image, [15], 1, [torch.rand(1, 2, 8, 8)], [15, 15]),
        "given_channels must be distinct",
    ),
    Bad(
        "build_channels",
        "fixation",
        lambda: (image, [11], 1, [], [], None, None, torch.rand(2, 2)),
        r"fixation must be \[B, 2\] = \[1, 2\]",
    ),
    Bad(
        "build_channels",
        "fixation-dtype",
        lambda: (image, [11], 1, [], [], None, None, torch.rand(1, 2).half()),
        "fixation must be Float",
    ),
    Bad(
        "build_channels",
        "fixation-double",
        lambda: (image.double(), [11], 1, [], [], None, None, torch.rand(1, 2)),
        "fixation must be Double",
    ),
]
