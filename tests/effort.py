"""How much a test tries: a kernel that the host runs thread by thread, under sanitizers too, takes a hundred times as long."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., None])
EMULATED = os.environ.get("TEXVLM_EMULATE") == "1"  # in a build with emulated kernels (tests/shim) CPU tensors go through these
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # tests/test_sanitizers.py
ADDRESS_MODES = ("clamp", "border") if EMULATED or SANITIZED else ("clamp", "wrap", "mirror", "border")


def examples(count: int) -> Callable[[Test], Test]:
    """So many examples of hypothesis, however long one takes; a part of them under sanitizers, and where kernels are emulated."""
    return settings(max_examples=max(count // (8 if EMULATED else 3 if SANITIZED else 1), 2), deadline=None)
