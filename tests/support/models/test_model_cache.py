"""Where built models are kept: shared by what is alike, apart from what is not, and not for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.models.model_cache import model_cache

_YEAR_S = 365 * 86400.0


def test_states_share_a_folder_and_forgotten_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TEST_CACHE", str(tmp_path))
    for name in ("old", "new", "strange"):
        (tmp_path / name).mkdir()
    for name in ("old", "new"):
        (tmp_path / name / "used").touch()
    long_ago = (tmp_path / "new" / "used").stat().st_mtime - _YEAR_S
    os.utime(tmp_path / "old" / "used", (long_ago, long_ago))
    found = model_cache.__wrapped__()
    assert found == model_cache.__wrapped__()
    assert found.parent == tmp_path
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["new", "strange", found.name])


def test_without_a_place_to_write_models_are_kept_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIDEGATE_TEST_CACHE", str(tmp_path / "file"))
    assert model_cache.__wrapped__().name == ".tidegate"
