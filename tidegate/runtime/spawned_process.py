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
called at any time and by several callers, and a cancelled one disturbs no other.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress


class SpawnedProcess:
    """One child, until it has ended. `spawn` makes it; its owner waits for its end before the loop closes."""

    def __init__(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._loop = loop
        self._ended: asyncio.Future[int] = loop.create_future()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status; of a child that a signal ended, the signal's number, negative."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it by SIGKILL; nothing happens where it has ended."""
        if not self._ended.done():
            self._process.kill()

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
        return f"<SpawnedProcess {self.pid} {state}>"


def spawn(command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str]) -> SpawnedProcess:
    """Start a program that reads nothing and prints to our stderr. Raises OSError: it cannot be started.

    Args:
        pass_fds: other descriptors that the child has, under the same numbers.
    """
    process = subprocess.Popen(
        command,
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=2,  # stdout carries our events, and nothing that a runtime prints may get among them
        env=env,
    )
    spawned = SpawnedProcess(process, asyncio.get_running_loop())
    spawned.watch()
    return spawned
