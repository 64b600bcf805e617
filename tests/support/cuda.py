"""Tests that need a GPU are skipped, by name, where there is none. `make test-gpu` runs them and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@pytest.fixture(scope="session")
def cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@contextmanager
def crowded(free_bytes: int) -> Iterator[None]:
    """Within, the GPU has only so much free memory; afterwards this process keeps none in reserve."""
    import torch

    torch.cuda.empty_cache()
    taken = torch.empty(max(0, torch.cuda.mem_get_info()[0] - free_bytes), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()
