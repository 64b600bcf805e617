"""Which demo models `tidegate up` builds before it starts."""

from __future__ import annotations

from pathlib import Path

from tidegate.tools.build.demo.paced import PacedCosts, add_paced
from tidegate.tools.up.models import missing_models


def test_beside_a_model_of_the_users_own_no_demo_is_built(tmp_path: Path) -> None:
    assert set(missing_models(tmp_path)) == {"digits", "minilm"}
    add_paced("mine", PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10), (1000, 40))), tmp_path)
    assert missing_models(tmp_path) == []
    assert missing_models(tmp_path, own=True) == []


def test_an_empty_folder_gets_the_demos(tmp_path: Path) -> None:
    assert set(missing_models(tmp_path, own=True)) == {"digits", "minilm"}
