"""`index`: many picture files to Parquet, what each keeps of a budget, by all cores; it can be killed, and goes on where it stopped."""

from __future__ import annotations

import fcntl
import glob
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import texvlm
from texvlm._ext import integer
from texvlm.data.cluster import map_on_cluster, on_cluster
from texvlm.data.pool import WorkerDied, map_surviving
from texvlm.data.selecting import Select

if TYPE_CHECKING:
    from texvlm.paths import CascadeConfig

ENGINES = ("auto", "pool", "ray")

ROWS, ROWS_WITH_TOKENS = 1024, 256
"""Of a file: so many are in memory, and are done again when the run is killed."""


@dataclass(frozen=True)
class Indexed:
    """What a run of `index` did.

    Attributes:
        done: pictures that it read, the broken ones among them.
        broken: those that have an `error`.
        there: pictures that were in the index before.
    """

    done: int
    broken: int
    there: int


def index(
    pictures: str | PathLike[str] | Iterable[str | PathLike[str]],
    out: str | PathLike[str],
    k: int = 273,
    cell: int = 16,
    path: str | CascadeConfig = "salience",
    query: str | None = None,
    *,
    tokens: bool = False,
    max_size: int | None = None,
    engine: str = "auto",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Indexed:
    """What each of many pictures keeps of a budget, as rows of Parquet files.

    It may be killed: a process that reads pictures costs the time of what it was at, the whole run what has been read since the last file
    was written. The same call goes on, and skips what is there. Every picture is one row, a broken one too.

    Args:
        pictures: a folder (all that Pillow can read under it), a pattern such as "photos/**/*.jpg", or the names of files.
        out: the folder of the index. One run at a time writes there, and all runs with the same arguments.
        k: cells that a picture keeps, see `texvlm.select`.
        cell: their side in pixels.
        path: how they are chosen.
        query: what is looked for, where the path asks for it.
        tokens: whether the pixels of the cells are kept too.
        max_size: a longer side is shrunk to this many pixels.
        engine: "pool", processes on this machine, or "ray", actors over a cluster whose nodes all see the files; "auto" takes Ray where
            RAY_ADDRESS names a cluster or Ray has been initialised. The rows are the same.
        workers: how many processes; by default as many as there are cores.
        progress: is called with how many are done, and of how many, after each picture.
        **options: further arguments of `texvlm.select`.

    Returns:
        Indexed. The rows are in out/part-*.parquet, in any order, with the arguments in the metadata "texvlm" of each file:

            path     string, absolute
            error    string, what is wrong with the picture; null where nothing is, else all of the following are
            height   int32, of the picture that was looked at, upright; width
            rows     int32, of the grid of cells; columns
            cells    list of int32, best first: cell c is in row c // columns and column c % columns
            levels   list of int8: a token of level l covers 2^l x 2^l cells, c the upper left one
            scores   list of float32
            tokens   binary, where asked for: uint8 [len(cells), 3, cell, cell]

    Raises:
        ValueError: no pictures, arguments that `texvlm.select` refuses, or others than those that the index was begun with.
        ImportError: pyarrow or Pillow is not installed: pip install 'texvlm[index]'; or Ray: pip install 'texvlm[scale]'.
        BlockingIOError: another run writes there.

    A script that calls it needs an `if __name__ == "__main__":`, as for any pool of processes.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(map(repr, ENGINES))}, got {engine!r}")
    workers = None if workers is None else integer("workers", workers, 1)
    on_ray = engine == "ray" or (engine == "auto" and on_cluster())
    if on_ray and importlib.util.find_spec("ray") is None:
        raise ImportError("engine='ray' needs Ray: pip install 'texvlm[scale]'")
    try:
        import PIL  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(f"an index needs {error.name}: pip install 'texvlm[index]'") from None
    select = Select(k, cell, path, query, dtype=torch.uint8, max_size=max_size, **options)
    select(torch.zeros(3, cell, cell))  # what it refuses is said now, not once for each picture
    with _locked(Path(out)) as folder:
        parts = Parts(folder, _settings(select, tokens), tokens)
        there = parts.paths()
        found = files(pictures)
        todo = [name for name in found if name not in there]
        done = broken = 0
        with parts:
            for name, row in _results(Row(select, tokens), todo, workers, on_ray):
                row = {"path": name, "error": str(row)} if isinstance(row, WorkerDied) else row
                parts.add(row)
                done, broken = done + 1, broken + ("error" in row)
                if progress is not None:
                    progress(done, len(todo))
    return Indexed(done, broken, len(found) - len(todo))


def _results(row: Row, todo: list[str], workers: int | None, on_ray: bool) -> Iterator[tuple[str, Any]]:
    if not todo:
        return iter(())
    if on_ray:
        return map_on_cluster(row, todo, workers)
    return map_surviving(row, todo, min(workers or len(os.sched_getaffinity(0)), len(todo)))


def files(pictures: str | PathLike[str] | Iterable[str | PathLike[str]]) -> list[str]:
    """The absolute names of the files of a folder, of a pattern, or of names, each once, in order."""
    names: Iterable[str]
    if not isinstance(pictures, (str, PathLike)):
        names = (os.fspath(name) for name in pictures)
    elif os.path.isdir(pictures):
        from PIL import Image

        known = tuple(ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN)
        walk = ((top, name) for top, _, inside in os.walk(pictures) for name in inside)
        names = (os.path.join(top, name) for top, name in walk if name.lower().endswith(known) and name[0] != ".")
    else:
        names = (name for name in glob.iglob(os.fspath(pictures), recursive=True) if os.path.isfile(name))
    found = sorted({os.path.abspath(name) for name in names})
    if not found:
        raise ValueError(f"no pictures: {pictures}")
    return found


class Row:
    """From a file's name to its row; picklable. What is wrong with the file is in the row."""

    def __init__(self, select: Select, tokens: bool) -> None:
        self.select, self.tokens = select, tokens

    def __call__(self, name: str) -> dict[str, Any]:
        """One picture."""
        try:
            sample = self.select(name)
        except Exception as error:  # nothing that is wrong with one picture ends the run
            return {"path": name, "error": str(error).strip().partition("\n")[0] or type(error).__name__}
        count = int(sample["count"])
        (height, width), (rows, columns) = sample["size"].tolist(), sample["grid"].tolist()
        row = {"path": name, "height": height, "width": width, "rows": rows, "columns": columns}
        for column, of in (("cells", "indices"), ("levels", "levels"), ("scores", "score")):
            row[column] = sample[of][:count].numpy()
        if self.tokens:
            row["tokens"] = sample["patches"][:count].numpy().tobytes()
        return row


class Parts:
    """The Parquet files of an index: each is whole or not there."""

    def __init__(self, folder: Path, settings: dict[str, str], tokens: bool) -> None:
        import pyarrow as pa

        self.folder, self.settings = folder, settings
        self.limit = ROWS_WITH_TOKENS if tokens else ROWS
        sizes = [(name, pa.int32()) for name in ("height", "width", "rows", "columns")]
        lists = [("cells", pa.list_(pa.int32())), ("levels", pa.list_(pa.int8())), ("scores", pa.list_(pa.float32()))]
        columns = [("path", pa.string()), ("error", pa.string()), *sizes, *lists, *([("tokens", pa.binary())] if tokens else [])]
        self.schema = pa.schema(columns, metadata={"texvlm": json.dumps(settings)})
        self.rows: list[dict[str, Any]] = []
        for rest in folder.glob("*.tmp"):  # of a run that was killed
            rest.unlink()
        self.written = sorted(folder.glob("part-*.parquet"))

    def paths(self) -> set[str]:
        """Those of the rows that are there."""
        import pyarrow.parquet as pq

        found: set[str] = set()
        for part in self.written:
            begun = json.loads((pq.read_schema(part).metadata or {}).get(b"texvlm", b"{}"))
            other = [name for name in self.settings.keys() | begun.keys() if begun.get(name) != self.settings.get(name)]
            if other:
                had = ", ".join(f"{name}={begun.get(name)}" for name in sorted(other))
                raise ValueError(f"{self.folder} holds an index with {had}: take another folder")
            found.update(pq.read_table(part, columns=["path"]).column("path").to_pylist())
        return found

    def add(self, row: dict[str, Any]) -> None:
        """One more row, in a file as soon as there are enough."""
        self.rows.append(row)
        if len(self.rows) >= self.limit:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that no file has yet."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self.rows:
            return
        number = int(self.written[-1].stem.rpartition("-")[2]) + 1 if self.written else 0
        part = self.folder / f"part-{number:08d}.parquet"
        columns = {name: [row.get(name) for row in self.rows] for name in self.schema.names}
        pq.write_table(pa.table(columns, schema=self.schema), part.with_suffix(".tmp"), compression="zstd")
        os.replace(part.with_suffix(".tmp"), part)
        self.written.append(part)
        self.rows.clear()

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()  # also where the run ends by an error or Ctrl-C


def _settings(select: Select, tokens: bool) -> dict[str, str]:
    """What the rows depend on, but for the weights of a scorer: where an object lies in memory does not count."""
    names = ("k", "cell", "path", "query", "max_size")
    values = {name: getattr(select, name) for name in names} | {"tokens": tokens} | select.options
    said = {name: re.sub(r" at 0x[0-9a-f]+", "", str(value)) for name, value in values.items()}
    return {"version": texvlm.__version__} | said


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The folder, made where there is none, for this process alone: the system unlocks it, however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another run writes to {folder}") from None
        yield folder
    finally:
        os.close(handle)
