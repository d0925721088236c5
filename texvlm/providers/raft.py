"""Learned optical flow, for channels 7 and 15-17."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.providers import as_pictures, require

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

LEAST = 128  # pixels: RAFT's correlation pyramid has four levels of features at an eighth
RELATIVE, ABSOLUTE = 0.01, 0.5  # of the forward-backward test, as in UnFlow (Meister et al. 2018)


class RaftFlow:
    """Optical flow by RAFT (Teed and Deng 2020, arXiv 2003.12039), or by any network that is called like torchvision's.

    Args:
        module: called with two batches [B, 3, h, w] in [-1, 1], h and w multiples of 8 and at least 128; returns the flow [B, 2, h, w]
            in pixels from the first to the second, or a list of ever better ones. By default torchvision's `raft_small` with its
            weights, which torchvision downloads. Move it to the pictures' device and set `.eval()` yourself.
        name: for the metadata.

    Raises:
        ImportError: torchvision is missing, and no module is given.
    """

    def __init__(self, module: Any = None, name: str | None = None) -> None:
        if module is None:
            models = require("torchvision.models.optical_flow", "RaftFlow", "torchvision")
            module = models.raft_small(weights="DEFAULT").eval()
            name = name or "RAFT small"
        self.module, self.name = module, name or type(module).__name__

    def __call__(self, previous: ImageLike, current: ImageLike) -> tuple[Tensor, Tensor]:
        """Two pictures of one shape -> flow [B, 2, H, W] in pixels from current to previous, occlusion [B, H, W].

        The previous picture at x + flow(x) is what the current one shows at x. A pixel is occluded where the flow there and back,
        f(x) + b(x + f(x)), is long: |f + b|^2 > 0.01 (|f|^2 + |b|^2) + 0.5; or where it leaves the picture.
        """
        before, now = as_pictures(previous), as_pictures(current)
        if before.shape != now.shape:
            raise ValueError(f"previous must have the shape of current, {list(now.shape)}, got {list(before.shape)}")
        height, width = now.shape[2:]
        down, right = (max(LEAST, n + -n % 8) - n for n in (height, width))
        before, now = (F.pad(x, (0, right, 0, down), mode="replicate") * 2 - 1 for x in (before, now))

        def flow(first: Tensor, second: Tensor) -> Tensor:
            out = self.module(first, second)
            out = out if isinstance(out, Tensor) else out[-1]
            if out.shape != (len(first), 2, *first.shape[2:]):
                raise ValueError(f"{self.name} must return [B, 2, h, w] for {list(first.shape)}, got {list(out.shape)}")
            return out[:, :, :height, :width].float()

        there, back = flow(now, before), flow(before, now)
        y, x = torch.meshgrid(
            torch.arange(height, device=there.device) + 0.5, torch.arange(width, device=there.device) + 0.5, indexing="ij"
        )
        u, v = (x + there[:, 0]) / width, (y + there[:, 1]) / height
        met = F.grid_sample(back, torch.stack([2 * u - 1, 2 * v - 1], -1), padding_mode="border", align_corners=False)
        lengths = there.square().sum(1) + met.square().sum(1)
        outside = (u < 0) | (u > 1) | (v < 0) | (v > 1)
        lost = (there + met).square().sum(1) > RELATIVE * lengths + ABSOLUTE
        return there, lost | outside
