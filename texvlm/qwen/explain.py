"""Seeing what a model was shown, and which of it an answer rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.qwen import attention
from texvlm.qwen.batch import PRIVATE
from texvlm.qwen.hooks import geometry_names
from texvlm.qwen.pictures import MODALITIES, THUMBNAIL_LEVEL, unpack_groups

if TYPE_CHECKING:
    from texvlm.qwen.adapter import QwenVLAdapter

DIM = 0.25
"""How bright the mean of a picture's kept groups is, where nothing was kept."""


def kept_pictures(adapter: QwenVLAdapter, batch: Mapping[str, Any]) -> list[Tensor]:
    """See `QwenVLAdapter.show`."""
    sizes, family = adapter.sizes, adapter.family
    m, p, cell = sizes.merge, sizes.patch, sizes.cell
    if f"{PRIVATE}cells" not in batch:
        return []
    record, grids = batch[f"{PRIVATE}cells"].cpu(), batch[f"{PRIVATE}grids"].cpu().tolist()
    rows = torch.cat([batch[modality.pixels].detach().float().cpu() for modality in MODALITIES if modality.pixels in batch])
    place = rows_of(adapter, batch).cpu()
    out: list[Tensor] = []
    for number, (_, _, frames, h, w) in enumerate(grids):
        mine = (record[:, 0] == number) & (record[:, 3] != THUMBNAIL_LEVEL)
        patches = rows.unflatten(0, (-1, sizes.unit))[place[mine]]
        tiles = unpack_groups(patches.flatten(0, 1), sizes, family)
        height, width, columns = h * p, w * p, w // m
        for frame in range(frames):
            picture = (DIM * tiles.mean((0, 2, 3)))[:, None, None].expand(-1, height, width).clone()
            for tile, (_, f, index, level) in zip(tiles, record[mine].tolist()):
                if f == frame:
                    y, x, side = index // columns * cell, index % columns * cell, cell << level
                    picture[:, y : y + side, x : x + side] = F.interpolate(tile[None], (side, side))[
                        0, :, : height - y, : width - x
                    ]
            out.append((picture * 255).round().to(torch.uint8))
    return out


def rows_of(adapter: QwenVLAdapter, batch: Mapping[str, Any]) -> Tensor:
    """Where each kept token of the record stands among the groups that the tower was given, all modalities in order."""
    record, grids = batch[f"{PRIVATE}cells"], batch[f"{PRIVATE}grids"]
    if adapter.mode == "prune_pre":
        return torch.arange(len(record), device=record.device)
    groups = grids[:, 3] * grids[:, 4] // adapter.sizes.unit
    starts = F.pad((groups * grids[:, 2]).cumsum(0), (1, 0))[:-1]
    return starts[record[:, 0]] + record[:, 1] * groups[record[:, 0]] + record[:, 2]


@dataclass(frozen=True)
class Explanation:
    """Which kept groups an answer rests on.

    Attributes:
        cells: int64 [tokens, 4]: picture, frame, cell and level of each kept token (`texvlm_cells`).
        attribution: [tokens], how much less likely the answer becomes without it, to first order: the derivative of the answer's log
            probability by the log of the token's weight in the decoder's attention.
        logprob: of the answers, [B].
        checked: int64, tokens that were really dropped, those of the highest attribution first and as many by chance.
        dropped: how much less likely the answer became without each of them, in the same units.
    """

    cells: Tensor
    attribution: Tensor
    logprob: Tensor
    checked: Tensor
    dropped: Tensor


def explain(adapter: QwenVLAdapter, sequences: Tensor, batch: Mapping[str, Any], check: int, seed: int) -> Explanation:
    """See `QwenVLAdapter.explain`."""
    model, hooks = adapter.model, adapter.hooks
    if f"{PRIVATE}cells" not in batch:
        raise ValueError("batch must come from prepare, and hold pictures for an answer to rest on")
    if f"{PRIVATE}past_bias" in batch:
        raise ValueError("batch must be a first turn: earlier pictures are in the cache alone")
    attention.check(model)
    state = adapter.state(batch, sequences)
    ids, mask = state["input_ids"], state["attention_mask"]
    asked = batch["input_ids"].shape[1]
    if ids.shape[1] == asked:
        raise ValueError("output must hold an answer after the batch's input_ids")
    if any(bool((ids[:, asked:] == m.token(model.config)).any()) for m in MODALITIES):
        raise ValueError("output must be text: its answer holds tokens that stand for pictures")
    answer, counted = ids[:, asked:], mask[:, asked:]
    whole = {**batch, "input_ids": ids, "attention_mask": mask, "position_ids": state["position_ids"]}
    whole.pop("labels", None)
    prompt = ids.clone()
    prompt[:, :asked][batch["attention_mask"] == 0] = -1
    prompt[:, asked:] = -1
    places = torch.cat([(prompt == m.token(model.config)).nonzero() for m in MODALITIES])
    named = (
        torch.arange(len(batch[f"{PRIVATE}cells"]), device=ids.device) if adapter.preparation.cuts else rows_of(adapter, batch)
    )

    def logprobs(bias: Tensor) -> Tensor:
        """Of the answers [B], with these biases of the prompt's keys."""
        call = hooks.call(whole)
        added = torch.zeros(ids.shape, dtype=bias.dtype, device=ids.device).index_put((places[:, 0], places[:, 1]), bias)
        call.decoder = attention.DecoderBias(added if call.decoder is None else added + call.decoder.bias)
        with hooks.entered(call):
            inputs = {k: v for k, v in whole.items() if not k.startswith(PRIVATE) and k not in geometry_names(whole)}
            logits = model(**inputs, logits_to_keep=answer.shape[1] + 1).logits[:, :-1]
        chosen = logits.float().log_softmax(-1).gather(2, answer[..., None])[..., 0]
        return (chosen * counted).sum(1)

    with adapter.hooks.biasing(), torch.enable_grad():
        bias = torch.zeros(len(places), device=ids.device, requires_grad=True)
        logprob = logprobs(bias)
        (attribution,) = torch.autograd.grad(logprob.sum(), bias)
        attribution = attribution[named]
        count = min(check, len(attribution))
        best = attribution.argsort(descending=True)[:count]
        generator = torch.Generator().manual_seed(seed)
        others = torch.randperm(len(attribution), generator=generator)[:count].to(best.device)
        checked = torch.cat([best, others])
        dropped = []
        with torch.no_grad():
            for token in named[checked].tolist():
                without = torch.zeros(len(places), device=ids.device)
                without[token] = attention.REMOVED
                dropped.append((logprob - logprobs(without)).sum())
    return Explanation(
        batch[f"{PRIVATE}cells"],
        attribution.detach(),
        logprob.detach(),
        checked,
        torch.stack(dropped) if dropped else attribution[:0],
    )
