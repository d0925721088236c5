"""A tiny image-text dual encoder for handwritten digits: queries that can be tried without any download.

`DigitsEmbedding` is the provider, `texvlm.digits.canvas` draws canvases to try it on, `python -m texvlm.digits.train` trains it anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from texvlm._ext import real_tensor
from texvlm.digits.model import STRIDE, WEIGHTS, WIDTH, ImageTower, TextTower, grey_of, spell
from texvlm.pca import PCA

__all__ = ["DigitsEmbedding"]


class DigitsEmbedding(nn.Module):
    """Dense features of handwritten digits and the words for them, as an `EmbeddingProvider`.

    It knows the digits 0 to 9 in any colour and polarity, about 12 to 110 pixels high, and reads the query letter by letter: "seven",
    "7", "a seven", "find the digit 7". Other queries should find nothing. Trained on 1297 of scikit-learn's 1797 digits (8 x 8 pixels;
    the other 500 are for tests) among clutter, contrastively; see `texvlm.digits.train`. About 0.3 MB of weights come with the package.

    It is a module: `.to(device)` moves it. Its weights are fixed; gradients flow to the picture.

    Example:
        >>> import torch, texvlm
        >>> digits = texvlm.DigitsEmbedding()
        >>> digits.encode_image(torch.rand(2, 3, 100, 64)).shape, digits.encode_text(["seven", "a 7"]).shape
        (torch.Size([2, 64, 13, 8]), torch.Size([2, 64]))
    """

    name = "digits"

    def __init__(self) -> None:
        import numpy as np

        super().__init__()
        self.image, self.text = ImageTower(folded=True), TextTower()
        with np.load(WEIGHTS, allow_pickle=False) as arrays:
            stored = {name: arrays[name] for name in arrays.files}
        weights = {name: torch.from_numpy(array).float() for name, array in stored.items() if "." in name}
        self.load_state_dict({name: w for name, w in weights.items() if not name.startswith("pca.")})
        self._pca = {name.removeprefix("pca."): array for name, array in stored.items() if name.startswith("pca.")}
        self.kept = float(stored["kept"])  # of the retrieval result on 16 axes, measured on training canvases
        self.eval().requires_grad_(False)

    @property
    def pca(self) -> PCA:
        """The axes that come with it, fitted on cells of training canvases."""
        return PCA.from_arrays(self._pca)

    def encode_image(self, pictures: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1], any size -> unit features [B, 64, ceil(H / 8), ceil(W / 8)], float32.

        On the CPU the features of a picture are the same with whatever others and however many threads.
        """
        weight = self.image.head.weight
        if real_tensor("pictures", pictures).dim() != 4 or pictures.shape[1] != 3:
            raise ValueError(f"pictures must be [B, 3, H, W], got {list(pictures.shape)}")
        if pictures.device != weight.device:
            raise ValueError(
                f"the pictures are on {pictures.device}, the digits encoder on {weight.device}: move it there with .to()"
            )
        if pictures.device.type != "cpu" or len(pictures) < 2:
            return self._encode(pictures)
        # one by one: how a convolution adds up depends on how many there are
        return torch.cat([self._encode(picture) for picture in pictures.split(1)])

    def _encode(self, pictures: Tensor) -> Tensor:
        weight = self.image.head.weight
        height, width = pictures.shape[2:]
        rows, columns = -(-height // STRIDE), -(-width // STRIDE)
        grey = grey_of(pictures.to(weight.dtype))
        features = self.image(grey)
        if height % STRIDE == 0 and width % STRIDE == 0:
            features = features[:, :, :rows, :columns]
        else:  # the grid covers the picture, not the filled-up one
            v = (torch.arange(rows, device=weight.device) + 0.5) / rows * height / grey.shape[2] * 2 - 1
            u = (torch.arange(columns, device=weight.device) + 0.5) / columns * width / grey.shape[3] * 2 - 1
            y, x = torch.meshgrid(v.to(weight.dtype), u.to(weight.dtype), indexing="ij")
            grid = torch.stack([x, y], -1).expand(len(pictures), -1, -1, -1)
            features = F.grid_sample(features, grid, padding_mode="border", align_corners=False)
        return F.normalize(features.float(), dim=1)

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Texts -> unit features [Q, 64], float32. Case and extra blanks do not matter."""
        if not texts:
            return torch.zeros(0, WIDTH, device=self.image.head.weight.device)
        return F.normalize(self.text(spell(texts, self.image.head.weight.device)).float(), dim=1)
