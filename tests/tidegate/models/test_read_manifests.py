"""A repository that is looked at again and again: what has changed is read, and one bad folder hides no other model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.cloud_pool.models import TEXT
from tidegate.models import repository
from tidegate.models.repository import ReadManifests, Repository, RepositoryError, save_manifest
from tidegate.outcome import ModelNotFound


def put(root: Path, name: str, version: str = "1", **more: object) -> Path:
    manifest = msgspec.structs.replace(TEXT, name=name, version=version, **more)
    return save_manifest(root / name / version, manifest)


def test_it_finds_each_version_lowest_first_and_says_why_others_cannot_be_read(tmp_path: Path) -> None:
    for version in ("10", "2"):
        put(tmp_path, "one", version)
    put(tmp_path, "bad").write_text("name: [")
    (tmp_path / "empty" / "1").mkdir(parents=True)
    (tmp_path / ".half" / "1").mkdir(parents=True)
    found, problems = ReadManifests(tmp_path).look()
    assert {name: [one.version for one in ones] for name, ones in found.items()} == {"one": ["2", "10"]}
    assert problems.keys() == {"bad", "empty"}
    assert "is not valid YAML" in problems["bad"] and "cannot read the manifest" in problems["empty"]


def test_only_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = repository.load_manifest
    monkeypatch.setattr(repository, "load_manifest", lambda folder: read.append(folder.parent.name) or real(folder))
    put(tmp_path, "one")
    two = put(tmp_path, "two")
    manifests = ReadManifests(tmp_path)
    first, _ = manifests.look()
    assert sorted(read) == ["one", "two"]
    read.clear()
    assert manifests.look()[0] == first
    assert read == []
    two.write_text(two.read_text() + "default_budget_s: 9.0\n")
    assert manifests.look()[0]["two"][0].default_budget_s == 9.0
    assert read == ["two"]
    read.clear()
    os.utime(two, ns=(1, 1))
    shutil.rmtree(tmp_path / "one")
    assert manifests.look()[0].keys() == {"two"}
    assert read == ["two"]
    assert repr(manifests).endswith("1 versions>")


def test_a_root_that_cannot_be_read_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="cannot read the model repository"):
        ReadManifests(tmp_path / "missing").look()


def test_a_folder_that_cannot_be_read_hides_no_other_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name in {"locked", "lost+found"}:
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    for name in ("a", "locked", "z"):
        put(tmp_path, name)
    (tmp_path / "lost+found").mkdir()  # of a mounted volume: its owner's alone
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", iterdir)
    found, problems = ReadManifests(tmp_path).look()
    assert found.keys() == {"a", "z"}
    assert problems.keys() == {"locked"} and "Permission denied" in problems["locked"]
    assert [one.name for one in Repository(tmp_path, only=("a",)).manifests()] == ["a"]
    with pytest.raises(RepositoryError, match="locked: cannot read the model's folder"):
        Repository(tmp_path).manifests()


def test_a_folder_whose_name_is_no_model_name_is_none_unless_it_has_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "lost+found" / "recovered").mkdir(parents=True)
    (tmp_path / "my model" / "1").mkdir(parents=True)
    (tmp_path / "my model" / "1" / "model.yaml").write_text("name: [")
    assert ReadManifests(tmp_path).look()[1].keys() == {"my model"}


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_an_integer_that_is_too_large_is_named_whatever_its_length(tmp_path: Path, digits: int) -> None:
    path = put(tmp_path, "one")
    path.write_text(path.read_text() + f"max_batch_size: 0x{'f' * digits}\n")
    assert f"an integer of {4 * digits} bits" in ReadManifests(tmp_path).look()[1]["one"]


def test_a_version_that_cannot_be_read_is_passed_over_where_that_is_wanted_and_its_model_has_another(
    tmp_path: Path,
) -> None:
    put(tmp_path, "one", "1")
    put(tmp_path, "one", "2").write_text("name: [")
    put(tmp_path, "two", "1")
    models = Repository(tmp_path, pass_over=True)
    assert [(one.name, one.version) for one in models.manifests()] == [("one", "1"), ("two", "1")]
    assert models.manifest("one").version == "1"
    assert models.damaged.keys() == {("one", "2")} and "is not valid YAML" in models.damaged["one", "2"]
    with pytest.raises(RepositoryError, match="is not valid YAML"):
        models.manifest("one", "2")
    with pytest.raises(ModelNotFound, match=r"no version '3' \(versions: 1\)"):
        models.manifest("one", "3")
    with pytest.raises(RepositoryError, match="is not valid YAML"):
        Repository(tmp_path).manifests()
    put(tmp_path, "two", "1").write_text("name: [")
    with pytest.raises(RepositoryError, match=r"two/1/model\.yaml: is not valid YAML"):
        Repository(tmp_path, pass_over=True).manifests()
    assert Repository(tmp_path, only=("one",), pass_over=True).manifest("one").version == "1"
