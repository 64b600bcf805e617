"""A scratch folder is gone when its process is, also when that process was killed.

    TMPDIR/tidegate-worker-k3j2h1x_/
        owner     locked by the process that made the folder, for as long as it lives
        files/    what the folder is for

Its process removes it at the end. One that is killed (SIGKILL, the kernel for want of memory) removes nothing, and
what runtimes compile and keep there takes gigabytes. So the first folder that a process makes in a place has those
swept that lost their owner there.

Whether an owner lives is told by a lock, which the kernel drops with its holder. A process id does not tell: numbers
are given anew, and containers that share a place number their processes each for themselves. The lock lies beside
`files`, so that a program that may write there alone (`tidegate/workers/sandbox.py`) cannot take it away.

Invariants:
* A folder whose owner lives is not swept: the lock's file has its name only once it is locked. A folder without such a
  file is left alone, whoever made it.
* Nor is one of another user's, nor anything that a symbolic link leads to.
* Of two that sweep at once one gets a folder's lock, and the other passes it over.

What it leaves: the empty folder of a process that is killed before it has locked it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import structlog

_OWNER: Final = "owner"
_FILES: Final = "files"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScratchFolder:
    """A folder for this user alone, by `make`. Its maker removes it."""

    root: Path
    held: int | None  # the lock's descriptor

    @classmethod
    def make(cls, prefix: str) -> ScratchFolder:
        """A new one, and those of this prefix that lost their owner are removed meanwhile. Raises OSError."""
        root = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            (root / _FILES).mkdir(0o700)
            made = cls(root, _hold(root))
        except OSError:
            shutil.rmtree(root, ignore_errors=True)
            raise
        _sweep_aside(root.parent, prefix)
        return made

    @property
    def files(self) -> Path:
        return self.root / _FILES

    def remove(self) -> None:
        """Remove it with all that is in it, as far as the disk lets that be. Once; blocks."""
        try:
            with suppress(OSError), _opened(self.root, _FOLDER) as folder:
                _empty(folder)
                self.root.rmdir()
        finally:
            if self.held is not None:
                os.close(self.held)


def sweep(place: Path, prefix: str) -> int:
    """Remove the folders in this place that lost their owner, and say how many they were. Blocks."""
    swept = 0
    for name in os.listdir(place):
        if name.startswith(prefix):
            with suppress(OSError):  # another one sweeps it, or it is none of ours
                swept += _sweep_one(place / name)
    return swept


@cache
def _sweep_aside(place: Path, prefix: str) -> None:
    """Sweep once in the life of this process, in a thread that nobody waits for."""

    def run() -> None:
        if swept := sweep(place, prefix):
            log.debug("scratch folders of killed processes were removed", folders=swept, place=str(place))

    threading.Thread(target=run, name="scratch sweep", daemon=True).start()


def _hold(root: Path) -> int | None:
    """The lock of a folder that is made; None where the place has no locks: then nobody sweeps it."""
    named = root / f"{_OWNER}.new"
    held = os.open(named, _LOCK | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named.rename(root / _OWNER)
    except OSError:
        os.close(held)
        named.unlink()
        return None
    return held


def _sweep_one(root: Path) -> bool:
    """Remove a folder that lost its owner. Raises OSError: its owner lives, say, or it has none."""
    with _opened(root, _FOLDER) as folder:
        if os.fstat(folder).st_uid != os.geteuid():
            return False
        with _opened(_OWNER, _LOCK, within=folder) as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)
    root.rmdir()
    return True


def _empty(folder: int) -> None:
    """Remove what is in a folder whose lock is held here. The lock's file goes last: what is left is swept again."""
    with suppress(RecursionError):  # a program may nest folders deeper than Python's calls
        shutil.rmtree(_FILES, ignore_errors=True, dir_fd=folder)
    if os.listdir(folder) == [_OWNER]:
        os.unlink(_OWNER, dir_fd=folder)


@contextmanager
def _opened(path: Path | str, flags: int, *, within: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
