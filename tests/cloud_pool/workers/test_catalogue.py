"""What a pool serves, out of what its repository holds."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest

from cloud_pool.workers.catalogue import read_catalogue
from tests.cloud_pool.models import manifest_of
from tests.support.models.trusted import trust_file
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository, RepositoryError, save_manifest
from tidegate.runtime.process import StartError

CONTENT = b"weights"


def variant(name: str, precision: str, *where: str) -> Variant:
    digest = hashlib.sha256(CONTENT).hexdigest()
    made = Variant(name, f"{name}.pt2", "torch-export", precision, (), digest, len(CONTENT))
    return msgspec.structs.replace(made, where=where)


def repository(root: Path, **models: tuple[Variant, ...]) -> Repository:
    for name, variants in models.items():
        for version in ("1", "2"):
            folder = root / name / version
            save_manifest(folder, manifest_of(name=name, version=version, variants=variants))
            for one in variants:
                (folder / one.artefact).write_bytes(CONTENT)
                trust_file(folder / one.artefact)
    return Repository(root)


def cut(root: Path, name: str, *versions: str) -> None:
    for version in versions:
        (root / name / version / "fp32.pt2").write_bytes(b"weightz")


def test_every_model_with_a_pool_variant_is_served_in_its_highest_version(tmp_path: Path) -> None:
    both = (variant("int8", "int8", "edge"), variant("fp32", "fp32", "pool"))
    models = repository(tmp_path, a=both, b=(variant("int8", "int8", "edge"),), c=both)
    assert [one.key for one in read_catalogue(models, None, "fp32").loadables] == ["a:2/fp32", "c:2/fp32"]


def test_the_wished_for_precision_is_served_and_otherwise_what_there_is(tmp_path: Path) -> None:
    models = repository(
        tmp_path,
        a=(variant("fp32", "fp32", "pool"), variant("bf16", "bf16", "pool")),
        b=(variant("fp32", "fp32", "pool"),),
    )
    assert [one.key for one in read_catalogue(models, None, "bf16").loadables] == ["a:2/bf16", "b:2/fp32"]


def test_a_named_model_must_be_there_and_be_for_a_pool(tmp_path: Path) -> None:
    models = repository(tmp_path, a=(variant("int8", "int8", "edge"),))
    with pytest.raises(StartError, match=r"key 'models'.*'x'"):
        read_catalogue(models, ["x"], "fp32")
    with pytest.raises(StartError, match=r"'a'.* has no variant for pools; .*version 2: .*\(variants: int8\)"):
        read_catalogue(models, ["a"], "fp32")


def test_a_repository_with_nothing_for_a_pool_is_an_error(tmp_path: Path) -> None:
    models = repository(tmp_path, a=(variant("int8", "int8", "edge"),))
    with pytest.raises(RepositoryError, match="nothing to serve"):
        read_catalogue(models, None, "fp32")


def test_a_broken_artefact_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    models = repository(tmp_path, a=(variant("fp32", "fp32", "pool"),))
    cut(tmp_path, "a", "1", "2")
    with pytest.raises(StartError, match=r"a/2/fp32\.pt2: has sha256"):
        read_catalogue(models, None, "fp32")


@pytest.mark.parametrize("models", [None, ["a"]])
def test_a_version_that_is_only_for_edges_is_passed_over(tmp_path: Path, models: list[str] | None) -> None:
    given = repository(tmp_path, a=(variant("fp32", "fp32", "pool"),))
    newest = manifest_of(name="a", version="10", variants=(variant("int8", "int8", "edge"),))
    save_manifest(tmp_path / "a" / "10", newest)
    found = read_catalogue(given, models, "fp32")
    assert [one.key for one in found.loadables] == ["a:2/fp32"]
    assert found.problems == {}
    assert found.unfit == {("a", "10"): "no variant for pools (variants: int8)"}
    with pytest.raises(StartError, match=r"no variant for pools; version 10: "):
        read_catalogue(given, ["a:10"], "fp32")


@pytest.mark.parametrize("models", [None, ["a"]])
def test_a_version_whose_files_are_wrong_is_passed_over_at_the_start_alone(
    tmp_path: Path, models: list[str] | None
) -> None:
    given = repository(tmp_path, a=(variant("fp32", "fp32", "pool"),))
    cut(tmp_path, "a", "2")
    found = read_catalogue(given, models, "fp32")
    assert [one.key for one in found.loadables] == ["a:1/fp32"]
    assert found.problems == found.wrong_files
    assert found.problems.keys() == {("a", "2")} and "sha256" in found.problems["a", "2"]
    for wanted, or_lower in (("a:2", True), ("a", False)):
        with pytest.raises(RepositoryError, match="sha256"):
            read_catalogue(given, [wanted], "fp32", or_lower=or_lower)


@pytest.mark.parametrize("models", [None, ["a"]])
def test_a_version_that_cannot_be_read_leaves_its_model_in_a_lower_one(
    tmp_path: Path, models: list[str] | None
) -> None:
    given = repository(tmp_path, a=(variant("fp32", "fp32", "pool"),), b=(variant("fp32", "fp32", "pool"),))
    (tmp_path / "a" / "2" / "model.yaml").write_text("name: [")
    found = read_catalogue(given, models, "fp32")
    assert [one.key for one in found.loadables] == ["a:1/fp32", "b:2/fp32"][: 1 if models else 2]
    assert found.problems.keys() == {("a", "2")} and "is not valid YAML" in found.problems["a", "2"]
    with pytest.raises(RepositoryError, match="is not valid YAML"):
        read_catalogue(given, ["a:2"], "fp32")


def refuse_d(manifest: Manifest) -> None:
    if manifest.name == "d":
        raise StartError("its steps may not run here")


@pytest.mark.slow
def test_what_is_wrong_with_one_model_keeps_no_other_away_unless_it_is_named(tmp_path: Path) -> None:
    one = (variant("fp32", "fp32", "pool"),)
    models = repository(tmp_path, a=one, b=one, c=one, d=one)
    cut(tmp_path, "a", "1", "2")
    for version in ("1", "2"):
        (tmp_path / "b" / version / "model.yaml").write_text("name: [")
    found = read_catalogue(models, None, "fp32", check=refuse_d)
    assert [one.key for one in found.loadables] == ["c:2/fp32"]
    assert found.problems.keys() == {("a", "2"), ("b", "1"), ("b", "2"), ("d", "2")}
    for name, why in (("a", "sha256"), ("b", "is not valid YAML")):
        with pytest.raises(RepositoryError, match=why):
            read_catalogue(models, ["c", name], "fp32")
    with pytest.raises(StartError, match="may not run here"):
        read_catalogue(models, ["c", "d"], "fp32", check=refuse_d)
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(StartError, match=r"could be loaded:\na: .*sha256.*\nb: .*YAML(?s:.*)\nd: its steps"):
        read_catalogue(models, None, "fp32", check=refuse_d)
