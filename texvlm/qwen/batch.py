"""What `prepare` returns: a batch that the model takes, and how a turn joins what was said before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature

IGNORED = -100
"""The label that no loss counts."""

PRIVATE = "texvlm_"
"""How keys of a batch begin that the model does not know; hooks take them out."""


class PreparedBatch(BatchFeature):
    """A BatchFeature whose geometry keeps its dtype: `.to(dtype)` casts pixels only, for positions do not fit in 16 bits."""

    def to(self, *args: Any, **kwargs: Any) -> PreparedBatch:
        """As BatchFeature.to; of floating point tensors only the pixels are cast."""
        device = kwargs.get("device", next((a for a in args if not isinstance(a, torch.dtype)), None))
        dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
        blocking = kwargs.get("non_blocking", False)

        def moved(name: str, value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(moved(name, v) for v in value)
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if name.startswith("pixel_values") else None, blocking)

        self.data = {name: moved(name, value) for name, value in self.items()}
        return self


def text_row(mask: Tensor) -> Tensor:
    """The first row of positions [B, S]: tokens counted without gaps, for a jump in it is read as a border between packed sequences."""
    return (mask.cumsum(1) - 1) * mask


def continued(batch: PreparedBatch, past: Mapping[str, Any]) -> PreparedBatch:
    """A prepared turn after what was said before it: whole ids, mask and positions; pixels of the new pictures only.

    Args:
        batch: the turn alone.
        past: see `QwenVLAdapter.state`.
    """
    earlier = past["input_ids"]
    if len(earlier) != len(batch["input_ids"]):
        raise ValueError(f"past must be of {len(batch['input_ids'])} samples, got {len(earlier)}")
    device = batch["input_ids"].device
    earlier, before, where = (past[name].to(device) for name in ("input_ids", "attention_mask", "position_ids"))
    mask = torch.cat([before, batch["attention_mask"]], dim=1)
    start = where[1:].amax((0, 2)) + 1
    positions = torch.where(batch["attention_mask"].bool(), batch["position_ids"][1:] + start[:, None], 0)
    batch["input_ids"] = torch.cat([earlier, batch["input_ids"]], dim=1)
    batch["attention_mask"] = mask
    batch["position_ids"] = torch.cat([text_row(mask)[None], torch.cat([where[1:], positions], dim=2)])
    batch[f"{PRIVATE}past_bias"] = (
        past["key_bias"].to(device) if "key_bias" in past else torch.zeros(earlier.shape, device=device)
    )
    for name in ("cells", "grids"):
        if name in past:
            batch[f"{PRIVATE}past_{name}"] = past[name].to(device)
    if "labels" in batch:
        batch["labels"] = torch.cat([torch.full_like(earlier, IGNORED), batch["labels"]], dim=1)
    batch[f"{PRIVATE}rope_deltas"] = (batch["position_ids"][1:].amax((0, 2)) + 1 - mask.sum(1))[:, None]
    return batch


def check_gaps(mask: Tensor, kind: str) -> None:
    """Linear attention reads what it is given, one after another, and fades over padding, which no mask undoes.

    Args:
        mask: [B, S] of a conversation.
        kind: the model's, which the message names.
    """
    begun = mask.cummax(1)[0]
    if not torch.equal(begun, mask):
        sample = int((begun != mask).any(1).nonzero()[0])
        raise ValueError(
            f"a conversation of {kind} cannot have padding within: its linear layers would read it. Sample {sample} has some: "
            "answers and turns of a batch must be equally long, or continue one sample at a time"
        )


def kept_so_far(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """`cells` and `grids` of all pictures up to this turn, counted from the first; nothing where there are none."""
    known = [
        (batch[f"{PRIVATE}{turn}cells"], batch[f"{PRIVATE}{turn}grids"])
        for turn in ("past_", "")
        if f"{PRIVATE}{turn}cells" in batch
    ]
    if not known:
        return {}
    cells, grids, count = [], [], 0
    for some, of in known:
        cells.append(some + some.new_tensor([count, 0, 0, 0]))
        grids.append(of)
        count += len(of)
    return {"cells": torch.cat(cells), "grids": torch.cat(grids)}
