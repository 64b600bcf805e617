"""What of a device's repository is served, where some of it is wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest

from edge_agent.serving.catalogue import read_catalogue, read_entry
from tests.support.models.tiny_models import tiny_repository
from tidegate.models.repository import Repository, RepositoryError, load_manifest, save_manifest
from tidegate.models.trust import TRUSTED
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


@pytest.mark.parametrize("or_none", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_what_is_wrong_keeps_nothing_else_away(root: Path, or_none: bool, named: bool) -> None:
    names = {one.name for one in root.iterdir()}
    found = read_catalogue(Repository(root), sorted(names) if named else None, or_none=or_none)
    assert {one.manifest.name for one in found.entries} == names - {"aaa", "bbb"}
    assert set(found.problems) == {"aaa", "bbb"}
    assert "nmae" in found.problems["aaa"]
    assert "bytes, but variant" in found.problems["bbb"]


def test_where_nothing_is_right_the_reasons_are_told(root: Path) -> None:
    for one in root.iterdir():
        if one.name not in ("aaa", "bbb"):
            shutil.rmtree(one)
    found = read_catalogue(Repository(root), None)
    assert not found.entries
    assert re.search(r"(?s)could be read:.*aaa: .*bbb: ", str(found.no_model(root)))


def test_a_model_that_is_not_there_is_told_with_those_that_are(root: Path) -> None:
    found = read_catalogue(Repository(root), ["triple"])
    assert re.fullmatch(
        r"key 'models': there is no model 'triple' \(models: bbb, .*double.*\)", found.problems["triple"]
    )


def test_a_name_in_two_versions_stops_the_start(root: Path) -> None:
    with pytest.raises(StartError, match="two versions"):
        read_catalogue(Repository(root), ["double:1", "double:2"])


@pytest.mark.parametrize("wanted", [None, ["double"]])
def test_a_version_that_cannot_be_read_leaves_its_model_in_a_lower_one(
    tmp_path: Path, wanted: list[str] | None
) -> None:
    root = tiny_repository(tmp_path, ("1", "2", "3"))
    for version in ("1", "3"):
        (root / "double" / version / "model.yaml").write_text("nmae: [")
    found = read_catalogue(Repository(root), wanted)
    (double,) = [one for one in found.entries if one.manifest.name == "double"]
    assert double.manifest.version == "2" and not found.problems
    assert "double/3/model.yaml: is not valid YAML" in double.instead and "double/1" not in double.instead
    named = read_catalogue(Repository(root), ["double:2"])
    assert named.entries[0].instead == ""
    assert "is not valid YAML" in read_catalogue(Repository(root), ["double:3"]).problems["double"]


@pytest.mark.parametrize("wanted", [None, ["double"]])
def test_a_version_that_is_only_for_pools_is_passed_over(tmp_path: Path, wanted: list[str] | None) -> None:
    root = tiny_repository(tmp_path, ("1", "2"))
    newest = root / "double" / "2"
    manifest = load_manifest(newest)
    (variant,) = manifest.variants
    for_pools = msgspec.structs.replace(variant, where=("pool",))
    save_manifest(newest, msgspec.structs.replace(manifest, variants=(for_pools,)))
    found = read_catalogue(Repository(root), wanted)
    (double,) = [one for one in found.entries if one.manifest.name == "double"]
    assert double.manifest.version == "1" and not found.problems and double.instead == ""
    assert found.unfit == [("double", "2", "no variant for edges (variants: int8)")]
    named = read_catalogue(Repository(root), ["double:2"])
    assert "has no variant for edges" in named.problems["double"]


def test_a_version_whose_files_are_wrong_is_passed_over_at_the_start_alone(tmp_path: Path) -> None:
    root = tiny_repository(tmp_path, ("1", "2"))
    (root / "double" / "2" / "int8.onnx").unlink()
    (double,) = read_catalogue(Repository(root), ["double"]).entries
    assert double.manifest.version == "1" and "double/2/int8.onnx: the artefact of variant" in double.instead
    assert "No such file" in read_catalogue(Repository(root), ["double:2"]).problems["double"]
    with pytest.raises(RepositoryError, match="No such file"):
        read_entry(root, "double", TRUSTED, or_lower=False)
