"""The shipped network: what it keeps of documents and photographs, that it loads, counts, and does not depend on threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import texvlm
from benchmarks._documents import Document, coverage, document
from texvlm.allocation import node_values
from texvlm.learned import VALUE_CHANNELS, ValueNet, shared_net
from texvlm.paths import CascadeConfig
from texvlm.pretrained import SHIPPED

pytest.importorskip("skimage", reason="scikit-image ships the photographs")

ONE = CascadeConfig.preset("learned")
MIXED = replace(CascadeConfig.preset("multiscale"), scorer="default")


@pytest.fixture(scope="module")
def net() -> ValueNet:
    return ValueNet.from_pretrained("default")


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Of fonts, photographs and clutter that the network has not seen."""
    return [document(32000 + seed, 1024, (8, 30)) for seed in range(3)]


def texture_of(image: torch.Tensor) -> texvlm.Texture:
    return texvlm.build_channels(image, channels=list(VALUE_CHANNELS))


# ---- what it knows ----


def test_it_finds_writing_where_salience_does_not(documents: list[Document]) -> None:
    mine, theirs = [], []
    for found in documents:
        overlap = found.overlap(16)
        for kept, path in ((mine, "learned"), (theirs, "salience")):
            mask = texvlm.select(found.image, 273, 16, path).mask()[0]
            kept.append(coverage(mask.float(), overlap, 273))
    assert sum(mine) / len(mine) > 0.75
    assert min(a - b for a, b in zip(mine, theirs)) > 0.1


def test_without_writing_it_keeps_what_is_looked_at() -> None:
    """The cup of coffee, a photograph that it has not seen: more of it than by salience."""
    from benchmarks._photographs import photographs

    ((_, image),) = photographs(("coffee",))
    cup = torch.zeros(image.shape[1] // 16, image.shape[2] // 16)
    cup[2:14, 12:26] = 1
    mine, theirs = (float((texvlm.select(image, 64, 16, p).mask()[0] * cup).sum()) for p in ("learned", "salience"))
    assert mine > theirs


def test_small_print_is_worth_fine_tokens_and_large_print_coarse_ones(net: ValueNet) -> None:
    share = []
    for sizes in ((9, 12), (50, 60)):
        found = document(32010, 1024, sizes)
        lod = texvlm.select(found.image, 137, 16, MIXED, weights={"detail": 0.0}).lod
        share.append(float(lod.eq(0).float().mean()))
    assert share[0] > share[1] + 0.3


# ---- counts, shapes ----


@pytest.mark.parametrize("size", [(128, 192), (100, 77), (7, 5), (1, 1), (65, 300)])
@pytest.mark.parametrize("cell", [16, 28, 5])
@pytest.mark.parametrize("config", [ONE, MIXED], ids=["one", "mixed"])
def test_exact_counts_and_disjoint_tokens(size: tuple[int, int], cell: int, config: CascadeConfig) -> None:
    image = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    selection = texvlm.select(image, 9, cell, config)
    total = selection.grid[0] * selection.grid[1]
    assert selection.count.tolist() == [min(9, total)] * 2
    assert selection.score[:, : min(9, total)].isfinite().all()
    painted = torch.zeros(2, *size, dtype=torch.int64)
    for b in range(2):
        for y0, x0, y1, x1 in selection.boxes()[b].tolist():
            painted[b, max(y0, 0) : y1, max(x0, 0) : x1] += y0 >= 0
    assert painted.max() == 1


def test_a_batch_is_its_pictures() -> None:
    images = torch.rand(3, 3, 96, 130, generator=torch.Generator().manual_seed(1))
    together = texvlm.select(images, 8, 16, ONE)
    for i in range(3):
        alone = texvlm.select(images[i], 8, 16, ONE)
        assert torch.equal(together.indices[i], alone.indices[0])


def test_what_has_nothing_to_see_has_finite_scores(net: ValueNet) -> None:
    for image in (torch.zeros(3, 64, 64), torch.full((3, 64, 64), 0.5), torch.full((3, 64, 64), torch.nan)):
        for level in (*net(texture_of(image), 16)[0], *net(texture_of(image), 16)[1]):
            assert level.isfinite().all() and (level >= 0).all()


def test_level_0_is_worth_the_same_among_any_levels(net: ValueNet) -> None:
    texture = texture_of(torch.rand(3, 128, 96, generator=torch.Generator().manual_seed(2)))
    alone, many = net(texture, 16, 1), net(texture, 16, 6)
    for one, all_of_them in zip(alone, many):
        assert [tuple(v.shape[1:]) for v in all_of_them] == [(8, 6), (4, 3), (2, 2), (1, 1), (1, 1), (1, 1)]
        torch.testing.assert_close(one[0], all_of_them[0])
        assert all(v.eq(0).all() for v in all_of_them[3:])  # seen anyway


def test_it_does_not_depend_on_threads(documents: list[Document]) -> None:
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append([texvlm.select(documents[0].image, 137, 16, config) for config in (ONE, MIXED)])
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*found):
        assert torch.equal(a.boxes(), b.boxes()) and torch.equal(a.score, b.score)


@pytest.mark.parametrize("config", [ONE, MIXED], ids=["one", "mixed"])
def test_it_compiles(config: CascadeConfig) -> None:
    image = torch.rand(3, 96, 128, generator=torch.Generator().manual_seed(3))
    wanted = texvlm.select(image, 7, 16, config).indices
    compiled = torch.compile(
        lambda t: texvlm.select(t, 7, 16, config).indices, fullgraph=True, dynamic=False, backend="aot_eager"
    )
    assert torch.equal(compiled(image), wanted)


# ---- weights ----


def test_what_ships() -> None:
    folder = SHIPPED / "default"
    assert {p.name for p in folder.iterdir()} == {"config.json", "weights.safetensors", "CARD.md"}
    assert sum(p.stat().st_size for p in folder.iterdir()) < 1_000_000
    assert json.loads((folder / "config.json").read_text())["class"] == "ValueNet"
    card = (folder / "CARD.md").read_text()
    for word in ("licence", "data", "_train_allocator", "held out"):
        assert word in card.lower(), word


def test_it_is_read_once() -> None:
    assert shared_net("default", torch.device("cpu")) is shared_net("default", torch.device("cpu"))


def test_a_network_of_ones_own(net: ValueNet, tmp_path: Path) -> None:
    image = torch.rand(3, 96, 96, generator=torch.Generator().manual_seed(4))
    net.save_pretrained(tmp_path / "mine")
    wanted = texvlm.select(image, 5, 16, "learned")
    for scorer in (net, str(tmp_path / "mine")):
        assert torch.equal(texvlm.select(image, 5, 16, "learned", scorer=scorer).indices, wanted.indices)
    with pytest.raises(FileNotFoundError, match="default"):
        texvlm.select(image, 5, scorer="nonsense")


def test_a_new_network_says_what_the_text_values_say() -> None:
    found = document(32020, 512, (12, 20))
    texture = texture_of(found.image)
    _, text = ValueNet()(texture, 16, 2)
    wanted = texvlm.reading.text_values(found.image.float() / 255, 16, 2, power=2.0)
    for mine, theirs in zip(text, wanted):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_gradients_reach_the_weights() -> None:
    net = ValueNet(hidden=4)
    detail, text = net(texture_of(torch.rand(3, 64, 64)), 16, 2)
    sum(v.sum() for v in (*detail, *text)).backward()
    assert net.last.weight.grad is not None and net.last.weight.grad.abs().sum() > 0


def test_weights_are_of_what_tokens_are_worth(documents: list[Document]) -> None:
    image = documents[0].image
    by_text, by_looks = (texvlm.select(image, 100, 16, "learned", weights={w: 0.0}).mask()[0] for w in ("detail", "text"))
    overlap = documents[0].overlap(16)
    assert float((by_text * overlap).sum()) > 2 * float((by_looks * overlap).sum())
    with pytest.raises(ValueError, match="weights must be of detail, text, query"):
        texvlm.select(image, 5, path="learned", weights={"edge": 1.0})


def test_soft_weights_and_memory(net: ValueNet) -> None:
    image = torch.rand(3, 96, 96, generator=torch.Generator().manual_seed(5))
    soft = texvlm.select(image, 5, 16, replace(ONE, scorer=net, temperature=0.05))
    assert soft.weights_all is not None
    torch.testing.assert_close(soft.weights_all.sum(1), torch.tensor([5.0]))
    kept = texvlm.select(image, 5, 16, "learned")
    again = texvlm.select(image, 5, 16, replace(ONE, memory=100.0), memory=kept)
    assert set(again.indices[0].tolist()) == set(kept.indices[0].tolist())


def test_values_add_up(net: ValueNet) -> None:
    texture = texture_of(torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(6)))
    with torch.no_grad():
        detail, text = net(texture, 16, 3)
        found = node_values(texture, 16, 3, {"detail": 2.0, "text": 5.0}, worth=net)
    for d, t, value in zip(detail, text, found):
        torch.testing.assert_close(value, 2 * d + 5 * t)
