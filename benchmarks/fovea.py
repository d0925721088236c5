"""What does a fovea of 273 tokens cost against grid_sample on every level of a 1024 x 1024 picture?

The peer reads each token from the two levels that its LOD lies between, one grid_sample a level, and blends
them with weights. It gets the pyramid, the layout, the LODs, the grids and the weights for free.
"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench

SIDE, SIZE = 1024, 16


def level_grids(tokens: texvlm.FoveatedTokens, levels: int) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(level, tokens that read it, their grid [1, n * 16, 16, 2], their weight [n, 1, 1, 1])."""
    uv, lod = tokens.uv.flatten(0, 2), tokens.lod.flatten()
    line = torch.arange(SIZE) - (SIZE - 1) / 2
    step = line * torch.exp2(lod)[:, None] / SIDE
    x = (uv[:, 0, None] + step)[:, None, :].expand(-1, SIZE, SIZE)
    y = (uv[:, 1, None] + step)[:, :, None].expand(-1, SIZE, SIZE)
    grid = 2 * torch.stack([x, y], -1) - 1
    out = []
    for level in range(levels):
        weight = (1 - (lod - level).abs()).clamp(min=0)
        chosen = weight.nonzero()[:, 0]
        if len(chosen):
            out.append((level, chosen, grid[chosen].reshape(1, -1, SIZE, 2), weight[chosen, None, None, None]))
    return out


def by_grid_sample(texture: texvlm.Texture, tokens: texvlm.FoveatedTokens):
    """The same patches by one grid_sample for each level."""
    plan = level_grids(tokens, texture.levels)
    pictures = [texture.level(level).contiguous() for level, *_ in plan]
    count = tokens.lod.numel()

    def run() -> torch.Tensor:
        out = torch.zeros(count, texture.channels, SIZE, SIZE)
        for picture, (_, chosen, grid, weight) in zip(pictures, plan, strict=True):
            part = torch.nn.functional.grid_sample(picture, grid, padding_mode="border", align_corners=False)
            part = part.view(texture.channels, -1, SIZE, SIZE).transpose(0, 1)
            out.index_add_(0, chosen, part * weight)
        return out

    return run


def main() -> int:
    bench = Bench(__doc__)
    answer = ""
    layout = texvlm.FoveaLayout()
    for channels, fixations in ((3, 1), (3, 8), (40, 1)):
        texture = texvlm.Texture(torch.rand(1, channels, SIDE, SIDE))
        fixation = torch.rand(1, fixations, 2) * 0.4 + 0.3
        tokens = texvlm.sample_foveated(texture, fixation, layout)
        peer = by_grid_sample(texture, tokens)
        error = (peer() - tokens.patches.flatten(0, 2)).abs().max()
        if error > 1e-4:
            raise AssertionError(f"the patches differ from grid_sample by {error}")
        uv, lod = tokens.uv.flatten(1, 2), tokens.lod.flatten(1, 2)
        times = bench.compare(
            f"C = {channels}, {fixations} x 273 tokens",
            {
                US: lambda t=texture, f=fixation: texvlm.sample_foveated(t, f, layout),
                US + ", the patches alone": lambda t=texture, u=uv, m=lod: t.patches(u, m),
                "grid_sample per level": peer,
            },
            moves=2 * 4 * tokens.patches.numel(),
            fresh=True,
        )
        if (channels, fixations) == (3, 1):
            ratio = times.ratio("grid_sample per level")
            answer = f"273 tokens take {1e3 * times.median():.2f} ms, grid_sample {ratio:.1f}x as long"

        e0 = torch.tensor(80.0, requires_grad=True)
        gaze, data = fixation.clone().requires_grad_(), texture.data.detach().requires_grad_()

        def train(t=texture, f=gaze, d=data, e=e0):
            out = texvlm.sample_foveated(t.replace(d), f, texvlm.FoveaLayout(e0=e)).patches
            return torch.autograd.grad(out, [f, e, d], torch.ones_like(out))

        def look(t=texture, f=gaze, e=e0):
            out = texvlm.sample_foveated(t, f, texvlm.FoveaLayout(e0=e)).patches
            return torch.autograd.grad(out, [f, e], torch.ones_like(out))

        bench.compare(
            f"forward + backward, C = {channels}, {tokens.lod.numel()} tokens",
            {US + ", fixation and e0": look, US + ", texels too": train},
        )
    return bench.finish(f"{answer}, with its grids for free.")


if __name__ == "__main__":
    sys.exit(main())
