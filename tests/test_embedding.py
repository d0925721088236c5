"""What embeddings mean: the axes are those of scikit-learn's PCA, relevance compares directions, and "seven" finds sevens."""

from __future__ import annotations

import functools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference
from texvlm.digits.canvas import cell_labels, digit_canvas, load_digits
from texvlm.digits.model import WEIGHTS
from texvlm.digits.train import WORDS
from texvlm.pca import Moments
from texvlm.retrieval import average_precision, retrieval_kept


def cloud(n: int, width: int, seed: int = 0, offset: float = 3.0) -> torch.Tensor:
    """Correlated vectors with a common mean."""
    g = torch.Generator().manual_seed(seed)
    mixing = (
        torch.randn(width, width, generator=g, dtype=torch.float64) * torch.logspace(0, -2, width, dtype=torch.float64)[:, None]
    )
    return torch.randn(n, width, generator=g, dtype=torch.float64) @ mixing + offset * torch.randn(
        width, generator=g, dtype=torch.float64
    )


# The axes


@pytest.mark.parametrize("width", [20, 64, 300])
def test_axes_are_those_of_scikit_learn(width: int) -> None:
    from sklearn.decomposition import PCA

    rows = cloud(1000, width, seed=width)
    oracle = PCA(16, svd_solver="full").fit(rows.numpy())
    pca = texvlm.PCA.fit(rows.split(130))
    torch.testing.assert_close(pca.mean, torch.from_numpy(oracle.mean_), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pca.axes, torch.from_numpy(oracle.components_), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(pca.variance, torch.from_numpy(oracle.explained_variance_), rtol=1e-9, atol=0)
    assert pca.explained == pytest.approx(float(oracle.explained_variance_ratio_.sum()), rel=1e-9)
    laid = torch.from_numpy(oracle.transform(rows.numpy()))
    torch.testing.assert_close(pca.transform(rows), F.normalize(laid, dim=1), rtol=1e-6, atol=1e-7)


@examples(30)
@given(st.integers(2, 60), st.integers(1, 40), st.booleans(), st.integers(0, 2**31))
def test_axes_equal_the_reference(n: int, width: int, centre: bool, seed: int) -> None:
    """Few rows or few dimensions too: axes that do not exist are zero."""
    rows = cloud(n, width, seed)
    pca = texvlm.PCA.fit(rows, centre=centre)
    mean, axes, variance = reference.principal_axes(rows, centre=centre)
    torch.testing.assert_close(pca.mean, mean, rtol=1e-10, atol=1e-10)
    assert pca.axes.shape == (16, width)
    there = variance > 1e-9 * variance[0]
    torch.testing.assert_close(pca.variance[: len(axes)][there], variance[there], rtol=1e-6, atol=0)
    lengths = pca.axes.norm(dim=1)
    assert ((lengths - 1).abs().lt(1e-9) | (lengths == 0)).all()
    for axis in pca.axes[lengths > 0]:
        assert axis[axis.abs().argmax()] > 0
    # Single axes are ill-conditioned where variances are close: what they span together is compared.
    laid = (rows - mean) @ pca.axes.T @ pca.axes
    torch.testing.assert_close(laid, (rows - mean) @ axes.T @ axes, rtol=1e-4, atol=1e-4)


def test_axes_do_not_depend_on_batches_or_their_order() -> None:
    rows = cloud(5000, 48, offset=1e4)  # a common mean 10,000 times the spread
    whole = texvlm.PCA.fit(rows)
    shuffled = texvlm.PCA.fit(list(reversed(rows.split(77))))
    torch.testing.assert_close(shuffled.axes, whole.axes, rtol=1e-8, atol=1e-8)
    left, right = Moments(), Moments()
    for i, batch in enumerate(rows.split(77)):
        (left if i % 3 else right).update(batch)
    merged = texvlm.PCA.from_moments(right.merge(left))
    torch.testing.assert_close(merged.axes, whole.axes, rtol=1e-8, atol=1e-8)
    assert merged.count == 5000


def test_dense_features_and_rows_that_are_not_finite() -> None:
    dense = cloud(2 * 6 * 7, 24).float().view(2, 6, 7, 24).permute(0, 3, 1, 2)
    holed = torch.cat([dense, torch.full((1, 24, 6, 7), torch.nan)])
    pca = texvlm.PCA.fit(holed)
    assert pca.count == 2 * 6 * 7
    torch.testing.assert_close(pca.axes, texvlm.PCA.fit(dense).axes)
    planes = pca.transform(holed)
    assert planes.shape == (3, 16, 6, 7) and planes.isfinite().all() and (planes[2] == 0).all()
    torch.testing.assert_close(planes[:2].square().sum(1), torch.ones(2, 6, 7))
    rows = reference.project(dense.permute(0, 2, 3, 1).reshape(-1, 24), pca.mean, pca.axes)
    torch.testing.assert_close(planes[:2].permute(0, 2, 3, 1).reshape(-1, 16).double(), rows, rtol=1e-4, atol=1e-5)
    for half in (torch.float16, torch.bfloat16):
        assert pca.transform(dense.to(half)).dtype == torch.float32


def test_few_dimensions_and_none() -> None:
    thin = texvlm.PCA.fit(cloud(100, 5))
    assert (thin.axes[5:] == 0).all() and thin.explained == pytest.approx(1)
    assert (thin.transform(cloud(3, 5))[:, 5:] == 0).all()
    constant = texvlm.PCA.fit(torch.ones(10, 20))
    assert (constant.axes == 0).all() and constant.explained == 1
    assert (constant.transform(torch.rand(4, 20)) == 0).all()


def test_save_and_load(tmp_path) -> None:
    pca = texvlm.PCA.fit(cloud(200, 40), texts=cloud(30, 40, seed=1))
    pca.save(tmp_path / "axes.npz")
    again = texvlm.PCA.load(tmp_path / "axes.npz")
    assert again.total == pca.total and again.count == pca.count == 200
    for name in ("mean", "axes", "variance", "text_mean"):
        assert torch.equal(getattr(again, name), getattr(pca, name))


def test_texts_have_a_mean_and_a_say_of_their_own() -> None:
    """Pictures vary along axes 0-15, texts along 16 and 17: only axes fitted with texts keep those two."""
    g = torch.Generator().manual_seed(0)
    features, texts = torch.zeros(500, 20), torch.zeros(40, 20)
    features[:, :16] = torch.randn(500, 16, generator=g)
    features[:, 16:18] = 0.2 * torch.randn(500, 2, generator=g)
    texts[:, 16:18] = torch.randn(40, 2, generator=g)
    alone, both = texvlm.PCA.fit(features), texvlm.PCA.fit(features, texts)
    assert alone.axes[:, 16:18].norm() < 0.2 and both.axes[:, 16:18].norm() > 1.3
    torch.testing.assert_close(both.text_mean, texts.double().mean(0))
    assert torch.equal(alone.text_mean, alone.mean)
    assert (texvlm.PCA.fit(features, texts, centre=False).text_mean == 0).all()
    apart = texts - texts.mean(0)
    torch.testing.assert_close(both.transform_text(texts), F.normalize(apart @ both.axes.float().T, dim=1), atol=1e-4, rtol=1e-4)
    kept = [retrieval_kept(features, apart + pca.text_mean.float(), pca).spearman for pca in (alone, both)]
    assert kept[1] > 0.85 > 0.5 > kept[0]
    moved = texvlm.PCA.fit(features, texts + 5)  # the mean of the texts alone changes nothing else
    torch.testing.assert_close(moved.axes, both.axes)
    torch.testing.assert_close(moved.transform_text(texts + 5), both.transform_text(texts), atol=1e-4, rtol=1e-4)


def test_uncentred_axes_keep_the_order_of_cosines() -> None:
    """Unit vectors in a space of 16 dimensions: the relevance on the axes is the cosine itself."""
    basis = torch.linalg.qr(torch.randn(50, 16, dtype=torch.float64))[0].T
    features, queries = (F.normalize(torch.rand(n, 16, dtype=torch.float64) @ basis, dim=1) for n in (300, 5))
    pca = texvlm.PCA.fit(features, centre=False)
    torch.testing.assert_close(pca.transform_text(queries) @ pca.transform(features).T, queries @ features.T)
    assert retrieval_kept(features, queries, pca).kept == 1


def test_bad_features() -> None:
    with pytest.raises(ValueError, match="at least two finite features, got 1"):
        texvlm.PCA.fit(torch.rand(1, 20))
    with pytest.raises(ValueError, match=r"floating point, \[n, D\] or \[B, D, h, w\], got torch.int64"):
        texvlm.PCA.fit(torch.ones(5, 20, dtype=torch.int64))
    with pytest.raises(ValueError, match="20 dimensions like those before, got 21"):
        texvlm.PCA.fit([torch.rand(5, 20), torch.rand(5, 21)])
    with pytest.raises(ValueError, match="20 dimensions like the features, got 7"):
        texvlm.PCA.fit(torch.rand(5, 20), texts=torch.rand(5, 7))
    with pytest.raises(ValueError, match=r"20 dimensions like the axes, got \[1, 3, 4, 4\]"):
        texvlm.PCA.fit(torch.rand(50, 20)).transform(torch.rand(1, 3, 4, 4))


# Relevance and retrieval


@examples(30)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_relevance_equals_the_reference(batch: int, width: int, rows: int, columns: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    planes, queries = torch.randn(batch, width, rows, columns, generator=g), torch.randn(3, width, generator=g)
    planes[:, :, 0, 0] = 0
    found = texvlm.relevance(planes, queries)
    assert found.shape == (batch, 3, rows, columns) and found.min() >= 0 and found.max() <= 1
    assert (found[:, :, 0, 0] == 0.5).all()
    for q in range(3):
        torch.testing.assert_close(found[:, q].double(), reference.relevance(planes, queries[q]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(texvlm.relevance(planes, queries[q]), found[:, q])


def test_relevance_has_gradients_and_none_at_zero() -> None:
    planes = torch.randn(1, 16, 2, 3, dtype=torch.float64, requires_grad=True)
    query = torch.randn(16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(texvlm.relevance, (planes, query))
    empty = torch.zeros(1, 16, 2, 2, requires_grad=True)
    texvlm.relevance(empty, query.detach().float()).sum().backward()
    assert (empty.grad == 0).all()


def test_relevance_of_a_texture_at_every_level() -> None:
    """Mips average vectors and shorten them; relevance compares directions."""
    planes = F.normalize(torch.randn(2, 16, 8, 12), dim=1)
    names = ["red", *(f"embedding_{i}" for i in range(16))]
    texture = texvlm.Texture(torch.cat([torch.rand(2, 1, 8, 12), planes], 1), names=names)
    query = torch.randn(16)
    torch.testing.assert_close(texvlm.relevance(texture, query), texvlm.relevance(planes, query))
    torch.testing.assert_close(texvlm.relevance(texture, query, level=2), texvlm.relevance(F.avg_pool2d(planes, 4), query))
    with pytest.raises(ValueError, match="built without one"):
        texvlm.relevance(texture)
    texture.meta["query_vector"] = tuple(query.tolist())
    torch.testing.assert_close(texvlm.relevance(texture), texvlm.relevance(planes, query))
    texture.meta["embedding_0"] = "absent: no embedding"
    with pytest.raises(ValueError, match="no embedding"):
        texvlm.relevance(texture, query)


def test_relevance_refuses() -> None:
    with pytest.raises(ValueError, match=r"query must be \[16\] or \[Q, 16\], got \[3\]"):
        texvlm.relevance(torch.rand(1, 16, 2, 2), torch.rand(3))
    with pytest.raises(ValueError, match=r"source must be planes \[B, K, h, w\] or a texture, got \[16, 2, 2\]"):
        texvlm.relevance(torch.rand(16, 2, 2), torch.rand(16))


def test_average_precision_is_scikit_learns() -> None:
    from sklearn.metrics import average_precision_score

    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        scores, right = torch.randn(200, generator=g), torch.rand(200, generator=g) < 0.1
        assert average_precision(scores, right) == pytest.approx(average_precision_score(right.numpy(), scores.numpy()))
    assert average_precision(torch.rand(5), torch.zeros(5, dtype=torch.bool)) == 0


def test_retrieval_kept_tells_good_axes_from_bad_ones() -> None:
    features = cloud(2000, 40, offset=0)
    queries = cloud(8, 40, seed=3, offset=0)
    pca = texvlm.PCA.fit(features, centre=False)
    # The sixteen weakest axes instead of the strongest.
    weak = texvlm.PCA(
        pca.mean, torch.linalg.eigh(features.T @ features)[1].T[:16], pca.variance, pca.total, pca.text_mean, pca.count
    )
    truth = (F.normalize(queries, dim=1) @ F.normalize(features, dim=1).T) > 0.3
    for known in (None, truth):
        good, bad = retrieval_kept(features, queries, pca, known), retrieval_kept(features, queries, weak, known)
        assert good.kept > 0.8 > 0.5 > bad.kept and good.spearman > 0.9 > bad.spearman
        assert good.kept == pytest.approx(good.axes / good.full)
    with pytest.raises(ValueError, match="at least one cell"):
        retrieval_kept(features, queries, pca, torch.zeros(8, 2000, dtype=torch.bool))


# Providers


class Fixed:
    """Features that are what the pictures are, 8 x 8 cells, mixed into more dimensions."""

    name = "fixed"

    def __init__(self, width: int = 48) -> None:
        self.mixing = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]

    def encode_image(self, pictures: torch.Tensor) -> torch.Tensor:
        cells = F.unfold(F.interpolate(pictures, scale_factor=0.5), 4, stride=4)
        rows, columns = pictures.shape[2] // 8, pictures.shape[3] // 8
        return F.normalize(torch.einsum("dk,bkn->bdn", self.mixing, cells), dim=1).view(len(pictures), -1, rows, columns)

    def encode_text(self, texts):
        rows = [torch.randn(48, generator=torch.Generator().manual_seed(len(text))) for text in texts]
        return F.normalize(torch.stack(rows) @ self.mixing.T, dim=1)


def test_any_object_is_a_provider() -> None:
    provider = Fixed()
    assert isinstance(provider, texvlm.EmbeddingProvider) and not isinstance(object(), texvlm.EmbeddingProvider)
    pictures = torch.rand(2, 3, 64, 96)
    embedding = texvlm.Embedding.fit(provider, pictures)
    planes = embedding.planes(pictures)
    assert planes.shape == (2, 16, 8, 12) and embedding.name == "fixed on 16 axes" and embedding.kept is None
    torch.testing.assert_close(planes, texvlm.embedding_planes(pictures, provider, embedding.pca))
    torch.testing.assert_close(planes, texvlm.embedding_planes(pictures, embedding))
    # The query: a text, texts, a vector at full width, a vector on the axes.
    wide = provider.encode_text(["a tree"])[0]
    laid = embedding.query("a tree")
    assert laid.shape == (16,)
    for query in (wide, laid, 5 * laid):
        torch.testing.assert_close(embedding.query(query), laid)
    torch.testing.assert_close(embedding.query(["a tree", "sky"])[0], laid)
    torch.testing.assert_close(embedding.relevance(pictures, "a tree"), texvlm.relevance(planes, laid))
    grey = (pictures[:1, :1] * 255).byte()
    torch.testing.assert_close(embedding.planes(grey), embedding.planes(grey.float().div(255).expand(-1, 3, -1, -1)))
    assert embedding.planes(torch.full((3, 16, 16), torch.nan)).isfinite().all()


def test_fit_says_how_much_is_kept() -> None:
    """Noise fills all 48 dimensions evenly: 16 axes can keep what a few queries find, not what forty do, and that is said."""
    pictures = [torch.rand(3, 128, 128) - 0.5 for _ in range(3)]
    texts = ["x" * n for n in range(1, 41)]
    with pytest.warns(UserWarning, match=r"16 axes keep \d+% of what these queries find with the 48 dimensions of fixed"):
        many = texvlm.Embedding.fit(Fixed(), pictures, texts)
    assert 0.05 < many.kept < 0.9 and f"{many.kept:.0%} of its retrieval kept" in many.name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        few = texvlm.Embedding.fit(Fixed(), pictures, texts[:4])
    assert few.kept > many.kept + 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texvlm.Embedding.fit(Fixed(), pictures, texts, axes=48).kept == 1


def test_bad_providers() -> None:
    with pytest.raises(TypeError, match="name, encode_image and encode_text, got int"):
        texvlm.Embedding(3)
    with pytest.raises(ValueError, match=r"fixed brings no principal axes: find them with Embedding.fit"):
        texvlm.Embedding(Fixed())
    with pytest.raises(ValueError, match="at least one picture"):
        texvlm.Embedding.fit(Fixed(), [])
    embedding = texvlm.Embedding.fit(Fixed(), torch.rand(1, 3, 64, 64))
    with pytest.raises(ValueError, match=r"48 dimensions, or 16 on the axes, got \[5\]"):
        embedding.query(torch.rand(5))
    provider = Fixed()
    provider.encode_image = lambda pictures: pictures[0]
    with pytest.raises(ValueError, match=r"fixed.encode_image must return floating point \[B, D, h, w\] for \[1, 3, 8, 8\], got"):
        texvlm.embedding_planes(torch.rand(3, 8, 8), provider, embedding.pca)


# Digits


@functools.lru_cache(maxsize=1)
def digits() -> texvlm.DigitsEmbedding:
    return texvlm.DigitsEmbedding()


MEAN, WORST = 0.7, 0.25  # average precision of the queries on cells; "one" is taken for strokes
CLUTTER = 0.4  # some sixty strokes, boxes and shuffled digits beside the sixty digits


@functools.lru_cache(maxsize=2)
def scene(seed: int):
    """A canvas of held-out digits: the canvas, its features at full width, its planes, and what each cell shows."""
    canvas = digit_canvas(*load_digits(held_out=True), side=1024, count=60, clutter=CLUTTER, seed=seed)
    features = digits().encode_image(canvas.image[None])
    planes = digits().pca.transform(features)
    return canvas, features, planes, cell_labels(canvas.boxes, canvas.labels, 128, 128)


def test_queries_light_up_their_digits() -> None:
    """Held-out digits of many sizes among clutter on 1024 x 1024: every query prefers its own cells, on 16 axes as at full width."""
    canvas, _, planes, target = scene(1)
    embedding = texvlm.Embedding(digits())
    assert planes.shape == (1, 16, 128, 128)
    torch.testing.assert_close(embedding.planes(canvas.image), planes)
    shown = texvlm.relevance(planes, embedding.query(WORDS))[0]
    inner = target >= 0
    found = []
    for digit in canvas.labels.unique().tolist():
        right = target == digit
        found.append(average_precision(shown[digit][inner], right[inner]))
        assert shown[digit][right].mean() > shown[digit][inner & ~right].mean() + 0.15
    assert min(found) > WORST and sum(found) / len(found) > MEAN, [round(f, 2) for f in found]
    chance = [float((target == digit)[inner].float().mean()) for digit in range(10)]
    assert max(chance) < 0.05


def test_sixteen_axes_keep_the_retrieval_result() -> None:
    """95 % of the mean average precision at full width, on canvases that the axes were not fitted on."""
    _, features, _, target = scene(1)
    rows, shown = features[0].flatten(1).T[target.flatten() >= 0], target.flatten()[target.flatten() >= 0]
    queries = digits().encode_text(WORDS)
    kept = retrieval_kept(rows, queries, digits().pca, shown[None] == torch.arange(10)[:, None])
    assert kept.kept >= 0.95 and kept.full > MEAN
    assert texvlm.Embedding(digits()).kept >= 0.95 and "retrieval kept" in texvlm.Embedding(digits()).name


def test_the_best_places_for_a_digit_are_that_digit() -> None:
    """Of the digits on the canvas, each query puts its own first: R-precision over all ten."""
    canvas, _, planes, _ = scene(1)
    shown = texvlm.relevance(planes, texvlm.Embedding(digits()).query(WORDS))[0]
    x, y = ((canvas.boxes[:, a] + canvas.boxes[:, a + 2]) / 16 for a in (0, 1))
    place = shown[:, y.long().clamp(max=127), x.long().clamp(max=127)]
    hits = 0
    for digit in range(10):
        own = canvas.labels == digit
        hits += int(own[place[digit].argsort(descending=True)[: int(own.sum())]].sum())
    assert hits >= 0.75 * len(canvas.labels), f"{hits} of {len(canvas.labels)}"
    assert (place.argmax(0) == canvas.labels).float().mean() >= 0.8


def test_queries_are_read() -> None:
    """Phrases that training never saw name the same digit; other words name none."""
    provider = digits()
    words = provider.encode_text(WORDS)
    for template in ("do you see a {}?", "point at the {}", "a picture with the digit {} in it", "  {}  ", "the written {}"):
        for names in (WORDS, [str(d) for d in range(10)], [w.upper() for w in WORDS]):
            cosine = provider.encode_text([template.format(name) for name in names]) @ words.T
            assert torch.equal(cosine.argmax(1), torch.arange(10)), template
            assert cosine.diagonal().min() > 0.6
    _, _, planes, target = scene(1)
    embedding = texvlm.Embedding(provider)
    seven, *strange = texvlm.relevance(planes, embedding.query(["seven", "a horse", "seventeen", "blue sky", "42"]))[0]
    for shown in strange:
        assert shown.quantile(0.99) < seven[target == 7].median()


def test_polarity_and_size_do_not_matter() -> None:
    """A held-out seven, dark on light or light on dark, at 14 to 90 pixels on plain ground: found at its place."""
    pictures, labels = load_digits(held_out=True)
    embedding = texvlm.Embedding(digits())
    right = total = 0
    for which in (labels == 7).nonzero()[:6, 0].tolist():
        for size in (16, 24, 40, 88):
            ink = F.interpolate(pictures[which][None, None], (size, size), mode="bilinear", align_corners=False)[0, 0]
            y, x = 120 - size // 2, 72 - size // 2
            canvas = torch.zeros(192, 192)
            canvas[y : y + size, x : x + size] = ink
            for picture in (0.2 + 0.7 * canvas, 0.8 - 0.7 * canvas):
                found = embedding.relevance(picture.expand(3, -1, -1), WORDS)[0, :, 15, 9]
                right, total = right + int(found.argmax() == 7), total + 1
    assert right >= 0.9 * total, f"{right} of {total}"


def test_digits_of_any_size_batch_and_input() -> None:
    provider = digits()
    embedding = texvlm.Embedding(provider)
    for size in ((1, 1), (3, 500), (40, 57), (64, 64)):
        pictures = torch.rand(2, 3, *size)
        found = provider.encode_image(pictures)
        assert found.shape == (2, 64, -(-size[0] // 8), -(-size[1] // 8))
        torch.testing.assert_close(found.square().sum(1), torch.ones(2, *found.shape[2:]))
        torch.testing.assert_close(provider.encode_image(pictures[1:]), found[1:], rtol=1e-4, atol=1e-5)
    assert embedding.planes(torch.full((1, 20, 20), torch.nan)).isfinite().all()
    picture = torch.rand(3, 32, 32, requires_grad=True)
    embedding.relevance(picture, "seven").sum().backward()
    assert picture.grad.abs().sum() > 0
    assert provider.encode_text([]).shape == (0, 64)
    with pytest.raises(ValueError, match="the pictures are on meta, the digits encoder on cpu"):
        provider.encode_image(torch.rand(1, 3, 8, 8, device="meta"))
    half = texvlm.DigitsEmbedding().bfloat16().encode_image(pictures)
    assert half.dtype == torch.float32 and (half * found).sum(1).mean() > 0.95


def test_a_picture_whose_size_is_no_multiple_of_eight_is_covered_evenly() -> None:
    """The grid covers the picture: a digit stays where it is, in uv, when the picture is cut."""
    canvas = digit_canvas(*load_digits(held_out=True), side=256, count=1, sizes=(60, 60), clutter=0, seed=4)
    x, y = ((canvas.boxes[0, a] + canvas.boxes[0, a + 2]) / 2 for a in (0, 1))
    word = WORDS[int(canvas.labels[0])]
    for cut in (0, 3, 5, 7):
        shown = texvlm.Embedding(digits()).relevance(canvas.image[:, : 256 - cut, : 256 - cut], word)[0]
        weight = (shown - 0.7).clamp(min=0)
        rows, columns = shown.shape
        v = float((weight.sum(1) * (torch.arange(rows) + 0.5)).sum() / weight.sum()) / rows * (256 - cut)
        u = float((weight.sum(0) * (torch.arange(columns) + 0.5)).sum() / weight.sum()) / columns * (256 - cut)
        assert abs(u - float(x)) < 8 and abs(v - float(y)) < 8


def test_weights_are_small_and_no_pickle() -> None:
    assert WEIGHTS.stat().st_size < 1e6
    with np.load(WEIGHTS, allow_pickle=False) as arrays:
        assert all(np.isfinite(arrays[name]).all() for name in arrays.files)


def test_canvases_are_what_they_say() -> None:
    pictures, labels = load_digits(held_out=False)
    assert len(pictures) == 1297 and len(load_digits(held_out=True)[0]) == 500
    one, again = (digit_canvas(pictures, labels, side=256, count=12, seed=5) for _ in range(2))
    assert torch.equal(one.image, again.image) and torch.equal(one.boxes, again.boxes)
    assert one.image.shape == (3, 256, 256) and one.image.min() >= 0 and one.image.max() <= 1
    x0, y0, x1, y1 = one.boxes.unbind(1)
    assert (x0 >= 0).all() and (y1 <= 256).all()
    for i in range(len(one.boxes)):
        for j in range(i):
            assert x1[i] <= x0[j] or x1[j] <= x0[i] or y1[i] <= y0[j] or y1[j] <= y0[i]
    target = cell_labels(one.boxes, one.labels, 32, 32)
    for digit, (a, b, c, d) in zip(one.labels.tolist(), one.boxes.tolist()):
        assert target[int((b + d) / 16), int((a + c) / 16)] == digit
    assert (target == 10).any() and (target == -1).any()


def test_the_training_runs_and_its_texts_are_apart() -> None:
    from texvlm.digits import train

    state = torch.random.get_rng_state()
    image, text = train.train([lesson._replace(steps=1) for lesson in train.LESSONS])
    torch.random.set_rng_state(state)
    stored = train.folded_weights(image, text)
    assert set(stored) == set(digits().state_dict())
    rng = random.Random(0)
    assert len(set(train.phrases(7, rng, 50))) > 20 and all("7" in p or "seven" in p.lower() for p in train.phrases(7, rng, 50))
    texts = torch.eye(4)[[0, 0, 1, 1]]
    together, mixed = (train.text_loss(t, torch.tensor([0, 0, 1, 1])) for t in (texts, texts[[0, 2, 1, 3]]))
    assert together < mixed


@pytest.mark.parametrize(("height", "width"), [(96, 128), (37, 53), (200, 333)])
def test_bits_do_not_depend_on_threads_or_on_the_batch(height: int, width: int) -> None:
    pictures, embedding = torch.rand(3, 3, height, width), texvlm.Embedding(texvlm.DigitsEmbedding())
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for parts in (pictures[None], pictures.split(1)):
                made = [texvlm.build_channels(part, query="seven", channels="embedding", embedding=embedding) for part in parts]
                found.append([torch.cat([t.data for t in made]), torch.cat([texvlm.relevance(t) for t in made])])
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        for a, b in zip(found[0], others):
            assert torch.equal(a, b)
