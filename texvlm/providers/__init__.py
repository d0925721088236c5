"""Opt-in companions: heavier models for single channels. Nothing here is imported, or needed, unless it is used.

| channel | provider | needs |
|---|---|---|
| 8 saliency | `ModuleSaliency` around any network | that network |
| 12, 38 segmentation | `SamSegmentation` | transformers, weights of a SAM |
| 18-33 embedding | `ClipEmbedding`; see `texvlm.embedding` | transformers, weights of a CLIP or SigLIP |
| 39 text | `RapidOcrText`, `DoctrText` | rapidocr and onnxruntime (weights inside); python-doctr |
| 7, 15-17 flow | `RaftFlow` | torchvision |

Except for embeddings, a provider is a callable with a name: any function that returns the plane will do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

__all__ = [
    "ClipEmbedding",
    "DoctrText",
    "ModuleSaliency",
    "PlaneProvider",
    "RaftFlow",
    "RapidOcrText",
    "SamSegmentation",
]

_HOME = {
    "ClipEmbedding": "clip",
    "DoctrText": "ocr",
    "ModuleSaliency": "salience",
    "RaftFlow": "raft",
    "RapidOcrText": "ocr",
    "SamSegmentation": "segmentation",
}


@runtime_checkable
class PlaneProvider(Protocol):
    """A named callable from a picture to a plane: labels [B, H, W] int64, or saliency or text [B, H, W] in [0, 1].

    Flow providers are called with (previous, current) and return (flow [B, 2, H, W], occlusion [B, H, W]).
    """

    name: str

    def __call__(self, image: ImageLike) -> Tensor:
        """The plane of a picture."""
        ...


def require(module: str, provider: str, packages: str) -> Any:
    """The module, or one line that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{provider} needs {packages}: pip install {packages} ({error})") from None


def as_pictures(image: ImageLike) -> Tensor:
    """A picture as float [B, 3, H, W] in [0, 1], without NaN: what networks are fed with."""
    from texvlm.pictures import as_float, as_rgb

    picture = as_float(as_rgb(image)).float()
    return torch.where(picture.isfinite(), picture, torch.zeros_like(picture)).clamp(0, 1)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"texvlm.providers.{_HOME[name]}"), name)
    raise AttributeError(f"module 'texvlm.providers' has no attribute {name!r}")
