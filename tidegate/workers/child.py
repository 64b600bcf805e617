"""The worker process: engines in, arrays out, one call after another. Started by `process.py`, never by hand.

Two threads. The main thread computes, because some runtimes bind their state to the thread that loaded them. A
reader thread takes frames off the socket meanwhile, for two reasons: the next call is already in memory when this
one ends, and the end of the socket, which is the end of the parent, is seen at once even in the middle of a long
computation.

A worker ends with its parent, however the parent ends: the kernel sends SIGKILL (Linux), and the reader exits at
the end of the socket (everywhere). Nothing here needs an orderly end. SIGINT and SIGTERM are ignored: Ctrl-C and
service managers send them to the whole group, and a parent that drains still needs its worker; it closes the socket
when it is done.

An engine's exception is an answer (Failed), not an end. Whatever an engine prints goes to stderr: stdout belongs to
the parent's events.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from tidegate import clock
from tidegate.engines.engine import Engine, EngineError, load_engine
from tidegate.lifeline import die_with_parent
from tidegate.models.manifest import EngineName
from tidegate.types import Buffer
from tidegate.workers import channel
from tidegate.workers.channel import Cancel, Computed, Failed, FrameError, Hello, Infer, Load, Loaded, Skipped

Work = tuple[Load | Infer, dict[str, NDArray[Any]]]


class Inbox:
    """Calls that came and were not begun. The parent keeps at most two calls with a worker, so this stays short."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()
        self._cancelled: set[int] = set()
        self._changed = threading.Condition()

    def put(self, work: Work) -> None:
        with self._changed:
            self._waiting.append(work)
            self._changed.notify()

    def cancel(self, call_id: int) -> None:
        """Mark a waiting call; one that has begun, or is over, is not touched."""
        with self._changed:
            if any(message.id == call_id for message, _ in self._waiting):
                self._cancelled.add(call_id)

    def take(self) -> tuple[Work, bool]:
        """The next call and whether it was cancelled. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            work = self._waiting.popleft()
            cancelled = work[0].id in self._cancelled
            self._cancelled.discard(work[0].id)
            return work, cancelled

    def __repr__(self) -> str:
        return f"<Inbox {len(self._waiting)} waiting, {len(self._cancelled)} of them cancelled>"


class Worker:
    """The computing side: engines by key, and the socket that answers leave by."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._engines: dict[str, Engine] = {}

    def serve(self, inbox: Inbox) -> NoReturn:
        self._sock.sendall(channel.pack(Hello(os.getpid())))
        while True:
            (message, arrays), cancelled = inbox.take()
            if cancelled:
                self._sock.sendall(channel.pack(Skipped(message.id)))
            else:
                self._answer(message, arrays)

    def _answer(self, message: Load | Infer, arrays: dict[str, NDArray[Any]]) -> None:
        try:
            frame = self._load(message) if isinstance(message, Load) else self._infer(message, arrays)
        except (EngineError, FrameError) as error:
            frame = [channel.pack(Failed(message.id, channel.shorten(str(error))))]
        except Exception as error:  # a foreign runtime may raise anything; the parent decides what it means
            traceback.print_exc()
            frame = [channel.pack(Failed(message.id, channel.shorten(f"{type(error).__name__}: {error}")))]
        for part in frame:
            self._sock.sendall(part)

    def _load(self, message: Load) -> list[Buffer]:
        _limit_threads(message.threads)
        began_at = clock.now()
        self._engines[message.key] = load_engine(
            cast(EngineName, message.engine),
            Path(message.artefact),
            outputs=message.outputs,
            threads=message.threads,
            device=message.device,
        )
        return [channel.pack(Loaded(message.id, clock.now() - began_at))]

    def _infer(self, message: Infer, arrays: dict[str, NDArray[Any]]) -> list[Buffer]:
        engine = self._engines.get(message.key)
        if engine is None:
            raise EngineError(f"no engine is loaded under {message.key!r}")
        began_at = clock.now()
        outputs = engine.infer(arrays)
        return channel.pack_with(Computed(message.id, clock.now() - began_at), outputs)

    def __repr__(self) -> str:
        return f"<Worker pid {os.getpid()} engines {sorted(self._engines)}>"


def read(sock: socket.socket, inbox: Inbox) -> None:
    """Take frames until the parent closes its end or dies, then end the process, whatever it computes."""
    try:
        while True:
            header_bytes, payload_bytes = channel.parse_prefix(_receive(sock, channel.PREFIX_BYTES))
            message = channel.parse_to_child(_receive(sock, header_bytes))
            payload = _receive(sock, payload_bytes)
            if isinstance(message, Cancel):
                inbox.cancel(message.id)
            else:
                specs = message.arrays if isinstance(message, Infer) else ()
                inbox.put((message, channel.unpack(specs, payload)))
    except (EOFError, ConnectionError):
        os._exit(0)
    except (FrameError, OSError, MemoryError):
        traceback.print_exc()
        os._exit(1)


def _receive(sock: socket.socket, size_bytes: int) -> memoryview:
    # numpy's memory, because it is not zeroed first and engines may write to it: torch warns about read-only arrays.
    buffer = np.empty(size_bytes, np.uint8).data
    filled = 0
    while filled < size_bytes:
        got = sock.recv_into(buffer[filled:])
        if got == 0:
            raise EOFError
        filled += got
    return buffer


def _limit_threads(threads: int) -> None:
    """Bound the pools that runtimes size by the environment when they are first imported. 0 leaves them all cores."""
    if threads <= 0:
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)


def main(arguments: list[str]) -> NoReturn:
    """`python -m tidegate.workers.child FD PARENT_PID`"""
    fd, parent_pid = int(arguments[0]), int(arguments[1])
    die_with_parent(parent_pid, by=signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    inbox = Inbox()
    threading.Thread(target=read, args=(sock, inbox), name="reader", daemon=True).start()
    try:
        Worker(sock).serve(inbox)
    except ConnectionError:
        os._exit(0)  # the parent left while an answer was on its way; the reader thread is about to notice the same


if __name__ == "__main__":
    main(sys.argv[1:])
