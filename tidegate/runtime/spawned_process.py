"""A child process that is started without a copy of this one, and whose end is awaited on the event loop.

uvloop's `create_subprocess_exec` forks: the kernel copies the page tables of this process, and then each page that is
written meanwhile, while the loop stands still. `subprocess` starts the same child by `vfork`, which copies nothing. In
a process with torch, on two busy cores, the loop stood still for 32 ms, with 2 GB in memory for 63 ms; now it does for
less than 1 ms.

It is started on the loop's own thread, not aside: Python holds its lock until the child is another program, so nothing
else would get on, and Linux ends a child that is to die with its parent (`lifeline.py`) as soon as the thread ends that
started it.

Invariants: the child is reaped on the loop, so that a signal never meets another process of the same id; where there is
no pidfd (other systems than Linux, or no descriptor is left) a thread waits for the child and reaps it. `wait` may be
called at any time and by several callers, and a cancelled one disturbs no other. A caller that leaves while pipes are
handed to the loop does not take that back: uvloop would close their descriptors, and the file objects would close the
same numbers again, which others may have by then.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

_LINE_BYTES: Final = 2**16
_MOST_BYTES: Final = 2**16  # of the output of a program that is waited for


class SpawnedProcess:
    """One child, until it has ended. `spawn` makes it; its owner waits for its end before the loop closes."""

    def __init__(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._loop = loop
        self._ended: asyncio.Future[int] = loop.create_future()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status as `wait` tells it; None as long as no end is known."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Its exit status; of a child that a signal ended, the signal's number, negative."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it by SIGKILL; nothing happens where it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens where it has ended."""
        if not self._ended.done():
            self._process.send_signal(number)

    def watch(self) -> None:
        """Begin to watch for its end. Called once."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            threading.Thread(target=self._wait_aside, name=f"wait for {self.pid}", daemon=True).start()
        else:
            self._loop.add_reader(descriptor, self._reap, descriptor)

    def _reap(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        self._end(self._process.wait())  # it has ended: this does not block

    def _wait_aside(self) -> None:
        status = self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, status)

    def _end(self, status: int) -> None:
        self._ended.set_result(status)

    def __repr__(self) -> str:
        state = f"ended with {self._ended.result()}" if self._ended.done() else "running"
        return f"<{type(self).__name__} {self.pid} {state}>"


class PipedProcess(SpawnedProcess):
    """A child whose input is written and whose output is read here. `spawn_piped` makes it; its owner closes it.

    Its input closes with its end, and its output when all was read: what it said last is there to be read still.
    """

    def __init__(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, line_bytes: int) -> None:
        super().__init__(process, loop)
        self.stdout = asyncio.StreamReader(line_bytes, loop)
        self._stdin: asyncio.StreamWriter | None = None
        self._reading: asyncio.ReadTransport | None = None

    async def connect(self) -> None:
        """Hand the pipes to the loop. Called once, and never cancelled."""
        loop, process = self._loop, self._process
        self._reading, _ = await loop.connect_read_pipe(lambda: _PipeProtocol(self.stdout, loop=loop), process.stdout)
        unread = asyncio.StreamReader(loop=loop)
        writing, protocol = await loop.connect_write_pipe(lambda: _PipeProtocol(unread, loop=loop), process.stdin)
        self._stdin = asyncio.StreamWriter(writing, protocol, None, loop)
        if self._ended.done():
            self._abort_input()

    async def write(self, data: bytes) -> None:
        """Write it to the child's input, and wait while much is unread. Raises OSError: the child reads no more."""
        if self._stdin is None or self._stdin.is_closing():  # uvloop has another error for that
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._stdin.write(data)
        await self._stdin.drain()

    def write_eof(self) -> None:
        """End the child's input, after all that was written."""
        if self._stdin is not None:
            self._stdin.close()

    def close(self) -> None:
        """Close both pipes at once: what is not written by now never is."""
        if self._reading is not None:
            self._reading.close()
        self._abort_input()

    def _end(self, status: int) -> None:
        super()._end(status)
        self._abort_input()

    def _abort_input(self) -> None:
        if self._stdin is None:
            return
        writing = self._stdin.transport
        # asyncio's may not be aborted once it is closed
        if not writing.is_closing() or writing.get_write_buffer_size():
            writing.abort()


class _PipeProtocol(asyncio.StreamReaderProtocol):
    """A stream over a pipe, which goes one way only: nothing is left to do after its end."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


def spawn(
    command: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    stdout: int | None = 2,
    stderr: int | None = None,
    new_session: bool = False,
) -> SpawnedProcess:
    """Start a program that reads nothing. Raises OSError: it cannot be started.

    Args:
        pass_fds: other descriptors that the child has, under the same numbers.
        env: its environment; None for ours.
        stdout: the descriptor that it prints to. Ours carries our events, and nothing that a runtime prints may get
            among them, so it is our stderr; None for our stdout.
        stderr: likewise; None for ours.
        new_session: a Ctrl-C in our terminal does not reach it.
    """
    process = subprocess.Popen(
        command,
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=new_session,
    )
    spawned = SpawnedProcess(process, asyncio.get_running_loop())
    spawned.watch()
    return spawned


async def spawn_piped(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    line_bytes: int = _LINE_BYTES,
    stderr: int | None = None,
    new_session: bool = False,
) -> PipedProcess:
    """Start a program with pipes for its input and its output. Raises OSError: it cannot be started.

    Args:
        env: its environment; None for ours.
        line_bytes: so long may a line be that it prints; twice as much is held before it has to wait.
        stderr: as `subprocess.Popen` takes it; None for ours.
        new_session: a Ctrl-C in our terminal does not reach it.
    """
    process = subprocess.Popen(  # noqa: ASYNC220 - which takes less than 1 ms
        command,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        start_new_session=new_session,
    )
    loop = asyncio.get_running_loop()
    spawned = PipedProcess(process, loop, line_bytes)
    spawned.watch()
    connecting = loop.create_task(spawned.connect(), name=f"pipes of {spawned.pid}")
    try:
        await asyncio.shield(connecting)
    except BaseException:
        spawned.kill()
        connecting.add_done_callback(lambda _: spawned.close())
        await spawned.wait()
        raise
    return spawned


class Said(NamedTuple):
    """What a program printed until its end, and its exit status as `SpawnedProcess.wait` tells it."""

    output: bytes
    status: int


async def output_of(command: Sequence[str], *, within_s: float, stderr: int = subprocess.DEVNULL) -> Said:
    """Run a program that reads nothing to its end, and return what it printed: the first `_MOST_BYTES` of it.

    Args:
        stderr: as `subprocess.Popen` takes it.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it had not ended after so long, and was killed.
    """
    process = await spawn_piped(command, stderr=stderr)
    try:
        process.write_eof()
        async with asyncio.timeout(within_s):
            output = await _first_bytes(process.stdout)
            return Said(output, await process.wait())
    finally:
        process.kill()
        process.close()
        await process.wait()


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """All that comes, to the end: a program whose output nobody reads would wait."""
    kept = b""
    while read := await reader.read(_LINE_BYTES):
        kept += read[: _MOST_BYTES - len(kept)]
    return kept
