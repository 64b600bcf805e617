"""The golden prompts of a plan: those recorded with the variant, or those of a file, and none that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.models.text_side import text_side_folder
from tests.support.paced_generation import write_pace
from tidegate.generate.teacher_forcing import KnownAnswer
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import ArtefactFile, Manifest
from tidegate.models.repository import Repository, RepositoryError, save_manifest
from tidegate.rollout.golden_prompts import GoldenPrompts, encode_prompts
from tidegate.tools.delivery.plan import golden_of, recorded_golden

ANSWERS = (KnownAnswer((5, 6), (7, 8, 9)),)


def talker(root: Path, *, recorded: bool) -> Manifest:
    """A generating model, with golden prompts beside its variant or without."""
    folder = root / "talker" / "1"
    folder.mkdir(parents=True)
    manifest = text_side_folder(folder)
    path = write_pace(folder)
    (variant,) = manifest.variants
    variant = replace(variant, artefact=path.name, sha256=sha256_of(path), size_bytes=path.stat().st_size)
    if recorded:
        golden = folder / "golden-paced.msgpack"
        golden.write_bytes(prompts_of(manifest))
        file = ArtefactFile(golden.name, sha256_of(golden), golden.stat().st_size)
        variant = replace(variant, golden=file)
    made = replace(manifest, variants=(variant,))
    save_manifest(folder, made)
    return made


def prompts_of(manifest: Manifest, *answers: KnownAnswer) -> bytes:
    assert manifest.generative is not None
    return encode_prompts(GoldenPrompts(manifest.generative.vocabulary, "paced", answers or ANSWERS))


def test_what_was_recorded_with_the_variant_is_what_devices_are_asked(tmp_path: Path) -> None:
    assert recorded_golden(Repository(tmp_path), talker(tmp_path / "none", recorded=False)) is None
    manifest = talker(tmp_path / "some", recorded=True)
    repository = Repository(tmp_path / "some")
    found = recorded_golden(repository, manifest)
    assert found is not None and found.path.read_bytes() == prompts_of(manifest)

    path = repository.folder(manifest) / "golden-paced.msgpack"
    path.write_bytes(prompts_of(manifest, KnownAnswer((5, 6), (1, 2, 3))))
    with pytest.raises(
        RepositoryError, match="are not the golden prompts that the manifest names; `tidegate model golden"
    ):
        recorded_golden(repository, manifest)


def test_a_file_that_holds_none_is_refused_with_the_command_that_writes_some(tmp_path: Path) -> None:
    manifest = talker(tmp_path / "models", recorded=False)
    path = tmp_path / "golden.msgpack"
    path.write_bytes(prompts_of(manifest))
    assert golden_of(path, manifest).path.read_bytes() == prompts_of(manifest)
    for raw in (b"PK", prompts_of(manifest, KnownAnswer((5,), (5000,)))):
        path.write_bytes(raw)
        with pytest.raises(RepositoryError, match="`tidegate model golden talker --out FILE` writes golden prompts"):
            golden_of(path, manifest)
