"""A reader with the demo models in the reader's folder, as `tidegate model build all` takes them for built."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.guides.reader import Reader
from tests.e2e.stack import WARM_S
from tests.support.models.demo_models import keep_torch_out


@pytest.fixture
def reader(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """In a folder with nothing but the demo models: in `models`, and where `tidegate up` would build them."""
    monkeypatch.setenv("TIDEGATE_POOL_WARMUP_BUDGET_S", WARM_S)
    made = Reader(tmp_path)
    try:
        shutil.copytree(models, tmp_path / "models")
        keep_torch_out(tmp_path / "models")  # no page here is about what a pool computes the digits with
        (tmp_path / ".tidegate").mkdir()
        (tmp_path / ".tidegate" / "models").symlink_to("../models")
        yield made
    finally:
        made.close()
