"""What a server and a request say in `mm_processor_kwargs`, checked, and together; it knows neither vLLM nor a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from texvlm.paths import PRESETS

PREFIX = "texvlm_"
NAMES = ("texvlm_keep", "texvlm_path", "texvlm_query", "texvlm_max", "texvlm_embedding")
OF_THE_SERVER = ("texvlm_max", "texvlm_embedding")
SCOPES = ("images_kwargs", "videos_kwargs", "text_kwargs", "audio_kwargs")
PATHS = (*(name for name, preset in PRESETS.items() if preset.get("scale") != "mixed"), "uniform")
"""What can be asked for by name: those that keep tokens of one level, and the same ones of the same picture each time."""

Budget = int | str | None


def others(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What is not ours."""
    return {name: value for name, value in kwargs.items() if not name.startswith(PREFIX)}


def _budget(name: str, value: Any) -> Budget:
    if value is None or value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value  # type: ignore[no-any-return]
    raise ValueError(f"{name} must be a whole number of at least 1, 'auto' or None, got {value!r}")


@dataclass(frozen=True)
class Options:
    """What counts for the pictures of one request.

    Attributes:
        keep: the budget, or a list of one for each picture.
        limit: the most that the server allows; None: all.
        path: see `texvlm.vllm`.
        query: a text or vector, or a list of texts, one for each picture.
    """

    keep: Budget | list[Budget] = None
    limit: Budget = None
    path: str = "learned"
    query: Any = None

    @classmethod
    def of(cls, server: Mapping[str, Any], request: Mapping[str, Any]) -> Options:
        """Of what the server and what the request says.

        Raises:
            ValueError: what is said is not known, not possible, or not for a request to say; the message names it.
        """
        for said in (server, request):
            unknown = [name for name in said if name.startswith(PREFIX) and name not in NAMES]
            if unknown:
                raise ValueError(f"mm_processor_kwargs must be of {', '.join(NAMES)}, got {unknown[0]}")
            for scope in SCOPES:
                inner = said.get(scope)
                inside = [name for name in inner if name.startswith(PREFIX)] if isinstance(inner, Mapping) else []
                if inside:
                    raise ValueError(f"{inside[0]} must stand in mm_processor_kwargs itself, got it in {scope}")
        for name in OF_THE_SERVER:
            if name in request and request[name] != server.get(name):
                raise ValueError(f"{name} is for the server to say, got it in a request")
        keep = _budget("texvlm_keep", server.get("texvlm_keep"))
        limit = _budget("texvlm_max", server.get("texvlm_max", keep))
        if isinstance(keep, int) and isinstance(limit, int) and limit < keep:
            raise ValueError(f"texvlm_max must be at least texvlm_keep, {keep}, got {limit}")
        asked: Any = keep
        if "texvlm_keep" in request:
            asked = request["texvlm_keep"]
            asked = (
                [_budget("texvlm_keep", k) for k in asked] if isinstance(asked, (list, tuple)) else _budget("texvlm_keep", asked)
            )
        path = request.get("texvlm_path", server.get("texvlm_path", "learned"))
        if not isinstance(path, str) or (path not in PATHS and path != server.get("texvlm_path")):
            raise ValueError(f"texvlm_path must be one of {', '.join(PATHS)}, got {path!r}")
        if path not in PATHS and ":" not in path:
            raise ValueError(f"texvlm_path must be one of {', '.join(PATHS)}, or package.module:name, got {path!r}")
        if cls(query=server.get("texvlm_query")).queries:
            raise ValueError(f"texvlm_query must be one text or vector for a server to say, got {server['texvlm_query']!r}")
        query = request["texvlm_query"] if "texvlm_query" in request else server.get("texvlm_query")
        return cls(asked, limit, path, query)

    @property
    def active(self) -> bool:
        """Whether there is a budget."""
        return self.keep is not None or self.limit is not None

    def budget(self, groups: int) -> int:
        """What a picture, or frame, of so many groups may keep at most; of a list, the most of any."""
        from texvlm.qwen.selectors import auto_budget

        def number(k: Budget) -> int:
            return groups if k is None else auto_budget(groups) if isinstance(k, str) else k

        each = self.keep if isinstance(self.keep, list) else [self.keep]
        return min(groups, number(self.limit), max((number(k) for k in each), default=groups))

    @property
    def queries(self) -> bool:
        """Whether the query is a list, one for each picture; numbers in a list are one vector."""
        return isinstance(self.query, (list, tuple)) and any(q is None or isinstance(q, (str, list, tuple)) for q in self.query)

    @property
    def lists(self) -> bool:
        """Whether pictures of the request differ in what is asked for them."""
        return isinstance(self.keep, list) or self.queries

    def each(self, count: int) -> list[Options]:
        """Those of each of so many pictures."""
        keeps = self.keep if isinstance(self.keep, list) else [self.keep] * count
        queries = self.query if self.queries else [self.query] * count
        for name, values in (("texvlm_keep", keeps), ("texvlm_query", queries)):
            if len(values) != count:
                raise ValueError(f"{name} must be one, or one for each of {count} pictures, got {len(values)}")
        return [replace(self, keep=k, query=q) for k, q in zip(keeps, queries)]


def named(what: str, value: Any) -> Any:
    """What a server names, "package.module:name"."""
    module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not module or not name:
        raise ValueError(f"{what} must be package.module:name, got {value!r}")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ValueError(f"{what} must be package.module:name, but {module} has no {name}")
    return getattr(found, name)
