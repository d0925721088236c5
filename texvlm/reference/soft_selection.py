"""Soft selection: weights in [0, 1] that sum to k."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _link(z: Tensor, link: str) -> Tensor:
    return torch.sigmoid(z) if link == "logistic" else -torch.expm1(-torch.exp(z.clamp(max=80)))


def _log_tails(z: Tensor, link: str) -> tuple[Tensor, Tensor]:
    """The logarithms of the sum of weights below 0, and of what is missing to 1 above."""
    below, above = z[z < 0], z[z >= 0]
    if link == "logistic":
        return F.logsigmoid(below).logsumexp(0), F.logsigmoid(-above).logsumexp(0)
    x = below.exp()
    low = torch.where(x < 1e-12, below, (-torch.expm1(-x.clamp(min=1e-300))).log())
    return low.logsumexp(0), (-above.clamp(max=700).exp()).logsumexp(0)


def soft_topk(scores: Tensor, k: int, temperature: float, link: str = "logistic") -> tuple[Tensor, Tensor]:
    """Return weights that sum to k, by bisection in float64.

    Args:
        scores: `[B, N]`; -inf and NaN have weight 0.
        k: at least 0.
        temperature: positive.
        link: "logistic", or "gumbel", 1 - exp(-exp(z)).

    Returns:
        weights `[B, N]`, link((score - threshold) / temperature), and the threshold `[B]`, float64: -inf where all weights are 1, inf
        where no finite score has any. Differentiable in the scores, by the formula of the implicit function theorem.
    """
    exact = torch.where(scores.isnan(), -torch.inf, scores).double()
    fixed, rows = exact.detach(), []
    for row in fixed:
        finite, tops = row[row.isfinite()], int((row == torch.inf).sum())
        if k <= tops:
            rows.append(torch.inf)
        elif k >= tops + len(finite):
            rows.append(-torch.inf)
        else:
            low, high = float(finite.min()) - 800 * temperature, float(finite.max()) + 800 * temperature
            for _ in range(300):
                middle = low + (high - low) / 2
                if not low < middle < high:
                    break
                z = (finite - middle) / temperature
                above = int((z >= 0).sum()) + tops - k
                below, missing = _log_tails(z, link)
                # where the integers cancel only the tails are left, which may be too small for numbers
                more = above + float(below.exp() - missing.exp()) >= 0 if above else bool(below >= missing)
                low, high = (middle, high) if more else (low, middle)
            rows.append(low + (high - low) / 2)
    threshold = torch.tensor(rows, dtype=torch.float64, device=scores.device)
    known = threshold.isfinite()
    solid = exact.isfinite() & known[:, None]
    t = torch.where(known, threshold, 0)
    # dt/ds: the slopes, normalised in the logarithm
    z = torch.where(solid, fixed - t[:, None], 0) / temperature
    log_slope = -z.abs() - 2 * torch.log1p(torch.exp(-z.abs())) if link == "logistic" else z - torch.exp(z.clamp(max=700))
    share = torch.where(solid, log_slope, -torch.inf).softmax(1).nan_to_num(0)
    moved = t + (share * torch.where(solid, exact - fixed, 0)).sum(1)
    z = (torch.where(solid, exact, 0) - moved[:, None]) / temperature
    infinite = exact == torch.inf
    top = torch.where(threshold == torch.inf, k / infinite.sum(1).clamp(min=1), 1.0)[:, None]
    flat = torch.where(infinite, top, ((threshold == -torch.inf)[:, None] & exact.isfinite()).double())
    weights = torch.where(solid, _link(z, link), flat)
    return weights.to(scores.dtype), torch.where(known, moved, threshold)
