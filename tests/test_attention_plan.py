"""What of a grid `hierarchical_attention` reads: plans, packed keys, what is refused by name."""

from __future__ import annotations

import doctest
import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import texvlm
from texvlm import attention, towers


@pytest.mark.parametrize(
    ("grid", "keep", "alone", "levels", "counts", "read"),
    [
        ((64, 64), 0.1, False, [3, 2], [32, 26], 0.1484375),
        ((64, 64), 0.1, True, [2], [26], 0.1640625),
        ((256, 256), 0.1, False, [4, 3, 2], [162, 407, 410], 9092 / 65536),
        ((256, 256), 0.02, True, [4, 3, 2], [95, 139, 82], 0.0382080078125),
        ((1, 5000), 0.1, False, [5, 4, 3, 2], [112, 157, 221, 125], 0.3274),  # a row: cells have two children
        ((6, 6), 0.1, False, [2], [1], 20 / 36),  # one cell of level 3 would say nothing
        ((5, 4), 0.1, False, [1], [1], 0.5),
        ((4, 4), 0.1, False, [], [], 1.0),
        ((1, 1), 0.1, False, [], [], 1.0),
        ((64, 64), 1.0, False, [], [], 1.0),
    ],
)
def test_plans(grid, keep, alone, levels, counts, read) -> None:
    assert attention.plan(grid, keep, alone=alone) == (levels, counts, pytest.approx(read))


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.001, 1.2), st.booleans())
def test_plans_of_all_grids(rows: int, columns: int, keep: float, alone: bool) -> None:
    """Never dearer than dense, nothing is split that is not there, and the first stage is small."""
    levels, counts, read = attention.plan((rows, columns), keep, alone=alone)
    assert len(levels) == len(counts) and 0 < read <= 1
    assert (read == 1) == (not levels)
    cells = [-(-rows >> level) * -(-columns >> level) for level in levels]
    assert all(1 <= count <= there for count, there in zip(counts, cells))
    assert not levels or 4 <= cells[0] <= max(256, cells[-1])
    assert levels == sorted(levels, reverse=True)


def test_more_is_read_with_more_kept() -> None:
    read = [attention.plan((64, 48), keep).read for keep in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1)]
    assert read == sorted(read) and len(set(read[:5])) == 5


def test_stages_as_asked_for() -> None:
    assert attention.plan((64, 64), 0.1, (2, 0)).levels == [2]
    assert attention.plan((64, 64), 0.1, (3, 2, 1, 0)).levels == [3, 2, 1]
    assert attention.plan((64, 64), 0.1, (0,)) == ([], [], 1.0)


@pytest.mark.parametrize(
    ("rows", "columns", "tile"), [(64, 64, (8, 8)), (1, 99, (1, 64)), (99, 1, (64, 1)), (3, 99, (4, 16)), (99, 3, (16, 4))]
)
def test_tiles_hold_64_queries_where_there_are_so_many(rows: int, columns: int, tile: tuple[int, int]) -> None:
    assert attention._tile(rows, columns) == tile


def test_packed_keys_serve_many_calls() -> None:
    q, k, v = torch.randn(3, 2, 2, 20 * 24, 8)
    mask = torch.rand(2, 480) > 0.2
    packed = attention.pack_keys(k, v, (20, 24), keep=0.2, mask=mask)
    torch.testing.assert_close(
        texvlm.hierarchical_attention(q, packed), texvlm.hierarchical_attention(q, k, v, (20, 24), 0.2, mask=mask), rtol=0, atol=0
    )
    dense = texvlm.hierarchical_attention(q, k, v, (20, 24), exact=True, mask=mask)
    torch.testing.assert_close(texvlm.hierarchical_attention(q, packed, exact=True), dense)
    torch.testing.assert_close(texvlm.hierarchical_attention(q, packed, keep=1), dense)
    assert texvlm.hierarchical_attention(q[:, :, :1], packed, keep=0.4).shape == (2, 2, 1, 8)


def test_packed_keys_are_a_pytree_and_can_be_saved() -> None:
    packed = attention.pack_keys(*torch.randn(2, 1, 2, 64, 4), (8, 8))
    twice = pytree.tree_map(lambda t: t.double(), packed)
    assert twice.k.dtype == torch.float64 and twice.log_weight is None and twice.plan == packed.plan
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    assert torch.equal(torch.load(file).keys, packed.keys)


def test_textures_as_keys_and_values() -> None:
    q, k, v = torch.randn(3, 2, 4, 12 * 10, 8)
    textures = [texvlm.Texture(t.transpose(1, 2).flatten(2), layout="spatial", grid=(12, 10)) for t in (k, v)]
    expected = texvlm.hierarchical_attention(q, k, v, (12, 10), 0.2)
    torch.testing.assert_close(texvlm.hierarchical_attention(q, *textures, keep=0.2), expected)
    torch.testing.assert_close(texvlm.hierarchical_attention(q, attention.pack_keys(*textures, keep=0.2, heads=4)), expected)


def test_what_weighs_nothing_has_no_gradient() -> None:
    q, k, v = torch.randn(3, 1, 1, 64, 4, dtype=torch.float64)
    weight = torch.rand(64, dtype=torch.float64)
    weight[:20] = 0
    bias = torch.randn(1, 64, dtype=torch.float64).requires_grad_()
    weight.requires_grad_()
    mask = torch.arange(64) < 50
    out = texvlm.hierarchical_attention(q, k, v, (8, 8), 0.3, weight=weight, bias=bias, mask=mask)
    out.square().sum().backward()
    for grad in (weight.grad, bias.grad[0]):
        assert torch.equal(grad != 0, (torch.arange(64) >= 20) & mask)
    direct = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=(weight.log() + bias[0]).masked_fill(~mask, -math.inf).detach().expand(64, 64)
    )
    exact = texvlm.hierarchical_attention(q, k, v, (8, 8), exact=True, weight=weight, bias=bias, mask=mask)
    torch.testing.assert_close(exact, direct)


Q, K = torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 24, 8)
PACKED = attention.pack_keys(K, K, (4, 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention.plan((0, 4)), "grid must be at least 1"),
        (lambda: attention.plan(7), r"grid must be \(rows, columns\), got 7"),
        (lambda: attention.plan((8, 8), 0), "keep must be a number above 0"),
        (lambda: attention.plan((8, 8), math.nan), "keep must be a number above 0"),
        (lambda: attention.plan((8, 8), 0.1, (2, 3, 0)), "stages must be levels that decrease to 0"),
        (lambda: attention.plan((8, 8), 0.1, (2, 1)), "stages must be levels that decrease to 0"),
        (lambda: attention.plan((8, 8), 0.1, "all"), "stages must be 'auto' or"),
        (lambda: texvlm.hierarchical_attention(Q[0], K, K, (4, 6)), r"q must be floating point \[B, H, Nq, D\]"),
        (lambda: texvlm.hierarchical_attention(Q, K, K), r"grid must be \(rows, columns\), got None"),
        (
            lambda: texvlm.hierarchical_attention(Q, K, K, (5, 5)),
            r"k must be .* N = 25 places .* got torch.float32 \[1, 2, 24, 8\]",
        ),
        (lambda: texvlm.hierarchical_attention(Q, K, K[:, :1], (4, 6)), r"v must have the shape of k, \[1, 2, 24, 8\]"),
        (lambda: texvlm.hierarchical_attention(Q, K, K.double(), (4, 6)), "v must have the dtype of k"),
        (lambda: texvlm.hierarchical_attention(Q.double(), K, K, (4, 6)), "q must have the dtype of k"),
        (lambda: texvlm.hierarchical_attention(Q[:, :3], K, K, (4, 6)), "H a multiple of 2"),
        (lambda: texvlm.hierarchical_attention(Q[..., :4], K, K, (4, 6)), "D = 8"),
        (
            lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), queries="grid"),
            "q must have the 24 queries of the grid 4 x 6, got 9",
        ),
        (lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), queries="each"), "queries must be 'auto', 'grid' or 'alone'"),
        (
            lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), importance="size"),
            "importance must be one of spread, mass, bound",
        ),
        (lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), mask=torch.ones(24)), "mask must be bool"),
        (
            lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), bias=torch.ones(23)),
            r"bias must be \[N\] or \[B, N\] = \[1, 24\]",
        ),
        (lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), weight=torch.ones(2, 24)), r"weight must be \[N\] or"),
        (lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), prefix=K), r"prefix must be \(keys, values\)"),
        (lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), prefix=(K[:, :1], K)), r"prefix keys must be .* \[1, 2, P, 8\]"),
        (lambda: texvlm.hierarchical_attention(Q, K, K, (4, 6), prefix=(K, K[:, :, :3])), "prefix values must have the shape"),
        (lambda: texvlm.hierarchical_attention(Q, PACKED, K), "v is in the PackedKeys already"),
        (lambda: texvlm.hierarchical_attention(Q, PACKED, mask=torch.ones(24) > 0), "mask is in the PackedKeys already"),
        (
            lambda: attention.pack_keys(texvlm.Texture(torch.rand(16, 4, 6)), texvlm.Texture(torch.rand(16, 4, 6))),
            "heads must say",
        ),
        (lambda: texvlm.hierarchical_attention(Q, texvlm.Texture(torch.rand(12, 4, 6)), K), r"heads \* 8 channels, got 12"),
        (
            lambda: texvlm.hierarchical_attention(Q, texvlm.Texture(torch.rand(16, 4, 6)), K, (6, 4)),
            "grid must be that of the texture",
        ),
    ],
)
def test_what_is_refused_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "function", [attention.plan, attention.pack_keys, towers.replace, towers.calibrate], ids=lambda f: f.__name__
)
def test_examples(function) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
