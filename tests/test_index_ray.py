"""An index by Ray has the rows of an index by a pool, once each: also after an actor, a node or the whole run was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_index import BUDGET, photographs, rows

from texvlm.data import Indexed, cluster, index

ray = pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture
def alone() -> Iterator[None]:
    """Ray on this machine."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def actors() -> list[int]:
    """The processes of actors, here."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::" in (process / "cmdline").read_bytes() and b"_Actor" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_rows_are_those_of_a_pool(tmp_path: Path, alone: None) -> None:
    names = photographs(tmp_path / "a", 20)
    Path(names[3]).write_bytes(b"no picture")
    assert index(tmp_path / "a", tmp_path / "ray", **BUDGET) == Indexed(20, 1, 0)  # auto: Ray has been initialised
    assert index(tmp_path / "a", tmp_path / "pool", engine="pool", **BUDGET) == Indexed(20, 1, 0)
    assert rows(tmp_path / "ray") == rows(tmp_path / "pool")
    assert index(tmp_path / "a", tmp_path / "ray", engine="ray", **BUDGET) == Indexed(0, 0, 20)


class Slow:
    """A function that takes its time, so that something can be killed meanwhile."""

    def __call__(self, item: str) -> int:
        time.sleep(0.05)
        return os.getpid()


def test_a_killed_actor_costs_nothing_but_time(alone: None) -> None:
    items = [str(i) for i in range(160)]
    killed: set[int] = set()

    def kill() -> None:
        while not killed:
            for process in actors()[:1]:
                time.sleep(0.5)
                os.kill(process, signal.SIGKILL)
                killed.add(process)
            time.sleep(0.1)

    threading.Thread(target=kill, daemon=True).start()
    found = list(cluster.map_on_cluster(Slow(), items, 2))
    assert killed and sorted(item for item, _ in found) == sorted(items)
    assert len({process for _, process in found} - killed) >= 1


def test_a_lost_node_costs_nothing_but_time() -> None:
    """In a process of its own: after Ray has been on this machine alone, no cluster's actors start."""
    code = """
import ray
from ray.cluster_utils import Cluster
from test_index_ray import Slow
from texvlm.data.cluster import map_on_cluster

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
nodes.add_node(num_cpus=2)
ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
items = [str(i) for i in range(160)]
found = []
for item, _ in map_on_cluster(Slow(), items, 4):
    found.append(item)
    if len(found) == 1:
        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
assert sorted(found) == sorted(items), found
assert not nodes.worker_nodes
print("once each", flush=True)
ray.shutdown()
nodes.shutdown()
"""
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True, timeout=90)
    assert "once each" in done.stdout, done.stderr  # the status is that of killed processes


@pytest.mark.parametrize("failures", [2, 3])
def test_a_stream_that_breaks_off_is_begun_again_with_what_is_left(
    alone: None, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    asked: list[list[str]] = []

    def streamed(function: Any, items: list[str], workers: int | None) -> Iterator[tuple[str, int]]:
        asked.append(items)
        if len(asked) > 1 + failures:
            yield from ((item, len(item)) for item in ("a", *items))  # one of them again
            return
        if len(asked) == 1:
            yield "a", 1
        raise ray.exceptions.ActorDiedError()

    monkeypatch.setattr(cluster, "_streamed", streamed)
    found: list[tuple[str, int]] = []
    if failures == cluster.ATTEMPTS:
        with pytest.raises(ray.exceptions.ActorDiedError):
            found.extend(cluster.map_on_cluster(len, ["a", "bb"]))
        return
    found.extend(cluster.map_on_cluster(len, ["a", "bb"]))
    assert found == [("a", 1), ("bb", 2)]
    assert asked == [["a", "bb"], *[["bb"]] * (failures + 1)]


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    photographs(tmp_path / "a", 60)
    code = f"""
import signal, os, texvlm.data.indexing as indexing
indexing.ROWS = 8
def seen(done, total):
    if done == 20:
        os.kill(os.getpid(), signal.SIGKILL)
indexing.index({str(tmp_path / "a")!r}, {str(tmp_path / "out")!r}, engine="ray", progress=seen, **{BUDGET!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=90)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    there = len(rows(tmp_path / "out"))
    assert there == 16
    assert index(tmp_path / "a", tmp_path / "out", engine="pool", **BUDGET) == Indexed(60 - there, 0, there)
    assert len(rows(tmp_path / "out")) == 60
