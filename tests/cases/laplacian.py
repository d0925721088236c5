import torch

import texvlm
from cases import Bad, Case, rand

SIZES = [(8, 8, 3), (7, 5, 1), (1, 9, 4), (6, 1, 5), (1, 1, 2), (2, 3, 3), (16, 12, 3), (13, 10, 3)]


def packed(h, w, c, batch=2, levels=None):
    def make(dtype, g):
        count = levels or texvlm.level_count(h, w)
        # Any buffer of this shape is a pyramid or a set of bands: both maps are linear.
        return rand(g, batch, texvlm.pyramid.texel_count(h, w, count), c, dtype=dtype), h, w, count

    return make


def adjoint(op):
    """The adjoint by autograd through the reference, in the accumulators' dtype."""

    def run(grad, h, w, levels):
        from texvlm import reference

        point = torch.zeros(grad.shape, dtype=torch.float64).requires_grad_()
        with torch.enable_grad():
            out = getattr(reference, op)(point, h, w, levels)
        result = torch.autograd.grad(out, point, grad.double(), create_graph=grad.requires_grad)[0]
        return result if grad.dtype == torch.float64 else result.float()

    return run


OPS = ("laplacian_decompose", "laplacian_reconstruct")
CASES = [
    *(Case(op, f"{h}x{w}x{c}", packed(h, w, c), grads=(0,), inductor=(h, w) == (8, 8)) for op in OPS for h, w, c in SIZES),
    *(Case(op, "two-levels", packed(12, 70, 3, levels=2)) for op in OPS),
    *(Case(op, "two-levels-small", packed(6, 9, 3, levels=2), grads=(0,)) for op in OPS),
    *(Case(op, "one-level", packed(4, 6, 3, levels=1), grads=(0,)) for op in OPS),
    *(Case(op, "wide", packed(6, 262, 3), atol=1e-5) for op in OPS),
    *(Case(op, "empty-batch", packed(4, 4, 3, batch=0)) for op in OPS),
    *(Case(f"{op}_backward", "", packed(13, 10, 3, batch=1), grads=(0,), reference=adjoint(op)) for op in OPS),
]

data = torch.zeros(1, 21, 3)
BAD = [
    *(Bad(op, "T", lambda: (data, 4, 5, 3), r"data must be \[B, T, C\] = \[\*, 25, \*\], got \[1, 21, 3\]") for op in OPS),
    *(Bad(op, "levels", lambda: (data, 4, 4, 4), "levels must be from 1 to 3") for op in OPS),
    *(Bad(op, "strided", lambda: (torch.zeros(1, 21, 6)[..., ::2], 4, 4, 3), "data must be contiguous") for op in OPS),
    *(Bad(op, "dtype", lambda: (data.int(), 4, 4, 3), "data must be float32.*got Int") for op in OPS),
    *(Bad(op, "zero-size", lambda: (data, 0, 4, 3), "height and width must be at least 1") for op in OPS),
]
