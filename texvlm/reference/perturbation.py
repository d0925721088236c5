"""The perturbed top-k, with noise that a counter tells."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cascade import select_topk

_LOW = 0xFFFFFFFF


def _product(a: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a times each word; int64 would overflow, so in halves."""
    low, high = a * (words & 0xFFFF), a * (words >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & _LOW, total & _LOW


def philox(counter: Tensor, seed: int) -> Tensor:
    """Return Philox4x32-10 of counters `[..., 4]`, words as int64, with the 64 bits of the seed as its key."""
    c0, c1, c2, c3 = counter.unbind(-1)
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high2, low2 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return torch.stack([c0, c1, c2, c3], dim=-1)


def normal_noise(batch: int, samples: int, count: int, seed: int) -> Tensor:
    """Return standard normal numbers `[batch, samples, count]`, float64: Box and Muller's transform of the words of a counter."""
    groups = -(-count // 4)
    index = torch.meshgrid(torch.arange(batch), torch.arange(samples), torch.arange(groups), indexing="ij")
    words = philox(torch.stack([index[2], index[1], index[0], torch.zeros_like(index[0])], dim=-1), seed)
    first, second = words[..., 0::2], words[..., 1::2]
    radius = (-2 * (((first >> 8).double() + 0.5) * 2.0**-24).log()).sqrt()
    angle = 2 * math.pi * second.double() * 2.0**-32
    both = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
    return both.flatten(3).flatten(2)[..., :count]


def perturbed_topk(scores: Tensor, k: int, samples: int, sigma: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the best k of `samples` noisy copies of the scores.

    Args:
        scores: `[B, N]`.
        k: at least 0.
        samples: how many copies.
        sigma: deviation of the noise.
        seed: tells the noise.

    Returns:
        gate `[B, samples, min(k, N)]`, 1 / samples, with the Monte Carlo gradient of the mean over the noise, each sample taken
        relative to the mean of the others; and the indices, ascending, int64.
    """
    batch, count = scores.shape
    noise = normal_noise(batch, samples, count, seed).to(scores)
    noisy = scores.detach()[:, None] + sigma * noise
    kept = min(k, count)
    indices = select_topk(noisy.flatten(0, 1), kept)[1].sort(dim=1).values.view(batch, samples, kept)
    # The factor of sample m is its noise beyond the mean noise of the others: the same sum as values relative to the others.
    others = (noise.sum(1, keepdim=True) - noise) / max(1, samples - 1)
    along = ((scores - scores.detach())[:, None] * (noise - others)).sum(-1) / sigma
    gate = ((1 + along) / samples)[..., None].expand(-1, -1, kept)
    return gate.contiguous(), indices
