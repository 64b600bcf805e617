"""How much memory a GPU has, as a command in the driver's place says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloud_pool.vllm.gpu_memory import gpu_memory_bytes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("program", "there"),
    [
        ('test "$2" = --format=csv,noheader,nounits && test "$3" = --id=1 && echo 81920', 81920 << 20),
        ("test $# = 3 && echo '[N/A]'", None),
        ("exit 6", None),
    ],
)
async def test_the_drivers_word_is_taken_where_it_is_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, there: int | None
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{program}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert await gpu_memory_bytes("1") == there


async def test_without_a_driver_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await gpu_memory_bytes("0") is None
