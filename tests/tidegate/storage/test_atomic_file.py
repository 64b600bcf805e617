"""Atomic file writes: the old content or the new one, the exact mode, and nothing left behind after a failure."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate.storage.atomic_file import link_atomically, move_durably, replacing, write_atomically


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was flushed to the disk, in order: the names of files and folders, and "rename" for each rename."""
    done: list[str] = []

    def fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def replace(source: os.PathLike[str], target: os.PathLike[str], real: Callable[..., None] = os.replace) -> None:
        done.append("rename")
        real(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return done


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_replaces_the_whole_content(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"a long first content", durable=durable)
    write_atomically(path, b"second", durable=durable)
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["file"]


def test_the_file_is_flushed_before_its_rename_and_the_folder_after_it(tmp_path: Path, synced: list[str]) -> None:
    write_atomically(tmp_path / "file", b"content")
    file, rename, folder = synced
    assert file.startswith(".file.") and file.endswith(".new")
    assert (rename, folder) == ("rename", tmp_path.name)


def test_a_write_that_need_not_be_durable_flushes_nothing(tmp_path: Path, synced: list[str]) -> None:
    write_atomically(tmp_path / "file", b"content", durable=False)
    assert synced == ["rename"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_given_mode_is_exact_whatever_the_umask_and_the_old_mode(tmp_path: Path, umask: None, mode: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o666)
    write_atomically(path, b"new", mode=mode)
    assert mode_of(path) == mode


def test_without_a_mode_the_umask_decides(tmp_path: Path, umask: None) -> None:
    write_atomically(tmp_path / "file", b"content")
    assert mode_of(tmp_path / "file") == 0o640


def test_a_secret_is_never_readable_by_others_while_it_is_written(
    tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def opened(path: str, flags: int, mode: int = 0o777, real: Callable[..., int] = os.open) -> int:
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            made.append(mode)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", opened)
    write_atomically(tmp_path / "key", b"secret", mode=0o600)
    assert made == [0o600]


def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failing", ["write", "fsync", "replace", "open"])
def test_an_error_names_the_file_and_not_the_hidden_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "write":
        monkeypatch.setattr(os, "fchmod", full)  # fails in the same place as a write, which cannot be replaced
    elif failing == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif failing == "replace":
        path.mkdir()
    else:
        path = tmp_path / "none" / "file"
    with pytest.raises(OSError) as caught:
        write_atomically(path, b"new", mode=0o600)
    assert (caught.value.filename, caught.value.filename2) == (str(path), None)
    assert str(caught.value).endswith(f": '{path}'")


def test_a_missing_folder_is_made_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "one" / "two" / "file"
    with pytest.raises(FileNotFoundError):
        write_atomically(path, b"content")
    write_atomically(path, b"content", parents=True)
    assert path.read_bytes() == b"content"


@pytest.mark.slow
def test_several_writers_of_one_path_never_mix_their_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([number]) * 100_000 for number in range(4)]
    writers = [
        threading.Thread(target=lambda content=content: [write_atomically(path, content) for _ in range(20)])  # type: ignore[misc]
        for content in contents
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert path.read_bytes() in contents
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_written_under_another_path_takes_the_name_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with replacing(path) as temporary:
        temporary.write_bytes(b"weights")
        assert not path.exists()
    assert path.read_bytes() == b"weights"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_a_moved_file_is_flushed_first(tmp_path: Path, synced: list[str]) -> None:
    partial, whole = tmp_path / "partial", tmp_path / "whole"
    partial.write_bytes(b"content")
    move_durably(partial, whole)
    assert whole.read_bytes() == b"content" and not partial.exists()
    assert synced == ["partial", "rename", tmp_path.name]


def test_a_link_gets_a_new_target_in_one_step(tmp_path: Path, synced: list[str]) -> None:
    link = tmp_path / "current"
    for target in ("one", "two"):
        link_atomically(link, target)
        assert os.readlink(link) == target
    assert synced == ["rename", tmp_path.name] * 2
    assert os.listdir(tmp_path) == ["current"]
