"""How fast are 273 patches of 16 x 16 x 3 of a 1024 x 1024 picture against grid_sample and unfold?

Cells of 16 px (aligned) against `unfold`, which can give nothing else; patches at any place against
`grid_sample` with a grid made beforehand. All fp32; ours writes [N, C, 16, 16]. Then what the peers cannot do
in one call (a LOD for each patch, rotation), and the gradients.
"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench

SIDE, COUNT, SIZE = 1024, 273, 16
NEVER = "F.unfold + index"


def patch_grid(center: torch.Tensor) -> torch.Tensor:
    """The grid that makes grid_sample read the same samples: [1, N * 16, 16, 2] in [-1, 1]."""
    line = (torch.arange(SIZE) - (SIZE - 1) / 2) / SIDE
    x = (center[0, :, 0, None, None] + line[None, None, :]).expand(-1, SIZE, SIZE)
    y = (center[0, :, 1, None, None] + line[None, :, None]).expand(-1, SIZE, SIZE)
    return (2 * torch.stack([x, y], -1) - 1).reshape(1, -1, SIZE, 2).contiguous()


def sampler(image: torch.Tensor, grid: torch.Tensor):
    """grid_sample -> [1, C, N * 16, 16]."""
    return lambda: torch.nn.functional.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)


def forward_backward(call, inputs):
    """The call and the gradients of all inputs for a gradient of ones."""

    def run() -> tuple[torch.Tensor, ...]:
        out = call()
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


def main() -> int:
    bench = Bench(__doc__)
    answers = []
    for channels in (3, 40):
        image = torch.rand(1, channels, SIDE, SIDE)
        texture = texvlm.Texture(image)
        cells = torch.randperm((SIDE // SIZE) ** 2)[:COUNT].sort().values
        row, column = cells // (SIDE // SIZE), cells % (SIDE // SIZE)
        aligned = (torch.stack([column, row], -1)[None] + 0.5) * (SIZE / SIDE)
        anywhere = aligned + torch.rand(1, COUNT, 2) / SIDE * 7
        lod = torch.zeros(1, COUNT)

        def ours(center, lod=lod, axes=None, t=texture, data=texture.data):
            return lambda: torch.ops.texvlm.extract_patches(
                data, center, lod, SIDE, SIDE, ["mean"], t.levels, SIZE, "clamp", axes
            )

        view = image.unfold(2, SIZE, SIZE).unfold(3, SIZE, SIZE)
        wanted = view[0][:, row, column].transpose(0, 1)
        if not torch.equal(ours(aligned)()[0], wanted):
            raise AssertionError("the aligned patches differ from the picture's own cells")

        # what is read and what is written
        moves = 2 * 4 * COUNT * channels * SIZE * SIZE
        calls = {
            US: ours(aligned),
            "Tensor.unfold view + index": lambda v=view, r=row, c=column: v[0][:, r, c],
        }
        if channels == 3 and not bench.quick:
            calls[NEVER] = lambda i=image, c=cells: torch.nn.functional.unfold(i, SIZE, stride=SIZE)[..., c]
        times = bench.compare(f"aligned cells, C = {channels}", calls, moves=moves, fresh=True)
        ratio = times.ratio("Tensor.unfold view + index")
        if channels == 3:
            bench.gate("aligned: no slower than Tensor.unfold + index", ratio, at_least=1.0)
            answers.append(f"{ratio:.1f}x as fast as unfold + index on aligned cells")

        grid = patch_grid(anywhere)
        other = sampler(image, grid)
        error = (other().view(channels, COUNT, SIZE, SIZE).transpose(0, 1) - ours(anywhere)()[0]).abs().max()
        if error > 1e-4:
            raise AssertionError(f"the patches differ from grid_sample by {error}")
        times = bench.compare(f"anywhere, C = {channels}", {US: ours(anywhere), "grid_sample": other}, moves=moves, fresh=True)
        ratio = times.ratio("grid_sample")
        if channels == 3:
            bench.gate("anywhere: faster than grid_sample", ratio, at_least=4.0)
            answers.append(f"{ratio:.1f}x as fast as grid_sample anywhere")

        lods = torch.rand(1, COUNT) * 4
        angle = torch.rand(1, COUNT) * 6.3
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
        bench.compare(
            f"what one call of a peer cannot do, C = {channels}",
            {
                US + ", a LOD each (two levels)": ours(anywhere, lods),
                US + ", rotated, LOD 0": ours(anywhere, lod, turn),
                US + ", rotated, a LOD each": ours(anywhere, lods, turn),
                "grid_sample (one level)": other,
            },
        )

        flat = texvlm.Texture(image, levels=1)
        data, uv = flat.data.requires_grad_(), anywhere.clone().requires_grad_()
        picture, places = image.clone().requires_grad_(), grid.clone().requires_grad_()
        bench.compare(
            f"forward + backward to texels and centres, one level, C = {channels}",
            {
                US: forward_backward(ours(uv, t=flat, data=data), [data, uv]),
                "grid_sample (texels and grid)": forward_backward(sampler(picture, places), [picture, places]),
                "zero-filling of the gradient": lambda i=image: torch.zeros_like(i),
            },
        )
    return bench.finish(f"273 patches of 16 x 16 x 3: {' and '.join(answers)}.")


if __name__ == "__main__":
    sys.exit(main())
