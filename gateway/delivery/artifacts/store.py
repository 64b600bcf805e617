"""A folder of files that are called what they hold: `sha256/DIGEST`.

    sha256/DIGEST          whole, checked, never changed
    partial/DIGEST         on its way in; its length says where to go on

A file gets its name by one rename, after all of it was written, hashed and synced. So whoever finds a name finds the
content that it names, after a power cut too, and two models that share a file have it once. What is partial is hashed
again from its first byte when it is whole: nothing is believed of bytes that were written before a crash.

Blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Final

from tidegate.models.digest import sha256_of
from tidegate.storage.atomic_file import move_durably

DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(Exception):
    """What somebody sends cannot be kept; the message says why."""


class ArtifactStoreFull(StoreError):
    """The disk is full, or the file may not be so large."""


class WrongContent(StoreError):
    """What came is not what its digest says."""


class OffsetMismatch(StoreError):
    """A piece does not begin where the last one ended; `offset_bytes` says where to go on."""

    def __init__(self, offset_bytes: int) -> None:
        super().__init__(f"the next byte is {offset_bytes}")
        self.offset_bytes = offset_bytes


class ArtifactStore:
    """The folder; nothing is written before something is taken in."""

    def __init__(self, root: Path, *, max_artifact_bytes: int = 16 * 2**30) -> None:
        self.root = root
        self.max_artifact_bytes = max_artifact_bytes

    def path(self, digest: str) -> Path:
        """Where the content of this digest is, if it is here. Raises ValueError: that is no digest."""
        return self.root / "sha256" / _checked(digest)

    def size_bytes(self, digest: str) -> int | None:
        """How large the whole content is; None where it is not here, or not whole."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def offset_bytes(self, digest: str) -> int:
        """How much of a content that is not whole yet has come."""
        try:
            return self._partial(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, digest: str, at: int, piece: bytes) -> int:
        """Add a piece of what is coming; how much there is now.

        Raises:
            OffsetMismatch: `at` is not where the last piece ended.
            NoRoom: the disk is full, and what has come stays; or it would be larger than files may be.
        """
        partial = self._partial(digest)
        if (offset := self.offset_bytes(digest)) != at:
            raise OffsetMismatch(offset)
        if at + len(piece) > self.max_artifact_bytes:
            raise ArtifactStoreFull(
                f"an artefact of over {self.max_artifact_bytes} bytes: raise `artifacts.max_artifact_bytes`"
            )
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file:
                file.write(piece)
        except OSError as error:
            raise self._words(error) from error
        return at + len(piece)

    def finish(self, digest: str) -> int:
        """Take what has come as whole; its size.

        Raises:
            WrongContent: it is not what its digest says, and is thrown away: nobody knows which byte is wrong.
        """
        partial, whole = self._partial(digest), self.path(digest)
        try:
            whole.parent.mkdir(parents=True, exist_ok=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()  # an empty file is a content too
            found = sha256_of(partial)
            if found != digest:
                partial.unlink()
                raise WrongContent(f"what came has sha256 {found}, not {digest}; send it again")
            move_durably(partial, whole)
            return whole.stat().st_size
        except OSError as error:
            raise self._words(error) from error

    def drop_partial(self, digest: str) -> None:
        self._partial(digest).unlink(missing_ok=True)

    def _partial(self, digest: str) -> Path:
        return self.root / "partial" / _checked(digest)

    def _words(self, error: OSError) -> Exception:
        if error.errno in _NO_ROOM:
            return ArtifactStoreFull(f"the gateway's disk is full: make room where {self.root} lies")
        return error

    def __repr__(self) -> str:
        return f"<ArtifactStore {self.root}>"


def _checked(digest: str) -> str:
    if not DIGEST.match(digest):
        raise ValueError(f"{digest[:80]!r} is no sha256: 64 digits of 0-9 and a-f")
    return digest
