"""An index has every picture once: also after a worker, a run or a file's content has come to grief."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from films import scenery
from PIL import Image

import texvlm
from texvlm.cli import main
from texvlm.data import Indexed, Select, index, indexing
from texvlm.data.pool import ATTEMPTS, WorkerDied, map_surviving

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")

BUDGET = {"k": 10, "cell": 16, "workers": 2}


def photographs(folder: Path, count: int) -> list[str]:
    """Picture files, and their names."""
    folder.mkdir(parents=True)
    names = [folder / f"{number:03}.png" for number in range(count)]
    for number, name in enumerate(names):
        Image.fromarray(np.roll(scenery((64, 80)), 3 * number, axis=1)).save(name)
    return [str(name) for name in names]


def rows(out: Path) -> dict[str, dict[str, Any]]:
    """By name, each of which is there once."""
    import pyarrow.parquet as pq

    found = [row for part in out.glob("part-*.parquet") for row in pq.read_table(part).to_pylist()]
    assert not [name for name, times in Counter(row["path"] for row in found).items() if times > 1]
    return {row["path"]: row for row in found}


def test_a_row_is_what_select_says_and_what_is_broken_is_a_row_too(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    photographs(tmp_path / "a", 3)
    photographs(tmp_path / "a" / "deeper", 2)
    whole = (tmp_path / "a" / "000.png").read_bytes()
    (tmp_path / "a" / "cut.png").write_bytes(whole[:999])
    (tmp_path / "a" / "empty.JPG").touch()
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    (tmp_path / "a" / ".hidden.png").write_bytes(whole)
    calls = []
    done = index(tmp_path / "a", tmp_path / "out", **BUDGET, tokens=True, progress=lambda *numbers: calls.append(numbers))
    assert done == Indexed(7, 2, 0) and calls == [(n, 7) for n in range(1, 8)]
    found = rows(tmp_path / "out")
    assert len(found) == 7
    for name, row in found.items():
        if Path(name).stem in ("cut", "empty"):
            assert row["error"].startswith("the picture is ") and {v for k, v in row.items() if k not in ("path", "error")} == {
                None
            }
            continue
        sample = Select(10, 16, dtype=torch.uint8)(name)
        assert row["error"] is None and (row["height"], row["width"], row["rows"], row["columns"]) == (64, 80, 4, 5)
        assert (
            row["cells"] == sample["indices"].tolist() and row["scores"] == sample["score"].tolist() and row["levels"] == 10 * [0]
        )
        assert row["tokens"] == sample["patches"].numpy().tobytes()
    (part,) = (tmp_path / "out").glob("*")
    assert json.loads(pq.read_schema(part).metadata[b"texvlm"])["k"] == "10"


def test_the_same_call_goes_on_and_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = photographs(tmp_path / "a", 9)
    out = tmp_path / "out"
    monkeypatch.setattr(indexing, "ROWS", 4)
    assert index([*names[:5], names[0]], out, **BUDGET) == Indexed(5, 0, 0)
    (out / "part-00000007.tmp").write_bytes(b"of a run that was killed")
    assert index(f"{tmp_path}/**/*.png", out, **BUDGET) == Indexed(4, 0, 5)
    assert index(tmp_path / "a", out, **BUDGET) == Indexed(0, 0, 9)
    assert sorted(rows(out)) == names and [part.suffix for part in out.iterdir()] == 3 * [".parquet"]
    with pytest.raises(ValueError, match=r"out holds an index with cell=16: take another folder"):
        index(tmp_path / "a", out, 10, 32, workers=2)
    with indexing._locked(out), pytest.raises(BlockingIOError, match="another run writes to"):
        index(tmp_path / "a", out, **BUDGET)
    for arguments, message in (
        ({"path": "nowhere"}, "nowhere"),
        ({"engine": "steam"}, "engine must be one of 'auto', 'pool', 'ray'"),
    ):
        with pytest.raises(ValueError, match=message):
            index(names, tmp_path / "other", **BUDGET | arguments)
    with pytest.raises(ValueError, match="no pictures"):
        index(tmp_path / "out", tmp_path / "other")


def test_killed_workers_cost_only_time(tmp_path: Path) -> None:
    names = photographs(tmp_path / "a", 30)
    killed = []

    def kill(done: int, total: int) -> None:
        if done in (4, 11, 12):
            victim = multiprocessing.active_children()[done % 2]
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    assert index(names, tmp_path / "out", **BUDGET, progress=kill) == Indexed(30, 0, 0)
    assert len(killed) == 3
    found = rows(tmp_path / "out")
    assert sorted(found) == names and all(row["error"] is None and len(row["cells"]) == 10 for row in found.values())


def fatal(item: int) -> int:
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def test_an_item_that_kills_whoever_takes_it_is_given_up() -> None:
    found = dict(map_surviving(fatal, range(12), 2))
    assert isinstance(found.pop(5), WorkerDied) and ATTEMPTS == 3
    assert found == {item: item * item for item in range(12) if item != 5}
    assert not multiprocessing.active_children()


RUN = """
import sys
from texvlm.data import index, indexing
indexing.ROWS = 3
if __name__ == "__main__":
    print(index(sys.argv[1], sys.argv[2], k=10, cell=16, workers=2))
"""


def started(folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "run.py").write_text(script)
    path = os.pathsep.join([str(Path(texvlm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "run.py", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_run_goes_on_and_leaves_nobody_behind(tmp_path: Path) -> None:
    names = photographs(tmp_path / "a", 60)
    out = tmp_path / "out"
    run = started(tmp_path, RUN, "a", "out")
    give_up = time.monotonic() + 120
    while len(list(out.glob("*.parquet"))) < 2 and run.poll() is None and time.monotonic() < give_up:
        time.sleep(0.01)
    run.kill()
    run.communicate(timeout=60)  # ends when the last of its processes has: they hold its standard output
    before = rows(out)
    assert 6 <= len(before) < 60
    again = started(tmp_path, RUN, "a", "out")
    said, error = again.communicate(timeout=240)
    assert said == f"Indexed(done={60 - len(before)}, broken=0, there={len(before)})\n", error
    assert sorted(rows(out)) == names


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    photographs(tmp_path / "a", 2)
    run = started(tmp_path, RUN.replace('if __name__ == "__main__":', "if True:"), "a", "out")
    _, error = run.communicate(timeout=240)
    assert run.returncode == 1 and error.splitlines()[-1].endswith("a script needs an if __name__ == '__main__'")


def test_ctrl_c_writes_what_there_is(tmp_path: Path) -> None:
    names = photographs(tmp_path / "a", 9)

    def interrupt(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index(names, tmp_path / "out", **BUDGET, progress=interrupt)
    assert len(rows(tmp_path / "out")) == 4
    assert index(names, tmp_path / "out", **BUDGET) == Indexed(5, 0, 4)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = photographs(tmp_path / "a", 3)
    (tmp_path / "a" / "x.jpg").write_bytes(b"\xff\xd8 and nothing")
    monkeypatch.chdir(tmp_path)
    command = ["index", "a", "-o", "out", "--budget", "7", "--query", "seven", "--tokens", "--workers", "2"]
    assert main(command) == 0
    assert "out: 4 pictures in " in (said := capsys.readouterr().out) and "1 broken: see the column error" in said
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("; 4 had been there\n")
    digits = texvlm.Embedding(texvlm.DigitsEmbedding())
    want = texvlm.select(Select().picture(names[1]), 7, 16, "query", "seven", embedding=digits)
    assert rows(tmp_path / "out")[names[1]]["cells"] == want.indices[0].tolist()
    for arguments in (
        ["index", "nowhere", "-o", "other"],
        ["index", "a", "-o", "a/x.jpg"],
        ["index", "a", "-o", "out", "--cell", "8"],
    ):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(command) == 2
    assert capsys.readouterr().err == "texvlm index: an index needs pyarrow: pip install 'texvlm[index]'\n"
