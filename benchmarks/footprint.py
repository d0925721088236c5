"""How fast are 65,536 anisotropic samples of a 1024 x 1024 texture, 8 taps each, against grid_sample of the taps and their mean?

Footprints of 8 x 1 pixels at random angles, so 8 taps at LOD 0: level 0 alone, as grid_sample knows no other. Its grid of taps is made
before the clock starts for the forward pass, and from uv inside it for the gradients. Forward; forward + backward to texels and uv; against
`sample_lod`, which takes one tap; and footprints of 16 x 2 pixels over all levels, which one call of a peer cannot do. fp32.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import texvlm
from benchmarks._harness import US, Bench

SIDE, COUNT, LONG = 1024, 65536, 8
NCHW, LAST, ONE_TAP = "grid_sample NCHW", "grid_sample channels_last", "texvlm, sample_lod: one tap"


def footprints(long: float, wide: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Footprints ddx and ddy [1, COUNT, 2] of so many pixels, at random angles."""
    angle = torch.rand(1, COUNT) * torch.pi
    along = torch.stack([angle.cos(), angle.sin()], dim=-1) / SIDE
    return along * long, along.flip(-1) * torch.tensor([-1.0, 1.0]) * wide


def taps(uv: torch.Tensor, ddx: torch.Tensor) -> torch.Tensor:
    """The grid [1, COUNT, LONG, 2] of the taps along ddx, in grid_sample's coordinates."""
    at = (torch.arange(LONG) + 0.5) / LONG - 0.5
    return (uv[:, :, None] + at[:, None] * ddx[:, :, None]) * 2 - 1


def averaged(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(image, grid, padding_mode="border", align_corners=False).mean(-1)


def forward(bench: Bench, channels: int) -> tuple[float, float]:
    image, uv = torch.rand(1, channels, SIDE, SIDE), torch.rand(1, COUNT, 2)
    ddx, ddy = footprints(LONG, 1)
    far = footprints(2 * LONG, 2)
    last, grid = image.contiguous(memory_format=torch.channels_last), taps(uv, ddx)
    single, full = texvlm.Texture(image, levels=1), texvlm.Texture(image)
    wanted = averaged(image, grid).transpose(1, 2)
    difference = (texvlm.sample_grad(single, uv, ddx, ddy) - wanted).abs().max().item()
    times = bench.compare(
        f"forward, C = {channels}",
        {
            US: lambda: texvlm.sample_grad(single, uv, ddx, ddy),
            "texvlm, 16 x 2, all levels": lambda: texvlm.sample_grad(full, uv, *far),
            ONE_TAP: lambda: texvlm.sample_lod(single, uv),
            NCHW: lambda: averaged(image, grid),
            LAST: lambda: averaged(last, grid),
        },
    )
    bench.gate(f"C = {channels}: largest difference from grid_sample / 1e-3", difference / 1e-3, at_most=1.0)  # steep texels
    ratio = times.ratio(times.best(NCHW, LAST))
    bench.gate(f"C = {channels}: times as fast as grid_sample", ratio, at_least=1.0 if channels == 3 else 4.0)
    return ratio, 1 / times.ratio(ONE_TAP)


def backward(bench: Bench, channels: int) -> float:
    image, uv = torch.rand(1, channels, SIDE, SIDE), torch.rand(1, COUNT, 2)
    ddx, ddy = footprints(LONG, 1)
    weights = torch.rand(1, COUNT, channels)
    incoming = weights.transpose(1, 2).contiguous()
    texture = texvlm.Texture(image, levels=1)
    leaves = texture.data.requires_grad_(), uv.clone().requires_grad_()
    mine = texture.replace(leaves[0])
    shape = ddx.clone().requires_grad_(), ddy.clone().requires_grad_()
    calls = {
        US: lambda: torch.autograd.grad(texvlm.sample_grad(mine, leaves[1], ddx, ddy), leaves, weights),
        "texvlm, to the footprint too": lambda: torch.autograd.grad(
            texvlm.sample_grad(mine, leaves[1], *shape), [*leaves, *shape], weights
        ),
        ONE_TAP: lambda: torch.autograd.grad(texvlm.sample_lod(mine, leaves[1]), leaves, weights),
    }
    for name, picture in ((NCHW, image), (LAST, image.contiguous(memory_format=torch.channels_last))):
        theirs = picture.clone().requires_grad_(), uv.clone().requires_grad_()
        calls[name] = lambda t=theirs: torch.autograd.grad(averaged(t[0], taps(t[1], ddx)), t, incoming)
    difference = (calls[US]()[0].view(1, SIDE, SIDE, channels).permute(0, 3, 1, 2) - calls[NCHW]()[0]).abs().max().item()
    times = bench.compare(f"forward + backward (texels and uv), C = {channels}", calls)
    bench.gate(f"C = {channels}: difference of the texels' gradients / 1e-3", difference / 1e-3, at_most=1.0)
    ratio = times.ratio(times.best(NCHW, LAST))
    bench.gate(f"C = {channels}, forward + backward: times as fast as grid_sample", ratio, at_least=1.0 if channels == 3 else 2.0)
    return ratio


def main() -> int:
    bench = Bench(__doc__)
    ahead, back = [forward(bench, channels) for channels in (3, 40)], [backward(bench, channels) for channels in (3, 40)]
    return bench.finish(
        f"Forward {ahead[0][0]:.1f}x (C = 3), {ahead[1][0]:.1f}x (C = 40) as fast as grid_sample on its better layout; forward + "
        f"backward {back[0]:.1f}x, {back[1]:.1f}x; 8 taps cost {ahead[0][1]:.1f} and {ahead[1][1]:.1f} times one."
    )


if __name__ == "__main__":
    sys.exit(main())
