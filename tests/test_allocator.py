"""The learned allocator: what its scorers read, how they are weighed, and that `select` deploys it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import texvlm
from texvlm.allocator import HALF_RESOLUTION
from texvlm.features import all_cells, node_features
from texvlm.quadtree import node_places, tree_shapes, values_of_scores

EMBEDDING = [f"mean:embedding_{i}" for i in range(16)]
SMALL = {"information": ["entropy", "rms:edge"], "perspective": ["mean:eccentricity", "lod"], "participation": EMBEDDING}


def learned(form: str = "mlp", **arguments) -> texvlm.Allocator:
    torch.manual_seed(0)
    allocator = texvlm.Allocator(form, **{**SMALL, **arguments})
    for parameter in allocator.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return allocator


def inputs(allocator: texvlm.Allocator, batch: int = 2, cells: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(batch, cells, len(allocator.terms)), torch.randn(batch, 16)


@pytest.mark.parametrize("form", ["linear", "mlp"])
def test_scores_are_the_balanced_sum_of_the_scorers(form: str) -> None:
    allocator = learned(form)
    features, query = inputs(allocator)
    allocator.fit_normalisation(features)
    parts = allocator.parts(features, query)
    assert list(parts) == ["information", "perspective", "participation"]
    torch.testing.assert_close(sum(share for share, _ in parts.values()), torch.ones(2))
    scores = allocator(features, query)
    torch.testing.assert_close(scores, sum(share[:, None] * s for share, s in parts.values()))
    assert scores.shape == (2, 50) and scores.std() > 0.01
    (scores * torch.randn_like(scores)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in allocator.parameters())


def test_the_balance_depends_on_the_picture() -> None:
    allocator = learned()
    features, query = inputs(allocator)
    features[1] *= 3
    shares = torch.stack([share for share, _ in allocator.parts(features, query).values()])
    assert (shares[:, 0] - shares[:, 1]).abs().max() > 0.01


def test_each_scorer_reads_its_own_terms() -> None:
    allocator = learned()
    features, query = inputs(allocator)
    before = allocator.parts(features, query)
    for name, terms in (("information", ["entropy"]), ("perspective", ["mean:eccentricity"]), ("participation", EMBEDDING)):
        changed = features.clone()
        changed[..., [allocator.terms.index(term) for term in terms]] += torch.rand(2, 50, len(terms))
        after = allocator.parts(changed, query)
        assert {n for n in after if not torch.equal(after[n][1], before[n][1])} == {name}
    other = allocator.parts(features, query.flip(0))
    assert {n for n in other if not torch.equal(other[n][1], before[n][1])} == {"participation"}


def test_normalisation_and_lod() -> None:
    allocator = learned(information=["entropy"], participation=[])
    features = torch.rand(3, 40, 2) * 5 + 1
    features[0, 0] = torch.nan
    features[..., 0] = torch.where(features[..., 0].isnan(), torch.nan, 7.0)  # constant: stays finite
    allocator.fit_normalisation(features)
    rows = features.flatten(0, 1)[1:, 1]
    lod = (1 + rows / HALF_RESOLUTION).log2()
    torch.testing.assert_close(allocator.mean, torch.stack([torch.tensor(7.0), rows.mean(), lod.mean()]))
    torch.testing.assert_close(allocator.deviation[1:], torch.stack([rows.std(correction=0), lod.std(correction=0)]))
    assert allocator.deviation[0] == 1
    assert allocator(-features[1:]).isfinite().all()  # no eccentricity is negative, but noise in its place is


def test_a_cell_that_is_none_ranks_last_and_changes_no_other() -> None:
    allocator = learned()
    features, query = inputs(allocator)
    padded = torch.cat([features, torch.full((2, 3, features.shape[-1]), torch.nan)], dim=1)
    scores = allocator(padded, query)
    assert scores[:, 50:].isnan().all()
    torch.testing.assert_close(scores[:, :50], allocator(features, query))


@pytest.mark.parametrize("form", ["linear", "mlp"])
def test_saved_and_loaded(tmp_path: Path, form: str) -> None:
    allocator = learned(form, cell=32)
    features, query = inputs(allocator)
    allocator.fit_normalisation(features).save_pretrained(tmp_path)
    same = texvlm.Allocator.from_pretrained(tmp_path)
    assert same.config == allocator.config and same.terms == allocator.terms and same.cell == 32
    assert {"cell", "channels", "normalisation"} <= same.config.keys()
    assert torch.equal(same(features, query), allocator(features, query))


@pytest.mark.parametrize("form", ["linear", "mlp"])
def test_compiled(form: str) -> None:
    allocator = learned(form)
    features, query = inputs(allocator)
    compiled = torch.compile(allocator, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features, query), allocator(features, query))


def test_half_precision_under_autocast() -> None:
    allocator = learned()
    features, query = inputs(allocator)
    with torch.autocast("cpu", torch.bfloat16):
        scores = allocator(features, query)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, allocator(features, query), atol=0.1, rtol=0.1)


def test_select_reads_its_terms_and_its_query() -> None:
    allocator = learned()
    image = torch.rand(2, 3, 64, 96)
    embedding = texvlm.Embedding(texvlm.DigitsEmbedding())
    selection = texvlm.select(image, 5, path="learned", query="seven", embedding=embedding, scorer=allocator)
    texture = texvlm.build_channels(image, channels=list(allocator.channels), embedding=embedding)
    features = texvlm.cell_features(texture, torch.arange(24).expand(2, -1), allocator.terms)
    query = embedding.query("seven")
    expected = texvlm.topk(allocator(features, query), 5)[1]
    assert torch.equal(selection.indices, expected)
    assert torch.equal(texvlm.select(texture, 5, path="learned", query=query, scorer=allocator).indices, expected)
    kept = texvlm.build_channels(image, query=query, embedding=embedding)
    assert torch.equal(texvlm.select(kept, 5, path="learned", scorer=allocator).indices, expected)
    two = embedding.query(["seven", "three"])
    assert torch.equal(
        texvlm.select(image, 5, path="learned", query=two, embedding=embedding, scorer=allocator).indices,
        texvlm.topk(allocator(features, two), 5)[1],
    )
    staged = texvlm.CascadeConfig(scorer=allocator, schedule=3)
    assert texvlm.select(texture, 5, path=staged, query=query).count.tolist() == [5, 5]


def test_nodes_of_several_levels(tmp_path: Path) -> None:
    allocator = learned(information=["entropy", "rms:edge", "level"], participation=[], levels=3)
    picture = torch.rand(2, 3, 72, 100)
    texture = texvlm.build_channels(picture, channels=allocator.channels)
    nodes = node_features(texture, allocator.terms, 16, 3, 16)
    shapes = tree_shapes(5, 7, 3)
    assert nodes.shape == (2, sum(h * w for h, w in shapes), 4)
    level1 = texvlm.cell_features(texture, all_cells(texture, 32), allocator.terms, 32, 16)
    assert torch.equal(nodes[:, 35:47, :3], level1) and nodes[:, 35:47, 3].unique() == 1
    allocator.fit_normalisation(nodes)
    scores = allocator(nodes)
    other = nodes.clone()
    other[..., 3] = 0
    assert not torch.equal(allocator(other), scores)  # the level counts
    allocator.save_pretrained(tmp_path)
    assert torch.equal(texvlm.Allocator.from_pretrained(tmp_path)(nodes), scores)

    selection = texvlm.select(picture, 6, 16, "multiscale", scorer=allocator)
    again = texvlm.select(texture, 6, 16, "multiscale", scorer=allocator)
    assert torch.equal(selection.indices, again.indices) and selection.lod.max() > 0
    for b in range(2):  # what is kept is the cut of its scores
        taken = texvlm.quadtree_cut(values_of_scores(scores[b : b + 1], (5, 7), 3), 6).taken
        cells, level = node_places(torch.cat([t.flatten() for t in taken]).nonzero()[:, 0], (5, 7), 3)
        assert set(zip(cells.tolist(), level.tolist())) == set(
            zip(selection.indices[b].tolist(), selection.lod[b].long().tolist())
        )
    with pytest.raises(ValueError, match="nodes of several levels"):
        texvlm.select(picture, 6, 16, "learned", scorer=allocator)
    with pytest.raises(ValueError, match="nodes of several levels"):
        texvlm.select(picture, 6, 16, "multiscale", scorer=learned(participation=[]))
    with pytest.raises(ValueError, match="and the level"):
        allocator(nodes[..., :3])
    with pytest.raises(ValueError, match="levels is 1"):
        texvlm.Allocator(information=["entropy", "level"], perspective=[], participation=[])


def test_select_without_a_query() -> None:
    allocator = learned(participation=[])
    assert not allocator.asks
    image = torch.rand(3, 64, 64)
    assert texvlm.select(image, 3, path="learned", scorer=allocator).count.tolist() == [3]
    with pytest.raises(ValueError, match="takes no query"):
        texvlm.select(image, 3, path="learned", scorer=allocator, query=torch.rand(16))


def test_errors() -> None:
    allocator = learned()
    features, query = inputs(allocator)
    for arguments, what in (
        ({"form": "deep"}, "form must be linear or mlp, got 'deep'"),
        ({"normalisation": "batch"}, "normalisation must be standard or none"),
        ({"information": [], "perspective": [], "participation": []}, "must have terms"),
        ({"perspective": ["lod"]}, "made of 'mean:eccentricity'"),
        ({"information": ["edges"]}, "terms must be"),
        ({"channels": ["edge"]}, "channels must be those that the terms read"),
    ):
        with pytest.raises(ValueError, match=what):
            texvlm.Allocator(**{**SMALL, **arguments})
    with pytest.raises(ValueError, match=r"features must be \[B, n, 19\]"):
        allocator(features[..., 1:], query)
    with pytest.raises(ValueError, match=r"features must be \[B, n, 19\]"):
        allocator(features[0], query)
    with pytest.raises(ValueError, match="asks for one"):
        allocator(features)
    with pytest.raises(ValueError, match=r"query must be \[2, 16\], got \[2, 15\]"):
        allocator(features, query[:, 1:])
    with pytest.raises(ValueError, match="nothing to fit"):
        learned(normalisation="none").fit_normalisation(features)
    with pytest.raises(ValueError, match="needs query="):
        texvlm.select(torch.rand(3, 32, 32), 1, path="learned", scorer=allocator)
    with pytest.raises(ValueError, match="brings its own terms"):
        texvlm.select(torch.rand(3, 32, 32), 1, path="learned", scorer=learned(participation=[]), weights={"edge": 1})
