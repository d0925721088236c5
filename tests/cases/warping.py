import torch

from cases import Bad, Case, coords, rand

NAN = float("nan")


def field(dtype, g, batch, h, w, size):
    """A flow whose targets stay off the pixels' centres, where the derivative jumps, and off the border."""
    scale = torch.tensor([size[1] / w, size[0] / h]).to(dtype)[:, None, None]
    return ((rand(g, batch, 2, h, w) * 0.8 + 0.1).to(dtype) + torch.randint(-2, 2, (batch, 2, 1, 1), generator=g)) / scale


def planes(h, w, channels=2, batch=2, flow=None, hidden=False, fill=0.0):
    def make(dtype, g):
        texels = rand(g, batch, channels, h, w, dtype=dtype)
        size = flow or (h, w)
        occlusion = rand(g, batch, *size) < 0.2 if hidden else None
        return texels, field(coords(dtype), g, batch, *size, (h, w)), fill, occlusion

    return make


def strided(dtype, g):
    texels, flow, fill, _ = planes(7, 12)(dtype, g)
    return texels.transpose(2, 3)[..., ::2], flow.transpose(2, 3)[..., ::2], fill, None


def not_finite(fill):
    def make(dtype, g):
        texels, flow, _, _ = planes(6, 5)(dtype, g)
        flow[0, 0, 2, 3], flow[1, 1, 0, 0] = NAN, float("inf")
        return texels, flow, fill, None

    return make


def moving(h, w, batch=1, flow=None, hidden=False, uint8=False, channels=3):
    def make(dtype, g):
        image, previous = (rand(g, batch, channels, h, w, dtype=dtype) for _ in range(2))
        if uint8:
            image, previous = ((p * 255).to(torch.uint8) for p in (image, previous))
        if flow is None:
            return image, previous
        occlusion = rand(g, batch, *flow) < 0.2 if hidden else None
        return image, previous, field(coords(dtype), g, batch, *flow, (h, w)), occlusion

    return make


CASES = [
    Case("warp", "6x7", planes(6, 7), grads=(0, 1), inductor=True),
    Case("warp", "1x9", planes(1, 9, channels=1), grads=(0,)),
    Case("warp", "9x6-coarse-flow", planes(9, 6, flow=(3, 4)), grads=(0,), atol=2e-6),
    Case("warp", "4x3-fine-flow", planes(4, 3, flow=(9, 7)), grads=(0,), atol=2e-6),
    Case("warp", "occluded", planes(8, 5, hidden=True, fill=0.25), grads=(0, 1)),
    Case("warp", "coarse-occluded", planes(9, 8, flow=(4, 3), hidden=True), grads=(0,), atol=2e-6),
    Case("warp", "staying", planes(8, 5, flow=(4, 3), hidden=True, fill=None), grads=(0, 1), atol=2e-6),
    Case("warp", "strided", strided, grads=(0, 1)),
    Case("warp", "not-finite", not_finite(0.5), grads=(0,)),
    Case("warp", "not-finite-staying", not_finite(None), grads=(0,)),
    Case("warp", "many-channels", planes(5, 6, channels=9, batch=1), grads=(0, 1)),
    Case("warp", "empty-batch", planes(5, 6, batch=0)),
    Case("motion", "6x7", moving(6, 7), grads=(0, 1), inductor=True),
    Case("motion", "moved", moving(6, 7, batch=2, flow=(6, 7)), grads=(0, 1, 2)),
    Case("motion", "occluded", moving(7, 8, flow=(7, 8), hidden=True), grads=(0, 1, 2)),
    Case("motion", "coarse-flow", moving(9, 8, flow=(3, 4)), grads=(0, 1), atol=2e-6),
    Case("motion", "uint8", moving(5, 9, uint8=True, flow=(5, 9)), dtypes=(torch.float32,)),
    Case("motion", "one-pixel", moving(1, 1), grads=(0, 1)),
]


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


BAD = [
    Bad("warp", "rank", lambda: (zeros(3, 4, 4), zeros(1, 2, 4, 4)), r"planes must be \[B, C, H, W\].*got \[3, 4, 4\]"),
    Bad("warp", "flow", lambda: (zeros(1, 3, 4, 4), zeros(1, 3, 4, 4)), r"flow must be \[B, 2, h, w\].*got \[1, 3, 4, 4\]"),
    Bad("warp", "flow-dtype", lambda: (zeros(1, 3, 4, 4), zeros(1, 2, 4, 4, dtype=torch.float64)), "flow must be Float"),
    Bad("warp", "flow-empty", lambda: (zeros(1, 3, 4, 4), zeros(1, 2, 0, 4)), "flow must be of at least 1 x 1"),
    Bad(
        "warp",
        "occlusion",
        lambda: (zeros(1, 3, 4, 4), zeros(1, 2, 4, 4), 0.0, zeros(1, 4, 5, dtype=torch.bool)),
        r"occlusion must be \[B, h, w\].*got \[1, 4, 5\]",
    ),
    Bad(
        "warp",
        "occlusion-dtype",
        lambda: (zeros(1, 3, 4, 4), zeros(1, 2, 4, 4), 0.0, zeros(1, 4, 4)),
        "occlusion must be Bool",
    ),
    Bad("motion", "previous", lambda: (zeros(1, 3, 4, 4), zeros(1, 3, 4, 5)), "previous must be of the shape of image"),
    Bad(
        "motion",
        "occlusion-alone",
        lambda: (zeros(1, 3, 4, 4), zeros(1, 3, 4, 4), None, zeros(1, 4, 4, dtype=torch.bool)),
        "occlusion must be given together with flow",
    ),
]
