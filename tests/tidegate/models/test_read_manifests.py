"""A repository that is looked at again and again: what has changed is read, and one bad folder hides no other model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.cloud_pool.models import TEXT
from tidegate.models import repository
from tidegate.models.repository import ReadManifests, RepositoryError, save_manifest


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
