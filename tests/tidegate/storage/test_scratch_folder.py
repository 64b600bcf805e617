"""Scratch folders go with their process, by its own hand or by the next one's; nothing else is ever touched."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidegate.storage.scratch_folder import ScratchFolder, sweep

PREFIX = "scratch-"
OWNER = """
import sys, tempfile, threading
from tidegate.storage.scratch_folder import ScratchFolder
tempfile.tempdir = sys.argv[1]
for _ in range(int(sys.argv[2])):
    folder = ScratchFolder.make("scratch-")
    (folder.files / "compiled").mkdir()
    (folder.files / "compiled" / "kernel").write_text("x")
    for thread in threading.enumerate():
        if thread.name == "scratch sweep":
            thread.join()
    print(folder.root, file=sys.stderr, flush=True)  # the log goes to stdout
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made; what a process sweeps by itself there is nothing yet."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def killed_owners(place: Path, count: int = 1) -> list[Path]:
    """Folders that a process has made, which was killed since."""
    with started(place, count) as owner:
        folders = told_by(owner, count)
        owner.kill()
    return folders


def started(place: Path, count: int = 1) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", OWNER, str(place), str(count)], stdin=pipe, stderr=pipe, text=True)


def told_by(owner: subprocess.Popen[str], count: int = 1) -> list[Path]:
    assert owner.stderr is not None
    return [Path(owner.stderr.readline().strip()) for _ in range(count)]


def abandoned(root: Path) -> Path:
    """A folder as a killed process leaves it."""
    (root / "files").mkdir(parents=True)
    (root / "owner").touch()
    return root


def swept_aside() -> None:
    """Wait for the thread that this process sweeps in."""
    for thread in threading.enumerate():
        if thread.name == "scratch sweep":
            thread.join()


def test_a_folder_is_its_users_alone_and_goes_with_all_that_is_in_it(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    folder = ScratchFolder.make(PREFIX)
    assert (folder.root.parent, folder.root.stat().st_mode & 0o777) == (place, 0o700)
    (folder.files / "a").mkdir()
    (folder.files / "a" / "b").write_text("x")
    folder.remove()
    swept_aside()
    assert os.listdir(place) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_the_folders_of_a_killed_process_are_swept_and_those_of_one_that_lives_are_not(place: Path) -> None:
    left = killed_owners(place, 2)
    with started(place) as owner:
        (kept,) = told_by(owner)
        assert [one for one in left if one.exists()] == [], "it has swept when it began"
        assert sweep(place, PREFIX) == 0
        assert (kept / "files" / "compiled" / "kernel").read_text() == "x"
        owner.kill()
        owner.wait()
        assert sweep(place, PREFIX) == 1
    assert os.listdir(place) == []


def test_a_process_sweeps_a_place_once_and_never_its_own_folders(place: Path) -> None:
    left = abandoned(place / f"{PREFIX}left")
    first = ScratchFolder.make(PREFIX)
    swept_aside()
    assert os.listdir(place) == [first.root.name]
    abandoned(left)
    second = ScratchFolder.make(PREFIX)
    swept_aside()
    assert sorted(place.iterdir()) == sorted([left, first.root, second.root])
    assert sweep(place, PREFIX) == 1
    assert first.files.is_dir() and second.files.is_dir()


def test_a_folder_that_nobody_locked_and_one_of_another_name_are_left_alone(place: Path) -> None:
    unlocked, named = place / f"{PREFIX}of-before", abandoned(place / "other")
    (unlocked / "files").mkdir(parents=True)
    (place / f"{PREFIX}file").touch()
    assert sweep(place, PREFIX) == 0
    assert (unlocked / "files").is_dir() and (named / "files").is_dir()


def test_no_symbolic_link_is_followed(place: Path, tmp_path: Path) -> None:
    outside = abandoned(tmp_path / "outside")
    (outside / "files" / "theirs").write_text("theirs")
    (place / f"{PREFIX}link").symlink_to(outside)
    inner, lock = abandoned(place / f"{PREFIX}inner"), place / f"{PREFIX}lock"
    (inner / "files" / "link").symlink_to(outside)
    (lock / "files").mkdir(parents=True)
    (lock / "owner").symlink_to(outside / "owner")
    assert sweep(place, PREFIX) == 1
    assert not inner.exists()
    assert lock.is_dir()
    assert (outside / "files" / "theirs").read_text() == "theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_a_folder_of_another_user_is_left_alone(place: Path) -> None:
    theirs = abandoned(place / f"{PREFIX}theirs")
    os.chown(theirs, 65534, 65534)
    assert sweep(place, PREFIX) == 0
    assert (theirs / "files").is_dir()


def test_many_may_sweep_at_once_and_each_folder_is_swept_by_one_of_them(place: Path) -> None:
    for number in range(60):
        (abandoned(place / f"{PREFIX}{number}") / "files" / "x").touch()
    with ThreadPoolExecutor(4) as pool:
        swept = pool.map(lambda _: sweep(place, PREFIX), range(4))
    assert sum(swept) == 60
    assert os.listdir(place) == []


def test_what_cannot_be_removed_yet_is_left_for_the_next_sweep(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandoned(place / f"{PREFIX}left")
    with monkeypatch.context() as failing:
        failing.setattr(shutil, "rmtree", lambda *_, **__: None)  # as where the disk refuses it
        assert sweep(place, PREFIX) == 0
    assert (left / "owner").exists()
    assert sweep(place, PREFIX) == 1


@pytest.mark.slow
def test_folders_nested_deeper_than_pythons_calls_stop_nobody(place: Path) -> None:
    folder = ScratchFolder.make(PREFIX)
    deepest = os.open(folder.files, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 10):
        os.mkdir("d", dir_fd=deepest)
        outer, deepest = deepest, os.open("d", os.O_RDONLY, dir_fd=deepest)
        os.close(outer)
    os.close(deepest)
    folder.remove()
    subprocess.run(["rm", "-rf", str(place)], check=True)


def test_a_place_without_locks_has_folders_that_nobody_sweeps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as failing:
        failing.setattr(fcntl, "flock", without)
        folder = ScratchFolder.make(PREFIX)
    assert os.listdir(folder.root) == ["files"]
    assert sweep(place, PREFIX) == 0
    folder.remove()
    assert os.listdir(place) == []


def test_a_place_that_takes_no_folder_says_so_and_keeps_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="no space left"):
        ScratchFolder.make(PREFIX)
    assert os.listdir(place) == []
    assert len(os.listdir("/proc/self/fd")) == before
