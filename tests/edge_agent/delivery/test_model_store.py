"""The model store and the journal are intact after a rollout, also when it was cut short."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge_agent.core.rollout_machine import S
from edge_agent.delivery import model_store
from edge_agent.delivery.journal import DeploymentJournal
from edge_agent.delivery.model_store import Generation, ModelStore
from edge_agent.delivery.partial_file import BadChunk, PartialFile
from tests.edge_agent.core.test_rollout_machine import ROLLOUT
from tests.support.bad_block import on_a_bad_block
from tests.support.edge.rollouts import Made, made
from tests.support.models.artefacts import artefact_of
from tidegate.models.digest import sha256_of
from tidegate.models.trusted_digests import TrustedDigests
from tidegate.rollout.plan import Artefact
from tidegate.storage.atomic_file import link_atomically

CONTENT = bytes(range(256)) * 100
ARTEFACT = artefact_of("x", CONTENT, 4096)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    store = ModelStore(tmp_path)
    store.prepare()
    return store


def bring(store: ModelStore, one: Made, generation: int) -> None:
    """As a rollout would have it committed."""
    plan = one.plan(keep=2)
    for artefact in plan.artefacts:
        store.path(artefact.sha256).write_bytes(one.contents[artefact.sha256])
    store.stage("double", plan)
    store.commit(store.committed().with_model("double", plan, generation))


def append(path: Path, content: bytes, artefact: Artefact = ARTEFACT) -> tuple[int, bool]:
    """(bytes held, whole) after appending."""
    with PartialFile(path, artefact) as partial:
        partial.append(content[partial.held_bytes :])
        return partial.held_bytes, partial.is_whole


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, len(CONTENT)), max_size=8).map(sorted), rot=st.integers(0, len(CONTENT) - 1))
def test_a_file_comes_whole_over_any_cuts_and_rot_costs_what_comes_after_it(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], rot: int
) -> None:
    path = tmp_path_factory.mktemp("partial") / "file"
    for cut in cuts:
        assert append(path, CONTENT[:cut])[0] == cut
    raw = bytearray(path.read_bytes()) if path.exists() else bytearray()
    if rot < len(raw):  # a power cut left something else
        raw[rot] ^= 1
        path.write_bytes(raw)
        with PartialFile(path, ARTEFACT) as partial:
            assert partial.checked_bytes <= rot
    while True:
        try:
            assert append(path, CONTENT)[1]
            break
        except BadChunk as error:  # an unchecked tail that rotted is found when its chunk is whole
            assert error.number == rot // 4096
    with PartialFile(path, ARTEFACT) as partial:
        assert partial.is_right()
    assert path.read_bytes() == CONTENT


def test_a_bad_chunk_is_cut_off_and_named(tmp_path: Path) -> None:
    with PartialFile(tmp_path / "file", ARTEFACT) as partial:
        with pytest.raises(BadChunk, match="chunk 1 has another digest"):
            partial.append(CONTENT[:4096] + bytes(4096))
        assert partial.held_bytes == partial.checked_bytes == 4096
        partial.append(CONTENT[4096:])
        assert partial.is_whole


def test_nothing_is_committed_until_the_link_is_swapped_and_a_broken_link_is_nothing(store: ModelStore) -> None:
    assert store.committed() == Generation()
    bring(store, made("2"), 1)
    assert store.committed().models["double"].version == "2"
    (store.root / "current").unlink()
    assert store.committed() == Generation()
    assert store.next_number() == 2


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [on_a_bad_block, emptied, Path.unlink])
def test_a_committed_generation_that_cannot_be_read_falls_back_to_the_one_before_and_nothing_is_collected(
    store: ModelStore, damage: Callable[[Path], None]
) -> None:
    versions = [made(str(number), factor=float(number)) for number in (2, 3, 4)]
    for generation, one in enumerate(versions, start=1):
        bring(store, one, generation)
    damage(store.root / "generations" / "3.json")

    assert store.committed().number == 2
    store.collect([])
    contents = {one.plan().content for one in versions}
    assert {path.name for path in (store.root / "versions").iterdir()} == contents
    assert all(store.is_complete(one.plan()) for one in versions)


@pytest.mark.parametrize("damage", [on_a_bad_block, emptied])
def test_a_generation_that_cannot_be_read_holds_up_the_collection_until_newer_ones_supersede_it(
    store: ModelStore, damage: Callable[[Path], None]
) -> None:
    bring(store, made("2"), 1)
    damage(store.root / "generations" / "1.json")
    assert store.committed() == Generation()
    assert store.next_number() == 2, "no number is given twice"

    for number in (2, 3):
        bring(store, made(str(number + 1), factor=float(number + 1)), number)
        store.collect([])
        assert store.repository(made("2").plan().content).exists() == (number == 2)
    assert [one.number for one in store.kept()] == [3, 2]
    assert not (store.root / "generations" / "1.json").is_symlink()


def test_a_generation_whose_commit_was_cut_short_stands_in_for_none(store: ModelStore) -> None:
    for generation, version in enumerate(("2", "3", "4"), start=1):
        bring(store, made(version, factor=float(version)), generation)
    link_atomically(store.root / "current", "generations/2.json")  # as before the power went
    on_a_bad_block(store.root / "generations" / "2.json")
    assert store.committed().number == 1


def test_where_a_copy_has_made_a_file_of_the_link_and_that_is_damaged_the_newest_generation_counts(
    store: ModelStore,
) -> None:
    one, current = made("2"), store.root / "current"
    bring(store, one, 1)
    current.unlink()
    emptied(current)
    assert store.committed().number == 1
    store.collect([])
    assert store.is_complete(one.plan())


def test_generations_that_cannot_be_listed_keep_the_committed_one_from_nothing_and_let_nothing_be_collected(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("2")
    bring(store, one, 1)

    def unreadable(_: Path) -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(model_store.os, "listdir", unreadable)
    assert store.kept() == []
    assert store.committed().number == 1
    with pytest.raises(OSError, match="Input/output error"):
        store.collect([])
    assert store.is_complete(one.plan())


def test_a_version_is_staged_once_and_its_litter_does_not_matter(store: ModelStore) -> None:
    one = made("2")
    bring(store, one, 1)
    root = store.repository(one.plan().content)
    litter = root.with_name(f".{root.name}")
    litter.mkdir()
    assert store.stage("double", one.plan()) == root
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == [
        "int8.onnx", "model.yaml", "trusted.digests"
    ]  # fmt: skip


def test_what_is_kept_is_the_newest_of_each_model_and_what_is_wanted(store: ModelStore) -> None:
    versions = [made(str(number), factor=float(number)) for number in (2, 3, 4)]
    for generation, one in enumerate(versions, start=1):
        bring(store, one, generation)
    wanted = made("9", factor=9.0)
    store.partial(wanted.files[1].sha256).write_bytes(b"half")
    store.partial("0" * 64).write_bytes(b"nobody's")
    store.collect([wanted.plan()])
    assert [one.number for one in store.kept()] == [3, 2]
    contents = {one.plan().content for one in versions[1:]}
    assert {path.name for path in (store.root / "versions").iterdir()} == contents
    assert [path.name for path in (store.root / "partial").iterdir()] == [wanted.files[1].sha256]
    assert not store.path(versions[0].files[1].sha256).exists()
    assert store.path(versions[1].files[1].sha256).exists()


def test_what_the_disk_has_damaged_is_removed_and_what_is_right_stays(store: ModelStore) -> None:
    one, other = made("2"), made("3", factor=3.0)
    for generation, model in enumerate((one, other), start=1):
        bring(store, model, generation)
    files, content = [file.sha256 for file in one.files], one.plan().content
    assert not store.discard_damaged(content, files, [one.golden.sha256])
    assert store.holds(content)

    with store.path(files[1]).open("r+b") as rotten:  # and so is its link in the version
        rotten.write(b"rot")
    assert store.discard_damaged(content, files)
    assert not store.holds(content)
    assert [store.has(file) for file in one.files] == [True, False]
    assert store.missing_bytes(one.plan()) == one.files[1].size_bytes
    assert not store.repository(content).exists()
    assert store.holds(other.plan().content)

    bring(store, one, 3)
    store.healed(content)
    assert store.holds(content)
    (store.repository(content) / "double" / "2" / "int8.onnx").unlink()
    assert store.discard_damaged(content, files)
    assert store.is_complete(one.plan())  # only the folder was damaged


def test_a_damaged_trust_list_costs_the_folder_and_no_file(store: ModelStore) -> None:
    one = made("2")
    bring(store, one, 1)
    files, content = [file.sha256 for file in one.files], one.plan().content
    trusted = TrustedDigests(store.repository(content))
    trusted.path.write_bytes(trusted.path.read_bytes().replace(b"sha256:", b"sha2\x1156:"))
    assert store.discard_damaged(content, files)
    assert not store.holds(content)
    assert store.is_complete(one.plan())
    store.stage("double", one.plan())
    assert set(trusted.entries()) == set(files)


def test_a_file_is_read_back_once_and_not_at_all_where_it_is_known_to_be_right(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def recorded(path: Path, **keys: Any) -> str:
        read.append(path.name)
        return sha256_of(path, **keys)

    monkeypatch.setattr(model_store, "sha256_of", recorded)
    one = made("2")
    bring(store, one, 1)
    files, content = [file.sha256 for file in one.files], one.plan().content
    assert not store.discard_damaged(content, files)
    assert sorted(read) == sorted(files)  # and not their links, too
    read.clear()
    assert not store.discard_damaged(content, files, verified=files[:1])
    assert read == files[1:]


def test_a_medium_that_cannot_be_read_counts_as_damage_and_a_check_that_is_stopped_removes_nothing(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("2")
    bring(store, one, 1)
    files, content = [file.sha256 for file in one.files], one.plan().content

    def unreadable(path: Path, **keys: Any) -> str:
        if path.name == files[0]:
            raise OSError(errno.EIO, "Input/output error")
        return sha256_of(path, **keys)

    monkeypatch.setattr(model_store, "sha256_of", unreadable)
    assert not store.discard_damaged(content, files, stopped=lambda: True)
    assert store.is_complete(one.plan()) and store.holds(content)
    assert store.discard_damaged(content, files)
    assert [store.has(file) for file in one.files] == [False, True]


def test_the_journal_comes_back_and_remembers_what_is_not_tried_again(tmp_path: Path) -> None:
    journal = DeploymentJournal(tmp_path / "journal.json")
    failed = replace(ROLLOUT, state=S.FAILED, reason="onnx: broken", blocked=True)
    journal.write(ROLLOUT)
    journal.write(failed)
    again = DeploymentJournal(journal.path)
    again.open()
    assert again.records == {"digits": failed}
    assert again.blocked == {failed.content: {"device/kiosk-1": 7}}
    again.forget("digits")
    assert again.records == {}


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b'{"records": {'), on_a_bad_block])
def test_a_damaged_journal_is_put_aside(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "journal.json"
    path.write_bytes(b"{}")
    damage(path)
    journal = DeploymentJournal(path)
    journal.open()
    assert journal.records == {}
    assert path.with_name("journal.json.damaged").exists()
    journal.write(ROLLOUT)
    again = DeploymentJournal(path)
    again.open()
    assert again.records == {"digits": ROLLOUT}
