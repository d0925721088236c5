"""Hierarchical attention of what is not there, not finite or very large, and over odd grids."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import texvlm
from texvlm import attention, reference

attend_op = torch.ops.texvlm.hierarchical_attention


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def self_attention(
    rows: int, columns: int, heads: int = 2, kv_heads: int | None = None, width: int = 8, batch: int = 1
) -> list[Tensor]:
    of_k = (batch, kv_heads or heads, rows * columns, width)
    return drawn((batch, heads, rows * columns, width), of_k, of_k)


def dense(
    q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor | None = None, prefix: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    if prefix is not None:
        k, v = torch.cat([k, prefix[0]], 2), torch.cat([v, prefix[1]], 2)
        log_weight = None if log_weight is None else F.pad(log_weight, (0, prefix[0].shape[2]))
    mask = None if log_weight is None else log_weight.to(q.dtype)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def with_gradients(f, *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = f(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights / weights[0].numel() ** 0.5)]


def close(actual: list[Tensor] | Tensor, wanted: list[Tensor] | Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


# ---- what cannot matter ----


@pytest.mark.parametrize("queries", ["grid", "alone"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_a_masked_place_holds_cannot_matter(value: float, queries: str) -> None:
    q, k, v = self_attention(24, 24, heads=4, kv_heads=2)
    mask = torch.rand(576) < 0.7
    mask[: 24 * 8] = False
    soiled = [t.masked_fill(~mask[:, None], value) for t in (k, v)]

    def answer(keep):
        return lambda q, k, v: texvlm.hierarchical_attention(q, k, v, (24, 24), keep, mask=mask, queries=queries)

    for keep in (0.1, 1):
        clean, dirty = with_gradients(answer(keep), q, k, v), with_gradients(answer(keep), q, *soiled)
        for a, b in zip(clean, dirty):
            assert torch.equal(a, b) and a.isfinite().all()
        assert (clean[2][:, :, ~mask] == 0).all() and (clean[3][:, :, ~mask] == 0).all()


@pytest.mark.parametrize("queries", ["grid", "alone"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_only_its_own_answer(value: float, queries: str) -> None:
    q, k, v = self_attention(24, 24)
    wanted = texvlm.hierarchical_attention(q, k, v, (24, 24), queries=queries)
    q[0, 1, 30, 3] = value
    out = texvlm.hierarchical_attention(q, k, v, (24, 24), queries=queries)
    others = torch.ones(2, 576, dtype=torch.bool)
    others[1, 30] = False
    assert out[0][others].isfinite().all() and not out[0, 1, 30].isfinite().any()
    if queries == "grid":  # in its tile, it is the others that choose
        others[1] = (torch.arange(576) // 24 >= 8) | (torch.arange(576) % 24 >= 8)
    assert torch.equal(out[0][others], wanted[0][others])


@pytest.mark.parametrize("queries", ["grid", "alone"])
@pytest.mark.parametrize("importance", ["spread", "bound"])
def test_a_place_that_is_infinitely_far_is_not_there(importance: str, queries: str) -> None:
    """Its cells have no finite mean, so that they are split, and dense attention to it is finite: nothing."""
    q, k, v = self_attention(24, 24)
    q[..., 3] = q[..., 3].abs() + 0.1
    k[:, :, 100, 3] = -math.inf
    out, chosen = texvlm.hierarchical_attention(q, k, v, (24, 24), queries=queries, importance=importance, return_chosen=True)
    assert out.isfinite().all()
    mask = torch.arange(576) != 100
    without = texvlm.hierarchical_attention(q, k, v, (24, 24), queries=queries, mask=mask, choice=chosen)
    close(out, without)
    close(texvlm.hierarchical_attention(q, k, v, (24, 24), exact=True), dense(q, k, v))


@pytest.mark.parametrize("queries", ["grid", "alone"])
@pytest.mark.parametrize("keep", [0.1, 1])
def test_nothing_to_read_is_answered_by_nothing(keep: float, queries: str) -> None:
    q, k, v = (t.requires_grad_() for t in self_attention(24, 24, batch=2))
    mask = torch.ones(2, 576, dtype=torch.bool)
    mask[0] = False
    ask = {"mask": mask, "queries": queries, "return_lse": True, "return_mass": True}
    out, lse, mass = texvlm.hierarchical_attention(q, k, v, (24, 24), keep, **ask)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all() and (mass[0] == 0).all()
    alone = texvlm.hierarchical_attention(q[1:], k[1:], v[1:], (24, 24), keep, **{**ask, "mask": None})
    close([out[1:], lse[1:], mass[1:]], list(alone))
    for loss in (out.sum(), lse[1].sum(), out.sum() + lse.exp().sum()):
        for gradient in torch.autograd.grad(loss, (q, k, v), retain_graph=True, allow_unused=True):
            assert gradient.isfinite().all() and (gradient[0] == 0).all()

    pk, pv = drawn(*[(2, 2, 1, 8)] * 2)
    out = texvlm.hierarchical_attention(q, k, v, (24, 24), keep, mask=mask, prefix=(pk, pv), queries=queries)
    close(out[0], pv[0].expand(-1, 576, -1))


@pytest.mark.parametrize("queries", ["grid", "alone"])
@pytest.mark.parametrize("shift", [1000.0, -1000.0])
def test_a_bias_for_all_changes_nothing(shift: float, queries: str) -> None:
    """No exponential of it is ever in the open."""
    q, k, v = self_attention(24, 24)
    bias = torch.randn(576, dtype=torch.float64)

    def answer(bias):
        ask = {"queries": queries, "return_lse": True, "return_mass": True, "return_chosen": True}
        return texvlm.hierarchical_attention(q, k, v, (24, 24), bias=bias, **ask)

    (out, lse, mass, chosen), shifted = answer(bias), answer(bias + shift)
    assert torch.equal(shifted[3], chosen)
    close(list(shifted[:3]), [out, lse + shift, mass], 1e-10)


@pytest.mark.parametrize("queries", ["grid", "alone"])
def test_large_logits_do_not_overflow(queries: str) -> None:
    q, k, v = (1000 * t.float() for t in self_attention(24, 24))
    for keep in (0.1, 1):
        answer = partial(texvlm.hierarchical_attention, grid=(24, 24), keep=keep, queries=queries)
        assert all(t.isfinite().all() for t in with_gradients(answer, q, k, v))
    close(answer(q, k, v), dense(q, k, v), 1e-4)


@pytest.mark.parametrize("grid", [(1, 5000), (5000, 1), (1, 1), (2, 1), (3, 700)], ids=str)
@pytest.mark.parametrize("queries", ["grid", "alone"])
def test_odd_grids(grid: tuple[int, int], queries: str) -> None:
    q, k, v = self_attention(*grid, width=4, heads=1)
    q = q if queries == "grid" else q[:, :, :9]
    out, lse, mass, chosen = texvlm.hierarchical_attention(
        q, k, v, grid, 0.05, queries=queries, return_lse=True, return_mass=True, return_chosen=True
    )
    plan = attention.plan(grid, 0.05, alone=queries == "alone")
    tile = attention._tile(*grid) if queries == "grid" else (1, 1)
    cells = reference.attention_pack(k, v, *grid, plan.levels)
    wanted = reference.hierarchical_attention(q, k, v, *cells, *grid, plan.levels, plan.counts, 0.5, tile, "spread", True)
    assert torch.equal(chosen, wanted[2])
    close([out, lse, mass * q.shape[2]], [wanted[0], wanted[1], wanted[3]], 1e-10)
    assert grid[0] * grid[1] < 100 or plan.read < 0.3
