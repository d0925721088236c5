"""The photographs that scikit-image and scikit-learn ship, as uint8 [3, H, W] whose sides are multiples of 128."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

SCENES = ("astronaut", "coffee", "chelsea", "rocket", "camera", "coins", "moon", "retina")
OTHERS = ("hubble_deep_field", "immunohistochemistry", "brick", "grass", "gravel")
"""Stars, stained tissue, and three uniform textures: much the same everywhere."""


def photographs(
    names: tuple[str, ...] = (*SCENES, "motorcycle", "china", "flower", *OTHERS),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and pictures."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    for name in names:
        if name in ("china", "flower"):
            picture = load_sample_image(f"{name}.jpg")
        elif name == "motorcycle":
            picture = data.stereo_motorcycle()[0]
        else:
            picture = getattr(data, name)()
        image = torch.from_numpy(np.array(picture))
        image = image.expand(3, -1, -1) if image.dim() == 2 else image.permute(2, 0, 1)[:3]
        height, width = (n // 128 * 128 for n in image.shape[1:])
        yield name, image[:, :height, :width].contiguous()
