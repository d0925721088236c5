"""Learned saliency, for channel 8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.providers import as_pictures

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


class ModuleSaliency:
    """Any network that says where people look, as a provider of channel 8.

    The network is called with pictures [B, 3, h, w] and returns maps [B, 1, h', w'] or [B, h', w']. Each map is enlarged bilinearly to
    the picture and scaled so that its least value is 0 and its largest 1 (a constant map is 0).

    Args:
        module: the network, or any callable. Move it to the pictures' device and set `.eval()` yourself.
        size: (rows, columns) that it wants; the picture's own by default.
        mean: of what it was trained on, per channel; (0, 0, 0) by default.
        std: likewise; (1, 1, 1) by default.
        scale: of the pixel values: 255 for networks that want bytes.
        activation: of what it returns: `torch.exp` for log densities (DeepGaze), `torch.sigmoid` for logits, none by default.
        name: for the metadata; the module's class by default.

    Example:
        >>> import torch
        >>> blur = torch.nn.AvgPool2d(9, 1, 4)
        >>> saliency = ModuleSaliency(lambda x: (x - blur(x)).abs().sum(1), name="difference from the surroundings")
        >>> saliency(torch.rand(3, 40, 60)).shape
        torch.Size([1, 40, 60])

        DeepGaze IIE, which takes a centre bias and returns a log density:

        >>> net = deepgaze_pytorch.DeepGazeIIE(pretrained=True).eval()                     # doctest: +SKIP
        >>> saliency = ModuleSaliency(lambda x: net(x, bias), scale=255, activation=torch.exp)  # doctest: +SKIP
    """

    def __init__(
        self,
        module: Callable[[Tensor], Tensor],
        size: tuple[int, int] | None = None,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        scale: float = 1.0,
        activation: Callable[[Tensor], Tensor] | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(module):
            raise TypeError(f"module must be callable, got {type(module).__name__}")
        self.module, self.size, self.scale, self.activation = module, size, scale, activation
        self.mean, self.std = tuple(mean), tuple(std)
        self.name = name or type(module).__name__

    def __call__(self, image: ImageLike) -> Tensor:
        """Pictures (see `texvlm.Texture`) -> [B, H, W] float32 in [0, 1]. Gradients flow as far as the network lets them."""
        pictures = as_pictures(image)
        height, width = pictures.shape[2:]
        if self.size is not None:
            pictures = F.interpolate(pictures, self.size, mode="bilinear", antialias=True, align_corners=False)
        mean, std = (torch.tensor(x, device=pictures.device).view(-1, 1, 1) for x in (self.mean, self.std))
        maps = self.module((pictures - mean) / std * self.scale)
        maps = (maps if self.activation is None else self.activation(maps)).float()
        maps = maps[:, None] if maps.dim() == 3 else maps
        if maps.dim() != 4 or maps.shape[:2] != (len(pictures), 1):
            raise ValueError(
                f"{self.name} must return [B, 1, h, w] or [B, h, w] for {len(pictures)} pictures, got {list(maps.shape)}"
            )
        maps = torch.where(maps.isfinite(), maps, torch.zeros_like(maps))
        maps = F.interpolate(maps, (height, width), mode="bilinear", align_corners=False)[:, 0]
        low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
        return (maps - low) / torch.where(high > low, high - low, torch.ones_like(high))
