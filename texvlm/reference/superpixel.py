"""Superpixels: k-means over Lab and place whose regions stay connected, merged to n, from coarse to fine."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .channels import object_boundary
from .salience import LAB_DELTA, SRGB_LINEAR_END, SRGB_TO_XYZ, WHITE, edge, luma, rgb_planes

COLOUR_STEPS = 1023
"""sRGB values are rounded to this many steps."""

LINEAR_MAX, CURVE_STEPS, CURVE_ONE = 65535, 4095, 16384
"""Linear light in 1 / LINEAR_MAX; the Lab curve f is tabulated at i / CURVE_STEPS, in 1 / CURVE_ONE."""

LAB_UNITS, LAB_BIAS = 16, 2048
"""Lab in 1/16; a and b with an offset, so that nothing is negative."""

PLACE_UNITS = 8
"""Centres of regions are kept in 1/8 pixel of the coarse level."""

CELLS_EACH, MOST_CELLS = 8, 2048
"""k-means starts from this many cells per superpixel, unless that makes more than MOST_CELLS."""

PIXELS_EACH = 160
"""The coarse level is the last one that has so many pixels per superpixel."""

COARSE_SWEEPS, FINE_SWEEPS = 6, 2
"""Sweeps over the borders at the coarse level, and at each finer one."""

COMPACTNESS, MERGE_COMPACTNESS = 10, 6
"""This much Lab distance weighs as much as the side of a cell (in k-means) or of a superpixel (in merging)."""

BORDER_COST = 15
"""In squared Lab distance: what a neighbour of another label costs, at the finer levels."""

USUAL_CONTRAST, MOST_SCALE = 150, 16
"""These three constants, squared, are for pictures whose neighbouring cells have this mean squared Lab distance; they grow and shrink
with it, by a factor from 1 / 256 to MOST_SCALE, so that dim pictures have regions too."""

RING = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))
"""The eight neighbours (dy, dx), clockwise from above; the even ones are the 4-neighbours."""

TRIED = (0, 6, 2, 4)
"""The order in which the labels of the 4-neighbours are tried: above, left, right, below."""


def integer_lab(rgb: Tensor) -> Tensor:
    """Return integer Lab `[..., 3]` (L, a, b in 1 / LAB_UNITS, a and b plus LAB_BIAS) of int64 sRGB steps `[..., 3]`."""
    srgb = torch.arange(COLOUR_STEPS + 1, dtype=torch.float64) / COLOUR_STEPS
    linear = torch.where(srgb <= SRGB_LINEAR_END, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    t = torch.arange(CURVE_STEPS + 1, dtype=torch.float64) / CURVE_STEPS
    curve = torch.where(t > LAB_DELTA**3, t ** (1 / 3), t / (3 * LAB_DELTA**2) + 4 / 29)
    linear_table = (LINEAR_MAX * linear + 0.5).floor().long().to(rgb.device)
    curve_table = (CURVE_ONE * curve + 0.5).floor().long().to(rgb.device)
    light = linear_table[rgb]
    f = []
    for row, white in zip(SRGB_TO_XYZ, WHITE, strict=True):
        red, blue = math.floor(32768 * row[0] / white + 0.5), math.floor(32768 * row[2] / white + 0.5)
        weighted = red * light[..., 0] + (32768 - red - blue) * light[..., 1] + blue * light[..., 2]
        f.append(curve_table[((weighted + 16384) >> 15) >> 4])
    return torch.stack(
        [
            116 * LAB_UNITS * f[1] // CURVE_ONE - 16 * LAB_UNITS,
            500 * LAB_UNITS * (f[0] - f[1]) // CURVE_ONE + LAB_BIAS,
            200 * LAB_UNITS * (f[1] - f[2]) // CURVE_ONE + LAB_BIAS,
        ],
        dim=-1,
    )


def level_size(height: int, width: int, level: int) -> tuple[int, int]:
    """Return the height and width of a mip level."""
    return max(1, height >> level), max(1, width >> level)


def level_lab(steps: Tensor, level: int) -> Tensor:
    """Return integer Lab `[h, w, 3]` of a level of the picture `[H, W, 3]`: of the rounded mean of each block.

    Blocks are 2^level pixels a side; the last row and column of blocks hold what is left.
    """
    height, width, _ = steps.shape
    h, w = level_size(height, width, level)
    row = (torch.arange(height, device=steps.device) >> level).clamp(max=h - 1)
    column = (torch.arange(width, device=steps.device) >> level).clamp(max=w - 1)
    block = (row[:, None] * w + column).flatten()
    sums = steps.new_zeros(h * w, 3).index_add_(0, block, steps.reshape(-1, 3))
    count = torch.bincount(block, minlength=h * w)[:, None]
    return integer_lab(((2 * sums + count) // (2 * count)).view(h, w, 3))


def plan(height: int, width: int, n: int) -> tuple[int, int, int]:
    """Return the coarse level, and the rows and columns of cells there, for min(n, H W) superpixels."""
    level = 0
    while max(height, width) >> (level + 1):
        h, w = level_size(height, width, level + 1)
        if h * w // PIXELS_EACH < n:
            break
        level += 1
    h, w = level_size(height, width, level)
    wanted = max(n, min(CELLS_EACH * n, MOST_CELLS))
    rows = min(max(int(math.sqrt(wanted * h / w) + 0.5), 1), h)
    columns = min(-(-wanted // rows), w)
    return level, max(rows, min(-(-n // columns), h)), columns


def cell_of(size: int, cells: int, device: torch.device) -> Tensor:
    """Return which of `cells` each of `size` pixels of an axis is in."""
    return (2 * torch.arange(size, device=device) + 1) * cells // (2 * size)


def means(lab: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return sums of (L, a, b, y, x, 1) and rounded means (L, a, b, y, x in 1 / PLACE_UNITS, pixels), `[count, 6]`."""
    height, width = labels.shape
    y, x = torch.meshgrid(torch.arange(height, device=lab.device), torch.arange(width, device=lab.device), indexing="ij")
    values = torch.cat([lab, torch.stack([y, x, torch.ones_like(y)], -1)], -1).reshape(-1, 6)
    sums = values.new_zeros(count, 6).index_add_(0, labels.flatten(), values)
    return sums, rounded(sums)


def rounded(sums: Tensor) -> Tensor:
    """Return the rounded means of sums `[..., 6]`."""
    n = sums[..., 5:]
    colour = (2 * sums[..., :3] + n) // (2 * n)
    place = (2 * PLACE_UNITS * sums[..., 3:5] + n) // (2 * n)
    return torch.cat([colour, place, n], -1)


def place_weight(height: int, width: int, compactness: int, regions: int) -> int:
    """Return the weight, over 65536, of a squared distance in 1 / PLACE_UNITS against one in 1 / LAB_UNITS."""
    unit = 65536 * (LAB_UNITS**2) // (PLACE_UNITS**2) * compactness**2
    return (unit * regions + height * width // 2) // (height * width)


def contrast_scale(model: Tensor, rows: int, columns: int) -> int:
    """Return, in 1/256, the mean squared Lab distance of cells side by side over USUAL_CONTRAST."""
    lab = model[:, :3].view(rows, columns, 3)
    squares = ((lab[1:] - lab[:-1]) ** 2).sum() + ((lab[:, 1:] - lab[:, :-1]) ** 2).sum()
    pairs = max(1, (rows - 1) * columns + rows * (columns - 1))
    return min(max(int(squares) * 256 // (pairs * USUAL_CONTRAST * LAB_UNITS**2), 1), 256 * MOST_SCALE)


def can_leave(same: Tensor) -> Tensor:
    """Return whether regions stay in one piece without these pixels, from which of RING have their label `[..., 8]`.

    The 4-neighbours of the label must be linked with each other inside the ring: as many of them as begin an arc,
    going clockwise, are the pieces that would be left. None at all: the pixel is the whole region.
    """
    before, two_before = same.roll(1, -1), same.roll(2, -1)
    begins = same & ~(before & two_before)
    return begins[..., ::2].sum(-1) == 1


def sweep(
    labels: Tensor,
    cost: Callable[[Tensor, Tensor, Tensor], Tensor],
    border: int,
    may_take: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Let each pixel of `[h, w]` choose among its own label and those of its 4-neighbours, in four interleaved quarters.

    Args:
        labels: int64 `[h, w]`.
        cost: of the pixels (y, x) in regions k.
        border: cost of each of the eight neighbours that has another label.
        may_take: which of the pixels (y, x) may be in regions k.
    """
    height, width = labels.shape
    labels = labels.clone()
    for odd_y in (0, 1):
        for odd_x in (0, 1):
            y, x = torch.meshgrid(torch.arange(odd_y, height, 2), torch.arange(odd_x, width, 2), indexing="ij")
            y, x = y.to(labels.device), x.to(labels.device)
            padded = torch.nn.functional.pad(labels, (1, 1, 1, 1), value=-1)
            ring = torch.stack([padded[y + 1 + dy, x + 1 + dx] for dy, dx in RING], -1)
            own = labels[y, x]
            best = own
            least = cost(y, x, own) + border * ((ring >= 0) & (ring != own[..., None])).sum(-1)
            for i in TRIED:
                label = ring[..., i]
                known = label.clamp(min=0)
                total = cost(y, x, known) + border * ((ring >= 0) & (ring != label[..., None])).sum(-1)
                wins = (label >= 0) & (label != own) & may_take(y, x, known) & (total < least)
                best, least = torch.where(wins, label, best), torch.where(wins, total, least)
            labels[y, x] = torch.where(can_leave(ring == own[..., None]), best, own)
    return labels


def merge(labels: Tensor, sums: Tensor, columns: int, wanted: int, weight: int) -> tuple[Tensor, Tensor]:
    """Merge regions that touch, always the pair with the least rise of the k-means energy, until `wanted` are left.

    Returns:
        the number of each cell's region, in the order of each region's first cell, and the means of the regions.
    """
    count = len(sums)
    total = {k: tuple(row) for k, row in enumerate(sums.tolist())}
    mean = {k: tuple(rounded(sums[k]).tolist()) for k in total}
    pairs = torch.cat(
        [
            torch.stack([labels[:, 1:].flatten(), labels[:, :-1].flatten()], -1),
            torch.stack([labels[1:].flatten(), labels[:-1].flatten()], -1),
        ]
    )
    pairs = torch.unique(pairs.sort(-1).values, dim=0)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    order = {(u, v): (u, v // columns - u // columns, v) for u, v in pairs.tolist()}  # ties: by the first pair of cells

    def price(u: int, v: int) -> int:
        p, q = mean[u], mean[v]
        colour = sum((p[i] - q[i]) ** 2 for i in range(3))
        far = sum((p[i] - q[i]) ** 2 for i in (3, 4))
        return 16 * p[5] * q[5] // (p[5] + q[5]) * min(colour + (weight * far >> 16), 1 << 34)

    region = list(range(count))
    while len(total) > wanted:
        u, v = min(order, key=lambda pair: (price(*pair), order[pair]))
        total[u] = tuple(a + b for a, b in zip(total[u], total.pop(v), strict=True))
        mean[u] = tuple(rounded(torch.tensor(total[u])).tolist())
        del mean[v]
        region = [u if k == v else k for k in region]
        merged: dict[tuple[int, int], tuple[int, int, int]] = {}
        for pair, place in order.items():
            low, high = sorted(u if k == v else k for k in pair)
            if low != high:
                merged[low, high] = min(place, merged.get((low, high), place))
        order = merged
    names = {k: i for i, k in enumerate(sorted(total))}
    return torch.tensor([names[k] for k in region]), torch.tensor([mean[k] for k in sorted(total)])


def superpixels(image: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return labels int64 `[B, H, W]` of connected regions of similar colour, and how many, int64 `[B]`.

    Convention: see `texvlm.superpixels`. Everything after the rounding of sRGB values to COLOUR_STEPS is integer
    arithmetic, so that this and the compiled op agree to the last label.

    Source: Achanta et al., "SLIC superpixels", 2012; Yao et al., "Real-time coarse-to-fine topologically preserving
    segmentation", 2015; Ward, 1963.
    """
    planes = rgb_planes(image)
    batch, _, height, width = planes.shape
    n = min(n, height * width)
    device = planes.device
    level, rows, columns = plan(height, width, n)
    steps = (planes.clamp(0, 1) * COLOUR_STEPS + 0.5).floor().long().permute(0, 2, 3, 1)
    out = torch.empty(batch, height, width, dtype=torch.int64, device=device)
    for b in range(batch):
        h, w = level_size(height, width, level)
        lab = level_lab(steps[b], level)
        home_y, home_x = cell_of(h, rows, device), cell_of(w, columns, device)
        labels = home_y[:, None] * columns + home_x
        sums, model = means(lab, labels, rows * columns)
        scale = contrast_scale(model, rows, columns)
        weight = place_weight(h, w, COMPACTNESS, rows * columns) * scale >> 8

        def near(y: Tensor, x: Tensor, k: Tensor, home_y: Tensor = home_y, home_x: Tensor = home_x) -> Tensor:
            return ((k // columns - home_y[y]).abs() <= 1) & ((k % columns - home_x[x]).abs() <= 1)

        for _ in range(COARSE_SWEEPS):

            def cost(y: Tensor, x: Tensor, k: Tensor, lab: Tensor = lab, model: Tensor = model, weight: int = weight) -> Tensor:
                far = (PLACE_UNITS * y - model[k, 3]) ** 2 + (PLACE_UNITS * x - model[k, 4]) ** 2
                return ((lab[y, x] - model[k, :3]) ** 2).sum(-1) + (weight * far >> 16)

            labels = sweep(labels, cost, 0, near)
            sums, model = means(lab, labels, rows * columns)
        if rows * columns > n:
            table, model = merge(labels, sums, columns, n, place_weight(h, w, MERGE_COMPACTNESS, n) * scale >> 8)
            labels, model = table.to(device)[labels], model.to(device)
        for finer in range(max(level - 1, 0), -1, -1):
            h, w = level_size(height, width, finer)
            if finer < level:
                y = (torch.arange(h, device=device) // 2).clamp(max=labels.shape[0] - 1)
                x = (torch.arange(w, device=device) // 2).clamp(max=labels.shape[1] - 1)
                labels = labels[y][:, x]
            lab = level_lab(steps[b], finer)

            def colour(y: Tensor, x: Tensor, k: Tensor, lab: Tensor = lab, model: Tensor = model) -> Tensor:
                return ((lab[y, x] - model[k, :3]) ** 2).sum(-1)

            for _ in range(FINE_SWEEPS):
                labels = sweep(
                    labels, colour, BORDER_COST * LAB_UNITS**2 * scale >> 8, lambda y, x, k: torch.ones_like(k, dtype=torch.bool)
                )
        out[b] = labels
    return out, torch.full((batch,), n, dtype=torch.int64, device=device)


def superpixel_channels(labels: Tensor, n: int) -> Tensor:
    """Return float32 `[B, 3, H, W]`: label, distance from the label's centroid over sqrt(area / pi), share of the picture."""
    batch, height, width = labels.shape
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y, x = y.to(labels.device, torch.float64), x.to(labels.device, torch.float64)
    out = torch.zeros(batch, 3, height, width, dtype=torch.float64, device=labels.device)
    out[:, 0] = labels
    for b in range(batch):
        for k in range(n):
            inside = labels[b] == k
            area = inside.sum()
            if area:
                far = ((y - y[inside].mean()) ** 2 + (x - x[inside].mean()) ** 2).sqrt()
                out[b, 1][inside] = (far / (area / math.pi).sqrt())[inside]
                out[b, 2][inside] = area.double() / (height * width)
    return out.float()


def boundaries(image: Tensor, labels: Tensor) -> Tensor:
    """Return float32 `[B, H, W]`: 1 where a 4-neighbour has another label and the edge is above two means."""
    return object_boundary(edge(luma(rgb_planes(image))), labels).float()
