"""vLLM's server as a child: started in a session of its own under a warden, read, and ended as a whole.

    start → its output into our log → its end, in words with its last lines

`stop` asks it to end by itself, and kills its processes after `_STOP_GRACE_S`; `kill` does so at once (`session.py`).
When this process is killed, the warden does it (`warden.py`): the write end of its lifeline is here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cloud_pool.vllm.child_log import ChildLog
from cloud_pool.vllm.session import descendants, kill_session, session_members
from tidegate import clock
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.spawned_process import SpawnedProcess, spawn
from tidegate.runtime.starvation import starved_s
from tidegate.workers.exit_status import describe_exit

_STOP_GRACE_S: Final = 10.0  # vLLM gives back shared memory and the GPU's in it
_WARDEN_S: Final = 2.0  # from the end of the server to that of its warden
_TRACKERS_S: Final = 2.0  # of what removes shared memory
_LOOK_S: Final = 0.02
_READ_BYTES: Final = 1 << 16


class ServerProcess:
    """One server, from `start` to `stop`."""

    def __init__(self, name: str, *, cores: frozenset[int] = frozenset()) -> None:
        self.log = ChildLog(name)
        self._cores = cores
        self._warden: SpawnedProcess | None = None
        self._lifeline = -1
        self._watching: asyncio.Task[str] | None = None

    @property
    def pid(self) -> int | None:
        """Of the server itself, where it is running."""
        if self._warden is None:
            return None
        children = Path(f"/proc/{self._warden.pid}/task/{self._warden.pid}/children")
        with suppress(OSError, ValueError, IndexError):
            return int(children.read_text().split()[0])
        return None

    @property
    def starved_s(self) -> float:
        """Seconds in which one of its processes was ready to run and got no core: of the one that had most."""
        if self._warden is None:
            return 0.0
        return max(starved_s(pid) for pid in descendants(self._warden.pid))

    async def start(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start it. Raises OSError: there are no more processes to be had.

        Args:
            folder: that goes with it where this process is killed.
        """
        ends, self._lifeline = os.pipe()
        said, says = os.pipe()  # not the subprocess module's own, whose `wait` waits for all that hold them
        try:
            self._warden = spawn(
                [
                    sys.executable,
                    "-P",  # a folder in which we were started may have packages of our names
                    "-m",
                    "cloud_pool.vllm.warden",
                    str(ends),
                    str(folder),
                    ",".join(map(str, sorted(self._cores))),
                    *command,
                ],
                pass_fds=(ends,),
                stdout=says,
                stderr=says,
                env=environment,
                new_session=True,  # which Ctrl-C does not reach, and which can be killed as one
            )
        except BaseException:
            os.close(said)
            raise
        finally:
            os.close(ends)
            os.close(says)
        self._watching = asyncio.create_task(self._watch(self._warden, said), name="vLLM's server")

    async def ended(self) -> str:
        """Wait for its end, and say how it came."""
        assert self._watching is not None, "start it first"
        return await asyncio.shield(self._watching)

    async def kill(self) -> None:
        """End all of its processes at once, if it was started."""
        if self._warden is None or self._watching is None:
            return
        kill_session(self._warden.pid, trackers=False)
        try:
            async with asyncio.timeout(_WARDEN_S):
                await asyncio.shield(self._watching)
        except TimeoutError:  # the warden had not started it, or does not run
            self._kill_group(self._warden.pid)
            await self._watching

    async def stop(self) -> None:
        """End it, if it was started and has not ended: by itself, or at once after a grace."""
        try:
            if self._warden is not None and self._watching is not None:
                await self._end(self._warden, self._watching)
        finally:
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1

    async def _end(self, warden: SpawnedProcess, watching: asyncio.Task[str]) -> None:
        warden.send_signal(signal.SIGTERM)  # which goes on to the server
        try:
            async with asyncio.timeout(_STOP_GRACE_S):
                await asyncio.shield(watching)
        except TimeoutError:
            await self.kill()
        except asyncio.CancelledError:
            self._kill_group(warden.pid)
            await watching
            raise

    async def _watch(self, warden: SpawnedProcess, said: int) -> str:
        reading = asyncio.create_task(self._read(said), name="what vLLM's server prints")
        try:
            status = await warden.wait()
            await self._end_rest(warden.pid)
            await asyncio.wait([reading], timeout=1.0)
        finally:
            await cancel_and_wait(reading)
        how = describe_exit(status)
        return f"{how}; its last words: {words}" if (words := self.log.last_words()) else how

    async def _read(self, said: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(said, "rb", buffering=0)
        )
        try:
            while data := await reader.read(_READ_BYTES):
                self.log.feed(data)
        finally:
            transport.close()

    async def _end_rest(self, leader: int) -> None:
        """End what the server started and left: its trackers by themselves, and all the others at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_TRACKERS_S):
                while session_members(leader):
                    kill_session(leader, trackers=False)
                    await clock.sleep(_LOOK_S)
        self._kill_group(leader)

    @staticmethod
    def _kill_group(leader: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)

    def __repr__(self) -> str:
        return f"<ServerProcess {'not started' if self._warden is None else f'warden {self._warden.pid}'}>"
