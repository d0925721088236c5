"""How fast are 65,536 random bilinear samples of a 1024 x 1024 texture against grid_sample and OpenCV's remap?

Forward; forward + backward to texels and uv, the zero-filling of the gradient included (and timed by itself).
fp32. Peers get their coordinates in their own form before the clock starts. The results of all are compared.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import texvlm
from benchmarks._harness import US, Bench

SIDE, COUNT = 1024, 65536
NCHW, LAST, REMAP = "grid_sample NCHW", "grid_sample channels_last", "cv2.remap INTER_LINEAR"


def grid_sample(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(image, grid, padding_mode="border", align_corners=False)


def remap(image: torch.Tensor, uv: torch.Tensor):
    """OpenCV's remap of [C, H, W] at uv as a call, or None without OpenCV. Its weights have 5 bits."""
    try:
        import cv2
        import numpy as np
    except ImportError:
        print("OpenCV is not installed: its row is left out (pip install opencv-python-headless)")
        return None
    source = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    x, y = (np.ascontiguousarray((uv[0, :, i] * SIDE - 0.5).reshape(256, -1).numpy()) for i in (0, 1))
    out = np.empty((*x.shape, source.shape[2]), np.float32)
    return lambda: cv2.remap(source, x, y, cv2.INTER_LINEAR, out, cv2.BORDER_REPLICATE)


def forward(bench: Bench) -> list[float]:
    against = {3: [(NCHW, 2.5), (LAST, 2.5)], 4: [(REMAP, 1.0)], 40: [(NCHW, 10.0), (LAST, 4.0)]}
    best = []
    for channels in (3, 4, 40):
        image, uv = torch.rand(1, channels, SIDE, SIDE), torch.rand(1, COUNT, 2)
        last, grid = image.contiguous(memory_format=torch.channels_last), (uv * 2 - 1)[:, None]
        single, full = texvlm.Texture(image, levels=1), texvlm.Texture(image)
        wanted = grid_sample(image, grid)[:, :, 0].transpose(1, 2)
        calls = {
            US: lambda t=single, uv=uv: texvlm.sample_lod(t, uv),
            "texvlm, all levels, bilinear": lambda t=full, uv=uv: texvlm.sample_lod(t, uv, 0.0, "bilinear"),
            "texvlm, all levels, trilinear": lambda t=full, uv=uv: texvlm.sample_lod(t, uv, 0.0),
        }
        errors = [(call() - wanted).abs().max().item() for call in calls.values()]
        calls |= {NCHW: lambda i=image, g=grid: grid_sample(i, g), LAST: lambda i=last, g=grid: grid_sample(i, g)}
        if channels == 4 and (peer := remap(image[0], uv)):
            calls[REMAP] = peer
        times = bench.compare(f"forward, C = {channels}", calls)
        bench.gate(f"C = {channels}: largest difference from grid_sample / 1e-5", max(errors) / 1e-5, at_most=1.0)
        for peer, wanted_ratio in against[channels]:
            if peer not in calls:
                continue
            for us in list(calls)[:3]:
                bench.gate(f"C = {channels}, {us}: against {peer}", times.ratio(peer, us), at_least=wanted_ratio)
        best.append(times.median(times.best(NCHW, LAST)) / times.median())
    return best


def backward(bench: Bench) -> list[float]:
    ratios = []
    for channels in (3, 40):
        image, uv = torch.rand(1, channels, SIDE, SIDE), torch.rand(1, COUNT, 2)
        texture = texvlm.Texture(image, levels=1)
        data, at = texture.data.requires_grad_(), uv.clone().requires_grad_()
        mine = texture.replace(data)
        weights = torch.rand(1, COUNT, channels)
        last = image.contiguous(memory_format=torch.channels_last)

        def ours(mine=mine, data=data, at=at, weights=weights):
            return torch.autograd.grad(texvlm.sample_lod(mine, at), [data, at], weights)

        calls = {
            US: ours,
            "texvlm, uv only": lambda f=ours, d=data, a=at, m=mine, w=weights: torch.autograd.grad(
                texvlm.sample_lod(m.replace(d.detach()), a), a, w
            ),
        }
        for name, picture in ((NCHW, image), (LAST, last)):
            leaf, grid = picture.clone().requires_grad_(), (uv * 2 - 1)[:, None].clone().requires_grad_()
            incoming = weights.transpose(1, 2)[:, :, None].contiguous()

            def peer(leaf=leaf, grid=grid, incoming=incoming):
                return torch.autograd.grad(grid_sample(leaf, grid), [leaf, grid], incoming)

            calls[name] = peer
        calls["zeros of the gradient (torch)"] = lambda s=data.shape: torch.zeros(s)
        g_data, g_uv = ours()
        g_image, g_grid = calls[NCHW]()
        worst = (g_data.view(1, SIDE, SIDE, channels).permute(0, 3, 1, 2) - g_image).abs().max().item()
        worst = max(worst, (g_uv / 2 - g_grid[:, 0]).abs().div(g_grid.abs().max()).max().item())
        times = bench.compare(f"forward + backward (texels and uv), C = {channels}", calls)
        bench.gate(f"C = {channels}: difference of the gradients / 1e-4", worst / 1e-4, at_most=1.0)
        for name in (NCHW, LAST):
            bench.gate(f"C = {channels}, forward + backward: against {name}", times.ratio(name), at_least=4.0)
        ratios.append(times.median(times.best(NCHW, LAST)) / times.median())
    return ratios


def main() -> int:
    bench = Bench(__doc__)
    ahead, back = forward(bench), backward(bench)
    return bench.finish(
        f"Forward {ahead[0]:.1f}x (C = 3), {ahead[1]:.1f}x (C = 4), {ahead[2]:.1f}x (C = 40) as fast as grid_sample on its better "
        f"layout; forward + backward {back[0]:.1f}x (C = 3), {back[1]:.1f}x (C = 40)."
    )


if __name__ == "__main__":
    sys.exit(main())
