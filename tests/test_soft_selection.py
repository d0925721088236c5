"""What soft selection means: sums, limits, gradients at any temperature, and samples that keep to the weights."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm

LINKS = ("logistic", "gumbel")
REAL = (torch.float32, torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("link", LINKS)
@given(
    n=st.integers(1, 300),
    share=st.floats(0, 1),
    exponent=st.floats(-6, 3),
    spread=st.sampled_from([1e-3, 1.0, 1e3]),
    kind=st.sampled_from(["normal", "ties", "heavy", "flat"]),
    seed=st.integers(0, 10**6),
)
@examples(60)
def test_sums_to_k_in_the_order_of_the_scores(
    link: str, n: int, share: float, exponent: float, spread: float, kind: str, seed: int
) -> None:
    scores = torch.randn(2, n, generator=generator(seed))
    scores = {"normal": scores, "ties": scores.round(), "heavy": scores.exp() ** 3, "flat": scores * 0}[kind] * spread
    k = round(share * n)
    weight = texvlm.soft_topk(scores, k, 10**exponent, link)
    assert weight.min() >= 0 and weight.max() <= 1
    torch.testing.assert_close(weight.double().sum(1), torch.full((2,), float(k), dtype=torch.float64), rtol=2e-6, atol=2e-5)
    order = scores.argsort(dim=1, stable=True)
    assert (weight.gather(1, order).diff(dim=1) >= -1e-6).all()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype", REAL)
def test_is_the_hard_set_beyond_twenty_temperatures_and_ties_share(link: str, dtype: torch.dtype) -> None:
    for temperature in (1e-6, 1e-3, 1.0):
        places = torch.randperm(64, generator=generator(1)).to(dtype)
        weight = texvlm.soft_topk(20.5 * temperature * places[None], 10, temperature, link)
        kept = texvlm.topk(places[None], 10)[1]
        hard = torch.zeros_like(weight).scatter(1, kept, 1)
        torch.testing.assert_close(weight, hard, rtol=0, atol=1e-3 if link == "logistic" else 0.1)
    tied = torch.tensor([[3.0, 2.0, 2.0, 1.0]], dtype=dtype)
    torch.testing.assert_close(
        texvlm.soft_topk(tied, 2, 1e-3, link), torch.tensor([[1.0, 0.5, 0.5, 0.0]], dtype=dtype), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("temperature", [0.02, 0.005, 1e-4, 1e-6])
def test_gradients_stay_finite_and_right_at_small_temperatures(link: str, dtype: torch.dtype, temperature: float) -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=dtype, requires_grad=True)
    weight, threshold = torch.ops.texvlm.soft_topk(scores, 2, temperature, link)
    (share,) = torch.autograd.grad(threshold.sum(), scores, retain_graph=True)
    assert share.isfinite().all() and abs(float(share.sum()) - 1) < 1e-5
    if link == "logistic":  # two scores half a unit away on both sides
        tolerance = 1e-6 / temperature * 0.1 if dtype == torch.float32 else 1e-6
        torch.testing.assert_close(share, torch.tensor([[0, 0.5, 0.5, 0]], dtype=dtype), rtol=0, atol=max(tolerance, 1e-5))
    (grad,) = torch.autograd.grad((weight * torch.tensor([1.0, 2, 3, 4], dtype=dtype)).sum(), scores)
    assert grad.isfinite().all() and abs(float(grad.sum())) < 1e-3
    # near ties: against the same in float64
    close = torch.tensor([[3.0, 2.0, 2.0 - 2**-21, 2.0 + 2**-21, 0.0]], dtype=dtype)
    grads = []
    for like in (close, close.double()):
        like = like.clone().requires_grad_()
        weights = texvlm.soft_topk(like, 2, temperature, link)
        (weights * torch.tensor([3.0, 1, 2, 4, 1], dtype=like.dtype)).sum().backward()
        assert like.grad is not None
        grads.append(like.grad.double())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-3 * float(grads[1].abs().max()))


@pytest.mark.parametrize("link", LINKS)
def test_what_is_removed_has_no_weight_and_no_gradient(link: str) -> None:
    scores = torch.randn(2, 40, generator=generator(2))
    lost = torch.rand(2, 40, generator=generator(3)) < 0.3
    for nothing in (-torch.inf, torch.nan):
        masked = torch.where(lost, nothing, scores).requires_grad_()
        weight = texvlm.soft_topk(masked, 5, 0.5, link)
        (weight * torch.where(lost, torch.inf, 1.0).nan_to_num(posinf=7.0)).sum().backward()
        assert (weight[lost] == 0).all() and masked.grad is not None and (masked.grad[lost] == 0).all()
        for row in range(2):  # as if they had never been there
            alone = texvlm.soft_topk(scores[row][~lost[row]], 5, 0.5, link)
            torch.testing.assert_close(weight[row][~lost[row]], alone, rtol=1e-5, atol=1e-6)
            log = texvlm.log_soft_topk(masked, 5, 0.5, link)
            assert (log[lost] == -torch.inf).all() and log[~lost].isfinite().all()


@pytest.mark.parametrize("link", LINKS)
def test_nothing_and_all_are_constant(link: str) -> None:
    for k, value in ((0, 0.0), (12, 1.0), (99, 1.0)):
        scores = torch.randn(2, 12, generator=generator(4), requires_grad=True)
        weight = texvlm.soft_topk(scores, k, 0.3, link)
        weight.sum().backward()
        assert (weight == value).all() and scores.grad is not None and (scores.grad == 0).all()
        log = texvlm.log_soft_topk(scores, k, 0.3, link)
        assert (log == (0 if k else -torch.inf)).all()
    many = torch.tensor([[torch.inf, torch.inf, 1.0, 0.0]])
    assert texvlm.soft_topk(many, 1, link=link).tolist() == [[0.5, 0.5, 0, 0]]
    torch.testing.assert_close(texvlm.soft_topk(many, 3, 0.01, link), torch.tensor([[1.0, 1, 1, 0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("link", LINKS)
def test_logarithms_are_right_where_weights_underflow(link: str) -> None:
    scores = (3 * torch.randn(2, 60, dtype=torch.float64, generator=generator(5))).requires_grad_()
    log = texvlm.log_soft_topk(scores, 7, 0.4, link)
    torch.testing.assert_close(log.exp(), texvlm.soft_topk(scores, 7, 0.4, link), rtol=1e-8, atol=1e-300)
    assert torch.autograd.gradcheck(lambda s: texvlm.log_soft_topk(s, 7, 0.4, link), scores)
    tiny = texvlm.log_soft_topk(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), 2, 1e-3, link)
    assert tiny.isfinite().all() and tiny[0, 3] < tiny[0, 2] < -200
    assert texvlm.soft_topk(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), 2, 1e-3, link)[0, 3] == 0


def test_a_log_bias_with_a_mask_is_removal() -> None:
    g = generator(6)
    query, keys, values = (
        torch.randn(1, 4, 8, generator=g),
        torch.randn(1, 50, 8, generator=g),
        torch.randn(1, 50, 8, generator=g),
    )
    lost = torch.rand(1, 50, generator=g) < 0.4
    scores = torch.where(lost, -torch.inf, torch.randn(1, 50, generator=g)).requires_grad_()
    bias = texvlm.log_soft_topk(scores, 50)  # all that is left: bias 0, and -inf for what is removed
    all_of_it = torch.softmax(query @ keys.mT + bias[:, None], -1) @ values
    rest = torch.softmax(query @ keys[:, ~lost[0]].mT, -1) @ values[:, ~lost[0]]
    torch.testing.assert_close(all_of_it, rest)
    all_of_it.sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()


def test_gumbel_top_k_includes_with_the_link_probability() -> None:
    scores = 1.5 * torch.randn(1, 4096, generator=generator(7))
    wanted = texvlm.soft_topk(scores, 273, link="gumbel")
    counts, draws, g = torch.zeros(4096), 1500, generator(8)
    for _ in range(draws // 50):
        kept = texvlm.gumbel_topk(scores.expand(50, -1), 273, generator=g)
        assert all(len(row.unique()) == 273 for row in kept[:2])
        counts += torch.bincount(kept.flatten(), minlength=4096)
    error = (counts / draws - wanted[0]).abs()
    deviation = (wanted[0] * (1 - wanted[0]) / draws).sqrt()
    assert (error <= 0.03 + 4 * deviation).all() and error.mean() < 0.01
    logistic = texvlm.soft_topk(scores, 273)  # the other link is no model of it
    assert (counts / draws - logistic[0]).abs().max() > 0.1


def test_exact_samples_have_the_weights_as_inclusion() -> None:
    weights = texvlm.soft_topk(torch.randn(1, 300, generator=generator(9)), 20, 0.7)
    draws, g = 4000, generator(10)
    kept = texvlm.sample_exact(weights.expand(draws, -1), generator=g)
    assert kept.shape == (draws, 20) and (kept >= 0).all() and (kept.diff(dim=1) > 0).all()
    rate = torch.bincount(kept.flatten(), minlength=300) / draws
    assert ((rate - weights[0]).abs() <= 5 * (weights[0] * (1 - weights[0]) / draws).sqrt() + 1e-9).all()
    hard = torch.zeros(3, 40).scatter(1, torch.tensor([[1, 5], [0, 39], [38, 39]]), 1)
    assert texvlm.sample_exact(hard, generator=g).tolist() == [[1, 5], [0, 39], [38, 39]]
    assert (
        texvlm.sample_exact(torch.zeros(2, 5)).shape == (2, 0)
        and (texvlm.sample_exact(torch.ones(1, 5)) == torch.arange(5)).all()
    )
    assert texvlm.sample_exact(torch.zeros(0, 5), 2).shape == (0, 2)


def test_exact_samples_are_exact_whatever_rounding_says() -> None:
    g = generator(11)
    for seed in range(200):
        n = int(torch.randint(2, 500, (1,), generator=g))
        k = int(torch.randint(1, n + 1, (1,), generator=g))
        weights = texvlm.soft_topk(torch.randn(4, n, generator=generator(seed)) * 3, k, 0.2)
        kept = texvlm.sample_exact(weights, k, generator=g)
        assert kept.shape == (4, k) and (kept >= 0).all() and (weights.gather(1, kept) > 0).all()
        sure = weights >= 1 - 1e-12
        assert torch.zeros(4, n).scatter(1, kept, 1).bool()[sure].all()


def test_noisy_top_k_is_hard_and_trains_softly() -> None:
    scores = torch.randn(2, 50, dtype=torch.float64, generator=generator(12), requires_grad=True)
    noise = texvlm.gumbel_noise(scores, generator(13))
    indices, gate = texvlm.noisy_topk(scores, 6, 0.8, noise)
    assert (indices == texvlm.topk((scores + noise).detach(), 6)[1]).all() and (gate == 1).all()
    factor = torch.arange(12.0, dtype=torch.float64).view(2, 6)
    (grad,) = torch.autograd.grad((gate * factor).sum(), scores)
    log = texvlm.log_soft_topk(scores, 6, 0.8, "gumbel").gather(1, indices)
    (wanted,) = torch.autograd.grad((log * factor).sum(), scores)
    torch.testing.assert_close(grad, wanted)
    removed = torch.full((1, 3), -torch.inf)
    assert texvlm.noisy_topk(removed, 2)[1].tolist() == [[0, 0]]


def test_straight_through_has_the_gradient_of_the_weights() -> None:
    weights = torch.rand(2, 9, generator=generator(14), requires_grad=True)
    indices = torch.tensor([[8, 0], [3, 4]])
    gate = texvlm.straight_through(indices, weights)
    gate.mul(torch.tensor([[1.0, 2], [3, 4]])).sum().backward()
    assert (gate == 1).all() and weights.grad is not None
    assert (weights.grad == torch.zeros(2, 9).scatter(1, indices, torch.tensor([[1.0, 2], [3, 4]]))).all()


def test_the_noise_gate_keeps_mean_and_variance() -> None:
    tokens = 3 * torch.randn(2, 4000, 5, generator=generator(15)) + torch.arange(5.0)
    for share in (0.0, 0.3, 1.0):
        mixed = texvlm.noise_gate(tokens, torch.full((2, 4000), share), generator(16))
        torch.testing.assert_close(mixed.mean(1), tokens.mean(1), atol=0.3, rtol=0)
        torch.testing.assert_close(mixed.std(1), tokens.std(1), atol=0.2, rtol=0)
        between = torch.corrcoef(torch.stack([mixed[0, :, 2], tokens[0, :, 2]]))[0, 1]
        assert abs(float(between) - math.sqrt(share)) < 0.05
    with pytest.raises(ValueError, match=r"weights must be \[B, N\]"):
        texvlm.noise_gate(tokens, torch.rand(2, 3))


def test_half_types_are_computed_in_float32() -> None:
    scores = torch.randn(1, 30, generator=generator(17))
    for dtype in (torch.float16, torch.bfloat16):
        weight = texvlm.soft_topk(scores.to(dtype), 4)
        assert weight.dtype == torch.float32 and abs(float(weight.sum()) - 4) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert texvlm.soft_topk(scores.bfloat16(), 4).dtype == torch.float32
    assert texvlm.soft_topk(scores[0], 4).shape == (30,)


def test_errors_name_the_argument() -> None:
    scores = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"scores must be \[B, N\] or \[N\], got \[1, 2, 5\]"):
        texvlm.soft_topk(scores[None], 2)
    with pytest.raises(ValueError, match=r"noise must be as large as scores, \[2, 5\], got \[5\]"):
        texvlm.soft_topk(scores, 2, noise=torch.zeros(5))
    with pytest.raises(ValueError, match="temperature must be positive, got -1"):
        texvlm.soft_topk(scores, 2, -1)
    with pytest.raises(ValueError, match="must sum to k = 3"):
        texvlm.sample_exact(torch.full((1, 4), 0.5), 3)
    with pytest.raises(ValueError, match=r"weights must be in \[0, 1\]"):
        texvlm.sample_exact(torch.full((1, 4), 1.5), 6)
