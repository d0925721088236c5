"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def run(block: int) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[block], f"README.md, example {block + 1}", "exec"), names)
    return names


def test_there_are_three_examples() -> None:
    assert len(BLOCKS) == 3


def test_first_example_gives_273_patches() -> None:
    assert run(0)["tokens"].shape == (1, 273, 3, 16, 16)


def test_second_example_gives_forty_answers() -> None:
    names = run(1)
    assert names["answers"].shape == (1, 1, 40) and names["sevens"].shape == (1, 240, 320)
    assert names["origin"] == "picture, previous picture and flow"


def test_training_example_learns_where_to_look() -> None:
    assert run(2)["error"] < 20  # by chance it would be about 90
