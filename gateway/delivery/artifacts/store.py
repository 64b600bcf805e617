"""The artefact store: a folder of files named by the SHA-256 of their content, `sha256/DIGEST`.

    sha256/DIGEST          complete, verified, never changed
    partial/DIGEST         being uploaded; its length is the offset at which the upload resumes

A file gets its name by one rename, after all of it was written, hashed and synced. So a name always leads to the
content that it names, after a power cut too, and two models that share a file store it once. A partial file is hashed
again from its first byte when it is complete: bytes that were written before a crash are not trusted. Partial files are
bounded by a ledger (`partial_ledger.py`), and one that has not grown for a day is removed.

Every method blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from typing import Final

from gateway.delivery.artifacts.partial_ledger import DEFAULT, PartialBounds, PartialLedger
from tidegate import clock
from tidegate.models.digest import sha256_of
from tidegate.storage.atomic_file import move_durably
from tidegate.storage.os_error_line import one_line

DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(Exception):
    """An upload cannot be stored; the message says why."""


class ArtifactStoreFull(StoreError):
    """The disk is full, or the file is larger than allowed."""


class ArtifactFolderFails(StoreError):
    """The folder cannot be read or written: it is read-only, not this account's, or on a damaged disk."""


class TooManyPartials(StoreError):
    """There is no room for another partial content, of this caller or of all."""


class WrongContent(StoreError):
    """The uploaded bytes do not have the digest that they were uploaded under."""


class OffsetMismatch(StoreError):
    """A piece does not begin where the last one ended; `offset_bytes` is where the next one must begin."""

    def __init__(self, offset_bytes: int) -> None:
        super().__init__(f"the next byte is {offset_bytes}")
        self.offset_bytes = offset_bytes


class ArtifactStore:
    """The store over one folder, which is created with the first upload."""

    def __init__(self, root: Path, *, max_artifact_bytes: int = 16 * 2**30, partials: PartialBounds = DEFAULT) -> None:
        self.root = root
        self.max_artifact_bytes = max_artifact_bytes
        self._partials = PartialLedger(partials)
        self._lock = threading.Lock()  # of the ledger: pieces of several contents are written at once
        self._adopted = False

    def path(self, digest: str) -> Path:
        """Return where the content of this digest is, or would be. Raises ValueError: that is no digest."""
        return self.root / "sha256" / _checked(digest)

    def size_bytes(self, digest: str) -> int | None:
        """Return the size of a complete content; None if it is absent or incomplete. Raises ArtifactFolderFails."""
        return self._size(self.path(digest))

    def offset_bytes(self, digest: str) -> int:
        """Return how many bytes of an incomplete content have been uploaded. Raises ArtifactFolderFails."""
        return self._size(self._partial(digest)) or 0

    def _size(self, path: Path) -> int | None:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._translated(error) from error

    def collect(self) -> list[str]:
        """Remove partial contents that have not grown for long, those of earlier processes too; return their names."""
        removed = []
        now = clock.now()
        with self._lock:
            self._adopt()
            for digest in self._partials.stale(now):
                self._partial(digest).unlink(missing_ok=True)
                self._partials.drop(digest)
                removed.append(digest)
        return removed

    def append(self, digest: str, at: int, piece: bytes, caller: str = "") -> int:
        """Append a piece to a partial content and return the new offset.

        Raises:
            OffsetMismatch: `at` is not where the last piece ended.
            TooManyPartials: the caller, or all callers, have too much that is unfinished.
            ArtifactStoreFull: the disk is full, and the partial content stays; or the file would be too large.
            ArtifactFolderFails: nothing can be written there.
        """
        partial = self._partial(digest)
        if (offset := self.offset_bytes(digest)) != at:
            raise OffsetMismatch(offset)
        if at + len(piece) > self.max_artifact_bytes:
            raise ArtifactStoreFull(
                f"an artefact of over {self.max_artifact_bytes} bytes: raise `artifacts.max_artifact_bytes`"
            )
        try:
            self._reserve(digest, caller, at + len(piece))
            partial.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file:
                file.write(piece)
        except OSError as error:
            self._settle(digest, caller)
            raise self._translated(error) from error
        return at + len(piece)

    def finish(self, digest: str) -> int:
        """Verify a partial content, give it its name and return its size. Again, it returns the size.

        Raises:
            WrongContent: the digest differs. The partial content is deleted, as no byte of it can be trusted.
            ArtifactStoreFull, ArtifactFolderFails: as `append`.
        """
        partial, whole = self._partial(digest), self.path(digest)
        try:
            if whole.exists() and not partial.exists():
                return whole.stat().st_size
            whole.parent.mkdir(parents=True, exist_ok=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()  # an empty file is a valid content, for which no piece was appended
            found = sha256_of(partial)
            if found != digest:
                partial.unlink()
                self._forget(digest)
                raise WrongContent(f"what came has sha256 {found}, not {digest}; send it again")
            move_durably(partial, whole)
            self._forget(digest)
            return whole.stat().st_size
        except OSError as error:
            raise self._translated(error) from error

    def _reserve(self, digest: str, caller: str, size_bytes: int) -> None:
        with self._lock:
            self._adopt()
            if why := self._partials.refusal(digest, caller, size_bytes):
                raise TooManyPartials(why)
            self._partials.put(digest, caller, size_bytes, clock.now())

    def _settle(self, digest: str, caller: str) -> None:
        """Note what was written of a piece that did not fit: perhaps nothing, perhaps not even the file."""
        with self._lock:
            if size := self.offset_bytes(digest):
                self._partials.put(digest, caller, size, clock.now())
            else:
                self._partials.drop(digest)

    def _forget(self, digest: str) -> None:
        with self._lock:
            self._partials.drop(digest)

    def _adopt(self) -> None:
        """Note, once, the partial contents that lie here from earlier processes."""
        if self._adopted:
            return
        folder = self.root / "partial"
        for path in folder.iterdir() if folder.is_dir() else ():
            if DIGEST.match(path.name):
                about = path.stat()
                # A file from the future, of a clock that was wrong, is as old as this look at it.
                age_s = max(0.0, clock.utc_s() - about.st_mtime)
                self._partials.put(path.name, "", about.st_size, clock.now() - age_s)
        self._adopted = True

    def _partial(self, digest: str) -> Path:
        return self.root / "partial" / _checked(digest)

    def _translated(self, error: OSError) -> StoreError:
        if error.errno in _NO_ROOM:
            return ArtifactStoreFull(f"the gateway's disk is full: make room where {self.root} lies")
        return ArtifactFolderFails(
            f"the gateway cannot use its folder of model files: {one_line(error)} (key 'artifacts.folder')"
        )

    def __repr__(self) -> str:
        return f"<ArtifactStore {self.root}>"


def _checked(digest: str) -> str:
    if not DIGEST.match(digest):
        raise ValueError(f"{digest[:80]!r} is no sha256: 64 digits of 0-9 and a-f")
    return digest
