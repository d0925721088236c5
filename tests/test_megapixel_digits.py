"""Megapixel Digits: what its canvases promise, and that every row of the benchmark trains and is deployed hard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
pytest.importorskip("skimage", reason="the photographs come with scikit-image")

import texvlm
from benchmarks import megapixel_digits
from benchmarks._megapixel import BANK, BENT, DIGITS, GRID, PHOTOGRAPHS, SAME, Bank, Batch, bank, compose, energy, recall
from benchmarks._megapixel_rows import (
    FIXED,
    FULL,
    NOISE,
    ORACLE,
    PICKS,
    TRAINED,
    Model,
    data,
    fixed,
    measured,
    oracle,
    train,
    untrained,
)
from benchmarks._selectors import ESTIMATORS, EXPLORED, Context, Picked, Reader, explored, taught


@pytest.fixture(scope="module")
def banks() -> tuple[Bank, Bank]:
    return bank(False), bank(True)


@pytest.fixture(scope="module")
def canvas(banks: tuple[Bank, Bank]) -> Batch:
    """Two of the test split."""
    return Batch.of(compose(banks[1], 7, 2))


def test_canvases_follow_from_their_seed(banks: tuple[Bank, Bank]) -> None:
    first, again, other = (compose(banks[0], seed, 2, grid=16) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first.pixels, other.pixels)
    assert not torch.equal(first.pixels, compose(banks[1], 3, 2, grid=16).pixels)


def test_splits_share_nothing(banks: tuple[Bank, Bank]) -> None:
    train_rows, test_rows = ({tuple(glyph.flatten().tolist()) for glyph in each.digits} for each in banks)
    assert (len(banks[0].digits), len(banks[1].digits)) == (BENT * 1297, 500)
    assert not train_rows & test_rows
    assert not set(PHOTOGRAPHS[False]) & set(PHOTOGRAPHS[True])


def test_a_canvas_holds_what_it_says(canvas: Batch) -> None:
    assert (canvas.texture.height, canvas.grid) == (2048, GRID)
    assert canvas.strangers.shape[1] >= 800
    for digits, strangers in zip(canvas.digits, canvas.strangers):
        assert len({*digits.tolist(), *strangers.tolist()}) == DIGITS + len(strangers)  # a cell each


def test_the_label_is_the_majority(banks: tuple[Bank, Bank]) -> None:
    """Read off the pixels: on plain ground the nearest source of each digit is itself."""
    of = banks[1]._replace(grounds=torch.zeros_like(banks[1].grounds))
    found = compose(of, 1, 10, grid=8)
    assert sorted(found.labels.tolist()) == list(range(10))
    batch = Batch.of(found)
    ink = of.digits.flatten(1).float()
    ink = ink / ink.norm(dim=1, keepdim=True)
    for patches, label in zip(batch.patches(batch.digits)[:, :, 0], found.labels):
        shifted = torch.stack([patches[:, y : y + 28, x : x + 28] for y in range(5) for x in range(5)], 1).flatten(2)
        nearest = (shifted @ ink.T / shifted.norm(dim=2, keepdim=True)).amax(1).argmax(1)
        assert int((of.labels[nearest] == label).sum()) == SAME


def test_what_stands_out_tells_nothing(banks: tuple[Bank, Bank]) -> None:
    """Ink and edge energy of strangers have the digits' distribution, and so energy ranks digits among glyphs as chance would."""
    for each in banks:
        digits, strangers = (energy(glyphs.float() / 255) for glyphs in (each.digits, each.strangers))
        assert ((digits.mean(0) - strangers.mean(0)).abs() < 0.15 * digits.std(0)).all()
        for mine, theirs in zip(digits.T, strangers.T):
            above = float((mine[:, None] > theirs).float().mean())  # area under the curve
            assert 0.45 < above < 0.55, above


def test_salience_finds_digits_no_oftener_than_other_glyphs(banks: tuple[Bank, Bank]) -> None:
    batch = Batch.of(compose(banks[1], 0, 12))
    pictures = batch.texture.level(0).float().expand(-1, 3, -1, -1)
    cells = torch.cat([texvlm.select(picture, k=400, cell=32).indices for picture in pictures])
    digits, strangers = recall(cells, batch.digits), recall(cells, batch.strangers)
    chance = (strangers * (1 - strangers) / batch.digits.numel()) ** 0.5
    assert abs(digits - strangers) < 3 * chance, (digits, strangers)


def test_the_oracle_sees_all_digits(canvas: Batch) -> None:
    generator = torch.Generator().manual_seed(0)
    for k in (DIGITS, 10, 32):
        cells = oracle(canvas, k, generator)
        assert recall(cells, canvas.digits) == 1 and all(len(set(row)) == k for row in cells.tolist())
    assert recall(oracle(canvas, DIGITS - 1, generator), canvas.digits) == (DIGITS - 1) / DIGITS


def test_rows_without_training_keep_k_cells(canvas: Batch) -> None:
    found = untrained([canvas], 10, 0)
    assert set(found) == {*FIXED, ORACLE}
    for row, cells in found.items():
        assert all(len(set(best)) == 10 for best in cells[0].tolist()), row
        score = fixed(Reader(), cells, [canvas], 10)
        assert 0 <= score.accuracy <= 1 and score.recall == recall(cells[0], canvas.digits)
    for row, pick in PICKS.items():
        few = pick(canvas, 6, torch.Generator().manual_seed(0))
        assert torch.equal(found[row][0][:, :6], few), row


@pytest.mark.parametrize("row", [*TRAINED, *(name + NOISE for name in ESTIMATORS)])
def test_every_row_trains_and_is_deployed_hard(row: str, banks: tuple[Bank, Bank], small: list[list[Batch]]) -> None:
    model, steps, _ = train(row, 4, 0, small, seconds=0, steps=2)
    assert steps == 2 * len(small)
    before = Model(row, 4, 0)
    for part in ("scorer", "reader"):
        if (trained := getattr(model, part)) is not None:
            moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), getattr(before, part).parameters())]
            assert all(p.isfinite().all() for p in trained.parameters())
            assert sum(moved) > len(moved) // 2, part
    logits, cells = model.deployed(small[0][0])
    assert logits.shape == (2, 10)
    if row in (*ESTIMATORS, ORACLE):
        assert cells is not None and cells.shape == (2, 4)
    if row in ESTIMATORS:
        assert torch.equal(cells, texvlm.topk(model.scorer(small[0][0]), 4)[1])
    score = measured(model, [small[0][0]], soft=True)
    assert (score.soft is not None) == (model.scorer is not None)
    assert (score.recall == 1) if row == FULL else True


@pytest.fixture(scope="module")
def small(banks: tuple[Bank, Bank]) -> list[list[Batch]]:
    """Two stages of a curriculum, of tiny canvases."""
    return [[Batch.of(compose(banks[0], seed, 2, grid))] for seed, grid in enumerate((4, 6, 6, 8))]


def test_the_control_sees_noise_alone(small: list[list[Batch]]) -> None:
    batch = small[0][0]
    scorer = Model("noisy_topk" + NOISE, 4, 0).scorer
    assert scorer is not None and scorer.noise
    assert not torch.equal(scorer(batch), scorer(batch))
    blank = batch._replace(texture=batch.texture.replace(torch.zeros_like(batch.texture.data)))
    torch.manual_seed(0)
    seen = scorer(batch)
    torch.manual_seed(0)
    assert torch.equal(seen, scorer(blank))


def test_no_cell_has_a_label(small: list[list[Batch]]) -> None:
    """The loss of every selector is the same whatever is said of where the digits lie."""
    batch = small[3][0]
    lied = batch._replace(digits=batch.digits.flip(1) * 0, strangers=batch.strangers * 0)
    for row in ESTIMATORS:
        first, second = (Model(row, 4, 0).eval()(of, 0.5)[0] for of in (batch, lied))
        assert torch.equal(first, second), row
    assert not torch.equal(first, Model("IPS", 4, 0).eval()(batch._replace(labels=(batch.labels + 1) % 10), 0.5)[0])


@pytest.mark.parametrize("progress", [0.0, 0.9])
def test_the_reader_explores_other_cells_in_training_alone(progress: float, small: list[list[Batch]]) -> None:
    scores = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    picked = Picked(texvlm.topk(scores, 4)[1])
    cells = explored(scores, picked, Context(4, progress, torch.Generator().manual_seed(0)))
    assert torch.equal(cells[:, :4], picked.indices)
    assert cells.shape[1] == 4 + EXPLORED[progress > 0] and all(len(set(row)) == len(row) for row in cells.tolist())
    assert Model("noisy_topk", 4, 0).deployed(small[3][0])[1].shape == (2, 4)


def test_the_reader_tells_the_scorer_what_it_sees(small: list[list[Batch]]) -> None:
    """Where the reader sees nothing, scores fall, those of cells that were not picked too; where it sees something, they rise."""
    batch = small[3][0]
    for sees, sign in ((-20.0, 1), (20.0, -1)):
        reader = Reader().eval()
        with torch.no_grad():
            reader.head.bias[:-1] += sees
        scores = torch.zeros(2, 64, requires_grad=True)
        context = Context(4, 0.0, torch.Generator().manual_seed(0))
        taught(reader, batch, scores, Picked(torch.arange(4).expand(2, -1), torch.zeros(2, 4)), context)[1].backward()
        assert ((sign * scores.grad > 0).sum(1) == 4 + EXPLORED[0]).all()


def test_bent_glyphs_are_of_training_alone(banks: tuple[Bank, Bank]) -> None:
    for of, ways in zip(banks, (BENT, 1)):
        glyphs = of.digits.unflatten(0, (ways, -1))
        assert (of.labels.unflatten(0, (ways, -1)) == of.labels[: glyphs.shape[1]]).all()
        assert len(of.strangers) == ways * BANK
        if ways > 1:
            same = F.cosine_similarity(glyphs[0].flatten(1).float(), glyphs[1].flatten(1).float())
            assert 0.7 < float(same.mean()) < 0.98  # bent, and the same glyph


def test_pools_and_tests_of_a_seed_differ(banks: tuple[Bank, Bank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks._megapixel_rows.CURRICULUM", ((4, 2, 0.5), (6, 2, 0.5)))
    monkeypatch.setattr("benchmarks._megapixel_rows.POOL", (2, 2))
    first, second = (data(*banks, seed, 10) for seed in (0, 1))
    assert [len(pool) for pool in first.pools] == [2, 2]
    assert sorted(torch.cat([batch.labels for batch in first.test]).tolist()) == list(range(10))
    assert not torch.equal(first.test[0].texture.data, second.test[0].texture.data)


def test_the_benchmark_runs_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks._megapixel_rows.CURRICULUM", ((4, 2, 0.5), (6, 2, 0.5)))
    monkeypatch.setattr("benchmarks._megapixel_rows.POOL", (1, 1))
    monkeypatch.setattr("benchmarks._megapixel_rows.PATH_CANVASES", 1)
    target = tmp_path / "result.json"
    asked = ["--quick", "--steps", "1", "--canvases", "10", "--k", "8", "--rows", "noisy_topk;IPS", "--json", str(target)]
    assert megapixel_digits.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("?") and lines[-1].startswith("k = 8: ")
    found = json.loads(target.read_text())
    assert {"noisy_topk", "IPS", "oracle", "downscale", "random", "noisy_topk, noise"} <= set(found["figures"]["k = 8"])
    assert len(found["gates"]) == 6
