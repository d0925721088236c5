"""Stem `perturbation`: the best k averaged over noise, the perturbed optimiser of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from texvlm._ext import acc_dtype, fake, integer, ops, real, real_tensor


def perturbed_topk(
    scores: Tensor, k: int, samples: int = 100, sigma: float = 0.05, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """The best k of noisy scores, many times: a mean over choices, with the gradient that a single choice lacks.

    The mean of f(best k of scores + sigma * noise) over normal noise is smooth in the scores, and f times the noise over sigma is an
    unbiased estimate of its gradient (Q. Berthet et al., 2020; J.-B. Cordonnier et al., 2021, for patches of pictures). Here the choices
    are indices, and the noise is made again for the gradient from a counter: memory is B x samples x k, not k x N.

    Args:
        scores: [B, N]; -inf is never among the best where k others are there. Half types are computed in float32.
        k: at least 0.
        samples: how many noisy copies; the gradient is a Monte Carlo estimate by as many.
        sigma: of the noise, in units of the scores, positive. A usual schedule falls to 0 over the training.
        seed: of the noise; None draws one from torch's generator.

    Returns:
        indices: int64 [B, samples, min(k, N)], ascending: slot j of all samples means about the same place.
        gate: [B, samples, min(k, N)], 1 / samples. A sum over samples of gate * g(index) is the mean of g, and its gradient reaches the
            scores by the gate. What a sample adds is taken relative to the others, which makes the estimate quieter, not biased.

    Raises:
        ValueError: k is negative, samples is below 1, sigma is not positive.

    Example:
        >>> import torch, texvlm
        >>> scores = torch.tensor([[0.0, 0.3, 0.2, -1.0]], requires_grad=True)
        >>> indices, gate = texvlm.perturbed_topk(scores, k=2, samples=1000, sigma=0.1, seed=0)
        >>> share = torch.zeros(1, 4).scatter_add(1, indices.flatten(1), gate.flatten(1))  # how often each is among the best
        >>> bool(share.sum().round() == 2), bool(share[0, 1] > share[0, 2] > share[0, 0])
        (True, True)
    """
    real_tensor("scores", scores)
    if seed is None:
        seed = int(torch.randint(1 << 62, ()))
    gate, indices = ops.perturbed_topk(
        scores.to(acc_dtype(scores.dtype)),
        integer("k", k, 0),
        integer("samples", samples),
        real("sigma", sigma),
        integer("seed", seed),
    )
    return indices, gate


@fake("perturbed_topk")
def _(scores: Tensor, k: int, samples: int) -> tuple[Tensor, Tensor]:
    size = (scores.shape[0], samples, torch.sym_min(k, scores.shape[1]))
    return scores.new_empty(size), scores.new_empty(size, dtype=torch.int64)


@fake("perturbed_topk_backward")
def _(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)
