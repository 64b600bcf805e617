"""Simulated devices keep their session numbers in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.crowd.epochs import InMemoryEpochs

NOW = 1_800_000_000.0


def test_numbers_grow_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    epochs = InMemoryEpochs()
    first = epochs.bump(NOW)
    assert epochs.bump(NOW) == first + 1
    assert epochs.current == first + 1
    assert list(tmp_path.iterdir()) == []
