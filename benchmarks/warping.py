"""How fast are planes of 1920 x 1080 warped by optical flow against grid_sample and OpenCV's remap?

The flow and its occlusions are those that `optical_flow` finds between a picture and a smooth warp of it. Forward; forward + backward to
planes and flow; and the motion that flow does not explain, with and without flow. fp32. torch makes its grid from the flow inside the
clock, OpenCV has its maps before.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import grid_sample

import texvlm
from benchmarks._harness import US, Bench
from benchmarks.flow import full_hd, tensor

HEIGHT, WIDTH = 1080, 1920
TORCH, REMAP = "torch grid_sample, with its grid", "OpenCV remap, channels last"


def main() -> int:
    bench = Bench(__doc__)
    try:
        import cv2
        import skimage.data  # noqa: F401
    except ImportError as missing:
        print(f"{missing}: there is no picture to warp (pip install opencv-python-headless scikit-image)")
        return bench.finish("not measured")
    cv2.setNumThreads(torch.get_num_threads())
    before, now = (tensor(picture).contiguous() for picture in full_hd())
    flow, occlusion = texvlm.optical_flow(before, now)
    planes, weights = torch.rand(1, 3, HEIGHT, WIDTH), torch.rand(1, 3, HEIGHT, WIDTH)
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")

    def sampled(planes: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
        grid = torch.stack([(x + flow[:, 0] + 0.5) * (2 / WIDTH) - 1, (y + flow[:, 1] + 0.5) * (2 / HEIGHT) - 1], dim=-1)
        return grid_sample(planes, grid, padding_mode="border", align_corners=False)

    difference = (texvlm.warp(planes, flow) - sampled(planes, flow)).abs().max().item()
    bench.gate("largest difference from grid_sample / 1e-3", difference / 1e-3, at_most=1.0)  # its grid has 2^-24 of the width
    hwc, map_x, map_y = planes[0].permute(1, 2, 0).numpy().copy(), (x + flow[0, 0]).numpy(), (y + flow[0, 1]).numpy()
    forward = bench.compare(
        f"warp three planes of {WIDTH} x {HEIGHT}",
        {
            US: lambda: texvlm.warp(planes, flow, occlusion),
            TORCH: lambda: sampled(planes, flow),
            REMAP: lambda: cv2.remap(hwc, map_x, map_y, cv2.INTER_LINEAR),
        },
        moves=4 * HEIGHT * WIDTH * 8,
        fresh=True,
    )
    bench.gate("warp, times as fast as grid_sample", forward.ratio(TORCH), at_least=1.0)

    leaves = planes.clone().requires_grad_(), flow.clone().requires_grad_()
    backward = bench.compare(
        "forward + backward to planes and flow",
        {
            US: lambda: torch.autograd.grad(texvlm.warp(*leaves), leaves, weights),
            TORCH: lambda: torch.autograd.grad(sampled(*leaves), leaves, weights),
        },
    )
    bench.gate("forward + backward, times as fast as grid_sample", backward.ratio(TORCH), at_least=1.0)

    image, last = before.float() / 255, now.float() / 255
    bench.compare(
        f"motion of {WIDTH} x {HEIGHT}",
        {
            US: lambda: texvlm.motion(previous=last, current=image, flow=flow),
            "without flow": lambda: texvlm.motion(last, image),
        },
    )
    return bench.finish(
        f"Forward {forward.ratio(TORCH):.1f}x, forward + backward {backward.ratio(TORCH):.1f}x as fast as grid_sample, forward "
        f"{forward.ratio(REMAP):.1f}x as fast as OpenCV's remap."
    )


if __name__ == "__main__":
    sys.exit(main())
