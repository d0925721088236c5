"""A small model that learns with the choice in its loop: that it learns at all, and goes on where it was broken off."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import qwen_folder

from benchmarks import _cards, tiny_vlm
from benchmarks._cards import CELL, NAMES, SIGNS, Cards, Kind, draw
from benchmarks._tiny_reader import Given, Reading, Schedule, Setting, Training, everything, reader, shown

ROOT = Path(__file__).resolve().parents[1]
DATA = Cards(6)
SIZED = Cards(4, kind=Kind(levels=3))


def test_boards_are_what_they_say() -> None:
    board, same = draw(3), draw(3)
    assert torch.equal(board.image, same.image) and not torch.equal(board.image, draw(3, test=True).image)
    assert len(board.signs) == len(NAMES) and len({c for cells in board.cells for c in cells}) == len(board.cells) == 48
    assert board.cells == board.tokens
    ink, says = _cards.inks(12, False)
    for sign, ((cell, _),), hue in zip(board.signs, board.cells, _cards.HUES):
        y, x = cell // 16 * CELL, cell % 16 * CELL
        card = board.image[:, y : y + CELL, x : x + CELL].float() / 255
        frame = torch.cat([card[:, :2].flatten(1), card[:, 14:].flatten(1)], 1).mean(1)
        assert float((frame - _cards.colour(hue)).abs().max()) < 0.06
        seen = 1 - card[:, 2:14, 2:14].mean(0) / card[:, :2].mean()  # the ink, as far as noise lets it be seen
        assert int(says[(ink - seen).square().mean((1, 2)).argmin()]) == sign


def test_cards_of_three_sizes_are_whole_in_a_token() -> None:
    board = draw(2, kind=Kind(levels=3))
    levels = [level for ((_, level),) in board.tokens]
    assert sorted(levels[:8]) == [0, 0, 0, 1, 1, 1, 2, 2] and len(levels) == 24
    every = [cell for cells in board.cells for cell, _ in cells]
    assert len(every) == len(set(every)) == sum(4**level for level in levels)  # they do not overlap
    for ((first, level),), cells in zip(board.tokens, board.cells):
        y, x = divmod(first, 16)
        assert y % (1 << level) == x % (1 << level) == 0
        assert {cell for cell, _ in cells} == {(y + r) * 16 + x + c for r in range(1 << level) for c in range(1 << level)}


def test_shuffled_pixels_say_nothing_but_their_mean() -> None:
    a, b = draw(5).image.float(), draw(5, kind=Kind(shuffled=True)).image.float()
    assert not torch.equal(a, b)
    cells = [t.unfold(1, CELL, CELL).unfold(2, CELL, CELL).mean((-2, -1)) for t in (a, b)]
    assert float((cells[0] - cells[1]).abs().max()) < 4
    ink, says = _cards.inks(12, False)
    means = torch.stack([ink[says == sign].mean() for sign in range(len(SIGNS))])
    assert float(means.max() - means.min()) < 0.02  # how much ink there is does not tell what it says


def test_cards_off_the_grid_lie_in_up_to_four_groups() -> None:
    board = draw(1, kind=Kind(jitter=4))
    assert {len(cells) for cells in board.cells} <= {1, 2, 4}
    assert len({cells[0] for cells in board.cells}) == 48
    assert all(cells[0] == tokens[0] for cells, tokens in zip(board.cells, board.tokens))


def test_how_much_of_a_card_is_shown() -> None:
    example = next(SIZED[i] for i in range(8) if SIZED[i]["tokens"][0][0][1] == 1)
    cell = example["tokens"][0][0][0]

    def kept(*tokens: tuple[int, int]) -> torch.Tensor:
        return torch.tensor([(0, 0, *token) for token in tokens])

    assert shown(example, kept((cell, 1))) == 1 and shown(example, kept((cell, 2))) == 0
    assert shown(example, kept((cell, 0), (cell + 17, 0), (cell + 2, 0))) == 0.5


def test_the_loss_falls_and_the_gradient_reaches_the_selector() -> None:
    reading = Reading(reader(0), Setting(tiny_vlm.allocator), 0)
    before = [p.clone() for p in reading.selector.information.parameters()]
    training = Training(reading, [DATA], Schedule(8))
    training.run()
    assert sum(training.losses[-3:]) < sum(training.losses[:3]) - 1
    assert all(not torch.equal(a, b) for a, b in zip(before, reading.selector.information.parameters()))


def test_a_training_goes_on_exactly(tmp_path: Path) -> None:
    whole, first, second = (Training(Reading(reader(0), Setting(tiny_vlm.allocator), 0), [DATA], Schedule(4)) for _ in range(3))
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
    setting, kind = tiny_vlm.ROWS[row].setting, tiny_vlm.ROWS[row].kind
    reading = Reading(reader(0), setting if setting.k is None else replace(setting, k=8), 0)
    data = Cards(1, kind=kind)
    Training(reading, [data], Schedule(1)).run()
    right, kept, seconds = reading.measure(data, 8)
    assert right.dtype == torch.bool and right.shape == (8,) and seconds > 0
    if row in ("dense", "oracle", "three sizes: oracle, levels"):
        assert kept == 1
    if setting.shrinks:
        assert kept != kept


def test_a_warm_reader_sees_cards_of_both_kinds() -> None:
    reading = Reading(reader(0), Setting(lambda _: Given(), 16, coarse=None), 0)
    training = Training(reading, [DATA, SIZED], Schedule(4, hidden=1.0))
    assert "given" in training.examples()[0] and training.examples()[0]["given"][0][1] == 0
    training.run()
    found = [token for example in Training(reading, [SIZED], Schedule(1)).examples() for token in example["given"]]
    assert {level for _, level in found} == {0, 1, 2}
    assert everything(SIZED[0], True)[:8] == [t[0] for t in SIZED[0]["tokens"][:8]]


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


@pytest.mark.long
def test_the_command_draws_trains_and_prints_a_table(tmp_path: Path) -> None:
    """In processes of its own: what reads a query has run OpenMP in the first one, which forked ones would not survive."""
    size = ["--boards", "8", "--warm", "4", "--steps", "2", "--count", "8", "--rows", "query; learned"]
    command = [sys.executable, "-m", "benchmarks.tiny_vlm", "--quick", *size, "--json", str(tmp_path / "tiny.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "tiny.json").read_text())["figures"]
    assert {"query, 16", "learned, 16"} <= set(figures) and (tmp_path / "tiny.png").exists()
    assert "points of learned above downscale" not in done.stdout  # no row, no gate
