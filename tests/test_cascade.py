"""The cascade means what it says: exact top-k, scores of known cells, selections of what stands out."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import texvlm
from texvlm import reference
from texvlm.paths import SCORE_CHANNELS, SCORERS, TERM_NAMES
from texvlm.reference.channels import CHANNEL_REDUCERS
from texvlm.stages import kept_cells

INDICES = (0, 1, 2, 3, 8)  # SCORE_CHANNELS in the channel table


def scored(image: torch.Tensor, dtype: torch.dtype | None = None) -> texvlm.Texture:
    """The texture that `select` reads, by the reference: these tests are about the cascade alone."""
    image = image if image.dim() == 4 else image[None]
    height, width = image.shape[2:]
    levels = texvlm.level_count(height, width)
    data = reference.build_channels(image, INDICES, levels, dtype=dtype)
    reducer = [CHANNEL_REDUCERS[i] for i in INDICES]
    return texvlm.Texture.from_data(data, height, width, levels, reducer, SCORE_CHANNELS)


def flat(value: dict[str, float], height: int, width: int) -> texvlm.Texture:
    """Each channel constant (0 where not named)."""
    levels = texvlm.level_count(height, width)
    texels = torch.tensor([value.get(name, 0.0) for name in SCORE_CHANNELS])
    data = texels.expand(1, texvlm.pyramid.texel_count(height, width, levels), 5).contiguous()
    return texvlm.Texture.from_data(data, height, width, levels, "mean", SCORE_CHANNELS)


def score(texture: texvlm.Texture, cells: list[int], cell: int, samples: int, weights: list[float]) -> torch.Tensor:
    """By weights of edge energy, entropy and mean saliency."""
    ids = torch.tensor([cells]).expand(texture.data.shape[0], -1)
    terms = {term: weight for term, weight in zip(SCORERS["salience"], weights) if weight}
    return texvlm.cell_features(texture, ids, list(terms), cell, samples) @ torch.tensor(
        list(terms.values()), dtype=torch.float32
    )


def textured(height: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """A random picture with detail at all scales, stronger in some places than in others."""
    g = torch.Generator().manual_seed(seed)
    total = torch.zeros(batch, 3, height, width)
    for octave in range(6):
        size = max(2, height >> octave), max(2, width >> octave)
        noise = torch.rand(batch, 3, *size, generator=g)
        total += torch.nn.functional.interpolate(noise, (height, width), mode="bilinear") * 2.0 ** (octave - 6)
    return total / total.amax()


# ---- topk ----


def test_topk_known_answer() -> None:
    nan, inf = math.nan, math.inf
    values, indices = texvlm.topk(torch.tensor([[0.0, nan, 2.0, -inf, 2.0, -0.0, inf, nan]]), 8)
    assert indices.tolist() == [[6, 2, 4, 0, 5, 3, 1, 7]]
    assert values[0, :6].tolist() == [inf, 2.0, 2.0, 0.0, -0.0, -inf]
    assert math.copysign(1, values[0, 4].item()) == -1  # the score itself comes back, not what it was compared as
    assert values[0, 6:].isnan().all()


@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e-40, -1e-40]),
        max_size=70,
    ),
    st.integers(0, 75),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
@examples(200)
def test_topk_is_a_stable_sort(values: list[float], k: int, dtype: torch.dtype) -> None:
    scores = torch.tensor([values], dtype=torch.float64).reshape(1, -1).to(dtype)
    as_float = scores[0].tolist()
    order = sorted(
        range(len(values)),
        key=lambda i: (math.isnan(as_float[i]), 0.0 if math.isnan(as_float[i]) else -as_float[i], i),
    )
    best, indices = texvlm.topk(scores, k)
    assert indices[0].tolist() == order[:k]
    torch.testing.assert_close(best, scores[:, order[:k]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 63, 257, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_equals_torch_on_distinct_scores(n: int, dtype: torch.dtype) -> None:
    scores = torch.stack([torch.randperm(n).to(dtype) - n // 2 for _ in range(5)]) * 0.37
    for k in {0, 1, n // 3, n - 1, n}:
        wanted = torch.topk(scores, k)
        values, indices = texvlm.topk(scores, k)
        assert torch.equal(values, wanted.values)
        assert torch.equal(indices, wanted.indices)


def test_topk_of_one_row_and_of_nothing() -> None:
    values, indices = texvlm.topk(torch.tensor([1.0, 3.0, 2.0]), 2)
    assert values.tolist() == [3.0, 2.0]
    assert indices.tolist() == [1, 2]
    for empty in (texvlm.topk(torch.rand(2, 5), 0), texvlm.topk(torch.rand(2, 0), 5)):
        assert [t.shape for t in empty] == [(2, 0), (2, 0)]
        assert empty[1].dtype == torch.int64


def test_topk_gradient_goes_to_the_winners() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0]], requires_grad=True)
    values, _ = texvlm.topk(scores, 2)
    (values * torch.tensor([10.0, 20.0])).sum().backward()
    assert scores.grad.tolist() == [[0.0, 10.0, 0.0, 20.0]]


def test_topk_under_autocast_is_in_float32() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert texvlm.topk(torch.rand(1, 5).half(), 2)[0].dtype == torch.float32
        assert texvlm.topk(torch.rand(1, 5).double(), 2)[0].dtype == torch.float64


def test_topk_does_not_depend_on_threads() -> None:
    scores = (torch.rand(37, 3000) * 50).round()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(texvlm.topk(scores, 400)[1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


# ---- scores ----


@pytest.mark.parametrize("samples", [1, 4, 16])
def test_terms_of_a_flat_cell(samples: int) -> None:
    texture = flat({"red": 0.3, "green": 0.3, "blue": 0.3, "edge": 0.25, "saliency": 0.75}, 32, 48)
    cells = list(range(6))
    torch.testing.assert_close(score(texture, cells, 16, samples, [1, 0, 0]), torch.full((1, 6), 0.25))
    assert score(texture, cells, 16, samples, [0, 1, 0]).abs().max() == 0
    torch.testing.assert_close(score(texture, cells, 16, samples, [0, 0, 1]), torch.full((1, 6), 0.75))
    torch.testing.assert_close(score(texture, cells, 16, samples, [2, 3, 4]), torch.full((1, 6), 3.5))


def test_entropy_of_16_equal_steps_is_one() -> None:
    ramp = (torch.arange(16.0) + 0.5) / 16
    texture = scored(ramp.expand(1, 3, 16, 16))
    torch.testing.assert_close(score(texture, [0], 16, 16, [0, 1, 0]), torch.ones(1, 1))


def test_entropy_of_two_values() -> None:
    image = torch.full((3, 16, 16), 0.1)
    image[:, :, 8:] = 0.9
    torch.testing.assert_close(score(scored(image), [0], 16, 16, [0, 1, 0]), torch.full((1, 1), 0.25))  # 1 bit of 4


def test_coarse_entropy_is_that_of_the_neighbours() -> None:
    # 9 cells, each with a luma of its own: the one in the middle sees 9 bins, a corner (border repeated) 4
    image = ((torch.arange(9.0) + 0.5) / 16).view(3, 3).repeat_interleave(16, 0).repeat_interleave(16, 1)
    image = torch.nn.functional.pad(image[None], (0, 16, 0, 16), mode="replicate").expand(3, -1, -1)
    middle, corner = score(scored(image), [5, 0], 16, 1, [0, 1, 0])[0].tolist()
    assert middle == pytest.approx(1, abs=1e-6)
    shares = [4 / 9, 2 / 9, 2 / 9, 1 / 9]
    assert corner == pytest.approx(-sum(p * math.log2(p) for p in shares) / math.log2(9), abs=1e-6)


def test_values_that_are_not_finite() -> None:
    texture = flat({"edge": 0.5}, 16, 32)
    texture.data[0, 0, 3] = math.nan  # level 0, cell 0: the edge
    texture.data[0, 20, 0] = math.nan  # level 0, cell 1: a colour, which counts as dark
    first, second = score(texture, [0, 1], 16, 16, [1, 1, 1])[0].tolist()
    assert math.isnan(first)
    assert second == pytest.approx(0.5)


def test_cells_outside_the_grid_score_nan() -> None:
    texture = flat({"edge": 1.0}, 32, 32)
    result = score(texture, [-1, 0, 3, 4, 2**62, -(2**63)], 16, 4, [1, 0, 0])[0]
    assert result.isnan().tolist() == [True, False, False, True, True, True]


def test_score_does_not_depend_on_the_batch_or_on_the_order_of_cells() -> None:
    texture = scored(textured(70, 90, batch=3))
    cells = list(range(30))
    together = score(texture, cells, 16, 4, [1, 0.5, 1])
    for b in range(3):
        alone = texture.replace(texture.data[b : b + 1].contiguous())
        assert torch.equal(score(alone, cells[::-1], 16, 4, [1, 0.5, 1])[0].flip(0), together[b])


# ---- select ----


def equal_to_reference(image: torch.Tensor, k: int, cell: int, weights: dict | None = None) -> None:
    mine, theirs = (
        texvlm.select(scored(image), k, cell, weights=weights),
        reference.select(image, k, cell, weights),
    )
    count = int(theirs.count[0])
    assert mine.grid == theirs.grid
    assert mine.count.tolist() == theirs.count.tolist()
    torch.testing.assert_close(mine.score[:, :count], theirs.score[:, :count], rtol=1e-5, atol=1e-5)
    gap = (theirs.score[:, 1:count] - theirs.score[:, : count - 1]).abs().min() if count > 1 else torch.tensor(1.0)
    if gap > 1e-5:  # scores are apart by more than rounding: the order is decided
        assert torch.equal(mine.indices[:, :count], theirs.indices[:, :count])
    else:
        for a, b in zip(mine.indices, theirs.indices, strict=True):
            assert len(set(a.tolist()) ^ set(b.tolist())) <= 2


@pytest.mark.parametrize(
    ("height", "width", "k", "cell"),
    [
        (256, 256, 20, 16),
        (200, 300, 30, 16),
        (199, 301, 30, 28),
        (64, 64, 16, 16),
        (90, 33, 7, 5),
        (300, 20, 9, 8),
        (1, 1, 3, 16),
    ],
)
def test_select_equals_reference(height: int, width: int, k: int, cell: int) -> None:
    equal_to_reference(textured(height, width, batch=2), k, cell)


@given(
    st.integers(1, 80),
    st.integers(1, 80),
    st.integers(0, 40),
    st.sampled_from([4, 8, 16, 7, 28, 100]),
    st.integers(0, 99),
)
@examples(25)
def test_select_equals_reference_on_any_size(height: int, width: int, k: int, cell: int, seed: int) -> None:
    equal_to_reference(textured(height, width, seed=seed), k, cell)


def test_select_with_weights_equals_reference() -> None:
    equal_to_reference(textured(128, 160), 11, 16, {"entropy": 3.0, "saliency": 0.0})


def test_a_selection_has_the_promised_form() -> None:
    texture = scored(textured(128, 200, batch=3))
    selection = texvlm.select(texture, k=40)
    assert (selection.grid, selection.cell) == ((8, 13), 16)
    assert selection.indices.shape == selection.score.shape == selection.weight.shape == selection.lod.shape == (3, 40)
    assert selection.indices.dtype == selection.count.dtype == torch.int64
    assert selection.count.tolist() == [40] * 3
    assert selection.weights_all is None
    assert selection.axes is None
    assert selection.weight.eq(1).all()
    assert selection.lod.eq(0).all()
    assert not selection.score.requires_grad
    for row, scores in zip(selection.indices, selection.score, strict=True):
        assert len(set(row.tolist())) == 40
        assert 0 <= row.min() <= row.max() < 8 * 13
        assert (scores.diff() <= 0).all()


def test_more_than_there_are_is_padded() -> None:
    selection = texvlm.select(scored(textured(32, 48)), k=9)
    assert selection.count.tolist() == [6]
    assert sorted(selection.indices[0, :6].tolist()) == list(range(6))
    assert selection.indices[0, 6:].tolist() == [-1] * 3
    assert selection.score[0, 6:].tolist() == [-math.inf] * 3
    assert selection.weight[0].tolist() == [1] * 6 + [0] * 3
    assert selection.lod.eq(0).all()


def test_nothing_asked_for() -> None:
    selection = texvlm.select(scored(textured(32, 48, batch=2)), k=0)
    assert selection.indices.shape == selection.score.shape == (2, 0)
    assert selection.count.tolist() == [0, 0]
    assert selection.grid == (2, 3)


def test_an_empty_batch() -> None:
    texture = scored(textured(32, 48))
    selection = texvlm.select(texture.replace(texture.data[:0]), k=4)
    assert selection.indices.shape == (0, 4)
    assert selection.count.shape == (0,)


def test_ties_go_to_the_lowest_cell() -> None:
    texture = flat({"edge": 0.5, "saliency": 0.5}, 1024, 1024)
    assert texvlm.select(texture).indices[0].tolist() == list(range(273))
    assert texvlm.select(texture, k=3, cell=28).indices[0].tolist() == [0, 1, 2]


def test_all_scores_nan_still_selects() -> None:
    texture = flat({"edge": math.nan}, 64, 64)
    selection = texvlm.select(texture, k=5)
    assert selection.indices[0].tolist() == [0, 1, 2, 3, 4]
    assert selection.score.isnan().all()


@pytest.mark.parametrize("cell", [14, 16, 28, 32])
def test_a_bright_detailed_object_is_found(cell: int) -> None:
    torch.manual_seed(1)
    image = torch.full((3, 20 * cell, 24 * cell), 0.2) + 0.01 * torch.rand(3, 20 * cell, 24 * cell)
    rows, columns = range(6, 9), range(11, 15)
    image[:, rows[0] * cell : (rows[-1] + 1) * cell, columns[0] * cell : (columns[-1] + 1) * cell] = torch.rand(
        3, 3 * cell, 4 * cell
    )
    wanted = {row * 24 + column for row in rows for column in columns}
    assert set(texvlm.select(scored(image), k=len(wanted), cell=cell).indices[0].tolist()) == wanted


def test_partial_cells_at_the_edge_are_cells() -> None:
    torch.manual_seed(1)
    image = torch.full((3, 70, 100), 0.5)
    image[:, 64:, 96:] = torch.rand(3, 6, 4)
    selection = texvlm.select(scored(image), k=1)
    assert selection.grid == (5, 7)
    assert selection.indices.tolist() == [[34]]


def test_a_cell_larger_than_the_picture_covers_it() -> None:
    selection = texvlm.select(scored(textured(10, 12)), k=2, cell=100)
    assert selection.grid == (1, 1)
    assert selection.indices.tolist() == [[0, -1]]


def test_text_is_found_before_the_plain_page() -> None:
    draw = pytest.importorskip("PIL.ImageDraw", reason="Pillow draws the text")
    from PIL import Image

    page = Image.new("L", (512, 512), 230)
    draw.Draw(page).text((200, 250), "tiny words to read", fill=20)
    image = texvlm.texture.as_image(page).float().expand(1, 3, -1, -1) / 255
    box = draw.Draw(page).textbbox((200, 250), "tiny words to read")
    selection = texvlm.select(scored(image), k=8)
    for index in selection.indices[0].tolist():
        y, x = divmod(index, selection.grid[1])
        assert box[0] - 16 <= 16 * x <= box[2]
        assert box[1] - 16 <= 16 * y <= box[3]


def test_the_kept_numbers() -> None:
    assert kept_cells(273, 4096) == (2000, 500, 273)
    assert kept_cells(3000, 4096) == (3000, 3000, 3000)
    assert kept_cells(273, 8160) == (3984, 996, 273)
    assert kept_cells(5, 3) == (3, 3, 3)
    assert kept_cells(0, 4096) == (2000, 500, 0)


def test_half_textures_select_nearly_the_same() -> None:
    image = textured(256, 256)
    wanted = set(texvlm.select(scored(image), k=40).indices[0].tolist())
    for dtype in (torch.float16, torch.bfloat16):
        selection = texvlm.select(scored(image, dtype), k=40)
        assert selection.score.dtype == torch.float32
        assert len(wanted & set(selection.indices[0].tolist())) >= 32
    assert texvlm.select(scored(image.double()), k=40).score.dtype == torch.float64


def test_channels_are_found_by_name() -> None:
    texture = scored(textured(64, 80))
    turned = texvlm.Texture.from_data(
        torch.cat([torch.rand_like(texture.data[..., :2]), texture.data.flip(-1)], dim=-1),
        *(64, 80, texture.levels),
        ["min", "max", *texture.reducer[::-1]],
        ["other", "another", *SCORE_CHANNELS[::-1]],
    )
    assert torch.equal(texvlm.select(turned, k=7).indices, texvlm.select(texture, k=7).indices)
    with pytest.raises(KeyError, match="no channel 'red'"):
        texvlm.select(texvlm.Texture(torch.rand(3, 32, 32)))


def test_selection_does_not_depend_on_threads() -> None:
    texture = scored(textured(200, 300, batch=2))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(texvlm.select(texture, k=33))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(other.indices, results[0].indices)
        assert torch.equal(other.score, results[0].score)


def test_a_selection_is_a_pytree_that_copies_and_pickles() -> None:
    selection = texvlm.select(scored(textured(64, 64)), k=5)
    for other in (
        pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, selection),
        copy.deepcopy(selection),
        pickle.loads(pickle.dumps(selection)),
    ):
        assert isinstance(other, texvlm.Selection)
        assert torch.equal(other.indices, selection.indices)
        assert (other.grid, other.cell, other.weights_all) == ((4, 4), 16, None)
    with pytest.raises(AttributeError):
        selection.cell = 8
    assert repr(selection) == "Selection(1 x 5 of 4 x 4 cells of 16 px, cpu)"


def test_select_compiles() -> None:
    texture = scored(textured(64, 96))
    compiled = torch.compile(lambda t: texvlm.select(t, k=7).indices, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(texture), texvlm.select(texture, k=7).indices)


def test_one_graph_serves_pictures_of_many_sizes() -> None:
    graphs = []

    def count(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: texvlm.select(x, 20, 8).indices, fullgraph=True, dynamic=True, backend=count)
    for size in [(65, 70), (80, 127), (127, 65), (100, 66), (90, 126), (77, 99), (111, 112), (101, 103), (73, 68)]:
        image = torch.rand(1, 3, *size)
        assert torch.equal(compiled(image), texvlm.select(image, 20, 8).indices)
    assert len(graphs) == 1  # all sizes have as many levels


def test_a_texture_that_needs_gradients_is_read_without() -> None:
    texture = scored(textured(64, 64))
    selection = texvlm.select(texture.replace(texture.data.requires_grad_()), k=5)
    assert not selection.score.requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "magic"}, ValueError, "path must be one of salience, query.*multiscale, got 'magic'"),
        ({"k": -1}, ValueError, "k must be at least 0, got -1"),
        ({"k": 2.0}, TypeError, "k must be an integer, got 2.0"),
        ({"k": True}, TypeError, "k must be an integer"),
        ({"cell": 0}, ValueError, "cell must be from 1 to 4096 pixels, got 0"),
        ({"cell": -16}, ValueError, "cell must be from 1"),
        ({"cell": 10**6}, ValueError, "cell must be from 1"),
        ({"cell": 16.0}, TypeError, "cell must be an integer, got 16.0"),
        (
            {"weights": {"colour": 1.0}},
            ValueError,
            "weights must be of edge, entropy, .*, got 'colour'",
        ),
        ({"query": "a cat"}, ValueError, "takes no query"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        texvlm.select(torch.rand(3, 32, 32), **arguments)


def test_the_names_and_defaults_are_those_of_the_reference() -> None:
    from texvlm.reference import cascade

    assert {TERM_NAMES.get(n, f"mean:{n}"): w for n, w in cascade.SCORE_WEIGHTS.items()} == SCORERS["salience"]
    assert texvlm.paths.SCHEDULES == cascade.SCHEDULES
    assert (texvlm.paths.STAGE_CELLS, texvlm.paths.AUTO_CELLS) == (cascade.STAGE_CELLS, cascade.AUTO_CELLS)


# ---- on every device ----


def kinds(n: int, kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    values = torch.rand(2, n, generator=g) * 2 - 1
    if kind == "ties":
        return (values * 3).round()
    if kind == "special":
        odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38])
        return torch.where(values > 0, odd[torch.randint(8, (2, n), generator=g)], values)
    return values


@pytest.mark.parametrize("kind", ["distinct", "ties", "special"])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 1), (513, 512), (2048, 2048), (2049, 2049), (4096, 273), (4096, 2049), (32768, 100), (32769, 100), (70000, 5000)],
    ids=str,
)
def test_topk_is_a_stable_sort_of_any_row(n: int, k: int, kind: str, device: torch.device) -> None:
    scores = kinds(n, kind)
    values, indices = texvlm.topk(scores.to(device), k)
    keys = scores + 0.0  # -0 equals 0
    order = torch.where(keys.isnan(), -math.inf, keys).sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, keys.gather(1, order).isnan().long().sort(dim=1, stable=True).indices)[:, :k]
    assert torch.equal(indices.cpu(), order)
    assert torch.equal(values.cpu().view(torch.int32), scores.gather(1, order).view(torch.int32)), "the very bits"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(300, 20), (3000, 2100), (33000, 50)], ids=str)
def test_topk_of_every_dtype(n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    scores = torch.randn(2, n, dtype=torch.float64).to(dtype)
    values, indices = texvlm.topk(scores.to(device), k)
    order = scores.double().sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(indices.cpu(), order) and torch.equal(values.cpu(), scores.gather(1, order))


@pytest.mark.parametrize("n", [1, 31, 255, 2047, 2048, 2049, 70000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_compaction(n: int, share: float, device: torch.device) -> None:
    mask = torch.rand(2, n) < share
    indices, count = texvlm.compact(mask.to(device))
    for row, wanted in enumerate(mask):
        places = wanted.nonzero()[:, 0]
        assert int(count[row]) == len(places)
        assert torch.equal(indices[row, : len(places)].cpu(), places)
        assert (indices[row, len(places) :] == -1).all()


def test_compaction_of_one_row() -> None:
    indices, count = texvlm.compact(torch.tensor([True, False, True]))
    assert indices.tolist() == [0, 2, -1] and count.item() == 2
