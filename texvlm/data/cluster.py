"""Many items over the machines of a Ray cluster: actors that may die, on nodes that may go, and every item has one result."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from texvlm.data.pool import ATTEMPTS
from texvlm.data.selecting import initialise_worker

ADDRESS = "RAY_ADDRESS"
"""Ray's own variable: where the cluster is."""

BATCH = 16
"""Items that an actor has at once."""

MOST_BLOCKS = 4096
"""What dies costs a block of items: few of them, but no more blocks than Ray's scheduler likes."""

CORES = 0.5
"""What an actor of one thread asks for. Where all of Ray's cores are held by actors, its other tasks wait for ever, without a word."""


def on_cluster() -> bool:
    """Whether there is a cluster: one is named by RAY_ADDRESS, or this process is part of one."""
    ray = sys.modules.get("ray")
    return bool(os.environ.get(ADDRESS)) or (ray is not None and ray.is_initialized())


class _Actor:
    """Made once in each of Ray's processes."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        initialise_worker()
        self.function = function

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of items; results are pickled, so that Arrow neither stacks nor changes them."""
        results = np.empty(len(batch["item"]), dtype=object)
        results[:] = [pickle.dumps(self.function(str(item))) for item in batch["item"]]
        return {"item": batch["item"], "result": results}


def map_on_cluster(function: Callable[[str], Any], items: Sequence[str], workers: int | None = None) -> Iterator[tuple[str, Any]]:
    """Applies a picklable function by Ray Data, which does again what a dead actor or a lost node was at.

    Without a cluster Ray is started on this machine for the length of the call. What is needed to import the function must be on all nodes,
    and what the items name within their reach.

    Args:
        function: of an item; what it raises ends the run.
        items: texts, each once.
        workers: the most actors; by default as many as the cluster has cores.

    Yields:
        Each item once, with its result, in any order.
    """
    import ray
    from ray.data import DataContext

    own = not ray.is_initialized()
    if own:
        alone = {} if ADDRESS in os.environ else {"address": "local", "include_dashboard": False}
        ray.init(log_to_driver=False, logging_level="error", **alone)
    context = DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    waiting, failed = dict.fromkeys(items), 0
    try:
        while waiting:
            before = len(waiting)
            try:
                for item, result in _streamed(function, list(waiting), workers):
                    if item in waiting:  # what was done again may come again
                        del waiting[item]
                        yield item, result
            except ray.exceptions.RayTaskError:  # the function's own
                raise
            except (
                ray.exceptions.RayError
            ):  # such as an actor that was starting on a node that went: a stream does not outlive that
                failed = failed + 1 if len(waiting) == before else 0
                if failed == ATTEMPTS:
                    raise
    finally:
        context.enable_progress_bars = shown
        if own:
            ray.shutdown()


def _streamed(function: Callable[[str], Any], items: list[str], workers: int | None) -> Iterator[tuple[str, Any]]:
    """Results of one run of Ray Data, as they come."""
    import ray
    from ray.data import ActorPoolStrategy

    most = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    data = ray.data.from_items(
        [{"item": item} for item in items], override_num_blocks=min(MOST_BLOCKS, -(-len(items) // BATCH))
    ).map_batches(
        _Actor,
        fn_constructor_args=(function,),
        batch_size=BATCH,
        compute=ActorPoolStrategy(min_size=1, max_size=most),
        num_cpus=CORES,
    )
    for batch in data.iter_batches(batch_size=None, batch_format="numpy"):
        yield from zip(batch["item"].tolist(), map(pickle.loads, batch["result"].tolist()))
