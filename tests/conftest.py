"""Shared fixtures: devices, seeds, and the one tolerance table."""

from __future__ import annotations

import pytest
import torch

# Absolute and relative, against the reference in float64 for the first two; half types against the rounding of their storage.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
