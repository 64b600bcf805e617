"""The model repository: the versions that it finds, their order, and the error for each possible mistake."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Bounds, Cost, Manifest, TensorSpec, Text, Variant
from tidegate.models.repository import (
    Repository,
    RepositoryError,
    manifest_text,
    parse_manifest,
    save_manifest,
    version_key,
)
from tidegate.outcome import ModelNotFound
from tidegate.types import Datatype

ARTEFACT = b"weights"
VARIANT = Variant(
    name="int8",
    artefact="m.onnx",
    engine="onnx",
    precision="int8",
    where=("edge", "pool"),
    sha256=hashlib.sha256(ARTEFACT).hexdigest(),
    size_bytes=len(ARTEFACT),
)
MANIFEST = Manifest(
    name="m",
    version="1",
    inputs=(TensorSpec("ids", Datatype.INT64, ("batch", 2), bounds=Bounds(0, 9)),),
    outputs=(TensorSpec("vector", Datatype.FP32, ("batch", 4)),),
    variants=(VARIANT,),
    cost=Cost("tokens", "ids"),
    axes={"batch": Axis(1, 8)},
)
TEXT = manifest_text(MANIFEST)
SOURCE = Path("m/1/model.yaml")


def put(root: Path, **changes: Any) -> Path:
    manifest = msgspec.structs.replace(MANIFEST, **changes)
    folder = root / manifest.name / manifest.version
    save_manifest(folder, manifest)
    (folder / "m.onnx").write_bytes(ARTEFACT)
    return folder


def test_a_saved_manifest_is_read_back_as_it_was(tmp_path: Path) -> None:
    put(tmp_path)
    assert Repository(tmp_path).manifests() == (MANIFEST,)


def test_the_same_manifest_is_always_spelled_the_same_and_the_schema_comes_first() -> None:
    assert manifest_text(parse_manifest(TEXT, SOURCE)) == TEXT
    assert TEXT.startswith("schema: 1\nname: m\n")
    assert list(yaml.safe_load(TEXT))[:4] == ["schema", "name", "version", "inputs"]


def test_models_are_sorted_by_name_and_then_by_version(tmp_path: Path) -> None:
    for name, version in [("b", "1"), ("a", "10"), ("a", "9")]:
        put(tmp_path, name=name, version=version)
    assert [(one.name, one.version) for one in Repository(tmp_path).manifests()] == [
        ("a", "9"),
        ("a", "10"),
        ("b", "1"),
    ]


def test_without_a_version_the_highest_is_meant(tmp_path: Path) -> None:
    for version in ("2", "10", "9"):
        put(tmp_path, version=version)
    repository = Repository(tmp_path)
    assert repository.manifest("m").version == "10"
    assert repository.manifest("m", "2").version == "2"


@pytest.mark.parametrize(
    ("lower", "higher"), [("2", "10"), ("1.2", "1.10"), ("1", "1.1"), ("7", "rc"), ("1-rc2", "1-rc10")]
)
def test_versions_are_ordered_as_people_do(lower: str, higher: str) -> None:
    assert version_key(lower) < version_key(higher)


def test_an_unknown_model_or_version_names_the_existing_ones(tmp_path: Path) -> None:
    put(tmp_path)
    repository = Repository(tmp_path)
    with pytest.raises(ModelNotFound, match=r"no model 'n' \(models: m\)"):
        repository.manifest("n")
    with pytest.raises(ModelNotFound, match=r"'m' has no version '2' \(versions: 1\)"):
        repository.manifest("m", "2")


def test_an_empty_repository_has_no_models(tmp_path: Path) -> None:
    assert Repository(tmp_path).manifests() == ()
    with pytest.raises(ModelNotFound, match="models: none"):
        Repository(tmp_path).manifest("m")


def test_a_repository_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"nowhere.*No such file.*tidegate model build"):
        Repository(tmp_path / "nowhere").manifests()


def test_a_build_in_progress_is_not_a_model(tmp_path: Path) -> None:
    put(tmp_path)
    (tmp_path / ".trash" / "1").mkdir(parents=True)
    (tmp_path / "m" / ".building-2").mkdir()
    (tmp_path / "README.md").write_text("not a model")
    assert len(Repository(tmp_path).manifests()) == 1


def test_a_version_without_a_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "m" / "3").mkdir(parents=True)
    with pytest.raises(RepositoryError, match=r"m/3/model\.yaml: cannot read the manifest: No such file"):
        Repository(tmp_path).manifests()


def test_a_new_version_is_seen_by_a_new_repository_and_not_by_one_that_has_read(tmp_path: Path) -> None:
    put(tmp_path)
    repository = Repository(tmp_path)
    assert repr(repository) == f"<Repository {tmp_path} unread>"
    repository.manifests()
    put(tmp_path, version="2")
    assert repr(repository) == f"<Repository {tmp_path} 1 versions>"
    assert repository.manifest("m").version == "1"
    assert Repository(tmp_path).manifest("m").version == "2"


@pytest.mark.parametrize(("key", "value"), [("name", "n"), ("version", "2")])
def test_a_manifest_in_another_models_folder_is_refused(tmp_path: Path, key: str, value: str) -> None:
    folder = put(tmp_path)
    folder.joinpath("model.yaml").write_text(manifest_text(msgspec.structs.replace(MANIFEST, **{key: value})))
    with pytest.raises(RepositoryError, match=rf"model\.yaml: {key}: '{value}' does not match the folder's"):
        Repository(tmp_path).manifests()


def test_files_have_their_places(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    assert repository.folder(MANIFEST) == tmp_path / "m" / "1"
    assert repository.artefact(MANIFEST, VARIANT) == tmp_path / "m" / "1" / "m.onnx"
    assert repository.tokenizer(MANIFEST) is None
    text = Text("t.json", 2, "ids", "ids", "vector")
    assert repository.tokenizer(msgspec.structs.replace(MANIFEST, text=text)) == tmp_path / "m" / "1" / "t.json"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("summary", "", None),
        ("schema: 1", "schema: 2", r"schema: Invalid enum value 2, namely 2"),
        ("name: m", "nmae: m", r"unknown key 'nmae' = 'm'; did you mean 'name'\?"),
        ("engine: onnx", "engine: tflite", r"variants\[0\]\.engine: .*'tflite', namely 'tflite'"),
        ("where: [edge, pool]", "where: [fridge]", r"variants\[0\]\.where\[0\]: .*namely 'fridge'"),
        ("size_bytes: 7", "size_bytes: many", r"variants\[0\]\.size_bytes: Expected `int`, got `str`, namely 'many'"),
        ("precision: int8", "precission: int8", r"unknown key 'variants\[0\]\.precission' = 'int8'; did you mean"),
        ("min: 1", "min: one", r"axes\.batch: Expected `int`, got `str`, namely \{'min': 'one', 'max': 8\}"),
        ("min: 1", "minn: 1", r"axes\.batch: .*unknown field `minn`"),
        ("version: '1'", "version: 1", r"version: Expected `str`, got `int`, namely 1"),
        ("name: m\n", "name: m\nname: n\n", r"the key 'name' is there twice"),
        ("name: m\n", "", r"the manifest: Object missing required field `name`"),
        ("m.onnx", "../m.onnx", r"variants\[0\] \(int8\)\.artefact: '\.\./m\.onnx' must be a plain file name"),
        ("schema: 1", "[", r"is not valid YAML"),
        ("schema: 1", "zzzzzz: 1\nschema: 1", r"unknown key 'zzzzzz' = 1$"),
    ],
)
def test_a_broken_manifest_is_refused_by_file_key_and_value(old: str, new: str, message: str | None) -> None:
    text = TEXT.replace(old, new)
    if message is None:
        assert parse_manifest(text, SOURCE) == MANIFEST
        return
    assert text != TEXT
    with pytest.raises(RepositoryError, match=message) as caught:
        parse_manifest(text, SOURCE)
    assert str(caught.value).startswith("m/1/model.yaml: ")


@pytest.mark.parametrize(("text", "message"), [("- a", "not list"), ("", "not NoneType"), ("axes: 3", "axes|missing")])
def test_a_file_that_is_no_mapping_is_no_manifest(text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=message):
        parse_manifest(text, SOURCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: " + "9" * 5000, "a value that cannot be read"),
        ("a: 2024-13-99", "month must be in 1..12"),
        ("a: 0x_", "a value that cannot be read"),
        ("a: !!timestamp x", "a value that cannot be read"),
        ("a: !!bool x", "a value that cannot be read"),
        ("? [a]\n: b", "a value that cannot be read"),
        ("[" * 5000, "nested too deeply"),
        ("a: &a [x, x]\nb: [*a, *a]", "aliases are not allowed"),
        ("# " + "x" * 2**20, "has more than 1048576 characters"),
        (manifest_text(MANIFEST).replace("batch", r'"\ud800"'), "no Unicode|invalid Unicode"),
        ("name: {" + ", ".join(f"k{n}: 1" for n in range(5000)) + "}", "Expected `str`"),
    ],
)
def test_hostile_yaml_is_refused_like_any_other_mistake_and_in_few_words(text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=message) as refused:
        parse_manifest(text, SOURCE)
    assert str(refused.value).startswith(f"{SOURCE}: ")
    assert len(str(refused.value)) < 1000


def test_axes_that_are_no_mapping_are_named() -> None:
    with pytest.raises(RepositoryError, match=r"axes: Expected `object`, got `array`, namely \[1\]"):
        parse_manifest(yaml.safe_dump({**yaml.safe_load(TEXT), "axes": [1]}), SOURCE)


def test_the_one_wrong_axis_among_right_ones_is_named() -> None:
    axes = {"batch": {"min": 1, "max": 2}, "width": {"min": 1, "max": "wide"}}
    with pytest.raises(RepositoryError, match=r"axes\.width: Expected `int`, got `str`"):
        parse_manifest(yaml.safe_dump({**yaml.safe_load(TEXT), "axes": axes}), SOURCE)


def test_axes_with_a_key_that_is_no_name_are_refused() -> None:
    with pytest.raises(RepositoryError, match=r"axes"):
        parse_manifest(yaml.safe_dump({**yaml.safe_load(TEXT), "axes": {1: {"min": 1, "max": 2}}}), SOURCE)


def test_a_manifest_that_is_not_text_is_named(tmp_path: Path) -> None:
    put(tmp_path).joinpath("model.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RepositoryError, match="is not UTF-8 text"):
        Repository(tmp_path).manifests()


def test_a_manifest_with_a_mistake_is_not_saved(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(MANIFEST, cost=Cost("tokens", "nope"))
    with pytest.raises(RepositoryError, match=r"model\.yaml: cost\.input: 'nope' is not an input"):
        save_manifest(tmp_path / "m" / "1", wrong)
    assert not (tmp_path / "m").exists()


def test_saving_leaves_nothing_but_the_manifest(tmp_path: Path) -> None:
    save_manifest(tmp_path / "m" / "1", MANIFEST)
    assert [path.name for path in (tmp_path / "m" / "1").iterdir()] == ["model.yaml"]


def test_a_right_artefact_is_verified(tmp_path: Path) -> None:
    put(tmp_path)
    Repository(tmp_path).verify(MANIFEST, VARIANT)


def test_a_changed_artefact_is_refused_with_both_digests(tmp_path: Path) -> None:
    put(tmp_path).joinpath("m.onnx").write_bytes(b"weighty")
    changed = hashlib.sha256(b"weighty").hexdigest()
    with pytest.raises(
        RepositoryError, match=rf"m\.onnx: has sha256 {changed}, but variant 'int8' names {VARIANT.sha256}"
    ):
        Repository(tmp_path).verify(MANIFEST, VARIANT)


def test_a_cut_off_artefact_is_refused_with_both_sizes(tmp_path: Path) -> None:
    put(tmp_path).joinpath("m.onnx").write_bytes(b"weig")
    with pytest.raises(RepositoryError, match=r"m\.onnx: has 4 bytes, but variant 'int8' names 7"):
        Repository(tmp_path).verify(MANIFEST, VARIANT)


def test_a_missing_artefact_is_named(tmp_path: Path) -> None:
    put(tmp_path).joinpath("m.onnx").unlink()
    with pytest.raises(RepositoryError, match=r"m\.onnx: the artefact of variant 'int8': No such file"):
        Repository(tmp_path).verify(MANIFEST, VARIANT)


def with_text(sha256: str | None) -> Manifest:
    return msgspec.structs.replace(MANIFEST, text=Text("t.json", 2, "ids", "ids", "vector", sha256))


def test_a_tokenizer_is_verified_by_its_digest_where_the_manifest_names_one(tmp_path: Path) -> None:
    tokenizer = put(tmp_path).joinpath("t.json")
    tokenizer.write_bytes(b"words")
    digest = hashlib.sha256(b"words").hexdigest()
    repository = Repository(tmp_path)
    repository.verify_tokenizer(MANIFEST)
    repository.verify_tokenizer(with_text(None))
    repository.verify_tokenizer(with_text(digest))

    tokenizer.write_bytes(b"others")
    with pytest.raises(RepositoryError, match=rf"t\.json: has sha256 .*, but the manifest names {digest}"):
        repository.verify_tokenizer(with_text(digest))
    tokenizer.unlink()
    with pytest.raises(RepositoryError, match=r"t\.json: the tokenizer: No such file"):
        repository.verify_tokenizer(with_text(None))


def test_a_file_larger_than_one_piece_has_the_digest_of_the_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000
    path = tmp_path / "large"
    path.write_bytes(content)
    pieces: list[int] = []
    assert sha256_of(path, on_bytes=pieces.append) == hashlib.sha256(content).hexdigest()
    assert sum(pieces) == len(content)
    assert len(pieces) > 1


@pytest.mark.parametrize(
    ("section", "value", "said"),
    [
        ("batching", {"priority_queue_policy": {1: {}, 2: {"max_queue_size": "x"}}},
         "batching.priority_queue_policy.2: Expected `int`, got `str`, namely {'max_queue_size': 'x'}"),
        ("batching", {"priority_queue_policy": {3: {"size": 1}}},
         "batching.priority_queue_policy.3: Object contains unknown field `size`, namely {'size': 1}"),
        ("sequence", {"state_inputs": {"past": 3}}, "sequence.state_inputs.past: Expected `str`, got `int`, namely 3"),
        ("axes", {"batch": {}, "sequence": {"min": "x"}},
         "axes.sequence: Expected `int`, got `str`, namely {'min': 'x'}"),
    ],
)  # fmt: skip
def test_a_wrong_entry_of_any_mapping_is_named(section: str, value: object, said: str) -> None:
    raw = {**yaml.safe_load(TEXT), section: value}
    with pytest.raises(RepositoryError) as refused:
        parse_manifest(yaml.safe_dump(raw), Path("model.yaml"))
    assert str(refused.value) == f"model.yaml: {said}"
