"""What the cut of a quadtree means: disjoint nodes, exactly as many as asked for, and nearly the best there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm.quadtree import log_soft_cut, node_numbers, node_places, tree_shapes, values_of_scores


def values_of(seed: int, rows: int, columns: int, levels: int, growth: float = 4.0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [growth**level * torch.rand(1, h, w, generator=g) for level, (h, w) in enumerate(tree_shapes(rows, columns, levels))]


def covered(taken: list[torch.Tensor]) -> torch.Tensor:
    """How many taken nodes cover each cell."""
    rows, columns = taken[0].shape[1:]
    planes = [t[0].long().repeat_interleave(2**level, 0).repeat_interleave(2**level, 1) for level, t in enumerate(taken)]
    return sum(plane[:rows, :columns] for plane in planes)  # type: ignore[return-value]


@examples(80)
@given(
    st.integers(0, 10**6),
    st.integers(1, 13),
    st.integers(1, 13),
    st.integers(1, 4),
    st.integers(0, 180),
    st.sampled_from([0.0, 1.0, 2.0, 4.0, 9.0]),
)
def test_exactly_as_many_disjoint_nodes_as_asked_for(
    seed: int, rows: int, columns: int, levels: int, k: int, growth: float
) -> None:
    values = values_of(seed, rows, columns, levels, growth)
    cut = texvlm.quadtree_cut(values, k)
    assert sum(int(t.sum()) for t in cut.taken) == min(k, rows * columns)
    assert covered(cut.taken).max() <= 1
    worth = sum(float(v[t].double().sum()) for v, t in zip(values, cut.taken))
    assert worth <= float(cut.bound) * (1 + 1e-5) + 1e-5


def best(values: list[torch.Tensor], k: int) -> float:
    """The largest sum of values of exactly k disjoint nodes, by all ways to share the budget among children."""

    nothing = np.full(k + 1, -np.inf)
    nothing[0] = 0

    def node(level: int, y: int, x: int) -> np.ndarray:
        if y >= values[level].shape[0] or x >= values[level].shape[1]:
            return nothing
        own = nothing.copy()
        own[1:2] = float(values[level][y, x])
        if level == 0:
            return own
        total = nothing
        for dy, dx in itertools.product((0, 1), (0, 1)):
            child = node(level - 1, 2 * y + dy, 2 * x + dx)
            total = np.array([max(total[j] + child[i - j] for j in range(i + 1)) for i in range(k + 1)])
        return np.maximum(own, total)

    total = nothing
    rows, columns = values[-1].shape
    for y, x in itertools.product(range(rows), range(columns)):
        tree = node(len(values) - 1, y, x)
        total = np.array([max(total[j] + tree[i - j] for j in range(i + 1)) for i in range(k + 1)])
    return float(total[k])


@pytest.mark.parametrize("seed", range(6))
def test_the_cut_is_nearly_the_best_and_the_bound_is_one(seed: int) -> None:
    values = values_of(seed, 8, 8, 3)
    for k in (3, 9, 20):
        cut = texvlm.quadtree_cut(values, k)
        got = sum(float(v[t].sum()) for v, t in zip(values, cut.taken))
        most = best([v[0] for v in values], k)
        assert 0.85 * most <= got <= most + 1e-4
        assert most <= float(cut.bound) + 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_values_that_fall_towards_the_roots_per_cell_are_allotted_exactly(seed: int) -> None:
    """Where a split never gains more than the one above it, the set is the best: the bound is reached."""
    g = torch.Generator().manual_seed(seed)
    cells = torch.rand(1, 8, 8, generator=g)
    values = [cells]
    for level in range(1, 3):  # a parent is worth all but a shrinking share of its children
        pooled = 4 * torch.nn.functional.avg_pool2d(values[-1], 2)
        values.append(pooled * 0.95**level)
    cut = texvlm.quadtree_cut(values, 25)
    got = sum(float(v[t].sum()) for v, t in zip(values, cut.taken))
    assert got >= 0.97 * float(cut.bound)


def test_a_coarse_token_is_worth_its_cells() -> None:
    cells = torch.zeros(1, 4, 4)
    cells[0, :2, :2] = 1.0
    values = [cells, torch.tensor([[[3.0, 0.0], [0.0, 0.0]]])]
    assert texvlm.quadtree_cut(values, 1).taken[1][0, 0, 0]  # 3 in one token
    assert texvlm.quadtree_cut(values, 4).taken[0][0, :2, :2].all()  # 4 in four


def test_the_result_does_not_depend_on_threads() -> None:
    values = [v.expand(3, -1, -1).contiguous() for v in values_of(1, 64, 64, 4, 3.0)]
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(texvlm.quadtree_cut(values, 273))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(results[0].taken, results[1].taken))
    assert torch.equal(results[0].bound, results[1].bound)


def test_halves_and_bad_levels() -> None:
    values = values_of(0, 5, 7, 3)
    assert texvlm.quadtree_cut([v.half() for v in values], 4).bound.dtype == torch.float32
    with pytest.raises(ValueError, match="values must be levels of 5 x 7, 3 x 4, 2 x 2 nodes"):
        texvlm.quadtree_cut([values[0], values[1], values[1]], 4)
    with pytest.raises(ValueError, match="k must be at least 0"):
        texvlm.quadtree_cut(values, -1)


@examples(40)
@given(st.integers(1, 13), st.integers(1, 13), st.integers(1, 5))
def test_nodes_are_numbered_level_by_level(rows: int, columns: int, levels: int) -> None:
    expected = [
        ((y << level) * columns + (x << level), level)
        for level, (h, w) in enumerate(tree_shapes(rows, columns, levels))
        for y in range(h)
        for x in range(w)
    ]
    nodes = torch.arange(len(expected))
    cells, level = node_places(nodes, (rows, columns), levels)
    assert list(zip(cells.tolist(), level.tolist())) == expected
    assert torch.equal(node_numbers(cells, level, (rows, columns), levels), nodes)


def test_scores_are_cut_as_they_are_whatever_is_added_to_them() -> None:
    shapes, g = tree_shapes(6, 9, 3), torch.Generator().manual_seed(0)
    scores = torch.randn(2, sum(h * w for h, w in shapes), generator=g, dtype=torch.float64)
    found = [texvlm.quadtree_cut(values_of_scores(scores + add, (6, 9), 3), 7).taken for add in (0.0, 100.0, -100.0)]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))
    # At one level these are the k best, and what is not finite is worth least.
    one = torch.randn(1, 54, generator=g)
    one[0, 3], one[0, 4] = torch.nan, -torch.inf
    (taken,) = texvlm.quadtree_cut(values_of_scores(one, (6, 9), 1), 52).taken
    assert not taken.flatten()[3:5].any()
    (taken,) = texvlm.quadtree_cut(values_of_scores(one, (6, 9), 1), 7).taken
    assert set(taken.flatten().nonzero()[:, 0].tolist()) == set(one.nan_to_num(-torch.inf).topk(7)[1][0].tolist())


def soft_by_all_sets(scores: torch.Tensor, k: int, rows: int, columns: int, levels: int) -> torch.Tensor:
    """How likely each node is, by listing all sets of disjoint nodes."""
    cells = [cells_of(node, rows, columns, levels) for node in range(scores.shape[1])]
    sets = [
        s
        for n in range(rows * columns + 1)
        for s in itertools.combinations(range(len(cells)), n)
        if disjoint([cells[i] for i in s])
    ]
    sizes = torch.tensor([len(s) for s in sets], dtype=torch.float64)
    total = torch.stack([scores[0, list(s)].sum() for s in sets])
    low, high = -50.0, 50.0
    for _ in range(100):
        price = (low + high) / 2
        weight = (total - price * sizes).softmax(0)
        low, high = (price, high) if float((weight * sizes).sum()) > k else (low, price)
    return torch.stack([weight[[i for i, s in enumerate(sets) if node in s]].sum() for node in range(len(cells))])


def cells_of(node: int, rows: int, columns: int, levels: int) -> set[int]:
    cell, level = (int(t) for t in node_places(torch.tensor(node), (rows, columns), levels))
    y, x = divmod(cell, columns)
    return {r * columns + c for r in range(y, min(rows, y + 2**level)) for c in range(x, min(columns, x + 2**level))}


def disjoint(sets: list[set[int]]) -> bool:
    return sum(map(len, sets)) == len(set().union(*sets))


@pytest.mark.parametrize(("rows", "columns", "levels", "k"), [(2, 3, 2, 2), (3, 3, 3, 4), (1, 5, 3, 1), (2, 4, 1, 3)])
def test_soft_cuts_are_the_mean_over_all_sets(rows: int, columns: int, levels: int, k: int) -> None:
    g = torch.Generator().manual_seed(rows)
    n = sum(h * w for h, w in tree_shapes(rows, columns, levels))
    scores = 2 * torch.randn(1, n, generator=g, dtype=torch.float64)
    soft = log_soft_cut(scores, k, (rows, columns), levels).exp()
    torch.testing.assert_close(soft[0], soft_by_all_sets(scores, k, rows, columns, levels), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(log_soft_cut(5 * scores, k, (rows, columns), levels, 5.0).exp(), soft)
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: log_soft_cut(s, k, (rows, columns), levels), (scores,))


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.floats(0.05, 20), st.booleans())
def test_soft_cuts_take_as_many_as_asked_for(seed: int, rows: int, columns: int, levels: int, spread: float, holes: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    n = sum(h * w for h, w in tree_shapes(rows, columns, levels))
    scores = spread * torch.randn(2, n, generator=g)
    if holes:
        scores[0, ::5] = -torch.inf
    there = int(scores[0, : rows * columns].isfinite().sum())
    if there < 2:
        return
    k = 1 + int(torch.randint(there - 1, (), generator=g))
    soft = log_soft_cut(scores, k, (rows, columns), levels).exp()
    assert float((soft.sum(1) / k - 1).abs().max()) < 1e-2
    if holes:
        assert not soft[0, ::5].any()


def test_cold_soft_cuts_are_the_cut() -> None:
    scores = torch.randn(1, 64 + 16 + 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cut = texvlm.quadtree_cut(values_of_scores(scores, (8, 8), 3), 9)
    soft = log_soft_cut(scores, 9, (8, 8), 3, 0.003).exp()[0] > 0.5
    hard = torch.cat([t.flatten() for t in cut.taken])
    assert int((soft != hard).sum()) <= 2  # but for the last that fills the budget
