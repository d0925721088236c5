"""What the perturbed top-k means: the noise, the mean over choices, and a gradient that is right in expectation."""

from __future__ import annotations

import pytest
import torch

import texvlm
from texvlm.reference.perturbation import normal_noise, philox


def test_philox_has_the_known_answers() -> None:
    """Of the method's own test vectors."""
    zeros = philox(torch.zeros(4, dtype=torch.int64), 0)
    assert [hex(w) for w in zeros.tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = philox(torch.full((4,), 0xFFFFFFFF), (1 << 64) - 1)
    assert [hex(w) for w in ones.tolist()] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def test_the_noise_is_standard_normal_and_its_own_in_every_place() -> None:
    noise = normal_noise(2, 50, 1001, seed=7)
    assert abs(float(noise.mean())) < 0.01 and abs(float(noise.std()) - 1) < 0.01
    assert abs(float((noise**4).mean()) - 3) < 0.1 and float(noise.abs().max()) < 6.5
    assert len(noise.unique()) == noise.numel() and not torch.equal(noise, normal_noise(2, 50, 1001, seed=8))
    neighbours = (noise[..., 1:] * noise[..., :-1]).mean()
    assert abs(float(neighbours)) < 0.01


def test_inclusion_and_its_gradient_are_right_in_expectation() -> None:
    """For the best one of two the inclusion is a normal distribution function, known with its derivative."""
    sigma, gap = 0.5, 0.3
    scores = torch.tensor([[gap, 0.0]], dtype=torch.float64, requires_grad=True)
    indices, gate = texvlm.perturbed_topk(scores, 1, samples=200_000, sigma=sigma, seed=1)
    share = (gate * (indices == 0)).sum()
    spread = sigma * 2**0.5
    wanted = torch.special.ndtr(torch.tensor(gap / spread, dtype=torch.float64))
    assert abs(float((share - wanted).detach())) < 0.004
    (grad,) = torch.autograd.grad(share, scores)
    slope = torch.exp(torch.tensor(-0.5 * (gap / spread) ** 2)) / (spread * (2 * torch.pi) ** 0.5)
    torch.testing.assert_close(grad, torch.tensor([[float(slope), -float(slope)]], dtype=torch.float64), rtol=0, atol=0.01)


def test_gradient_of_any_function_of_the_choice() -> None:
    """Against differences of the mean itself, by the same noise."""
    g = torch.Generator().manual_seed(2)
    scores = torch.randn(1, 12, dtype=torch.float64, generator=g)
    value = torch.randn(12, 12, dtype=torch.float64, generator=g)

    def mean(s: torch.Tensor) -> torch.Tensor:
        indices, gate = texvlm.perturbed_topk(s, 3, samples=100_000, sigma=0.6, seed=5)
        pairs = value[indices[..., 0], indices[..., 2]]  # of the set, not of its members one by one
        return (gate.mean(-1) * pairs).sum()

    leaf = scores.clone().requires_grad_()
    (grad,) = torch.autograd.grad(mean(leaf), leaf)
    step = 0.25
    for n in range(0, 12, 3):
        moved = torch.zeros_like(scores)
        moved[0, n] = step
        with torch.no_grad():
            slope = (mean(scores + moved) - mean(scores - moved)) / (2 * step)
        assert abs(float(slope - grad[0, n])) < 0.03


def test_memory_holds_no_noise_and_results_do_not_depend_on_how_it_is_split() -> None:
    scores = torch.randn(3, 4096, generator=torch.Generator().manual_seed(3))
    indices, gate = texvlm.perturbed_topk(scores, 20, samples=400, sigma=0.1, seed=9)  # more rows than fit at once
    assert gate.shape == indices.shape == (3, 400, 20) and (indices.diff(dim=2) > 0).all()
    noise = normal_noise(3, 400, 4096, 9).float()[:, [0, 399]]
    wanted = texvlm.topk((scores[:, None] + 0.1 * noise).flatten(0, 1), 20)[1].sort(1).values.view(3, 2, 20)
    assert (indices[:, [0, 399]] == wanted).float().mean() > 0.99  # the last digit of the noise may differ
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        again = texvlm.perturbed_topk(scores, 20, samples=400, sigma=0.1, seed=9)[0]
        torch.set_num_threads(before)
        assert torch.equal(again, indices)


def test_a_seed_repeats_and_none_draws() -> None:
    scores = torch.zeros(1, 100)
    first, second = (texvlm.perturbed_topk(scores, 5, 4, seed=3)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.manual_seed(0)
    drawn = [texvlm.perturbed_topk(scores, 5, 4)[0] for _ in range(2)]
    torch.manual_seed(0)
    assert not torch.equal(*drawn) and torch.equal(texvlm.perturbed_topk(scores, 5, 4)[0], drawn[0])


def test_half_types_and_errors() -> None:
    assert texvlm.perturbed_topk(torch.zeros(1, 9).half(), 2, 3)[1].dtype == torch.float32
    with pytest.raises(ValueError, match="sigma must be positive, got -1"):
        texvlm.perturbed_topk(torch.zeros(1, 9), 2, 3, sigma=-1)
