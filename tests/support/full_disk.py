"""A disk that takes nothing: a small tmpfs, where this machine lets one be mounted, filled and emptied by the test."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FILLER = ".filler"
NAMES = 200


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Leave no byte and no name free."""
        with (self.folder / FILLER).open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"0" * 4096)
            except OSError as error:
                assert error.errno == errno.ENOSPC

        with suppress(OSError):
            for number in range(NAMES):
                (self.folder / f"{FILLER}-{number}").touch()

    def empty(self) -> None:
        for file in self.folder.glob(f"{FILLER}*"):
            file.unlink()

    def read_only(self) -> None:
        _mount("-o", "remount,ro", str(self.folder))


@contextmanager
def small_disk(folder: Path, *, size: str = "64k") -> Iterator[SmallDisk]:
    """A tmpfs at the folder, unmounted at the end; skips the test where none can be mounted."""
    folder.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a small disk")
    try:
        _mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={NAMES}", "tidegate-test", str(folder))
    except subprocess.CalledProcessError:
        pytest.skip("no disk can be mounted here")
    try:
        yield SmallDisk(folder)
    finally:
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)
