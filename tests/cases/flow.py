import torch
from torch.nn.functional import interpolate

from cases import Bad, Case, rand


def shifted(h, w, batch=1, move=(1, 2), dtype=None, finest=None):
    """Two crops of one smooth random picture."""

    def make(texels, g):
        if batch == 0:
            return torch.zeros(0, 3, h, w, dtype=texels), torch.zeros(0, 3, h, w, dtype=texels), finest
        coarse = rand(g, batch, 3, h // 5 + 3, w // 5 + 3, dtype=torch.float64)
        wide = interpolate(coarse, (h + 8, w + 8), mode="bicubic").clamp(0, 1)
        previous, current = wide[..., 4 : 4 + h, 4 : 4 + w], wide[..., 4 - move[0] :, 4 - move[1] :][..., :h, :w]
        if dtype == torch.uint8:
            return (previous * 255).to(dtype), (current * 255).to(dtype), finest
        return previous.to(texels), current.to(texels), finest

    return make


def strided(dtype, g):
    previous, current, _ = shifted(24, 60)(dtype, g)
    channels_last = previous.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return channels_last[..., ::2], current[..., ::2], None


def begun(h, w, grid, finest=None, batch=1, holes=False):
    """Shifted, and begun at about the right flow, in pixels of its own grid."""

    def make(dtype, g):
        previous, current, _ = shifted(h, w, batch=batch, move=(2, 3))(dtype, g)
        scale = torch.tensor([grid[1] / w, grid[0] / h]).reshape(1, 2, 1, 1)
        initial = (torch.tensor([-2.7, -1.6]).reshape(1, 2, 1, 1) * scale).expand(batch, 2, *grid).contiguous()
        if holes:
            initial[0, 1, 0, 0], initial[0, 0, 1, 2] = float("nan"), float("inf")
        return previous, current, finest, initial

    return make


def not_finite(dtype, g):
    previous, current, _ = shifted(30, 30)(dtype, g)
    previous[0, 1, 20, 4], current[0, 0, 9, 9] = float("nan"), float("inf")
    return previous, current, None


# A search ends when its steps are shorter than 0.1 pixels: what rounding changes in it is far below that.
ONE = (torch.float32,)
CASES = [
    Case("optical_flow", "40x52", shifted(40, 52), atol=0.02, inductor=True),
    Case("optical_flow", "33x25-batch", shifted(33, 25, batch=2, move=(2, -1)), dtypes=(torch.float32, torch.float64), atol=0.02),
    Case("optical_flow", "48x64-finest-1", shifted(48, 64, finest=1), dtypes=ONE, atol=0.02),
    Case("optical_flow", "uint8", shifted(41, 30, dtype=torch.uint8), dtypes=ONE, atol=0.02),
    Case("optical_flow", "strided", strided, dtypes=ONE, atol=0.02),
    Case("optical_flow", "not-finite", not_finite, dtypes=ONE, atol=0.02),
    Case("optical_flow", "3x70", shifted(3, 70, move=(0, 1)), dtypes=ONE, atol=0.02),
    Case("optical_flow", "one-pixel", shifted(1, 1), dtypes=ONE, atol=0.02),
    Case("optical_flow", "initial", begun(40, 52, (40, 52)), dtypes=ONE, atol=0.02),
    Case("optical_flow", "initial-other-grid", begun(61, 70, (7, 9), batch=2), dtypes=ONE, atol=0.02),
    Case("optical_flow", "initial-finest-1", begun(64, 48, (16, 12), finest=1), dtypes=ONE, atol=0.02),
    Case("optical_flow", "initial-not-finite", begun(40, 40, (10, 10), holes=True), dtypes=ONE, atol=0.02),
    Case("optical_flow", "empty-batch", shifted(20, 20, batch=0), dtypes=ONE, atol=0.02),
]


def pictures(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


BAD = [
    Bad(
        "optical_flow",
        "channels",
        lambda: (pictures(1, 1, 8, 8), pictures(1, 1, 8, 8)),
        r"current must be \[B, 3, H, W\].*got \[1, 1, 8, 8\]",
    ),
    Bad(
        "optical_flow",
        "shape",
        lambda: (pictures(1, 3, 8, 9), pictures(1, 3, 8, 8)),
        r"previous must be of the shape of current, \[1, 3, 8, 8\], got \[1, 3, 8, 9\]",
    ),
    Bad(
        "optical_flow",
        "dtype",
        lambda: (pictures(1, 3, 8, 8, dtype=torch.uint8), pictures(1, 3, 8, 8)),
        "previous must be Float",
    ),
    Bad("optical_flow", "zero-size", lambda: (pictures(1, 3, 0, 8), pictures(1, 3, 0, 8)), "height and width must be at least 1"),
    Bad("optical_flow", "finest", lambda: (pictures(1, 3, 8, 8), pictures(1, 3, 8, 8), -1), "finest must be a level"),
    Bad(
        "optical_flow",
        "initial",
        lambda: (pictures(1, 3, 8, 8), pictures(1, 3, 8, 8), None, pictures(2, 2, 8, 8)),
        r"initial must be \[B, 2, h, w\]",
    ),
    Bad(
        "optical_flow",
        "initial-dtype",
        lambda: (pictures(1, 3, 8, 8), pictures(1, 3, 8, 8), None, pictures(1, 2, 8, 8, dtype=torch.float64)),
        "initial must be Float",
    ),
]
