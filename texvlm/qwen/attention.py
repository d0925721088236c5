"""Attention with a bias of its own for each key, where transformers passes none: w of a key counts as log w in its logits.

A key of weight 0 is as good as removed, whatever its query: softmax(q k + log w). It is registered under the name `texvlm_bias`, over
sdpa, which it is for whoever brings no bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "texvlm_bias"
KEYWORD = "texvlm_key_bias"
"""What a bias travels under, through the keyword arguments of blocks and layers, which reach the attention untouched."""

WATCH = "texvlm_watch"
"""What a `Watch` travels under."""

REMOVED = -1e4
"""The log of weight 0: e^-10000 is 0 in every dtype, and where nothing but removed keys is left the mean of them results, not NaN."""


def log_weights(weights: Tensor) -> Tensor:
    """Log w in float32 (float64 stays), `REMOVED` where w is 0 or less; no gradient there."""
    weights = weights if weights.dtype == torch.float64 else weights.float()
    there = weights > 0
    return torch.where(there, torch.where(there, weights, 1).log(), REMOVED)


class TowerBias:
    """The biases of a tower's rows, handed out segment by segment, as its blocks ask for them in order, layer after layer.

    Towers cut their rows into segments and attend within each; no argument says which. They are asked for in order, and none is left
    out, also where a checkpointed block runs again: the place in the rows says it.

    Args:
        bias: [N], of the rows in the order of the blocks.
    """

    def __init__(self, bias: Tensor) -> None:
        self.bias, self.place = bias, 0

    def take(self, key: Tensor) -> Tensor:
        """[1, 1, 1, n] of the next n = key.shape[2] rows."""
        count, end = key.shape[2], self.place + key.shape[2]
        if end > len(self.bias):
            raise RuntimeError(f"a segment of {count} rows goes beyond the {len(self.bias)} of the tower")
        part = self.bias[self.place : end]
        self.place = end % len(self.bias)
        return part[None, None, None]


class DecoderBias:
    """The biases of a prompt's keys; keys that came later have none.

    Args:
        bias: [B, S].
    """

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def take(self, key: Tensor) -> Tensor:
        """[B, 1, 1, keys]; samples that were repeated (beams) repeat their biases."""
        batch, count = key.shape[0], key.shape[2]
        bias = self.bias.repeat_interleave(batch // len(self.bias), 0)
        return F.pad(bias, (0, max(0, count - bias.shape[1])))[:, None, None, :count]


class Watch:
    """Looks on: what the last queries of the first sample attend to, summed over heads, layer by layer.

    Args:
        queries: how many of the last.

    Attributes:
        seen: [queries, keys] of each layer of full attention.
    """

    def __init__(self, queries: int) -> None:
        self.queries, self.seen = queries, list[Tensor]()

    def look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Computes the attention of these queries once more, and keeps it."""
        last, heads = query[0, :, -self.queries :].float(), query.shape[1] // key.shape[1]
        logits = scaling * last @ key[0].float().repeat_interleave(heads, 0).mT
        count, total = last.shape[1], key.shape[2]
        future = torch.ones(count, total, dtype=torch.bool, device=query.device).triu(total - count + 1)
        self.seen.append(logits.masked_fill(future, -torch.inf).softmax(-1).sum(0))


def biased_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    texvlm_key_bias: TowerBias | DecoderBias | None = None,
    texvlm_watch: Watch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """sdpa, with the bias of the keys added to the logits."""
    if texvlm_watch is not None:
        texvlm_watch.look(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if texvlm_key_bias is not None:
        bias = texvlm_key_bias.take(key).to(query.device, query.dtype)  # layers may be on several devices
        queries, keys = query.shape[2], key.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None and causal and queries > 1:
            # No mask with more keys than queries is the first pass over an empty static cache: keys beyond are yet to come.
            attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        if attention_mask is None:
            attention_mask = bias.expand(-1, -1, queries, -1)
        elif attention_mask.dtype == torch.bool:
            attention_mask = torch.where(attention_mask, bias, torch.finfo(query.dtype).min)
        else:
            attention_mask = attention_mask + bias
        is_causal = False
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


@contextmanager
def used_by(*modules: Any) -> Iterator[None]:
    """These modules attend through `biased_attention` for a while; what they had before is theirs again afterwards."""
    AttentionInterface.register(NAME, biased_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = [(module.config, module.config._attn_implementation) for module in modules]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def unbiased_part(model: Any) -> str | None:
    """The part of a model whose attention cannot take biases, and what it has; None where all can."""
    for part, config in (("the tower", model.model.visual.config), ("the decoder", model.model.language_model.config)):
        if config._attn_implementation not in ("sdpa", "eager", NAME, None):
            return f"{part} has {config._attn_implementation!r}"
    return None


def check(model: Any) -> None:
    """Raises a ValueError where a model's attention cannot take biases."""
    if (part := unbiased_part(model)) is not None:
        raise ValueError(f"bias needs attention 'sdpa', {part}: model.set_attn_implementation('sdpa')")
