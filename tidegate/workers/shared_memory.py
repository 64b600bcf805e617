"""Memory that a worker and its parent share, so that large arrays are handed over instead of sent.

A payload through a socket is copied into the kernel, out of it, and once more where it is read in pieces, and wakes
both ends for every piece. In a shared segment it is written once, and read where it lies.

    parent   Outgoing ── writes inputs ──▶ segment ◀── views of it ── Incoming   child
    parent   Incoming ── views of it ──▶ segment ◀── writes outputs ── Outgoing  child

A segment is an anonymous file in memory (memfd). Both ends get all of them when the child is started, empty, and each
takes memory only when it is written. The writer grows it by size class; nobody can shrink it (sealed), so that no end
can take memory away that the other one reads. There is no name, so nothing is left behind: the kernel frees it when
the last process that has it has ended, or has let go of it, however it ended.

When a segment may be written again:
* an input segment, when the child has answered the call: engines keep nothing of their inputs;
* an output segment, when its last view has died. The parent knows by a weak reference to the array that all views
  share as their base (`Incoming.lend`), and says so with its next call (`Incoming.take_freed`), which
  needs no frame of its own. Until then the segment is the parent's alone.

Bounds: so many segments a direction, MOST_BYTES each. One of more than KEPT_BYTES that nobody reads any more gives its
memory back at once, so an output's does by the parent's hand: the next call, which frees it, may never come.
Where no segment is free, or a payload is too small to be worth it or too large, it goes through the socket, as it does
where there is no memfd (other systems than Linux): slower, and otherwise the same. Who keeps views for long makes that
the rule, so what is to be kept is copied (`cloud_pool/serving/sequence_state.py`).

A page of a segment counts as resident in both processes, once it was touched in both.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.types import Buffer
from tidegate.workers.channel import FrameError

MOST_BYTES: Final = 256 << 20
KEPT_BYTES: Final = 32 << 20  # what a batch of 8 camera images takes, as float32 of 1280 x 720
_LEAST_BYTES: Final = 1 << 18
SOCKET: Final = -1  # in place of a segment's number: the payload follows in the socket


def create(count: int) -> list[int]:
    """The files of so many empty segments; none where the system has no such thing. The caller closes them."""
    if not hasattr(os, "memfd_create"):
        return []
    files: list[int] = []
    try:
        for _ in range(count):
            files.append(os.memfd_create("tidegate-arrays", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError:  # forbidden by a sandbox, or no files left: the socket does as well
        close(files)
        return []
    return files


def close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


class Outgoing:
    """The end that writes. Mutable: `write` takes a free segment; `free` it when the other end is done with it.

    Owns the files. `write` and `free` may be called from two threads.
    """

    def __init__(self, files: Sequence[int]) -> None:
        self._files = list(files)
        self._maps: list[mmap.mmap | None] = [None] * len(files)
        self._free = list(reversed(range(len(files))))  # the last one freed is taken first: its memory is there

    @property
    def files(self) -> tuple[int, ...]:
        return tuple(self._files)

    def write(self, parts: Iterable[Buffer], size_bytes: int) -> int:
        """The number of the segment that holds these parts now; SOCKET where there is none for them."""
        if size_bytes > MOST_BYTES:
            return SOCKET
        try:
            number = self._free.pop()
        except IndexError:
            return SOCKET
        try:
            into, at = memoryview(self._grown(number, size_bytes)), 0
        except OSError:  # no room for the mapping
            self._free.append(number)
            return SOCKET
        for part in parts:
            into[at : at + len(part)] = part
            at += len(part)
        return number

    def free(self, number: int) -> None:
        """The other end reads it no more."""
        mapped = self._maps[number]
        if mapped is not None and len(mapped) > KEPT_BYTES:
            with suppress(OSError):
                mapped.madvise(mmap.MADV_REMOVE)
        self._free.append(number)

    def close(self) -> None:
        """Let go of everything; what the other end still has mapped stays there."""
        files, self._files, self._free = self._files, [], []
        self._maps.clear()
        close(files)

    def _grown(self, number: int, size_bytes: int) -> mmap.mmap:
        mapped = self._maps[number]
        if mapped is None or len(mapped) < size_bytes:
            capacity = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
            os.ftruncate(self._files[number], capacity)
            mapped = self._maps[number] = mmap.mmap(self._files[number], capacity)
        return mapped

    def __repr__(self) -> str:
        return f"<Outgoing {len(self._free)} of {len(self._files)} segments free>"


class Incoming:
    """The end that reads. Mutable: `view` a segment, or `lend` it to whoever gets its arrays.

    Owns the files.
    """

    def __init__(self, files: Sequence[int]) -> None:
        self._files = list(files)
        self._maps: list[mmap.mmap | None] = [None] * len(files)
        self._lent: dict[int, weakref.ref[NDArray[Any]]] = {}
        self._freed: deque[int] = deque()

    @property
    def files(self) -> tuple[int, ...]:
        return tuple(self._files)

    def lend(self, number: int, size_bytes: int) -> memoryview:
        """A view as `view` gives it, whose segment `take_freed` names when it and all arrays in it have died.

        Raises:
            FrameError: as `view` does, or it is lent already.
        """
        if number in self._lent:
            raise FrameError(f"segment {number} was named again while its contents are still read")
        # All arrays in it have this one as their base, or a view of it, until they die.
        base = np.frombuffer(self.view(number, size_bytes), np.uint8)
        self._lent[number] = weakref.ref(base, lambda _: self._unread(number, size_bytes))
        return base.data

    def view(self, number: int, size_bytes: int) -> memoryview:
        """The first so many bytes of a segment, in place.

        Raises:
            FrameError: there is no such segment, or it has not so many bytes.
        """
        if not 0 <= number < len(self._files):
            raise FrameError(f"segment {number} was named, of {len(self._files)}")
        mapped = self._maps[number]
        if mapped is None or len(mapped) < size_bytes:
            there = os.fstat(self._files[number]).st_size
            if not 0 < size_bytes <= there <= MOST_BYTES:
                raise FrameError(f"segment {number} has {there} bytes, but {size_bytes} were named")
            mapped = self._maps[number] = mmap.mmap(self._files[number], there)
        return memoryview(mapped)[:size_bytes]

    def take_freed(self) -> tuple[int, ...]:
        """Segments of which the last view has died since the last call."""
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
            self._lent.pop(freed[-1], None)
        return tuple(freed)

    def _unread(self, number: int, size_bytes: int) -> None:
        """The last view of a segment has died, in whichever thread. Costs what the end of any array so large does."""
        if size_bytes > KEPT_BYTES:
            with suppress(OSError, IndexError):  # the other end has sealed it, or this end was closed meanwhile
                if (mapped := self._maps[number]) is not None:
                    mapped.madvise(mmap.MADV_REMOVE)
        self._freed.append(number)  # only now: from here on the other end may be told, and write again

    def close(self) -> None:
        """Let go of everything but what views still hold; their memory goes when they do."""
        files, self._files = self._files, []
        self._maps.clear()
        close(files)

    def __repr__(self) -> str:
        return f"<Incoming {len(self._lent) - len(self._freed)} of {len(self._files)} segments lent>"
