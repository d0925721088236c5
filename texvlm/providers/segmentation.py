"""Segments from the Segment Anything family, for channels 12 and 38."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.providers import as_pictures

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what SAM was trained with
STABILITY_OFFSET = 1.0  # in logits


class SamSegmentation:
    """Every pixel's segment, by a promptable segmentation model asked at a grid of points.

    The recipe is that of Segment Anything (Kirillov et al. 2023, arXiv 2304.02643): a mask is kept if the model expects it to be good,
    if it changes little with the threshold, and if no better one has nearly the same bounding box. Masks overlap and leave holes, so
    they are laid over one another, large ones first, and what is left goes to the nearest segment.

    Args:
        model: a transformers SamModel, or a model with the same `get_image_embeddings` and forward; on the pictures' device.
        points: to a side of the grid.
        batch: points asked at a time.
        iou: the least quality that the model expects of a mask.
        stability: the least overlap of the mask at logit +1 with that at -1.
        overlap: intersection over union of bounding boxes above which only the better mask stays.

    Example:
        >>> from transformers import SamModel                                              # doctest: +SKIP
        >>> segment = SamSegmentation(SamModel.from_pretrained("facebook/sam-vit-base"))   # doctest: +SKIP
        >>> segment(image).shape                                                           # doctest: +SKIP
        torch.Size([1, 480, 640])
    """

    def __init__(
        self, model: Any, points: int = 32, batch: int = 64, iou: float = 0.88, stability: float = 0.95, overlap: float = 0.7
    ) -> None:
        if not hasattr(model, "get_image_embeddings"):
            raise TypeError(f"model must be a SamModel of transformers, or built like one, got {type(model).__name__}")
        self.model, self.points, self.batch = model, points, batch
        self.iou, self.stability, self.overlap = iou, stability, overlap
        self.name = f"{type(model).__name__} {getattr(model.config, '_name_or_path', '') or 'of random weights'}"

    @torch.no_grad()
    def __call__(self, image: ImageLike) -> Tensor:
        """Pictures (see `texvlm.Texture`) -> labels [B, H, W] int64, 0 .. n-1, largest segment first; not always in one piece."""
        return torch.stack([self._labels(picture) for picture in as_pictures(image)])

    def _labels(self, picture: Tensor) -> Tensor:
        from texvlm.distance import distance_transform

        height, width = picture.shape[1:]
        logits = self._masks(picture)
        labels = torch.full((height, width), -1, device=picture.device)
        areas = (logits > 0).sum((1, 2))
        for number, index in enumerate(areas.argsort(descending=True, stable=True).tolist()):
            mask = F.interpolate(logits[index][None, None], (height, width), mode="bilinear", align_corners=False)[0, 0] > 0
            labels[mask] = number
        if (labels < 0).all():
            return torch.zeros_like(labels)
        nearest = distance_transform(labels >= 0)[1].reshape(height, width)
        labels = labels.flatten()[nearest]
        return labels.unique(return_inverse=True)[1].view(height, width)

    def _masks(self, picture: Tensor) -> Tensor:
        """Logits [n, h, w] of the masks that stay, over the picture, at the model's resolution."""
        side = int(self.model.config.vision_config.image_size)
        height, width = picture.shape[1:]
        rows, columns = (max(1, round(n * side / max(height, width))) for n in (height, width))
        mean, std = (torch.tensor(x, device=picture.device).view(-1, 1, 1) for x in (MEAN, STD))
        pixels = F.interpolate(picture[None], (rows, columns), mode="bilinear", antialias=True, align_corners=False)
        pixels = F.pad((pixels - mean) / std, (0, side - columns, 0, side - rows))
        dtype = (
            next((p.dtype for p in self.model.parameters()), torch.float32)
            if hasattr(self.model, "parameters")
            else torch.float32
        )
        seen = self.model.get_image_embeddings(pixels.to(dtype))
        v, u = torch.meshgrid(*2 * (((torch.arange(self.points, device=picture.device) + 0.5) / self.points),), indexing="ij")
        asked = torch.stack([u * columns, v * rows], -1).view(1, -1, 1, 2).to(dtype)
        masks, scores = [], []
        for start in range(0, asked.shape[1], self.batch):
            out = self.model(image_embeddings=seen, input_points=asked[:, start : start + self.batch], multimask_output=True)
            logits, quality = out.pred_masks.flatten(0, 2).float(), out.iou_scores.flatten().float()
            # The masks cover the padded square: only the part over the picture counts.
            logits = logits[:, : max(1, round(logits.shape[1] * rows / side)), : max(1, round(logits.shape[2] * columns / side))]
            inner = (logits > STABILITY_OFFSET).sum((1, 2))
            outer = (logits > -STABILITY_OFFSET).sum((1, 2))
            keep = (quality >= self.iou) & (inner >= self.stability * outer) & (inner > 0)
            masks.append(logits[keep])
            scores.append(quality[keep])
        return self._apart(torch.cat(masks), torch.cat(scores))

    def _apart(self, masks: Tensor, scores: Tensor) -> Tensor:
        """Non-maximum suppression by bounding boxes, best first."""
        if len(masks) == 0:
            return masks
        inside = masks > 0
        extents = []
        for line in (inside.any(2), inside.any(1)):  # rows, columns
            n = line.shape[1]
            extents += [line.byte().argmax(1), n - line.flip(1).byte().argmax(1)]
        y0, y1, x0, x1 = (e.float() for e in extents)
        area = (y1 - y0) * (x1 - x0)
        kept: list[int] = []
        for i in scores.argsort(descending=True, stable=True).tolist():
            if kept:
                k = torch.tensor(kept, device=masks.device)
                down = (torch.minimum(y1[i], y1[k]) - torch.maximum(y0[i], y0[k])).clamp(min=0)
                along = (torch.minimum(x1[i], x1[k]) - torch.maximum(x0[i], x0[k])).clamp(min=0)
                both = down * along
                if float((both / (area[i] + area[k] - both)).max()) > self.overlap:
                    continue
            kept.append(i)
        return masks[kept]
