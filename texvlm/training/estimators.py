"""How a gradient gets through the choice of k cells: estimators by name, all with the same result.

    noisy_topk        the k best of the scores with Gumbel noise; what is kept is read by a softmax whose bias is 0 in value and has the
                      gradient of the log of the probability of being kept (straight-through): what is read often although it is worse
                      than the rest becomes less likely. Trains what is deployed, and nothing else: the default
    noisy_gate        the same with the gradient of the log weight of the noisy scores: what is kept by luck learns little
    soft              all cells, biased by the log of their weight in the soft selection. A reader can learn to undo this bias, and then
                      nothing is learned that holds when k cells are kept: for comparison
    gumbel            the same of scores with Gumbel noise
    straight_through  the k best, without noise, with the gradient of their weights
    exact_sample      k cells drawn such that each is kept with exactly the probability of its weight, with the gradient of its log
    perturbed         the mean over `samples` hard selections of perturbed scores, with its Monte-Carlo gradient

Sources: straight-through, Bengio, Leonard and Courville, arXiv 1308.3432; Gumbel top-k, Kool, van Hoof and Welling, arXiv 1903.06059;
the gradient of the log probability, Williams, "Simple statistical gradient-following algorithms" (1992); noisy top-k gates, Shazeer et
al., arXiv 1701.06538; perturbed optimisers, Berthet et al., arXiv 2002.08676, and for patches Cordonnier et al., arXiv 2104.03059.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from texvlm.cascade import topk
from texvlm.perturbation import perturbed_topk
from texvlm.soft_selection import log_soft_topk, noisy_topk, sample_exact, soft_topk, straight_through


class Choice(NamedTuple):
    """Cells that are read, and with what weight.

    Attributes:
        indices: int64 [B, n].
        weight: [B, n], each row sums to 1; carries the gradient to the scores.
    """

    indices: Tensor
    weight: Tensor

    def read(self, values: Tensor) -> Tensor:
        """The mean of values [B, N] or [B, N, D] over what was chosen, [B] or [B, D], as attention with equal logits would read it."""
        index = self.indices if values.dim() == 2 else self.indices[..., None].expand(-1, -1, values.shape[2])
        weight = self.weight if values.dim() == 2 else self.weight[..., None]
        return (weight * values.gather(1, index)).sum(1)


class Noise(NamedTuple):
    """Where the randomness of one step comes from, so that it can be repeated.

    Attributes:
        gumbel: standard Gumbel noise [B, N].
        generator: on the device of the scores.
        seed: for what is made anew on the way back.
    """

    gumbel: Tensor
    generator: torch.Generator
    seed: int


def hard(scores: Tensor, k: int) -> Choice:
    """The k best: what is deployed. No gradient."""
    indices = topk(scores.detach(), k)[1]
    return Choice(indices, torch.full(indices.shape, 1 / k, device=scores.device))


def _kept(indices: Tensor, log_weight: Tensor) -> Choice:
    """These cells, read by a softmax of equal logits that has the gradient of their log weights [B, N]."""
    bias = log_weight.gather(1, indices)
    return Choice(indices, (bias - bias.detach()).softmax(1))


def _everything(log_weight: Tensor) -> Choice:
    """All cells, read by a softmax of these biases [B, N]."""
    indices = torch.arange(log_weight.shape[1], device=log_weight.device).expand(len(log_weight), -1)
    return Choice(indices, log_weight.softmax(1))


def _noisy_topk(scores: Tensor, k: int, temperature: float, noise: Noise, samples: int) -> Choice:
    indices, gate = noisy_topk(scores, k, temperature, temperature * noise.gumbel)
    return Choice(indices, gate.log().softmax(1))


def _noisy_gate(scores: Tensor, k: int, temperature: float, noise: Noise, samples: int) -> Choice:
    noisy = temperature * noise.gumbel
    return _kept(topk(scores.detach() + noisy, k)[1], log_soft_topk(scores, k, temperature, noise=noisy))


def _soft(scores: Tensor, k: int, temperature: float, noise: Noise, samples: int) -> Choice:
    return _everything(log_soft_topk(scores, k, temperature))


def _gumbel(scores: Tensor, k: int, temperature: float, noise: Noise, samples: int) -> Choice:
    return _everything(log_soft_topk(scores, k, temperature, noise=temperature * noise.gumbel))


def _straight_through(scores: Tensor, k: int, temperature: float, noise: Noise, samples: int) -> Choice:
    indices = topk(scores.detach(), k)[1]
    return Choice(indices, straight_through(indices, soft_topk(scores, k, temperature)).log().softmax(1))


def _exact_sample(scores: Tensor, k: int, temperature: float, noise: Noise, samples: int) -> Choice:
    indices = sample_exact(soft_topk(scores.detach(), k, temperature), k, generator=noise.generator)
    return _kept(indices, log_soft_topk(scores, k, temperature))


def _perturbed(scores: Tensor, k: int, temperature: float, noise: Noise, samples: int) -> Choice:
    indices, gate = perturbed_topk(scores, k, samples, temperature, noise.seed)
    return Choice(indices.flatten(1), gate.flatten(1) / k)


Estimator = Callable[[Tensor, int, float, Noise, int], Choice]
"""scores [B, N], k, temperature (of "perturbed" its sigma), noise, samples -> what is read."""

ESTIMATORS: dict[str, Estimator] = {
    "noisy_topk": _noisy_topk,
    "noisy_gate": _noisy_gate,
    "soft": _soft,
    "gumbel": _gumbel,
    "straight_through": _straight_through,
    "exact_sample": _exact_sample,
    "perturbed": _perturbed,
}
"""By name; the first is the default."""
