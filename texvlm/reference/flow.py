"""Optical flow by coarse-to-fine inverse search, with forward-backward occlusion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .pyramid import generate_mipmaps, split_levels
from .salience import luma, rgb_planes

PATCH = 8
"""Side of a patch, in pixels of its level."""

COARSEST_SIDE, COARSEST_SHORT_SIDE = 24, 16
"""No level whose longer or shorter side is shorter than these is searched."""

FULL_SIZE = 1280
"""Pictures up to this long are searched down to level 0, longer ones to level 1."""

MOST_STEPS = 8
STILL_STEP = 0.1
"""Gauss-Newton steps of a patch, and the length in pixels below which a step is the last."""

SEARCH_RADIUS = 8.0
"""A step that would lead farther than this from where the patch began is not made, and ends the search."""

NOISE = 3.5e-5
"""Variance of luma that is not motion."""

LEAST_CURVATURE = 5e-6
"""Added to the diagonal of the normal matrix."""

MOST_GAIN = 4.0
"""The pictures' contrasts are taken to differ by no more than this factor."""

APART = 0.5
"""A neighbour's flow is tried when it differs by at least this many pixels from the first and from the best one."""


class Pass(NamedTuple):
    """How a level is searched: pixels between nodes, how often, and how the nodes are made smooth after each time."""

    stride: int
    searches: int
    steps: int
    smoothness: float
    softness: float


FINEST, MIDDLE, COARSE = Pass(4, 1, 12, 36.0, 0.12), Pass(5, 3, 4, 25.0, 2.0), Pass(3, 7, 12, 15.0, 4.0)
"""For the finest level, for those between, and for those whose longer side is shorter than COARSE_SIDE."""

COARSE_SIDE, KNOWN_SIDE = 120, 100

OCCLUSION_SHARE, OCCLUSION_FLOOR = 0.01, 0.5
"""Occluded where |f + b|^2 > share (|f|^2 + |b|^2) + floor; tested once, at its centre, for each block of half a stride."""


def read(planes: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return planes `[D, h, w]` at places `[D, ...]` in texels, bilinearly, borders replicated."""
    height, width = planes.shape[1:]
    flat = planes.flatten(1)
    y0, x0 = y.floor(), x.floor()
    result = torch.zeros_like(y)
    for i in (0, 1):
        for j in (0, 1):
            weight = (1 - (y - y0 - i).abs()) * (1 - (x - x0 - j).abs())
            index = (y0 + i).clamp(0, height - 1).long() * width + (x0 + j).clamp(0, width - 1).long()
            result = result + weight * flat.gather(1, index.flatten(1)).reshape(y.shape)
    return result


def read_nodes(nodes: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return nodes `[2, D, rows, columns]` at places `[D, ...]` in units of the grid, as `[2, D, ...]`."""
    rows, columns = nodes.shape[2:]
    return torch.stack([read(plane, y * rows - 0.5, x * columns - 0.5) for plane in nodes])


class Patches:
    """The templates of all nodes: `[D, N, PATCH, PATCH]` times `gain` `[D]`, upper left pixels at `top`, `left` `[N]`."""

    def __init__(self, planes: Tensor, top: Tensor, left: Tensor, gain: Tensor) -> None:
        planes = planes * gain[:, None, None]
        span = torch.arange(PATCH, dtype=planes.dtype)
        self.y = (top[:, None, None] + span[:, None]).expand(-1, PATCH, PATCH)
        self.x = (left[:, None, None] + span).expand(-1, PATCH, PATCH)

        def at(dy: int, dx: int) -> Tensor:
            shape = (len(planes), *self.y.shape)
            return read(planes, (self.y + dy).expand(shape), (self.x + dx).expand(shape))

        self.luma = at(0, 0)
        self.dx = (at(0, 1) - at(0, -1)) / 2
        self.dy = (at(1, 0) - at(-1, 0)) / 2
        dx, dy = (d - d.mean((2, 3), keepdim=True) for d in (self.dx, self.dy))
        self.xx, self.xy, self.yy = ((a * b).sum((2, 3)) for a, b in ((dx, dx), (dx, dy), (dy, dy)))

    def fit(self, target: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the squared error of the patches moved by (u, v) `[D, N]`, and the right-hand side of the normal equations."""
        residual = read(target, self.y + v[..., None, None], self.x + u[..., None, None]) - self.luma
        residual = residual - residual.mean((2, 3), keepdim=True)
        return residual.square().sum((2, 3)), (self.dx * residual).sum((2, 3)), (self.dy * residual).sum((2, 3))


def begin(patches: Patches, target: Tensor, prior: Tensor, y: Tensor, x: Tensor, given: bool) -> tuple[Tensor, Tensor]:
    """Return where each patch begins: the prior `[2, D, rows, columns]` at its node, or that of a prior node around if it fits better.

    Args:
        patches: what is matched.
        target: `[D, h, w]` where.
        prior: flows in pixels of this level.
        y: `[D, N]` the nodes, in units of the prior's grid.
        x: likewise.
        given: the prior was not found in these pictures: that nothing moves is tried too.
    """
    rows, columns = prior.shape[2:]
    first_u, first_v = u, v = read_nodes(prior, y, x)
    least = patches.fit(target, u, v)[0]
    place_y, place_x = ((p * n - 0.5) for p, n in ((y, rows), (x, columns)))
    # Half-way, and beyond the border, the nearest node is the one before: the weight of the next must be larger.
    near_y, near_x = ((p - 0.5).ceil().clamp(0, n - 1) for p, n in ((place_y, rows), (place_x, columns)))
    candidates = []
    for k in range(1, 9, 2):  # above, left, right, below
        at = (near_y + k // 3 - 1).clamp(0, rows - 1).long() * columns + (near_x + k % 3 - 1).clamp(0, columns - 1).long()
        candidates.append([plane.flatten(1).gather(1, at) for plane in prior])
    if given:
        candidates.append([torch.zeros_like(u)] * 2)
    for cu, cv in candidates:
        apart = torch.minimum((cu - first_u) ** 2 + (cv - first_v) ** 2, (cu - u) ** 2 + (cv - v) ** 2) >= APART**2
        error = patches.fit(target, cu, cv)[0]
        better = apart & (error < least)
        u, v, least = torch.where(better, cu, u), torch.where(better, cv, v), torch.where(better, error, least)
    return u, v


def search(patches: Patches, target: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the patches' flows and squared errors after inverse Gauss-Newton steps from (u, v)."""
    xx, xy, yy = patches.xx + LEAST_CURVATURE, patches.xy, patches.yy + LEAST_CURVATURE
    determinant = xx * yy - xy * xy
    u0, v0, best_u, best_v = u, v, u, v
    least = torch.full_like(u, 3e38)
    runs = torch.ones_like(u, dtype=torch.bool)
    for _ in range(MOST_STEPS):
        error, bx, by = patches.fit(target, u, v)
        runs = runs & (error < least)
        least, best_u, best_v = torch.where(runs, error, least), torch.where(runs, u, best_u), torch.where(runs, v, best_v)
        du, dv = (yy * bx - xy * by) / determinant, (xx * by - xy * bx) / determinant
        runs = runs & ((u - du - u0) ** 2 + (v - dv - v0) ** 2 <= SEARCH_RADIUS**2)
        u, v = torch.where(runs, u - du, u), torch.where(runs, v - dv, v)
        last = runs & (du**2 + dv**2 < STILL_STEP**2)
        best_u, best_v = torch.where(last, u, best_u), torch.where(last, v, best_v)
        runs = runs & ~last
    return best_u, best_v, least


def smooth(found: Tensor, precision: tuple[Tensor, Tensor, Tensor], how: Pass) -> Tensor:
    """Return the nodes `[2, D, rows, columns]` after Jacobi steps towards the smoothest flow that fits.

    That is the minimum of sum_p (u_p - found_p)' P_p (u_p - found_p) + smoothness sum_pq sqrt(|u_p - u_q|^2 + softness^2)

    where a node at the border has itself for the neighbour that it lacks.
    """
    xx, xy, yy = precision
    flow = found
    for _ in range(how.steps):
        around = pad(flow, (1, 1, 1, 1), mode="replicate")
        neighbours = (around[..., :-2, 1:-1], around[..., 2:, 1:-1], around[..., 1:-1, :-2], around[..., 1:-1, 2:])
        total, pulled = torch.zeros_like(xx), torch.zeros_like(flow)
        for other in neighbours:
            weight = how.smoothness / ((other - flow).square().sum(0) + how.softness**2).sqrt()
            total, pulled = total + weight, pulled + weight * other
        bx, by = xx * found[0] + xy * found[1] + pulled[0], xy * found[0] + yy * found[1] + pulled[1]
        determinant = (xx + total) * (yy + total) - xy * xy
        flow = torch.stack([((yy + total) * bx - xy * by) / determinant, ((xx + total) * by - xy * bx) / determinant])
    return flow


def optical_flow(
    previous: Tensor, current: Tensor, finest: int | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the flow from the current to the previous picture, and where it has nothing to point at.

    Args:
        previous: `[B, C, H, W]`, C of 1, 3 or 4, float or uint8.
        current: of the same shape.
        finest: the mip level down to which is searched.
        initial: `[B, 2, h, w]`, (x, y) in pixels of its own grid: what the search begins with, backwards its opposite. Levels
            shorter than KNOWN_SIDE are left out then.

    Returns:
        flow, float32 `[B, 2, H, W]`, (x, y) in pixels, and occlusion, bool `[B, H, W]`. Not differentiable.

    Convention: both directions at once, in float64. Per level, from the coarsest: every `stride` pixels a node, whose patch lies
    around it inside the picture; it begins at the coarser level's flow there, or at a neighbour's, goes by Gauss-Newton steps on the
    differences from the patch's mean, of templates brought to the contrast of what is searched (the standard deviation of the coarsest
    level), and is made smooth with its normal matrix over its mean squared residual as precision. Coarse
    levels are searched again from their own smooth flow. Between the last nodes the flow is bilinear.

    Source: Kroeger et al., "Fast optical flow using dense inverse search", 2016, without its variational step; the test of Meister et
    al., "UnFlow", 2018.
    """
    batch, _, height, width = current.shape
    both = torch.cat([luma(rgb_planes(p)).double() for p in (previous, current)])
    if batch == 0:
        return torch.zeros(0, 2, height, width), torch.zeros(0, height, width, dtype=torch.bool)
    count = 1
    while max(height, width) >> count >= COARSEST_SIDE and min(height, width) >> count >= COARSEST_SHORT_SIDE:
        count += 1
    finest = min(int(max(height, width) > FULL_SIZE) if finest is None else finest, count - 1)
    levels = [p[..., 0] for p in split_levels(generate_mipmaps(both[:, None], ["mean"], count), height, width, count)]
    contrast = levels[-1].std((1, 2), correction=0)
    before = contrast.roll(batch)
    gain = torch.where(before > 0, contrast / before, torch.where(contrast > 0, MOST_GAIN, 1.0)).clamp(1 / MOST_GAIN, MOST_GAIN)
    prior, given = None, initial is not None
    above: tuple[int, ...] = ()
    if initial is not None:
        above = (0, *initial.shape[2:])
        limit = torch.tensor([above[2], above[1]])[:, None, None]
        field = torch.where(initial.isfinite().all(1, keepdim=True), initial.double().clamp(-limit, limit), 0.0).transpose(0, 1)
        prior = torch.cat([field, -field], 1)
        while count - 1 > finest and max(levels[count - 1].shape[1:]) < KNOWN_SIDE:
            count -= 1
    extent = (1.0, 1.0)  # of the prior's grid, over the picture: the last node may stand for less than a stride
    for level in range(count - 1, finest - 1, -1):
        target = levels[level]
        template = torch.cat([target[batch:], target[:batch]])
        h, w = target.shape[1:]
        how = FINEST if level == finest else COARSE if initial is None and max(h, w) < COARSE_SIDE else MIDDLE
        rows, columns = -(-h // how.stride), -(-w // how.stride)
        i, j = (p.flatten() for p in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        top, left = (k * how.stride + how.stride // 2 - PATCH // 2 for k in (i, j))
        patches = Patches(
            template, top.clamp(max=h - PATCH).clamp(min=0).double(), left.clamp(max=w - PATCH).clamp(min=0).double(), gain
        )
        node_y, node_x = (((k + 0.5) * how.stride / n).expand(2 * batch, -1) for k, n in ((i, h), (j, w)))
        if prior is not None:
            prior = prior * torch.tensor([w / above[2], h / above[1]]).double()[:, None, None, None]
        for _ in range(how.searches):
            u = v = torch.zeros(2 * batch, rows * columns, dtype=torch.float64)
            if prior is not None:
                u, v = begin(patches, target, prior, node_y / extent[0], node_x / extent[1], given)
            given = False
            u, v, error = search(patches, target, u, v)
            shape = (2 * batch, rows, columns)
            precision = 1 / (error / PATCH**2 + NOISE)
            matrix = [(m * precision).reshape(shape) for m in (patches.xx, patches.xy, patches.yy)]
            prior = smooth(torch.stack([u.reshape(shape), v.reshape(shape)]), (matrix[0], matrix[1], matrix[2]), how)
            extent = (rows * how.stride / h, columns * how.stride / w)
        above = target.shape
    assert prior is not None
    scale = torch.tensor([width / levels[finest].shape[2], height / levels[finest].shape[1]]).double()
    prior = prior * scale[:, None, None, None]

    def at(part: slice, y: Tensor, x: Tensor) -> Tensor:
        return read_nodes(prior[:, part], y / height / extent[0], x / width / extent[1])

    def centres(n: int, block: int) -> Tensor:
        low = torch.arange(0, n, block)
        return (low + (low + block).clamp(max=n)).double() / 2

    def grid(block: int) -> list[Tensor]:
        places = torch.meshgrid(centres(height, block), centres(width, block), indexing="ij")
        return [p.expand(batch, *p.shape) for p in places]

    forward, backward = slice(0, batch), slice(batch, 2 * batch)
    flow = at(forward, *grid(1)).transpose(0, 1)
    block = FINEST.stride * 2**finest // 2
    y, x = grid(block)
    f = at(forward, y, x)
    to_x, to_y = x + f[0], y + f[1]
    b = at(backward, to_y, to_x)
    gap = (f + b).square().sum(0)
    hidden = gap > OCCLUSION_SHARE * (f.square().sum(0) + b.square().sum(0)) + OCCLUSION_FLOOR
    hidden = hidden | (to_y < 0) | (to_x < 0) | (to_y > height) | (to_x > width)
    hidden = hidden.repeat_interleave(block, 1).repeat_interleave(block, 2)
    return flow.float(), hidden[:, :height, :width]
