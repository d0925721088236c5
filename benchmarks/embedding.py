"""What does a query cost on a 1024 x 1024 picture, and what do 16 principal axes keep of what it finds?

Retrieval: canvases with held-out digits of 14 to 96 pixels among clutter; the queries "zero" to "nine" rank all cells of 8 pixels (the
rim of a digit, where both answers are right, left out); average precision per query, at full width (64) and on axes. Time: the planes,
the comparison, and fitting the axes against scikit-learn's PCA and torch's randomised one.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import texvlm
from benchmarks._harness import US, Bench, Call
from texvlm.digits.canvas import cell_labels, digit_canvas, load_digits
from texvlm.digits.train import WORDS
from texvlm.pca import Moments
from texvlm.retrieval import average_precision, retrieval_kept

SIDE, CELL = 1024, 8
CANVASES = range(101, 105)
CLUTTER = 0.4  # 56 strokes, boxes and shuffled digits among up to 60 digits; 1.0 is 140 of them, on rough ground


def scenes(
    provider: texvlm.DigitsEmbedding, held_out: bool, seeds: range, clutter: float = CLUTTER
) -> tuple[Tensor, Tensor, Tensor]:
    """Features [n, D] and labels [n] of the cells of canvases, and one of the canvases."""
    digits, labels = load_digits(held_out)
    rows, shown = [], []
    for seed in seeds:
        canvas = digit_canvas(digits, labels, SIDE, clutter=clutter, seed=seed)
        target = cell_labels(canvas.boxes, canvas.labels, SIDE // CELL, SIDE // CELL, CELL).flatten()
        features = provider.encode_image(canvas.image[None])[0].flatten(1).T
        rows.append(features[target >= 0])
        shown.append(target[target >= 0])
    return torch.cat(rows), torch.cat(shown), canvas.image


def per_query(bench: Bench, features: Tensor, shown: Tensor, queries: Tensor, pca: texvlm.PCA) -> tuple[float, float]:
    """Prints what each query finds; returns the worst average precision on the axes, and the mean margin."""
    laid = 0.5 + 0.5 * pca.transform_text(queries) @ pca.transform(features).T
    full = queries @ features.T
    print(
        "\nwhat each query finds (relevance: 0.5 says nothing; margin: median of its own cells over the 99th percentile of all others)"
    )
    print(f"  {'query':8} {'cells':>6} {'AP, 64':>8} {'AP, 16':>8} {'own':>6} {'digits':>7} {'ground':>7} {'margin':>7}")
    found = []
    for digit, word in enumerate(WORDS):
        own, other, ground = shown == digit, (shown != digit) & (shown < 10), shown == 10
        values = laid[digit]
        margin = float(values[own].median() - values[~own].quantile(0.99))
        row = [average_precision(full[digit], own), average_precision(values, own)]
        means = [float(values[part].mean()) for part in (own, other, ground)]
        print(
            f"  {word:8} {int(own.sum()):6d} {row[0]:8.3f} {row[1]:8.3f} {means[0]:6.2f} {means[1]:7.2f} {means[2]:7.2f} {margin:+7.2f}"
        )
        bench.figure(
            f"query {word}",
            {"full": row[0], "axes": row[1], "own": means[0], "digits": means[1], "ground": means[2], "margin": margin},
        )
        found.append((row[1], margin))
    return min(f[0] for f in found), sum(f[1] for f in found) / len(found)


def axes_table(bench: Bench, fitted: Tensor, features: Tensor, queries: Tensor, truth: Tensor) -> None:
    """Prints what other numbers of axes keep, and other ways to treat the mean."""
    print(f"\nwhat axes keep of the mean average precision\n  {'':44} {'explained':>9} {'AP':>7} {'kept':>7} {'Spearman':>9}")
    texts = Moments().update(queries)
    seen = Moments().update(fitted)
    ways = {f"{k} axes, mean left in": texvlm.PCA.from_moments(seen, None, k, centre=False) for k in (4, 8, 12, 16, 32)}
    centred = texvlm.PCA.from_moments(seen)
    nothing = torch.zeros_like(centred.mean)
    ways["16 axes, centred; nothing taken from the text"] = texvlm.PCA(**{**vars(centred), "text_mean": nothing})
    ways["16 axes, centred; the features' mean from it"] = centred
    ways["16 axes, centred; the texts' own mean from it"] = texvlm.PCA(**{**vars(centred), "text_mean": texts.mean})
    ways["16 axes of pictures and texts, centred"] = texvlm.PCA.from_moments(seen, texts)
    for name, pca in ways.items():
        r = retrieval_kept(features, queries, pca, truth)
        print(f"  {name:44} {r.explained:9.3f} {r.axes:7.3f} {r.kept:7.1%} {r.spearman:9.3f}")
        bench.figure(name, r._asdict())


def fitting(rows: Tensor) -> dict[str, Call]:
    """Ours and the peers, 16 axes of `rows`."""
    calls: dict[str, Call] = {
        US: lambda: texvlm.PCA.fit(rows),
        "torch.pca_lowrank (randomised)": lambda: torch.pca_lowrank(rows, 16),
    }
    try:
        from sklearn.decomposition import PCA, IncrementalPCA

        array = rows.double().numpy()  # as exact as ours: float32 in, float64 inside
        calls["scikit-learn PCA, full"] = lambda: PCA(16, svd_solver="full").fit(array)
        calls["scikit-learn PCA, covariance_eigh"] = lambda: PCA(16, svd_solver="covariance_eigh").fit(array)
        calls["scikit-learn IncrementalPCA"] = lambda: IncrementalPCA(16, batch_size=1024).fit(array)
    except ImportError:
        print("scikit-learn is not installed: its rows are left out (pip install scikit-learn)")
    return calls


@torch.no_grad()
def main() -> int:
    bench = Bench(__doc__)
    provider = texvlm.DigitsEmbedding()
    embedding = texvlm.Embedding(provider)
    queries = provider.encode_text(WORDS)
    features, shown, image = scenes(provider, True, CANVASES[:2] if bench.quick else CANVASES)
    truth = shown[None] == torch.arange(10)[:, None]
    kept = retrieval_kept(features, queries, embedding.pca, truth)
    worst, margin = per_query(bench, features, shown, queries, embedding.pca)
    fitted, labels, _ = scenes(provider, False, range(2))
    ground = (labels == 10).nonzero()[:, 0]
    fitted = fitted[torch.cat([(labels < 10).nonzero()[:, 0], ground[torch.randperm(len(ground))[: int((labels < 10).sum())]]])]
    axes_table(bench, fitted, features, queries, truth)
    bench.figure("retrieval", kept._asdict())
    print("\nother amounts of clutter")
    for clutter in (0.0, 1.0):
        cells, labels, _ = scenes(provider, True, CANVASES[:2], clutter)
        r = retrieval_kept(cells, queries, embedding.pca, labels[None] == torch.arange(10)[:, None])
        print(f"  {clutter}: mean average precision {r.full:.3f}, on 16 axes {r.axes:.3f} ({r.kept:.1%} kept)")
        bench.figure(f"retrieval, clutter {clutter}", r._asdict())
    print()
    bench.gate("mean average precision on 16 axes", kept.axes, at_least=0.75)
    bench.gate("worst query's average precision on 16 axes", worst, at_least=0.3)
    bench.gate("share of the retrieval result that 16 axes keep", kept.kept, at_least=0.95)

    planes = embedding.planes(image)
    query, wide = embedding.query("seven"), queries[7]
    dense = provider.encode_image(image[None])
    times = bench.compare(
        "digits, 1024 x 1024: planes, and their parts",
        {
            US: lambda: embedding.planes(image),
            "the encoder alone": lambda: provider.encode_image(image[None]),
            "the axes alone": lambda: embedding.pca.transform(dense),
        },
    )
    bench.compare(
        "one query against 128 x 128 places",
        {
            US: lambda: texvlm.relevance(planes, query),
            "torch cosine_similarity, 16": lambda: F.cosine_similarity(planes, query.view(1, -1, 1, 1)),
            "torch cosine_similarity, 64": lambda: F.cosine_similarity(dense, wide.view(1, -1, 1, 1)),
        },
    )
    rows = torch.randn(4096, 256) @ torch.randn(256, 256)
    calls = fitting(rows)
    bench.compare("16 axes of 4096 x 256 features", calls, seconds=4)
    if "scikit-learn PCA, full" in calls:
        from sklearn.decomposition import PCA

        oracle = PCA(16, svd_solver="full").fit(rows.double().numpy()).components_
        apart = 1e6 * float((texvlm.PCA.fit(rows).axes - torch.from_numpy(oracle)).abs().max())
        bench.gate("axes' largest difference from scikit-learn's, in 1e-6", apart, at_most=1)
    return bench.finish(
        f"{1e3 * times.median():.0f} ms for the planes; mean average precision {kept.full:.3f}, on 16 axes {kept.axes:.3f} "
        f"({kept.kept:.1%} kept), worst query {worst:.3f}, margin {margin:+.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
