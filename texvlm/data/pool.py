"""A pool of processes that may be killed: what one of them was at is done again by another, and every item has one result."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from texvlm.data.selecting import initialise_worker

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 2
"""Items that a worker has at once: the next one is there when it ends the last."""

ATTEMPTS = 3
"""So many workers may die of an item before it is given up."""


class WorkerDied(RuntimeError):
    """Each worker that was given an item ended without an answer: the item is fatal (a crash, or too much memory)."""


class _Worker:
    """A process, and what it has been given."""

    def __init__(self, context: Any, function: Callable[[Any], Any]) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that its end is seen here
        self.ready = False
        self.pending: deque[Any] = deque()

    def give(self, item: Any) -> None:
        self.pending.append(item)
        with contextlib.suppress(OSError):  # it has died, which the next `wait` will find
            self.pipe.send(item)


def _work(function: Callable[[Any], Any], pipe: Connection) -> None:
    """A worker's life: ends when nobody reads its answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    initialise_worker()
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send("ready")
        while True:
            pipe.send(function(pipe.recv()))


def map_surviving(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[tuple[Item, Result | WorkerDied]]:
    """Applies a function in processes of one thread each, and outlives them.

    Args:
        function: picklable. It raises nothing: what is wrong with an item is a result.
        items: picklable and hashable; read as they are needed.
        workers: how many processes. Each is started anew when it dies.

    Yields:
        Every item, once, with its result, in the order in which they are done; or with `WorkerDied`, which is no result of `function`.

    Raises:
        RuntimeError: processes end before they begin, as under a script without `if __name__ == "__main__":`.
    """
    context = multiprocessing.get_context("forkserver")  # no threads are lost in it, and torch is imported once for all
    context.set_forkserver_preload(["texvlm.data.indexing"])
    source, again, deaths, stillborn = iter(items), deque[Item](), Counter[Item](), 0
    crew = [_Worker(context, function) for _ in range(workers)]
    nothing = object()
    try:
        while True:
            for worker in crew:
                while worker.ready and len(worker.pending) < AHEAD:
                    item: Any = again.popleft() if again else next(source, nothing)
                    if item is nothing:
                        break
                    worker.give(item)
            if any(worker.ready for worker in crew) and not any(worker.pending for worker in crew):
                return
            for pipe in wait([worker.pipe for worker in crew]):
                at = next(i for i, worker in enumerate(crew) if worker.pipe is pipe)
                worker = crew[at]
                try:
                    answer = worker.pipe.recv()
                except (EOFError, OSError):  # it has died
                    answer = nothing
                if answer is not nothing and worker.ready:
                    yield worker.pending.popleft(), answer
                elif answer is not nothing:
                    worker.ready, stillborn = True, 0
                else:
                    if worker.pending:
                        blamed = worker.pending.popleft()
                        deaths[blamed] += 1
                        again.extend(worker.pending)
                        if deaths[blamed] < ATTEMPTS:
                            again.append(blamed)
                        else:
                            yield blamed, WorkerDied(f"the process that read it died, {ATTEMPTS} times")
                    stillborn += not worker.ready
                    if stillborn > 2 * workers:
                        raise RuntimeError("processes end before they begin: a script needs an if __name__ == '__main__'")
                    worker.pipe.close()
                    worker.process.join()
                    crew[at] = _Worker(context, function)
    finally:
        for worker in crew:
            worker.pipe.close()
        for worker in crew:
            worker.process.join(10)
            worker.process.kill()
