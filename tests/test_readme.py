"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import texvlm

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def run(block: int) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[block], f"README.md, example {block + 1}", "exec"), names)
    return names


def test_there_are_eight_examples() -> None:
    assert len(BLOCKS) == 8


def test_first_example_gives_273_patches() -> None:
    assert run(0)["tokens"].patches.shape == (1, 273, 3, 16, 16)


def test_second_example_takes_four_paths() -> None:
    names = run(1)
    assert names["mixed"].count.tolist() == [137]
    assert all(names[path].count.tolist() == [273] for path in ("lines", "query", "mine"))


def test_third_example_trains_a_choice() -> None:
    names = run(2)
    gradient = names["scorer"].weight.grad
    assert names["bias"].shape == (2, 273) and gradient.isfinite().all() and gradient.abs().sum() > 0


def test_fourth_example_gives_forty_answers() -> None:
    names = run(3)
    assert names["answers"].shape == (1, 1, 40) and names["sevens"].shape == (1, 240, 320)
    assert names["origin"] == "picture, previous picture and flow"


def test_training_example_learns_where_to_look() -> None:
    assert run(4)["error"] < 20  # by chance it would be about 90


def test_video_example_computes_what_moved() -> None:
    names = run(5)
    assert 0 < names["changed"] < 0.1 and names["kept"].count.tolist() == [64]
    channels = [name for name in names["texture"].names if name not in ("motion", "saliency", "edge_distance")]
    whole = texvlm.build_channels(names["frame"], channels=channels)
    assert torch.equal(names["texture"].level(0)[:, [names["texture"].index(name) for name in channels]], whole.level(0))


def test_qwen_example_pays_for_273_tokens() -> None:
    names = run(6)
    assert (names["batch"]["input_ids"] == names["model"].config.image_token_id).sum() == 273
    assert len(names["batch"]["pixel_values"]) == 4 * 273
    assert (names["inputs"]["input_ids"] == names["model"].config.image_token_id).sum() == 2048
    assert names["answer"].shape[1] <= names["batch"]["input_ids"].shape[1] + 8


def test_attention_example_reads_a_part_and_says_what_is_looked_at() -> None:
    names = run(7)
    assert names["out"].shape == (1, 8, 4096, 32) and [answer.shape for answer in names["answers"]] == 3 * [(1, 8, 1, 32)]
    assert names["found"].total <= 0.25 and len(names["found"].keep) == 4
    assert names["features"].shape == (1, 1024, 64) and names["chosen"].count.tolist() == [40]
    torch.testing.assert_close(names["seen"].sum(), torch.tensor(1.0))
