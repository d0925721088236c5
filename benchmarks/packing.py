"""How fast are the rows of 273 of 4096 cells made, against Qwen-VL's processor on the whole picture and taking them there?

transformers' processor (its PIL and NumPy one) makes the rows of all cells, of which those that are kept are taken; ours makes these
alone, into new memory each time. The uint8 picture is [H, W, 3], as a decoder leaves it. Then float pictures against the same in torch,
cells of mixed levels (each reads as many times more pixels), and gradients.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import texvlm
from benchmarks._harness import US, Bench, Call

PATCH, GRID, COUNT = 16, 64, 273
SIZE = (2 * PATCH * GRID, 2 * PATCH * GRID)
PROCESSOR, TORCH = "processor + index", "torch on the whole picture + index"


def by_processor(processor: Qwen2VLImageProcessorPil, picture: Image.Image, cells: Tensor) -> Tensor:
    rows = processor(images=picture, return_tensors="pt")["pixel_values"]
    return rows.view(GRID * GRID, -1)[cells].view(4 * len(cells), -1)


def by_torch(image: Tensor, cells: Tensor) -> Tensor:
    """The rows of a float picture [3, H, W]."""
    if image.shape[1:] != SIZE:
        image = F.interpolate(image[None], SIZE, mode="bicubic", antialias=True)[0]
    patches = ((image - 0.5) / 0.5).view(3, GRID, 2, PATCH, GRID, 2, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
    kept = patches.reshape(GRID * GRID, 4, 3, 1, PATCH, PATCH)[cells]
    return kept.expand(-1, -1, -1, 2, -1, -1).reshape(4 * len(cells), -1)


def with_gradient(call: Call, leaf: Tensor, weights: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(call(), leaf, weights)
    return gradient


def photograph(side: int) -> Tensor:
    """uint8 [side, side, 3], smooth but for a little noise."""
    smooth = F.interpolate(torch.rand(1, 3, side // 8, side // 8), (side, side), mode="bicubic")[0].permute(1, 2, 0)
    return ((smooth + 0.02 * torch.randn(side, side, 3)).clamp(0, 1) * 255).to(torch.uint8)


def main() -> int:
    bench = Bench(__doc__)
    area = dict.fromkeys(("shortest_edge", "longest_edge"), SIZE[0] * SIZE[1])
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, size=area, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    cells = torch.randperm(GRID * GRID)[:COUNT].sort().values
    level = torch.randint(4, (COUNT,))
    mixed = torch.stack([level, *((torch.rand(COUNT) * (GRID >> level)).long() for _ in range(2))], -1)
    rows = (4 * COUNT, 2 * 3 * PATCH * PATCH)
    weights = torch.randn(rows)
    moves, threads = 2 * weights.nbytes, torch.get_num_threads()
    ratios = []
    for side, most in ((SIZE[0], 3), (2400, 15), (1500, 15)):
        name = "as large as it is" if side == SIZE[0] else f"from {side} x {side}"
        pixels = photograph(side)
        peer = partial(by_processor, processor, Image.fromarray(pixels.numpy()), cells)
        ours = partial(texvlm.pack_cells, pixels.numpy(), cells, SIZE)
        bench.gate(f"{name}: largest difference to the processor", float((peer() - ours()).abs().max()), at_most=1e-5)
        for n in dict.fromkeys((1, threads)):
            torch.set_num_threads(n)
            times = bench.compare(f"uint8, {name}, {n} thread(s)", {US: ours, PROCESSOR: peer}, moves=moves, fresh=True)
            bench.gate("times as fast as the processor and indexing", times.ratio(PROCESSOR), at_least=5)
            bench.gate("milliseconds", 1e3 * times.median(), at_most=most)
            ratios.append(times.ratio(PROCESSOR))
        planes = pixels.permute(2, 0, 1).contiguous()
        bench.compare(
            f"uint8, {name}: other layouts, other cells",
            {
                US: ours,
                "three planes": partial(texvlm.pack_cells, planes, cells, SIZE),
                "all 4096 cells": partial(texvlm.pack_cells, planes, torch.arange(GRID * GRID), SIZE),
                "273 cells of levels 0 to 3": partial(texvlm.pack_cells, planes, mixed, SIZE),
            },
        )
        image = (planes.float() / 255).requires_grad_()
        ours, peer = partial(texvlm.pack_cells, image, cells, SIZE), partial(by_torch, image, cells)
        bench.compare(
            f"float32, {name}",
            {
                US: torch.no_grad()(ours),
                TORCH: torch.no_grad()(peer),
                f"{US}, with gradient": partial(with_gradient, ours, image, weights),
                f"{TORCH}, with gradient": partial(with_gradient, peer, image, weights),
            },
        )
    return bench.finish(
        f"{min(ratios):.0f} to {max(ratios):.0f} times as fast as the processor and indexing, and the same rows within 1e-5"
    )


if __name__ == "__main__":
    sys.exit(main())
