import torch

import texvlm
from cases import Bad, Case, rand

# OpenGL has float32 and float16 textures; gradients, which the contract takes in float64, are tested in test_gl.py. Sides are even
# until they are 1: other sizes are what the driver makes of them (test_gl.py again).
TEXELS = (torch.float32, torch.float16)


def image(h, w, c, batch=2, levels=None, dtype_of=None):
    def make(dtype, g):
        return rand(g, batch, c, h, w, dtype=dtype), levels or texvlm.level_count(h, w), dtype_of

    return make


def uint8(dtype, g):
    return (rand(g, 2, 3, 8, 4) * 255).to(torch.uint8), 4, dtype


def strided(dtype, g):
    return rand(g, 2, 10, 8, 7, dtype=dtype).permute(0, 3, 1, 2)[:, ::2, 2:, :], 4


CASES = [
    *(
        Case("generate_mipmaps_gl", f"{h}x{w}x{c}", image(h, w, c), dtypes=TEXELS, inductor=(h, w, c) == (8, 8, 3))
        for h, w, c in [(8, 8, 3), (4, 16, 1), (1, 8, 4), (16, 1, 5), (1, 1, 2), (8, 2, 8)]
    ),
    Case("generate_mipmaps_gl", "one-4-channel-picture", image(8, 8, 4, batch=1), dtypes=TEXELS),
    Case("generate_mipmaps_gl", "two-levels", image(8, 6, 3, levels=2), dtypes=TEXELS),
    Case("generate_mipmaps_gl", "one-level", image(5, 3, 3, levels=1), dtypes=TEXELS),
    Case("generate_mipmaps_gl", "to-half", image(8, 8, 3, dtype_of=torch.float16), dtypes=(torch.float32,), atol=2e-3),
    Case("generate_mipmaps_gl", "uint8", uint8, dtypes=TEXELS),
    Case("generate_mipmaps_gl", "strided", strided, dtypes=TEXELS),
    Case("generate_mipmaps_gl", "empty-batch", image(4, 4, 3, batch=0), dtypes=TEXELS),
]

BAD = [
    Bad("generate_mipmaps_gl", "rank", lambda: (torch.rand(3, 4, 4), 1), r"image must be \[B, C, H, W\].*got \[3, 4, 4\]"),
    Bad(
        "generate_mipmaps_gl",
        "double",
        lambda: (torch.rand(1, 3, 4, 4, dtype=torch.float64), 1),
        "image must be float32, float16 or uint8 .OpenGL.*got Double",
    ),
    Bad(
        "generate_mipmaps_gl",
        "bfloat16",
        lambda: (torch.rand(1, 3, 4, 4), 1, torch.bfloat16),
        "dtype must be float32 or float16, got BFloat16",
    ),
    Bad("generate_mipmaps_gl", "levels", lambda: (torch.rand(1, 3, 4, 4), 4), "levels must be from 1 to 3.*got 4"),
    Bad("generate_mipmaps_gl", "zero-size", lambda: (torch.rand(1, 3, 0, 4), 1), "height and width must be at least 1.*0 x 4"),
]
