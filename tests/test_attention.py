"""What hierarchical attention means: where it equals dense attention, what its cells are, what cannot matter, what does."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from cases.attention import attend
from effort import examples
from hypothesis import given
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


# ---- what equals dense attention ----


@pytest.mark.parametrize(
    "how", [{"keep": 1}, {"exact": True}, {"keep": 1, "queries": "alone"}, {"exact": True, "keep": 0.01}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("grid", [(9, 13), (8, 16), (1, 1)], ids=str)
def test_everything_kept_is_dense_attention(how: dict, dtype: torch.dtype, grid: tuple[int, int]) -> None:
    n = grid[0] * grid[1]
    q, k, v, pk, pv = drawn((2, 6, n, 8), *[(2, 2, n, 8)] * 2, *[(2, 2, 3, 8)] * 2, dtype=dtype)
    bias = torch.randn(2, n).to(dtype)
    mask = torch.rand(n) < 0.7
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12

    close(
        with_gradients(lambda q, k, v: texvlm.hierarchical_attention(q, k, v, grid, **how), q, k, v),
        with_gradients(lambda q, k, v: dense(q, k, v), q, k, v),
        tolerance,
    )
    close(
        with_gradients(
            lambda q, k, v, bias, pk, pv: texvlm.hierarchical_attention(
                q, k, v, grid, bias=bias, mask=mask, prefix=(pk, pv), **how
            ),
            *(q, k, v, bias, pk, pv),
        ),
        with_gradients(
            lambda q, k, v, bias, pk, pv: dense(q, k, v, bias.masked_fill(~mask, -math.inf), (pk, pv)), q, k, v, bias, pk, pv
        ),
        tolerance,
    )


@pytest.mark.parametrize(("levels", "counts"), [([2, 1], [6, 20]), ([1], [20]), ([3, 2, 1], [2, 6, 20])], ids=str)
@pytest.mark.parametrize("tile", [[2, 4], [1, 1]], ids=str)
def test_every_cell_split_is_dense_attention(levels: list[int], counts: list[int], tile: list[int]) -> None:
    q, k, v = self_attention(7, 10, heads=4, kv_heads=2)
    log = torch.randn(1, 70, dtype=torch.float64)

    def split(q, k, v, log):
        cells = torch.ops.texvlm.attention_pack(k, v, 7, 10, levels, log)
        return attend_op(q, k, v, *cells, 7, 10, levels, counts, 8**-0.5, tile, "spread", False, log)[0]

    close(with_gradients(split, q, k, v, log), with_gradients(dense, q, k, v, log))


def of_cells(t: Tensor, grid: tuple[int, int], level: int) -> Tensor:
    """The same for all places of a cell: that of the first."""
    side = 1 << level
    field = t.unflatten(2, grid)[:, :, ::side, ::side]
    return field.repeat_interleave(side, 2).repeat_interleave(side, 3)[:, :, : grid[0], : grid[1]].flatten(2, 3)


@pytest.mark.parametrize("queries", ["grid", "alone"])
@pytest.mark.parametrize("grid", [(32, 32), (27, 19)], ids=str)
def test_equal_keys_and_values_in_a_cell_lose_nothing(grid: tuple[int, int], queries: str) -> None:
    """That is what the logarithm of the count is for, weights or not, in value and in the gradient of the queries."""
    q, k, v = self_attention(*grid)
    k, v = of_cells(k, grid, 3), of_cells(v, grid, 3)
    weight = torch.rand(1, k.shape[2], dtype=torch.float64)
    weight[:, ::7] = 0
    ask = {"keep": 0.05, "queries": queries, "stages": (3, 2, 0)}
    close(
        with_gradients(lambda q, k, v, w: texvlm.hierarchical_attention(q, k, v, grid, weight=w, **ask), q, k, v, weight)[:2],
        with_gradients(lambda q, k, v, w: dense(q, k, v, w.log()), q, k, v, weight)[:2],
        1e-10,
    )
    out, lse = texvlm.hierarchical_attention(q, k, v, grid, return_lse=True, **ask)
    close(out, dense(q, k, v), 1e-10)
    close(lse, (q @ k.mT * 8**-0.5).logsumexp(-1), 1e-10)


@pytest.mark.parametrize("keep", [0.1, 1])
def test_a_weight_counts_as_repeating_the_key(keep: float) -> None:
    """A place of weight 3 beside one of weight 0 is three places of the same key."""
    q, k, v = self_attention(16, 16)
    times = torch.randint(0, 4, (256,))
    times[::16] = 1
    out, lse, chosen = texvlm.hierarchical_attention(
        q, k, v, (16, 16), keep, weight=times.double(), return_lse=True, return_chosen=True
    )
    if keep == 1:
        repeated = torch.arange(256).repeat_interleave(times)
        close(out, dense(q, k[:, :, repeated], v[:, :, repeated]))
        close(lse, (q @ k[:, :, repeated].mT * 8**-0.5).logsumexp(-1))
    by_bias, chosen_by_bias = texvlm.hierarchical_attention(
        q, k, v, (16, 16), keep, bias=times.double().log(), return_chosen=True
    )
    both, _ = texvlm.hierarchical_attention(
        q, k, v, (16, 16), keep, weight=times, bias=torch.zeros(256), mask=times > 0, return_chosen=True
    )
    assert torch.equal(chosen, chosen_by_bias)
    close(by_bias, out)
    close(both, out)


# ---- cells ----


@pytest.mark.parametrize("grid", [(16, 24), (13, 9), (1, 40)], ids=str)
def test_cells_hold_the_means_of_their_places(grid: tuple[int, int]) -> None:
    _, k, v = self_attention(*grid, batch=2)
    weight = torch.rand(2, k.shape[2], dtype=torch.float64)
    packed = attention.pack_keys(k, v, grid, weight=weight, stages=(3, 1, 0))
    assert packed.plan.levels == [3, 1]
    at = 0
    for level in packed.plan.levels:
        for y, x in itertools.product(range(0, grid[0], 1 << level), range(0, grid[1], 1 << level)):
            ours = (..., slice(y, y + (1 << level)), slice(x, x + (1 << level)))

            def in_cell(t: Tensor, ours=ours) -> Tensor:
                return t.mT.unflatten(3, grid)[ours].flatten(3).mT

            w = weight.unflatten(1, grid)[ours].flatten(1)[:, None, :, None]
            close(packed.log_count[:, at], w.sum((1, 2, 3)).log())
            for i, (places, means) in enumerate([(k, packed.keys), (v, packed.values)]):
                cell = in_cell(places)
                mean = (w * cell).sum(2) / w.sum(2)
                close(means[:, :, at], mean)
                close(packed.spread[:, :, at, i], (w * (cell - mean[:, :, None]) ** 2).sum((2, 3)) / w.sum((2, 3)))
            close(packed.low[:, :, at], in_cell(k).amin(2))
            close(packed.high[:, :, at], in_cell(k).amax(2))
            at += 1
    assert at == packed.keys.shape[2]


def test_what_is_split_lies_inside_what_was_split_before() -> None:
    q, k, v = self_attention(40, 56)
    _, chosen = texvlm.hierarchical_attention(q, k, v, (40, 56), stages=(4, 2, 1, 0), return_chosen=True)
    plan = attention.plan((40, 56), stages=(4, 2, 1, 0))
    assert chosen.dtype == torch.int32 and chosen.shape == (1, 2, 5 * 7, sum(plan.counts))
    before = None
    for level, cells in zip(plan.levels, chosen.split(plan.counts, -1)):
        rows, columns = -(-40 >> level), -(-56 >> level)
        assert cells.lt(rows * columns).all() and (cells.diff() > 0)[cells[..., 1:] >= 0].all()
        there = cells >= 0
        if before is not None:
            finer, of, parents = before[0] - level, before[1], before[2]
            parent = (cells // columns >> finer) * of + (cells % columns >> finer)
            assert ((parent[..., :, None] == parents[..., None, :]).any(-1) | ~there).all()
        before = level, columns, cells


def test_a_choice_that_is_given_back_is_kept() -> None:
    q, k, v = self_attention(24, 20, heads=4, kv_heads=2)
    first = texvlm.hierarchical_attention(q, k, v, (24, 20), return_lse=True, return_mass=True, return_chosen=True)
    again = texvlm.hierarchical_attention(
        q, k, v, (24, 20), choice=first[3], return_lse=True, return_mass=True, return_chosen=True, importance="mass"
    )
    close(list(again), list(first))
    other = texvlm.hierarchical_attention(q * 2, k, v, (24, 20), choice=first[3], return_chosen=True)[1]
    assert torch.equal(other, first[3])


# ---- symmetries and bounds ----


@pytest.mark.parametrize("tile", ["grid", "alone"])
def test_a_picture_that_is_turned_is_answered_as_it_was(tile: str) -> None:
    """Where the sides are powers of two, cells become cells."""
    q, k, v = self_attention(32, 32, batch=2)

    def turned(t: Tensor, turn) -> Tensor:
        return turn(t.unflatten(2, (32, 32))).flatten(2, 3)

    wanted = texvlm.hierarchical_attention(q, k, v, (32, 32), queries=tile)
    for turn in (lambda t: t.flip(2), lambda t: t.flip(3), lambda t: t.transpose(2, 3), lambda t: t.rot90(1, (2, 3))):
        out = texvlm.hierarchical_attention(*(turned(t, turn) for t in (q, k, v)), (32, 32), queries=tile)
        close(out, turned(wanted, turn), 1e-11)
    order = torch.tensor([1, 0])
    close(
        texvlm.hierarchical_attention(q[order][:, order], k[order][:, order], v[order][:, order], (32, 32), queries=tile),
        wanted[order][:, order],
    )


def test_unrelated_queries_may_come_in_any_order() -> None:
    q, k, v = self_attention(16, 20)
    order = torch.randperm(320)
    wanted = texvlm.hierarchical_attention(q, k, v, (16, 20), queries="alone")
    close(texvlm.hierarchical_attention(q[:, :, order], k, v, (16, 20), queries="alone"), wanted[:, :, order])
    close(texvlm.hierarchical_attention(q[:, :, 7:8], k, v, (16, 20)), wanted[:, :, 7:8])


@pytest.mark.parametrize("importance", ["spread", "mass", "bound"])
@pytest.mark.parametrize("queries", ["grid", "alone"])
def test_the_answer_is_a_mean_of_values(importance: str, queries: str) -> None:
    q, k, v, pk, pv = drawn(*[(2, 2, 35 * 21, 8)] * 3, *[(2, 2, 5, 8)] * 2)
    ask = {"importance": importance, "queries": queries, "prefix": (pk, pv), "return_lse": True, "return_mass": True}
    weight = torch.rand(2, 735, dtype=torch.float64) * (torch.rand(735) < 0.8)
    out, lse, mass = texvlm.hierarchical_attention(q, k, v, (35, 21), 0.1, weight=weight, **ask)
    there = weight[:, None, :, None] > 0
    low, high = (torch.cat([v.where(there, sign * math.inf), pv], 2) for sign in (1, -1))
    assert (out >= low.amin(2, keepdim=True) - 1e-12).all() and (out <= high.amax(2, keepdim=True) + 1e-12).all()

    # The exponential of a mean is at most the mean of the exponentials.
    exact = texvlm.hierarchical_attention(q, k, v, (35, 21), exact=True, weight=weight, **ask)
    of_prefix = q @ pk.mT * 8**-0.5
    assert (lse <= exact[1] + 1e-12).all() and (lse >= of_prefix.amax(-1)).all()

    for total, mass in ((lse, mass), exact[1:]):  # noqa: B020
        close(mass.sum(-1) + (of_prefix - total[..., None]).exp().sum(-1).mean(-1), torch.ones(2, 2, dtype=torch.float64))
        assert (mass >= 0).all() and (mass.masked_select(~there[..., 0]) == 0).all()
    close(exact[2], ((q @ k.mT * 8**-0.5 + weight.log()[:, None, None]) - exact[1][..., None]).exp().mean(2))


# ---- what it is for ----


def smooth(g: torch.Generator, channels: int, apart: int = 8, side: int = 64) -> Tensor:
    """[1, 1, N, channels]: a field that varies over some `apart` places."""
    field = torch.randn(1, channels, side // apart + 1, side // apart + 1, generator=g)
    return F.interpolate(field, (side, side), mode="bicubic", align_corners=True).flatten(2).mT[:, None]


def searched(needles: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A smooth field, and single keys in it which some queries, wherever they are, give the most of their attention."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = 0.7 * smooth(g, 32), 0.7 * smooth(g, 32), smooth(g, 32)
    at, by = (torch.randperm(4096, generator=g)[:needles] for _ in range(2))
    sought = q[:, :, by]
    score = (sought @ k.mT * 32**-0.5).logsumexp(-1, keepdim=True) + 1
    k[:, :, at] = sought * score * 32**0.5 / sought.square().sum(-1, keepdim=True)
    v[:, :, at] = torch.randn(1, 1, needles, 32, generator=g)
    return q, k, v


def error(q: Tensor, k: Tensor, v: Tensor, keep: float = 0.1, **ask) -> float:
    exact = dense(q, k, v)
    return float((texvlm.hierarchical_attention(q, k, v, (64, 64), keep, **ask) - exact).norm() / exact.norm())


@pytest.mark.parametrize("seed", range(3))
def test_needles_in_a_smooth_field_are_found(seed: int) -> None:
    """By the mass of cells they are not: the mean of a cell hides its one key."""
    smooth_only, needles = searched(0, seed), searched(24, seed)
    without = error(*smooth_only)
    assert without < 0.2
    assert error(*needles) <= 1.3 * without
    assert error(*needles, importance="mass") > 0.5


def test_more_is_read_less_is_lost() -> None:
    q, k, v = searched(0, 5)
    errors = [error(q, k, v, keep=keep) for keep in (0.02, 0.1, 0.3, 0.8)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.3 * errors[0]
    assert error(q, k, v, exact=True) < 1e-5


# ---- at home in PyTorch ----


@examples(40)
@given(st.data())
def test_random_sizes_equal_the_reference(data: st.DataObject) -> None:
    def among(*values):
        return data.draw(st.sampled_from(values))

    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    levels = sorted(data.draw(st.sets(st.integers(1, 4), max_size=3)), reverse=True)
    counts = [data.draw(st.integers(0, min(5, -(-rows >> level) * -(-columns >> level)))) for level in levels]
    tile = among((1, 1), (2, 2), (1, 3), (4, 2), (8, 8), (3, 5))
    queries = data.draw(st.integers(0, 9)) if tile == (1, 1) else None
    kv_heads, batch, width, prefix = among(1, 2), among(1, 2), data.draw(st.integers(1, 9)), among(0, 0, 1, 3)
    make = attend(
        *(rows, columns, levels, counts, tile),
        heads=kv_heads * among(1, 3),
        kv_heads=kv_heads,
        batch=batch,
        width=width,
        queries=queries,
        prefix=prefix,
        importance=among("spread", "mass", "bound"),
    )
    args = list(make(torch.float64, torch.Generator().manual_seed(data.draw(st.integers(0, 99)))))
    if among(False, True):  # powers of two: a cell of one place then has no spread at all, however it is summed
        times = torch.tensor([0.0, 0.5, 1.0, 4.0], dtype=torch.float64)
        args[17] = times[torch.randint(4, (batch, rows * columns))].log()
        args[3:9] = reference.attention_pack(args[1], args[2], rows, columns, levels, args[17])
        for a, b in zip(
            torch.ops.texvlm.attention_pack(args[1], args[2], rows, columns, levels, args[17]), args[3:9], strict=True
        ):
            close(a, b)
    results = []
    at = [i for i in (0, 1, 2, 3, 4, 5, 17, 18, 19) if args[i] is not None]
    for attend_by in (attend_op, reference.hierarchical_attention):
        mine = [a.clone().requires_grad_() if i in at else a for i, a in enumerate(args)]
        out, lse, chosen, mass = attend_by(*mine)
        loss = (out * out.detach().cos()).sum() + lse.where(lse > -math.inf, 0).square().sum()
        results.append([out.detach(), lse.detach(), chosen, mass, *torch.autograd.grad(loss, [mine[i] for i in at])])
    close(results[0], results[1], 1e-9)


@pytest.mark.parametrize("queries", ["grid", "alone"])
def test_gradcheck(queries: str) -> None:
    q, k, v, bias, pk, pv = drawn((1, 4, 35, 3), *[(1, 2, 35, 3)] * 2, (35,), *[(1, 2, 2, 3)] * 2)
    q = q if queries == "grid" else q[:, :, :6]
    mask = torch.rand(35) < 0.8

    def f(q, k, v, bias, pk, pv):
        ask = {"bias": bias, "mask": mask, "prefix": (pk, pv), "queries": queries, "return_lse": True}
        return texvlm.hierarchical_attention(q, k, v, (5, 7), 0.3, stages=(3, 2, 1, 0), **ask)

    assert attention.plan((5, 7), 0.3, (3, 2, 1, 0)).counts
    assert torch.autograd.gradcheck(f, [t.detach().requires_grad_() for t in (q, k, v, bias, pk, pv)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(dtype: torch.dtype) -> None:
    """As exact as their storage, given the same choice."""
    q, k, v = (t.to(dtype) for t in self_attention(24, 24, heads=4, kv_heads=2, width=16))
    exact = [t.double() for t in (q, k, v)]
    wanted, choice = texvlm.hierarchical_attention(*exact, (24, 24), return_chosen=True)
    out, lse = texvlm.hierarchical_attention(q, k, v, (24, 24), choice=choice, return_lse=True)
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    assert out.dtype == dtype and lse.dtype == torch.float32
    close(out.double(), wanted, tolerance)
    f = lambda *t: texvlm.hierarchical_attention(*t, (24, 24), choice=choice)  # noqa: E731
    for a, b in zip(with_gradients(f, q, k, v), with_gradients(f, *exact)):
        assert (a.double() - b).norm() < 2 * tolerance * b.norm()


def test_the_number_of_threads_changes_nothing() -> None:
    q, k, v = (t.float() for t in self_attention(40, 33, heads=4, kv_heads=2))
    bias = torch.randn(1320)
    before, results = torch.get_num_threads(), []

    def answer(q, k, v, bias, queries="grid", **ask):
        return texvlm.hierarchical_attention(q, k, v, (40, 33), bias=bias, queries=queries, **ask)

    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for queries in ("grid", "alone"):
                results.append(with_gradients(partial(answer, queries=queries), q, k, v, bias))
                results[-1] += answer(q, k, v, bias, queries, return_lse=True, return_mass=True, return_chosen=True)
    finally:
        torch.set_num_threads(before)
    for a, b in itertools.chain(zip(results[0], results[2], strict=True), zip(results[1], results[3], strict=True)):
        assert torch.equal(a, b)


def test_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    mask = torch.rand(12 * 20) < 0.9

    def f(q, k, v, pk, pv):
        packed = attention.pack_keys(k, v, (12, 20), keep=0.2, mask=mask)
        out, lse, mass = texvlm.hierarchical_attention(
            q, k, v, (12, 20), 0.2, mask=mask, prefix=(pk, pv), return_lse=True, return_mass=True
        )
        return out + texvlm.hierarchical_attention(q, packed, queries="alone") + lse[..., None] + mass.sum()

    inputs = drawn((1, 4, 240, 8), *[(1, 2, 240, 8)] * 2, *[(1, 2, 1, 8)] * 2, dtype=torch.float32)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    close(with_gradients(compiled, *inputs), with_gradients(f, *inputs), 1e-6)


def test_under_autocast() -> None:
    x = torch.randn(1, 240, 16)
    qkv = torch.nn.Linear(16, 48)

    def answer():
        q, k, v = qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return texvlm.hierarchical_attention(q, k, v, (12, 20), 1), dense(q, k, v)

    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = answer()
    close(out.float(), wanted.float(), 1.6e-2)
    out.float().square().sum().backward()
    assert qkv.weight.grad.isfinite().all() and qkv.weight.grad.dtype == torch.float32
    q, k, v = (t.float() for t in self_attention(12, 20))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = texvlm.hierarchical_attention(q, k, v, (12, 20), 1)
    close(mixed.float(), dense(q, k, v), 1.6e-2)


def test_functorch_raises_or_is_right() -> None:
    q, k, v = self_attention(8, 9, batch=1)
    f = lambda q: texvlm.hierarchical_attention(q, k, v, (8, 9), 0.3)  # noqa: E731
    with pytest.raises(RuntimeError):
        torch.func.jvp(f, (q,), (torch.ones_like(q),))
    stacked = torch.stack([q, q.flip(0) * 2])
    try:
        mapped = torch.func.vmap(f)(stacked)
    except RuntimeError:
        return
    close(mapped, torch.stack([f(x) for x in stacked]))


MEMORY = """
import torch, texvlm

def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

def attend(side):
    q, k, v = (torch.randn(1, 1, side * side, 8).requires_grad_() for _ in "qkv")
    out, mass = texvlm.hierarchical_attention(q, k, v, (side, side), 0.01, return_mass=True)
    out.sum().backward()
    return mass

torch.set_num_threads(1)
attend(32)
before = peak()
attend(256)
print(peak() - before)
"""


def test_memory_grows_with_the_places_alone() -> None:
    """65,536 queries of as many keys: one byte for each pair would be 4 GiB."""
    grown = int(subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout)
    assert grown < 128 * 1024  # KiB: inputs, results and gradients are 14 MiB
