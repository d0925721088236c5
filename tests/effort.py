"""How much a test tries: a kernel that the host runs thread by thread, under sanitizers too, takes a hundred times as long."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., None])
EMULATED = os.environ.get("TEXVLM_EMULATE") == "1"  # in a build with emulated kernels (tests/shim) CPU tensors go through these
ADDRESS_MODES = ("clamp", "border") if EMULATED else ("clamp", "wrap", "mirror", "border")


def examples(count: int) -> Callable[[Test], Test]:
    """So many examples of hypothesis, however long one takes; an eighth of them where kernels are emulated."""
    return settings(max_examples=max(count // 8, 2) if EMULATED else count, deadline=None)
