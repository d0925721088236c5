"""What the paths of `select` mean, and where the kept tokens lie."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

import texvlm
from benchmarks._documents import coverage, document
from texvlm import reference
from texvlm.paths import PATHS, CascadeConfig


class Colours:
    """A provider that knows red, green and blue: cells of 8 pixels by their mean colour, less grey."""

    name, dim, cell = "colours", 3, 8

    def encode_image(self, pictures: torch.Tensor) -> torch.Tensor:
        means = F.avg_pool2d(pictures, 8)
        return means - means.mean(1, keepdim=True)

    def encode_text(self, texts: Sequence[str]) -> torch.Tensor:
        words = ["red", "green", "blue"]
        return torch.eye(3)[[words.index(text) for text in texts]] - 1 / 3


def colours() -> texvlm.Embedding:
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return texvlm.Embedding.fit(Colours(), picture, ["red", "green", "blue"], axes=3)


def scene(height: int = 128, width: int = 192, seed: int = 0) -> torch.Tensor:
    """Soft noise with a detailed object in the rows 32 to 64 and the columns 96 to 144."""
    g = torch.Generator().manual_seed(seed)
    image = F.interpolate(0.3 * torch.rand(1, 3, 8, 12, generator=g), (height, width), mode="bicubic")[0].clamp(0, 1)
    image[:, 32:64, 96:144] = torch.rand(3, 32, 48, generator=g)
    return image


# ---- every path ----


@pytest.mark.parametrize("path", [p for p in PATHS if p != "query"])
@pytest.mark.parametrize(("k", "cell"), [(7, 16), (0, 16), (500, 16), (5, 28), (3, 300)])
def test_every_path_keeps_valid_disjoint_tokens(path: str, k: int, cell: int) -> None:
    image = torch.stack([scene(), scene(seed=1)])
    selection = texvlm.select(image, k, cell, path)
    total = selection.grid[0] * selection.grid[1]
    assert selection.indices.shape == selection.score.shape == selection.lod.shape == (2, k)
    assert (selection.count <= min(k, total)).all()
    if path not in ("adaptive", "predictive"):
        assert selection.count.tolist() == [min(k, total)] * 2
    covered = torch.zeros(2, *selection.size, dtype=torch.int64)
    for b in range(2):
        for i, (y0, x0, y1, x1) in enumerate(selection.boxes()[b].tolist()):
            if i >= selection.count[b]:
                assert (y0, x0, y1, x1) == (-1, -1, -1, -1) and selection.indices[b, i] == -1
                continue
            assert 0 <= y0 < y1 <= 128 and 0 <= x0 < x1 <= 192
            covered[b, y0:y1, x0:x1] += 1
    assert covered.max() <= 1
    mask = F.interpolate(selection.mask()[:, None].float(), scale_factor=cell)[:, 0, :128, :192]
    assert torch.equal(mask.long(), covered)


@pytest.mark.parametrize("path", [p for p in PATHS if p not in ("query", "predictive")])
def test_every_path_finds_the_only_object(path: str) -> None:
    selection = texvlm.select(scene(), 4, 16, path)
    inside = torch.zeros(128, 192, dtype=torch.bool)
    inside[32:64, 96:144] = True
    certain = 1 if path == "multiscale" else 4  # coarse tokens show it with fewer, and then look elsewhere
    for y0, x0, y1, x1 in selection.boxes()[0, :certain].tolist():
        assert inside[y0:y1, x0:x1].any(), path


# With symbolic sizes the longest paths are traced for half a minute: theirs are numbers.
@pytest.mark.parametrize(
    ("path", "dynamic"), [("anisotropic_text", None), ("multiscale", None), ("predictive", True), ("soft", True)]
)
def test_paths_compile(path: str, dynamic: bool | None) -> None:
    image = scene()
    compiled = torch.compile(
        lambda t: texvlm.select(t, 7, 16, path).indices, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    assert torch.equal(compiled(image), texvlm.select(image, 7, 16, path).indices)


def test_five_stages_equal_the_reference_in_photographs() -> None:
    image = torch.rand(1, 3, 512, 512, generator=torch.Generator().manual_seed(4))
    mine = texvlm.select(image, 20, 16, CascadeConfig(schedule=5))
    theirs = reference.select(image, 20, 16, schedule=5)
    assert len(set(mine.indices[0].tolist()) ^ set(theirs.indices[0].tolist())) <= 2


def test_a_query_keeps_what_answers_it() -> None:
    image = torch.full((3, 96, 96), 0.5)
    image[0, 16:32, 48:80], image[2, 64:80, 0:32] = 1.0, 1.0
    for word, cells in (("red", {9, 10}), ("blue", {24, 25})):
        kept = texvlm.select(image, 2, 16, "query", word, embedding=colours()).indices[0].tolist()
        assert set(kept) == cells
    planes = torch.zeros(16, 96, 96)
    planes[3, 16:32, 48:80], planes[5, 64:80, 0:32] = 1.0, 1.0
    texture = texvlm.Texture(planes, names=[f"embedding_{i}" for i in range(16)])
    assert set(texvlm.select(texture, 2, 16, "query", torch.eye(16)[3]).indices[0].tolist()) == {9, 10}
    assert texvlm.select(image, 1, 16, "multiscale", "blue", embedding=colours()).mask()[0, 4, :2].any()


def test_a_query_that_nothing_answers_says_so() -> None:
    green = torch.zeros(3, 64, 64)
    green[1] = 1.0
    with pytest.warns(UserWarning, match="nothing in this picture is more relevant"):
        texvlm.select(green, 2, 16, "query", "red", embedding=colours())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texvlm.select(green, 2, 16, "query", "green", embedding=colours())


def test_where_a_query_enters_in_photographs() -> None:
    image = scene(512, 512).mean(0, keepdim=True).repeat(3, 1, 1)
    image[0, 400:416, 400:416], image[1:, 400:416, 400:416] = 1.0, 0.0
    cell = 25 * 32 + 25
    for stages, found in ((None, True), ((1, 2, 3), True), ((), False)):  # by salience alone it is nothing special
        config = CascadeConfig(terms={"mean:attention": 1.0}, query_stages=stages, schedule=3)
        kept = texvlm.select(image, 1, 16, config, "red", embedding=colours()).indices[0].tolist()
        assert (kept == [cell]) == found


def test_text_is_covered_along_its_lines_in_photographs() -> None:
    found = document(31000, 1024, (10, 30))
    overlap = found.overlap(16)
    kept = texvlm.select(found.image, 273, 16, "anisotropic_text")
    plain = texvlm.select(found.image, 273, 16)
    share, other = (coverage(s.mask()[0].float(), overlap, 273) for s in (kept, plain))
    assert share > 0.6 and share > other + 0.2
    axes = kept.axes
    assert axes is not None
    long, short = axes[0, :50].norm(dim=1).unbind(1)
    torch.testing.assert_close(long / short, torch.full((50,), 4.0))
    torch.testing.assert_close(torch.linalg.det(axes[0, :50]), torch.ones(50))
    angle = torch.atan2(axes[0, :50, 1, 0], axes[0, :50, 0, 0]).abs()
    assert angle.median() < 0.4  # lines are turned by up to 8 degrees


def test_an_adaptive_budget_follows_the_picture_in_photographs() -> None:
    busy = torch.rand(3, 512, 512, generator=torch.Generator().manual_seed(5))
    small = torch.full((3, 512, 512), 0.5)
    small[:, 64:96, 64:96] = busy[:, :32, :32]
    counts = texvlm.select(torch.stack([busy, small]), 200, 16, "adaptive").count.tolist()
    assert counts[0] == 200
    assert 4 <= counts[1] <= 40


def test_what_was_kept_stays_a_little_likelier_in_photographs() -> None:
    first, second = scene(512, 512, seed=6), scene(512, 512, seed=7)
    blend = [torch.lerp(first, second, w) for w in (0.45, 0.55)]
    before = texvlm.select(blend[0], 60, 16, "video")
    alone = texvlm.select(blend[1], 60, 16, "video")
    remembered = texvlm.select(blend[1], 60, 16, "video", previous=blend[0], memory=before)
    old = set(before.indices[0].tolist())
    assert len(old & set(remembered.indices[0].tolist())) >= len(old & set(alone.indices[0].tolist()))
    with pytest.raises(ValueError, match="memory must be of 1 x"):
        texvlm.select(blend[1], 60, 32, "video", memory=before)


def test_the_soft_path_sums_to_k_and_carries_gradients() -> None:
    image = scene().requires_grad_()
    selection = texvlm.select(image, 6, 16, "soft")
    assert selection.weights_all is not None
    torch.testing.assert_close(selection.weights_all.sum(1), torch.tensor([6.0]), atol=1e-3, rtol=0)
    (selection.weights_all * torch.rand_like(selection.weights_all)).sum().backward()
    assert image.grad is not None and image.grad.abs().sum() > 0


def test_predictive_drops_duplicates_and_loses_nothing() -> None:
    g = torch.Generator().manual_seed(9)
    tile = torch.rand(3, 16, 16, generator=g)
    image = tile.repeat(1, 6, 8)
    image[:, 32:48, 64:80] = torch.rand(3, 16, 16, generator=g)
    selection = texvlm.select(image, 48, 16, "predictive")
    assert sorted(selection.indices[0, : int(selection.count)].tolist()) == [0, 20]
    noise = torch.rand(3, 96, 128, generator=g)
    assert int(texvlm.select(noise, 48, 16, "predictive").count) == 48


@pytest.mark.parametrize("bound", [0.0, 0.02, 0.1])
def test_predictive_keeps_what_no_neighbour_predicts(bound: float) -> None:
    g = torch.Generator().manual_seed(10)
    ramp = torch.linspace(0, 1, 100).expand(2, 3, 70, 100) + 0.01 * torch.rand(2, 3, 70, 100, generator=g)
    ramp[1, :, :40] = 0.0
    source = texvlm.predict_cells(ramp, 8, bound)
    kept = source == torch.arange(source.shape[1])
    selection = texvlm.select(ramp, 200, 8, CascadeConfig(terms={"residual": 1.0}, schedule=1, bound=bound))
    assert selection.count.tolist() == kept.sum(1).tolist()
    assert torch.equal(selection.mask().flatten(1), kept)


def test_clusters_first() -> None:
    image = scene(256, 256)
    selection = texvlm.select(image, 10, 16, CascadeConfig(schedule="clusters"))
    assert int(selection.count) == 10
    kept = {divmod(i, 16) for i in selection.indices[0].tolist()}
    assert len([1 for y, x in kept if 2 <= y < 4 and 6 <= x < 9]) >= 5


def test_weights_name_channels_terms_and_contiguity() -> None:
    image = scene()
    bright = texvlm.select(image, 1, 16, weights={"edge": 0, "entropy": 0, "saliency": 0, "red": 1.0})
    means = F.avg_pool2d(image[None, :1], 16).flatten()
    assert int(bright.indices[0, 0]) == int(means.argmax())
    dark = texvlm.select(image, 1, 16, weights={"edge": 0, "entropy": 0, "saliency": 0, "min:blue": -1.0})
    assert int(dark.indices[0, 0]) == int(-F.max_pool2d(-image[None, 2:], 16).flatten().neg().argmax()) or int(dark.count) == 1

    def neighbours(selection: texvlm.Selection) -> int:
        mask = selection.mask()[0].float()[None, None]
        around = F.conv2d(mask, torch.ones(1, 1, 3, 3), padding=1) - mask
        return int((around * mask).sum())

    noise = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(10))
    plain, together = (texvlm.select(noise, 40, 16, weights=w) for w in (None, {"contiguity": 3.0}))
    assert neighbours(together) > neighbours(plain)


def test_a_scorer_of_ones_own_is_given_features() -> None:
    image = scene()
    mine = texvlm.select(image, 5, 16, "learned", scorer=lambda features: features[..., 0])  # rms:edge
    theirs = texvlm.select(image, 5, 16, CascadeConfig(terms={"rms:edge": 1.0}, schedule=1))
    assert torch.equal(mine.indices, theirs.indices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "query"}, "needs query="),
        ({"path": "query", "query": "red"}, "a text needs embedding="),
        ({"path": "query", "query": torch.zeros(3)}, "a picture needs embedding="),
        ({"path": "learned", "scorer": lambda f: f}, r"scorer must return scores \[1, 4\]"),
        ({"path": "multiscale", "weights": {"edge": 1.0}}, "weights must be of detail, text, query"),
        ({"weights": {"edge": float("nan")}}, "weights must be finite"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        texvlm.select(torch.rand(3, 32, 32), 2, **arguments)


@pytest.mark.parametrize(
    "parts",
    [
        {"schedule": 2},
        {"footprint": "round"},
        {"scale": "many"},
        {"budget": "large"},
        {"levels": 0},
        {"terms": {"mode:red": 1.0}},
    ],
)
def test_bad_configurations(parts: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        CascadeConfig(**parts)


# ---- mixed levels ----


def test_mixed_levels_see_more_than_one_in_photographs() -> None:
    from benchmarks._photographs import photographs
    from benchmarks._reading import blocks_of, shown

    for _, image in photographs(("astronaut", "coffee")):
        errors = [
            (shown(image, blocks_of(texvlm.select(image, 137, 16, path))).float() - image.float()).square().mean()
            for path in ("multiscale", "salience")
        ]
        assert errors[0] < 0.6 * errors[1]


def test_mixed_levels_do_not_depend_on_threads() -> None:
    image = scene(256, 320)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(texvlm.select(image, 33, 16, "multiscale"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].boxes(), results[1].boxes())


def test_small_print_gets_fine_tokens_and_large_print_coarse_ones_in_photographs() -> None:
    found = document(31001, 1024, (10, 60))
    selection = texvlm.select(found.image, 200, 16, "multiscale", weights={"detail": 0.0})
    height = texvlm.reading.line_heights(found.image)[0]
    fine, coarse = [], []
    for (y0, x0, y1, x1), lod in zip(selection.boxes()[0].tolist(), selection.lod[0].tolist()):
        (fine if lod == 0 else coarse).append(float(height[(y0 + y1) // 32, (x0 + x1) // 32]))
    assert fine and coarse
    assert sum(fine) / len(fine) < sum(coarse) / len(coarse)


# ---- tokens ----


def test_tokens_are_the_pixels_of_their_boxes() -> None:
    image = scene()
    texture = texvlm.Texture(image)
    selection = texvlm.select(image, 5)
    tokens = selection.tokens(texture)
    for patch, (y0, x0, y1, x1) in zip(tokens.patches[0], selection.boxes()[0].tolist()):
        torch.testing.assert_close(patch, image[:, y0:y1, x0:x1])
    assert torch.equal(tokens.rest, texture.level(3))
    with pytest.raises(ValueError, match="texture must be of 128 x 192 pixels"):
        selection.tokens(texvlm.Texture(image[:, :64]))


def test_tokens_of_coarse_levels_are_mips_and_padding_is_zero() -> None:
    image = scene()
    texture = texvlm.Texture(image)
    selection = texvlm.select(image, 500, 16, "multiscale")
    assert int(selection.count) == 96
    few = texvlm.select(image, 20, 16, "multiscale")
    tokens = few.tokens(texture)
    for patch, lod, (y0, x0, y1, x1) in zip(tokens.patches[0], few.lod[0].long().tolist(), few.boxes()[0].tolist()):
        if y1 - y0 == x1 - x0 == 16 << lod:
            torch.testing.assert_close(patch, texture.level(lod)[0, :, y0 >> lod : y1 >> lod, x0 >> lod : x1 >> lod])
    padded = selection.tokens(texture)
    assert padded.patches[0, 96:].abs().max() == 0
    assert padded.uv[0, 96:].eq(-1).all()
    small = texvlm.select(image, 5)
    assert small.centres().shape == (1, 5, 2)
