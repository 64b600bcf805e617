"""A worker's inbox: what its parent sent and it has not begun, in order.

The thread that computes takes frames off the socket itself, between two calls. A thread for reading would be woken for
each call and wake the other one in turn, which takes longer than a small model does; one wake-up is what a call costs.
What comes while it computes waits in the socket.

Two things cannot wait for the end of a computation, and each has a thread that sleeps otherwise. The parent's end is
seen by a watch (`end_with_parent`), which needs no frames. And a device of its own fetches the inputs of the next call
during this one, so where an engine prepares them, frames are taken off the socket ahead, in a thread (`read_ahead`).
"""

from __future__ import annotations

import os
import select
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, NoReturn, Protocol

import numpy as np

from tidegate.engines.engine import Arrays
from tidegate.workers import channel
from tidegate.workers.array_transport import Handover
from tidegate.workers.channel import CancelRun, LoadEngine, RunEngine
from tidegate.workers.generation.messages import (
    BeginSequence,
    CancelSequence,
    CreditSequence,
    SequenceToChild,
    with_prompt,
)

_READ_AHEAD_BYTES: Final = 1 << 16
Work = tuple[LoadEngine | RunEngine, Arrays]
Entry = tuple[Work, bool] | SequenceToChild
Received = Work | SequenceToChild | CancelRun
Prepare = Callable[[LoadEngine | RunEngine, Arrays], Arrays]


class FrameSource(Protocol):
    """Where what the parent sent comes from."""

    def next(self) -> Received:
        """Blocks."""
        ...

    def next_if_any(self) -> Received | None: ...


class CallFrames:
    """Frames off a socket, by the thread that asks.

    Its methods raise EOFError or ConnectionError at the parent's end, and FrameError, UnexpectedMessage, OSError or
    MemoryError for what cannot be taken.
    """

    def __init__(self, sock: socket.socket, handover: Handover) -> None:
        self._bytes = SocketBytes(sock)
        self._handover = handover

    def next(self) -> Received:
        header_bytes, payload_bytes = channel.parse_prefix(self._bytes.take(channel.PREFIX_BYTES))
        message = channel.parse_to_child(self._bytes.take(header_bytes))
        payload = self._bytes.take(payload_bytes)
        if isinstance(message, RunEngine):
            self._handover.freed(message.freed)
            return message, channel.unpack(message.arrays, self._handover.payload(message, payload))
        if isinstance(message, BeginSequence):
            return with_prompt(message, payload)
        if isinstance(message, CreditSequence | CancelSequence | CancelRun):
            return message
        return message, {}

    def next_if_any(self) -> Received | None:
        """None where nothing came. A frame of which a part is here is waited for."""
        return self.next() if self._bytes.any_there() else None

    def __repr__(self) -> str:
        return f"<CallFrames of {self._bytes!r}>"


class FramesAhead:
    """Frames that a thread takes off the socket while the main thread computes.

    Args:
        prepare: what is done for a call before its turn, in that thread.
    """

    def __init__(self, frames: CallFrames, prepare: Prepare) -> None:
        self._frames = frames
        self._prepare = prepare
        self._received: SimpleQueue[Received] = SimpleQueue()
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def next(self) -> Received:
        return self._received.get()

    def next_if_any(self) -> Received | None:
        try:
            return self._received.get_nowait()
        except Empty:
            return None

    def _read(self) -> NoReturn:
        """Until the parent closes its end or dies; then the process ends, whatever it computes."""
        try:
            while True:
                received = self._frames.next()
                if isinstance(received, tuple):
                    message, arrays = received
                    received = message, self._prepare(message, arrays)
                self._received.put(received)
        except Exception as error:
            end_process(error)

    def __repr__(self) -> str:
        return f"<FramesAhead {self._received.qsize()} taken, {self._frames!r}>"


class CallInbox:
    """What came and was not begun. The parent bounds what it keeps with a worker, so this stays short."""

    def __init__(self, frames: CallFrames) -> None:
        self._frames = frames
        self._source: FrameSource = frames
        self._waiting: deque[Work | SequenceToChild] = deque()
        self._cancelled: set[int] = set()

    def read_ahead(self, prepare: Prepare) -> None:
        """From now on frames are taken off the socket while the main thread computes, and their calls prepared."""
        if self._source is self._frames:
            self._source = FramesAhead(self._frames, prepare)

    def take(self) -> Entry:
        """The next call and whether it was cancelled, or what is said of a sequence. Blocks."""
        while not self._waiting:
            self._put(self._source.next())
        self._look()  # for a cancellation of it, say
        return self._taken()

    def take_if_any(self) -> Entry | None:
        """The same, or None at once where nothing came."""
        self._look()
        return self._taken() if self._waiting else None

    def _look(self) -> None:
        """Take in what has come by now."""
        while (received := self._source.next_if_any()) is not None:
            self._put(received)

    def _put(self, received: Received) -> None:
        if isinstance(received, CancelRun):
            # One that has begun, or is over, is not touched.
            if any(isinstance(one, tuple) and one[0].id == received.id for one in self._waiting):
                self._cancelled.add(received.id)
        else:
            self._waiting.append(received)

    def _taken(self) -> Entry:
        entry = self._waiting.popleft()
        if not isinstance(entry, tuple):
            return entry
        cancelled = entry[0].id in self._cancelled
        self._cancelled.discard(entry[0].id)
        return entry, cancelled

    def __repr__(self) -> str:
        return f"<CallInbox {len(self._waiting)} waiting, {len(self._cancelled)} of them cancelled>"


class SocketBytes:
    """What comes by a socket, in pieces as asked for. Reads ahead, so that a small frame takes one call of the system.

    A piece has memory of its own, which begins aligned and may be written to.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._at = self._end = 0  # what is ahead

    def any_there(self) -> bool:
        """Whether a piece would begin at once. Does not block. Raises EOFError at the end of the socket."""
        if self._at == self._end:
            try:
                self._at, self._end = 0, self._receive(self._ahead, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    def take(self, size_bytes: int) -> memoryview:
        """The next bytes. Blocks. Raises EOFError at the end of the socket."""
        # numpy's memory, because it is not zeroed first and engines may write to it: torch warns about read-only
        # arrays.
        piece = np.empty(size_bytes, np.uint8).data
        filled = 0
        while filled < size_bytes:
            if self._at == self._end and size_bytes - filled >= _READ_AHEAD_BYTES:
                filled += self._receive(piece[filled:])
                continue
            if self._at == self._end:
                self._at, self._end = 0, self._receive(self._ahead)
            count = min(size_bytes - filled, self._end - self._at)
            piece[filled : filled + count] = self._ahead[self._at : self._at + count]
            self._at, filled = self._at + count, filled + count
        return piece

    def _receive(self, into: memoryview, flags: int = 0) -> int:
        got = self._sock.recv_into(into, 0, flags)
        if got == 0:
            raise EOFError
        return got

    def __repr__(self) -> str:
        return f"<SocketBytes of {self._sock!r}, {self._end - self._at} ahead>"


def end_with_parent(inbox: CallInbox, fd: int, prepare: Prepare) -> None:
    """End this process as soon as the parent closes its end of the socket or dies, whatever is computed then.

    Where the system does not tell of that alone (outside Linux), frames are read ahead: that finds the end as well.
    """
    if not hasattr(select, "POLLRDHUP"):
        inbox.read_ahead(prepare)
        return
    threading.Thread(target=_end_at_hangup, args=(fd,), name="parent's end", daemon=True).start()


def _end_at_hangup(fd: int) -> NoReturn:
    watch = select.poll()
    watch.register(fd, select.POLLRDHUP)
    watch.poll()
    os._exit(0)


def end_process(error: Exception) -> NoReturn:
    """End a worker at what cannot be gone on from: in silence where the parent has gone."""
    if isinstance(error, EOFError | ConnectionError):
        os._exit(0)
    traceback.print_exception(error)
    os._exit(1)
