"""A staged model version appears in the repository whole or not at all, however its build ends.

A build writes into a hidden folder beside its place and is renamed at the end, after everything is on the disk; readers
pass over hidden folders. What an earlier build left behind when it was cut off is removed by the next one. A lock on
the model's folder makes two builds of one model take turns; the kernel drops it when its holder dies, in whatever way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.storage.atomic_file import sync_file, sync_folder
from tidegate.tools.build.errors import BuildError


def check_vacant(root: Path, name: str, version: str, *, force: bool) -> None:
    """Raises BuildError where the version exists and is not to be replaced.

    Under the lock the answer holds; before it, it spares a wait for another build.
    """
    place = root / name / version
    if place.exists() and not force:
        raise BuildError(f"{place} exists; give another --version, or --force to replace it")


@contextmanager
def model_lock(root: Path, name: str) -> Iterator[None]:
    """Hold the right to write the versions of model `name`; waits for another holder."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staged_version(root: Path, name: str, version: str) -> Iterator[Path]:
    """An empty folder that replaces ROOT/NAME/VERSION when the block ends well. Needs the lock."""
    model = root / name
    for leftover in model.glob(".building-*"):
        shutil.rmtree(leftover)
    building, place = model / f".building-{version}", model / version
    building.mkdir()
    try:
        yield building
        _flush(building)
        _swap(building, place)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _swap(building: Path, place: Path) -> None:
    if place.exists():
        # A folder that is not empty cannot be replaced in one step. Cut off between the two renames, the version is
        # missing and gets built again; it is never half old and half new.
        old = building.with_name(f".building-{place.name}.old")
        os.rename(place, old)
        os.rename(building, place)
        shutil.rmtree(old)
    else:
        os.rename(building, place)
    sync_folder(place.parent)


def _flush(folder: Path) -> None:
    """Without it a power cut may keep the rename and lose the bytes."""
    for path in folder.iterdir():
        sync_file(path)
    sync_folder(folder)
