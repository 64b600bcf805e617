"""Files that survive a power cut: the whole new content under the name, or the whole old one.

Written beside, synced, renamed, and the folder synced, since the rename itself must survive too. The file beside has
one fixed name, so that cuts leave no litter; so a path has one writer at a time. All of it blocks for the disk.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Raises OSError; then the old content is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def link_durably(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, over what it was. Raises OSError; then it is what it was."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    os.symlink(target, beside)
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in the folder is on disk when this returns. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
