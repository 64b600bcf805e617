"""A reader with the demo models, as `tidegate model build all` leaves them in the reader's folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.guides.reader import Reader
from tests.e2e.stack import WARM_S


@pytest.fixture
def reader(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """In a folder with nothing but the demo models: in `models`, and where `tidegate up` would build them."""
    monkeypatch.setenv("TIDEGATE_POOL_WARMUP_BUDGET_S", WARM_S)
    made = Reader(tmp_path)
    try:
        shutil.copytree(models, tmp_path / "models")
        (tmp_path / ".tidegate").mkdir()
        (tmp_path / ".tidegate" / "models").symlink_to("../models")
        yield made
    finally:
        made.close()
