"""A partial file holds an artefact under download, in which only chunks with the signed digest count.

Received bytes are appended; each full chunk is compared with its digest at once, and cut off again when it differs, so
`checked_bytes` covers only right chunks. The tail of a chunk is kept, unchecked, over a cut of the link: a
download that is cut ten times then fetches each byte once all the same. After a restart the whole file is checked
again, because a power cut may have left anything behind.

Blocks on the disk; OSError escapes.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from tidegate.models.digest import sha256_of
from tidegate.rollout.plan import Artefact

_READ_BYTES = 1 << 20


class BadChunk(Exception):
    """A chunk came with another digest than the plan's; `number` counts from 0."""

    def __init__(self, number: int) -> None:
        super().__init__(f"chunk {number} has another digest than the plan names")
        self.number = number


class PartialFile:
    """Open inside `with`, or between `open` and `close`."""

    def __init__(self, path: Path, artefact: Artefact) -> None:
        self.artefact = artefact
        self._path = path
        self._file: BinaryIO | None = None
        self._chunks = 0  # whole and right
        self._tail_bytes = 0
        self._digest = sha256()
        self._stopped = False

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Open the file and read back what an earlier start left; `close` it also where this raises."""
        self._path.touch()
        self._file = self._path.open("r+b")
        self._check_again()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def stop_checking(self) -> None:
        """Have an `open` in another thread end soon; the file can only be closed then."""
        self._stopped = True

    @property
    def held_bytes(self) -> int:
        """The offset at which the download goes on."""
        return self.checked_bytes + self._tail_bytes

    @property
    def checked_bytes(self) -> int:
        return min(self._chunks * self.artefact.chunk_bytes, self.artefact.size_bytes)

    @property
    def is_whole(self) -> bool:
        return self._chunks == len(self.artefact.chunks)

    def append(self, received: bytes) -> int:
        """Append received bytes; how many chunks became whole. Raises BadChunk, with the bad chunk cut off."""
        file, view, whole = self._file, memoryview(received), 0
        assert file is not None
        while view and not self.is_whole:
            piece = view[: self._chunk_bytes() - self._tail_bytes]
            file.write(piece)
            self._digest.update(piece)
            self._tail_bytes += len(piece)
            view = view[len(piece) :]
            whole += self._close_chunk()
        return whole

    def is_right(self) -> bool:
        """Whether size and digest of the whole are the plan's, read back from the disk once it is there."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        size_bytes = os.fstat(self._file.fileno()).st_size
        return size_bytes == self.artefact.size_bytes and sha256_of(self._path) == self.artefact.sha256

    def _chunk_bytes(self) -> int:
        return min(self.artefact.chunk_bytes, self.artefact.size_bytes - self.checked_bytes)

    def _close_chunk(self) -> int:
        if self._tail_bytes < self._chunk_bytes():
            return 0
        right = self._digest.hexdigest() == self.artefact.chunks[self._chunks]
        self._digest, self._tail_bytes = sha256(), 0
        if not right:
            self._cut_off()
            raise BadChunk(self._chunks)
        self._chunks += 1
        return 1

    def _cut_off(self) -> None:
        """Truncate the file after the last right chunk."""
        assert self._file is not None
        self._file.flush()
        self._file.seek(self.checked_bytes)
        self._file.truncate()

    def _check_again(self) -> None:
        """Check the bytes that an earlier start left, and keep the right ones."""
        assert self._file is not None
        file = self._file
        while not self.is_whole:
            piece = file.read(min(_READ_BYTES, self._chunk_bytes() - self._tail_bytes))
            if self._stopped:
                return  # with the file as it is
            if not piece:
                break
            self._digest.update(piece)
            self._tail_bytes += len(piece)
            try:
                self._close_chunk()
            except BadChunk:
                return
        file.seek(self.held_bytes)
        file.truncate()

    def __repr__(self) -> str:
        return f"<PartialFile {self.artefact.path} {self.held_bytes} of {self.artefact.size_bytes} bytes>"
