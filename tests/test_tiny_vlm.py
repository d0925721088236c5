"""A small model that learns with the choice in its loop: that it learns at all, and goes on where it was broken off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import qwen_folder

from benchmarks import _cards, tiny_vlm
from benchmarks._cards import CELL, NAMES, Cards, draw
from benchmarks._tiny_reader import Given, Reading, Schedule, Setting, Training, reader

DATA = Cards(6)


def test_boards_are_what_they_say() -> None:
    board, same = draw(3), draw(3)
    assert torch.equal(board.image, same.image) and not torch.equal(board.image, draw(3, test=True).image)
    assert len(board.cards) == len(NAMES) and len({c for cells in board.cells for c in cells} | set(board.decoys)) == 48
    ink, which = _cards.digits()
    for digit, (cell, *_), hue in zip(board.cards, board.cells, _cards.HUES):
        y, x = cell // 16 * CELL, cell % 16 * CELL
        card = board.image[:, y : y + CELL, x : x + CELL].float() / 255
        frame = torch.cat([card[:, :2].flatten(1), card[:, 14:].flatten(1)], 1).mean(1)
        assert float((frame - _cards.colour(hue)).abs().max()) < 0.06
        seen = 1 - card[:, 2:14, 2:14].max(0)[0] / card[:, :2].max()  # the ink, as far as noise lets it be seen
        likely = ((ink[:-397] - seen).square().mean((1, 2)) - 1e-9).argmin()
        assert int(which[likely]) == digit


def test_shuffled_pixels_say_nothing_but_their_mean() -> None:
    a, b = draw(5).image.float(), draw(5, shuffled=True).image.float()
    assert not torch.equal(a, b)
    cells = [t.unfold(1, CELL, CELL).unfold(2, CELL, CELL).mean((-2, -1)) for t in (a, b)]
    assert float((cells[0] - cells[1]).abs().max()) < 4


def test_cards_off_the_grid_lie_in_up_to_four_groups() -> None:
    board = draw(1, jitter=4)
    assert all(1 <= len(cells) <= 4 and len(set(cells)) == len(cells) for cells in board.cells)
    assert not {c for cells in board.cells for c in cells} & set(board.decoys)


def test_the_loss_falls_and_the_gradient_reaches_the_selector() -> None:
    reading = Reading(reader(0), Setting(tiny_vlm.allocator), 0)
    before = [p.clone() for p in reading.selector.information.parameters()]
    training = Training(reading, DATA, Schedule(8))
    training.run()
    assert sum(training.losses[-3:]) < sum(training.losses[:3]) - 1
    assert all(not torch.equal(a, b) for a, b in zip(before, reading.selector.information.parameters()))


def test_a_training_goes_on_exactly(tmp_path: Path) -> None:
    whole, first, second = (Training(Reading(reader(0), Setting(tiny_vlm.allocator), 0), DATA, Schedule(4)) for _ in range(3))
    torch.manual_seed(1)
    whole.run()
    torch.manual_seed(1)
    first.run(2)
    first.save(tmp_path / "half.pt")
    torch.manual_seed(2)
    second.load(tmp_path / "half.pt")
    second.run()
    assert second.losses == whole.losses
    for a, b in zip(whole.reading.model.state_dict().values(), second.reading.model.state_dict().values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("row", tiny_vlm.ROWS)
def test_every_row_takes_a_step_and_is_measured(row: str) -> None:
    reading = Reading(reader(0), tiny_vlm.setting(row, 8), 0)
    Training(reading, DATA, Schedule(1)).run()
    right, seconds = reading.measure(DATA, 8)
    assert right.dtype == torch.bool and right.shape == (8,) and seconds > 0
    if row == "oracle":
        assert isinstance(reading.selector, Given) and reading.kept(DATA, 8) == 1


def test_a_checkpoint_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = qwen_folder.save(tmp_path / "model")
    lines = []
    for i in range(4):
        image.fromarray(draw(i).image[:, :48, :48].permute(1, 2, 0).numpy()).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"image": f"{i}.png", "question": "what colour is here", "answer": "red"}))
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
    command = ["--model", str(folder), "--data", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path / "out")]
    assert tiny_vlm.main([*command, "--steps", "1", "--held-out", "1", "--budget", "4", "--rank", "2", "--accumulate", "1"]) == 0
    assert (tmp_path / "out" / "selector").is_dir()
