"""What of a device's repository is served, where some of it is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from edge_agent.serving.catalogue import read_catalogue
from tests.support.models.tiny_models import tiny_repository
from tidegate.models.repository import Repository, RepositoryError
from tidegate.runtime.process import StartError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_repository(tmp_path)
    found = next(tmp_path.rglob("model.yaml"))
    right = found.parent.parent
    misspelt, cut = tmp_path / "aaa" / "1", tmp_path / "bbb" / "1"
    for folder in (misspelt, cut):
        shutil.copytree(found.parent, folder)
        text = (folder / "model.yaml").read_text()
        (folder / "model.yaml").write_text(text.replace(f"name: {right.name}", f"name: {folder.parent.name}", 1))
    (misspelt / "model.yaml").write_text("nmae: aaa\n")
    for artefact in cut.iterdir():
        if artefact.name != "model.yaml":
            artefact.write_bytes(artefact.read_bytes()[:-1])
    return tmp_path


def test_what_is_wrong_keeps_nothing_else_away_where_models_may_come(root: Path) -> None:
    with capture_logs() as logs:
        served = read_catalogue(Repository(root), None, or_none=True)
    names = {one.name for one in root.iterdir()} - {"aaa", "bbb"}
    assert {one.manifest.name for one in served} == names
    told = {entry["model"]: entry["reason"] for entry in logs if entry["event"] == "a model is not served"}
    assert set(told) == {"aaa", "bbb"} and "nmae" in told["aaa"]


def test_where_nothing_is_right_the_reasons_are_told(root: Path) -> None:
    for one in root.iterdir():
        if one.name not in ("aaa", "bbb"):
            shutil.rmtree(one)
    with capture_logs(), pytest.raises(StartError, match=r"(?s)could be read:.*aaa: .*bbb: "):
        read_catalogue(Repository(root), None, or_none=True)


def test_where_no_model_may_come_later_a_wrong_one_stops_the_start(root: Path) -> None:
    with pytest.raises(RepositoryError, match="nmae"):
        read_catalogue(Repository(root), None)
