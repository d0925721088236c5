"""Text regions from trained detectors, for channel 39."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from texvlm.providers import as_pictures, require

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike


def paint_quads(quads: Tensor, scores: Tensor, height: int, width: int) -> Tensor:
    """Convex quadrilaterals [n, 4, 2] (x, y in pixels, corners in order) as a plane [H, W]: at each pixel centre the best score.

    Example:
        >>> import torch
        >>> quad = torch.tensor([[[1.0, 1.0], [3.0, 1.0], [3.0, 2.0], [1.0, 2.0]]])
        >>> paint_quads(quad, torch.tensor([0.5]), 3, 4)[1]
        tensor([0.0000, 0.5000, 0.5000, 0.0000])
    """
    plane = torch.zeros(height, width)
    for quad, score in zip(quads.double().cpu(), scores.tolist()):
        (x0, y0), (x1, y1) = quad.amin(0).floor().long().tolist(), quad.amax(0).ceil().long().tolist()
        x0, y0, x1, y1 = max(x0, 0), max(y0, 0), min(x1, width), min(y1, height)
        if x0 >= x1 or y0 >= y1:
            continue
        y, x = torch.meshgrid(torch.arange(y0, y1) + 0.5, torch.arange(x0, x1) + 0.5, indexing="ij")
        edge = quad.roll(-1, 0) - quad
        # Which side of each edge a pixel is on: inside means the same side of all four.
        side = edge[:, 0, None, None] * (y - quad[:, 1, None, None]) - edge[:, 1, None, None] * (x - quad[:, 0, None, None])
        inside = (side >= 0).all(0) | (side <= 0).all(0)
        part = plane[y0:y1, x0:x1]
        part.copy_(torch.where(inside, part.clamp(min=score), part))
    return plane


def _hwc(picture: Tensor) -> Any:
    """[3, H, W] in [0, 1] as uint8 RGB [H, W, 3]."""
    return (picture * 255).round().byte().permute(1, 2, 0).contiguous().cpu().numpy()


class RapidOcrText:
    """Text lines found by RapidOCR (PP-OCR's detector, a differentiable-binarisation net on ONNX Runtime), as a plane.

    The weights come with the package: nothing is downloaded. It runs on the CPU; pictures on other devices travel there and back.

    Args:
        threshold: the least mean probability of a line, in [0, 1].
        unclip: how far the shrunken kernel of a line, which the net finds, is grown again.
        longest: pictures with a longer side are shrunk to it before they are looked at.
        engine: a `rapidocr.RapidOCR` of your own instead.

    Raises:
        ImportError: rapidocr or onnxruntime is missing.

    Example:
        >>> text = RapidOcrText()                                                          # doctest: +SKIP
        >>> text(image).shape                                                              # doctest: +SKIP
        torch.Size([1, 480, 640])
    """

    name = "RapidOCR"

    def __init__(self, threshold: float = 0.5, unclip: float = 1.6, longest: int = 2000, engine: Any = None) -> None:
        if engine is None:
            rapidocr = require("rapidocr", "RapidOcrText", "rapidocr onnxruntime")
            require("onnxruntime", "RapidOcrText", "rapidocr onnxruntime")
            engine = rapidocr.RapidOCR(params={"Global.log_level": "error", "Global.max_side_len": longest})
        self.engine, self.threshold, self.unclip = engine, threshold, unclip

    def __call__(self, image: ImageLike) -> Tensor:
        """Pictures (see `texvlm.Texture`) -> [B, H, W] float32: the probability of the line that covers a pixel, 0 elsewhere."""
        pictures = as_pictures(image)
        height, width = pictures.shape[2:]
        planes = []
        for picture in pictures:
            found = self.engine(
                _hwc(picture)[:, :, ::-1].copy(),  # it wants blue first, as OpenCV does
                use_det=True, use_cls=False, use_rec=False, box_thresh=self.threshold, unclip_ratio=self.unclip,
            )  # fmt: skip
            if found is None or found.boxes is None or len(found.boxes) == 0:
                planes.append(torch.zeros(height, width))
                continue
            planes.append(paint_quads(torch.as_tensor(found.boxes), torch.as_tensor(found.scores).clamp(0, 1), height, width))
        return (torch.stack(planes) if planes else torch.zeros(0, height, width)).to(pictures.device)


class DoctrText:
    """Words found by docTR's detectors (DBNet, LinkNet, FAST), as a plane.

    Args:
        predictor: a `doctr.models.detection_predictor(...)`; by default `fast_tiny` with its pretrained weights, which docTR downloads.
        assume_straight: whether that default looks for upright boxes only.

    Raises:
        ImportError: python-doctr is missing, and no predictor is given.
    """

    name = "docTR"

    def __init__(self, predictor: Any = None, assume_straight: bool = True) -> None:
        if predictor is None:
            models = require("doctr.models", "DoctrText", "python-doctr")
            predictor = models.detection_predictor("fast_tiny", pretrained=True, assume_straight_pages=assume_straight)
        self.predictor = predictor

    def __call__(self, image: ImageLike) -> Tensor:
        """Pictures (see `texvlm.Texture`) -> [B, H, W] float32: the score of the word that covers a pixel, 0 elsewhere."""
        pictures = as_pictures(image)
        height, width = pictures.shape[2:]
        planes = []
        for page in self.predictor([_hwc(picture) for picture in pictures]):
            plane = torch.zeros(height, width)
            for found in page.values() if isinstance(page, dict) else (page,):
                boxes = torch.as_tensor(found).double()
                if len(boxes):
                    plane = torch.maximum(plane, paint_quads(*self._quads(boxes, height, width), height, width))
            planes.append(plane)
        return (torch.stack(planes) if planes else torch.zeros(0, height, width)).to(pictures.device)

    @staticmethod
    def _quads(boxes: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Relative boxes (x0, y0, x1, y1, score) [n, 5], or corners with the score in a fifth row [n, 5, 2], in pixels."""
        size = torch.tensor([width, height], dtype=boxes.dtype)
        if boxes.dim() == 3:
            return boxes[:, :4] * size, boxes[:, 4, 0] if boxes.shape[1] > 4 else torch.ones(len(boxes))
        x0, y0, x1, y1 = boxes[:, :4].unbind(1)
        corners = torch.stack([x0, y0, x1, y0, x1, y1, x0, y1], 1).view(-1, 4, 2)
        return corners * size, boxes[:, 4] if boxes.shape[1] > 4 else torch.ones(len(boxes))
