"""Stem `soft_selection`: weights that sum to k in place of the best k, and the other ways to train a choice that is deployed hard."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import acc_dtype, fake, integer, ops, real, real_tensor

LINKS = ("logistic", "gumbel")
"""How a score beyond the threshold becomes a weight."""


def _soft(scores: Tensor, k: int, temperature: float, link: str, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, N] with the noise, as the op takes them, their weights and the threshold [B]."""
    real_tensor("scores", scores)
    if scores.dim() not in (1, 2):
        raise ValueError(f"scores must be [B, N] or [N], got {list(scores.shape)}")
    scores = scores.to(acc_dtype(scores.dtype))
    if noise is not None:
        if real_tensor("noise", noise).shape != scores.shape:
            raise ValueError(f"noise must be as large as scores, {list(scores.shape)}, got {list(noise.shape)}")
        scores = scores + noise
    rows = scores if scores.dim() == 2 else scores[None]
    weights, threshold = ops.soft_topk(rows, integer("k", k, 0), real("temperature", temperature), link)
    return rows, weights, threshold


def soft_topk(scores: Tensor, k: int, temperature: float = 1.0, link: str = "logistic", noise: Tensor | None = None) -> Tensor:
    """Weights in [0, 1] that sum to k: the best k, softened.

    A weight is link((score - t) / temperature), with the threshold t at which the weights of a row sum to k:

        logistic  1 / (1 + exp(-z)), the projection onto {0 <= w <= 1, sum w = k} with entropy as the distance
        gumbel    1 - exp(-exp(z)): with what probability a score is among the best k of scores / temperature + Gumbel noise
                  (`gumbel_topk`), nearly, where k and N are large

    As the temperature falls the weights approach those of the best k: scores that differ from the others by more than 20 temperatures
    have theirs; equal scores share. A small temperature alone does not make a choice hard: deploy the best k.

    Args:
        scores: [B, N] or [N]; float16 and bfloat16 are computed, and returned, in float32. -inf and NaN are removed: their weight is 0
            and their gradient too. +inf has weight 1.
        k: at least 0; from as many on as are not removed, all of these have weight 1.
        temperature: positive, in units of the scores.
        link: "logistic" or "gumbel".
        noise: is added to the scores, of their shape.

    Returns:
        [B, N] (or [N]). Gradients in scores and noise are exact: they follow from the implicit function theorem in O(N), stay finite at
        any temperature, and sum to 0 over a row. No second derivatives.

    Raises:
        ValueError: k is negative, the temperature is not positive, or an unknown link.

    Example:
        >>> import torch, texvlm
        >>> texvlm.soft_topk(torch.tensor([3.0, 2.0, 2.0, 1.0]), k=2, temperature=0.01)
        tensor([1.0000, 0.5000, 0.5000, 0.0000])
    """
    weights = _soft(scores, k, temperature, link, noise)[1]
    return weights if scores.dim() == 2 else weights[0]


def log_soft_topk(
    scores: Tensor, k: int, temperature: float = 1.0, link: str = "logistic", noise: Tensor | None = None
) -> Tensor:
    """The logarithm of `soft_topk`, accurate where the weight itself underflows: what a log-bias of attention needs.

    Args, Raises: see `soft_topk`.

    Returns:
        [B, N] (or [N]), at most 0. -inf where a score is removed, without a gradient.

    Example:
        >>> import torch, texvlm
        >>> texvlm.log_soft_topk(torch.tensor([3.0, 2.0, 1.0, 0.0]), k=2, temperature=0.01)[2:]
        tensor([ -50., -150.])
    """
    rows, _, threshold = _soft(scores, k, temperature, link, noise)
    there = rows.isfinite() & threshold.isfinite()[:, None]
    z = (torch.where(there, rows, 0).double() - torch.where(threshold.isfinite(), threshold, 0)[:, None]) / real(
        "temperature", temperature
    )
    if link == "logistic":
        log = F.logsigmoid(z)
    else:
        # log(1 - exp(-x)) of x = exp(z): z where x is small, which is to first order z - x / 2
        x = z.clamp(max=50).exp()
        log = torch.where(z < -12, z - x / 2, (-torch.expm1(-x.clamp(min=1e-6))).log())
    hard = torch.where((rows == torch.inf) | (rows.isfinite() & (threshold == -torch.inf)[:, None]), 0.0, -torch.inf)
    if k == 0:
        hard = torch.full_like(hard, -torch.inf)
    log = torch.where(there, log, hard.double()).to(rows.dtype)
    return log if scores.dim() == 2 else log[0]


def gumbel_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard Gumbel noise, of the shape, dtype (at least float32) and device of a tensor. Never infinite."""
    noise = torch.empty_like(real_tensor("like", like), dtype=acc_dtype(like.dtype)).exponential_(generator=generator)
    return -noise.clamp_(min=torch.finfo(noise.dtype).tiny).log()


def gumbel_topk(scores: Tensor, k: int, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """A sample of k without replacement, from a softmax of scores / temperature.

    It is the best k of scores / temperature + Gumbel noise (T. Vieira, 2014; W. Kool, H. van Hoof and M. Welling, 2019). How often an
    index is in it: `soft_topk` with link "gumbel".

    Args:
        scores: [B, N]; -inf and NaN come last.
        k: at least 0.
        temperature: positive.
        generator: of the noise.

    Returns:
        int64 [B, min(k, N)], in the order of the draw. No gradient.

    Example:
        >>> import torch, texvlm
        >>> texvlm.gumbel_topk(torch.tensor([[0.0, 100.0, 50.0, 0.0]]), k=2)
        tensor([[1, 2]])
    """
    scores = real_tensor("scores", scores).detach()
    return ops.select_topk(
        scores.to(acc_dtype(scores.dtype)) / real("temperature", temperature) + gumbel_noise(scores, generator), k
    )[1]


def sample_exact(weights: Tensor, k: int | None = None, generator: torch.Generator | None = None) -> Tensor:
    """A sample of exactly k, that has each index with a probability of exactly its weight.

    Systematic sampling (W. Madow, 1949): the weights are laid end to end from a random start in [0, 1), and every index is taken within
    whose stretch a whole number falls. Neighbours are taken together less often than by chance.

    Args:
        weights: [B, N] in [0, 1], rows that sum to k (`soft_topk`), up to rounding.
        k: the sum; by default that of the first row, rounded.
        generator: of the start.

    Returns:
        int64 [B, k], ascending. No gradient: `straight_through` has one.

    Raises:
        ValueError: a weight is outside of [0, 1], or the rows do not sum to k.

    Example:
        >>> import torch, texvlm
        >>> texvlm.sample_exact(torch.tensor([[1.0, 0.0, 1.0, 0.5, 0.5]]), k=3).shape
        torch.Size([1, 3])
    """
    weights = real_tensor("weights", weights).detach().double()
    if weights.dim() != 2:
        raise ValueError(f"weights must be [B, N], got {list(weights.shape)}")
    if k is None:
        k = int(weights[0].sum().round()) if len(weights) else 0
    k = integer("k", k, 0)
    if weights.device.type == "cpu" and weights.numel():  # on a GPU it would wait for the device
        if not bool(((weights >= -1e-4) & (weights <= 1 + 1e-4)).all()):
            raise ValueError("weights must be in [0, 1]")
        if not bool(((weights.sum(1) - k).abs() <= 1e-3 * max(1, k)).all()):
            raise ValueError(f"weights must sum to k = {k} in every row, got {weights.sum(1).tolist()[:4]}")
    ends = weights.clamp(0, 1).cumsum(1)
    ends = (ends * (k / ends[:, -1:].clamp(min=1e-300))).clamp(max=k) if weights.shape[1] else ends
    # The end of the last stretch that is not empty is k, whatever rounding says.
    ends = torch.where(ends >= k - 1e-9 * max(1, k), float(k), ends)
    start = torch.rand(len(weights), 1, dtype=torch.float64, device=weights.device, generator=generator)
    whole = (ends + start).floor()
    taken = whole > F.pad(whole[:, :-1], (1, 0))
    return ops.compact(taken)[0][:, :k]


def straight_through(indices: Tensor, weights: Tensor) -> Tensor:
    """Ones for what was chosen, with the gradients of its soft weights.

    Args:
        indices: int64 [B, k], what was chosen.
        weights: [B, N], `soft_topk` or any others.

    Returns:
        [B, k], 1 in value. Multiply what is chosen by it: its gradient reaches the weights as if they had been the factors (Y. Bengio,
        N. Leonard and A. Courville, 2013).

    Example:
        >>> import torch, texvlm
        >>> scores = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
        >>> gate = texvlm.straight_through(torch.tensor([[1]]), texvlm.soft_topk(scores, 1))
        >>> gate.sum().backward()
        >>> gate.item(), bool((scores.grad != 0).all())
        (1.0, True)
    """
    if real_tensor("weights", weights).dim() != 2:
        raise ValueError(f"weights must be [B, N], got {list(weights.shape)}")
    if real_tensor("indices", indices).dtype != torch.int64 or indices.dim() != 2 or len(indices) != len(weights):
        raise ValueError(f"indices must be int64 [{len(weights)}, k], got {indices.dtype} {list(indices.shape)}")
    kept = weights.gather(1, indices)
    return kept - kept.detach() + 1


def noisy_topk(
    scores: Tensor, k: int, temperature: float = 1.0, noise: Tensor | None = None, link: str = "gumbel"
) -> tuple[Tensor, Tensor]:
    """The best k of noisy scores, with a gate that trains the scores: the default to train with.

    What is chosen is hard, as it is deployed, but noise makes the choice vary. The gate is 1; attention over the k adds its logarithm,
    0, to the logits, or a pool multiplies by it. Its gradient is that of the logarithm of the probability of being kept, which is the
    soft weight of the scores without the noise: what helps rises, and through the sum that is fixed all others sink. So attention is a
    softmax over what is kept, weighted as it would be softly (R. Williams, 1992, for the gradient; N. Shazeer et al., 2017, for the noise).

    A reader that is trained along with the scores learns to look past what is of no use, and a gate of 1 then teaches little. There let
    the weights themselves count, in training and at work: log_soft_topk(scores, k).gather(1, indices) in place of the gate's logarithm
    (benchmarks/README.md: 62 % of digits found and read where the gate ends at 27 %).

    Args:
        scores: [B, N]; -inf and NaN are removed, and come last.
        k: at least 0.
        temperature: of the soft weights that the gradient is of.
        noise: added to the scores for the choice: temperature * `gumbel_noise(scores)` is what the link "gumbel" stands for; None: none.
        link: see `soft_topk`.

    Returns:
        indices: int64 [B, min(k, N)], best first.
        gate: [B, min(k, N)], 1 in value; 0 for an index that is removed.

    Example:
        >>> import torch, texvlm
        >>> scores = torch.randn(2, 64, requires_grad=True)
        >>> indices, gate = texvlm.noisy_topk(scores, 8, noise=texvlm.gumbel_noise(scores))
        >>> gate.log().abs().max().item()
        0.0
    """
    if real_tensor("scores", scores).dim() != 2:
        raise ValueError(f"scores must be [B, N], got {list(scores.shape)}")
    if noise is not None and real_tensor("noise", noise).shape != scores.shape:
        raise ValueError(f"noise must be as large as scores, {list(scores.shape)}, got {list(noise.shape)}")
    log = log_soft_topk(scores, k, temperature, link)
    noisy = scores.detach() if noise is None else scores.detach() + noise
    indices = ops.select_topk(noisy.to(acc_dtype(scores.dtype)), k)[1]
    kept = log.gather(1, indices)
    there = kept > -torch.inf
    kept = torch.where(there, kept, 0)
    return indices, (kept - kept.detach()).exp() * there


def noise_gate(tokens: Tensor, weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mixes tokens with noise as far as they are not chosen, at the variance that they have.

    A token becomes mean + sqrt(w) (token - mean) + sqrt(1 - w) deviation * noise, with the mean and the deviation of each channel over
    the tokens of a picture: so a reader can not tell a weight from the size of what it weighs, as it could of w * token.

    Args:
        tokens: [B, N, D].
        weights: [B, N] in [0, 1].
        generator: of the noise.

    Returns:
        [B, N, D], in the tokens' dtype. Gradients in tokens and weights (of the square roots, from 1e-6 on).

    Example:
        >>> import torch, texvlm
        >>> texvlm.noise_gate(torch.randn(2, 64, 8), torch.rand(2, 64)).shape
        torch.Size([2, 64, 8])
    """
    real_tensor("tokens", tokens), real_tensor("weights", weights)  # both, before either's shape is told
    if tokens.dim() != 3 or weights.shape != tokens.shape[:2]:
        raise ValueError(f"weights must be [B, N] of tokens [B, N, D], got {list(weights.shape)} and {list(tokens.shape)}")
    mean = tokens.mean(1, keepdim=True)
    deviation = tokens.std(1, keepdim=True, correction=0)
    noise = torch.empty_like(tokens).normal_(generator=generator)
    weight = weights.unsqueeze(-1).to(tokens.dtype)
    share, rest = (w.clamp(min=1e-6).sqrt() for w in (weight, 1 - weight))
    return mean + share * (tokens - mean) + rest * deviation.detach() * noise


@fake("soft_topk")
def _(scores: Tensor) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape[:1], dtype=torch.float64)


@fake("soft_topk_backward")
def _(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)
