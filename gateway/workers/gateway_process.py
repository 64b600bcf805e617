"""One process of a gateway as its parent sees it: started with its part, heard until it ends, and ended for certain.

    starting → ready → leaving → over            over at any time: by itself, by a signal, or for want of a process

Each process says something at least once a second (`process_part.py`). One that serves and is silent for too long
(`tidegate/runtime/process_silence.py`) hangs: the kernel would give its sockets connections for ever, which nobody
accepts. It is killed, with a traceback if it can still write one, and started again as one that ended by itself.

A process gets its file descriptors by inheritance, its part by the channel, and the parent's process id, so that the
kernel ends it with its parent. What it says on stdout and stderr goes where the parent's does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import structlog

from gateway.workers.channel import ProcessChannel
from gateway.workers.messages import CannotStart, FromParent, FromProcess, Leave, MemberState, PartAssignment, Serving
from gateway.workers.process_part import member_name
from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process_silence import ProcessSilence
from tidegate.runtime.spawned_process import SpawnedProcess, spawn
from tidegate.workers.exit_status import describe_exit

KILL_AFTER_S: Final = 5.0  # beyond its drain
log = structlog.get_logger(__name__)


class GatewayProcess:
    """`start` it once, then wait for `settled`, or for `over`.

    Args:
        on_message: called with each of its messages that concerns others.
        on_change: called when its state has changed.
    """

    def __init__(
        self,
        part: PartAssignment,
        config_path: Path | None,
        on_message: Callable[[GatewayProcess, FromProcess], None],
        on_change: Callable[[], None],
    ) -> None:
        self.part = part
        self.state: MemberState = "starting"
        self.serving: Serving | None = None
        self.why_not = ""  # it could not start
        self.was_told_to_end = False
        self.started_at = clock.now()
        self.settled = asyncio.Event()  # it serves, or is over
        self.over = asyncio.Event()
        self._config_path = config_path
        self._on_message = on_message
        self._on_change = on_change
        self._process: SpawnedProcess | None = None
        self._channel: ProcessChannel[FromProcess] | None = None
        self._not_started = ""  # that the system gave no process, and why
        self._silence: ProcessSilence | None = None
        self._task = OwnedTask(self._live, name=f"process {self.name}")

    @property
    def name(self) -> str:
        return member_name(self.part.number)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self._not_started:
            return self._not_started
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "runs"
        how = describe_exit(code, exited="ended with exit code", killed="was ended by")
        how += self._silence.ended_for if self._silence is not None else ""
        return how + (f": {self.why_not}" if self.why_not and code >= 0 else "")

    async def start(self) -> Self:
        """Begin. Where the system gives no process (no memory, too many of them), it is over, and `how` says why."""
        try:
            await self._spawn()
        except OSError as error:
            self._not_started = f"could not be started: {error}"
            await self.aclose()  # there is a process where it was the channel that could not be had
            self._end()
            return self
        self.send(self.part)
        self._task.start()
        return self

    async def _spawn(self) -> None:
        """Raises OSError: a process or its channel could not be had."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = self._execute(theirs.fileno())
                self._silence = ProcessSilence(self.pid)
            self._channel = await ProcessChannel.open(ours, FromProcess)
        except BaseException:
            ours.close()
            raise

    def _execute(self, channel_fd: int) -> SpawnedProcess:
        command = [sys.executable, "-P", "-m", "gateway", "--part", str(channel_fd)]
        command += ["--die-with-parent", str(os.getpid())]
        if self._config_path is not None:
            command += ["--config", str(self._config_path)]
        inherited = [fd for one in self.part.sockets for fd in one]
        return spawn(
            command,
            pass_fds=sorted({*inherited, channel_fd}),
            stdout=None,
            new_session=True,  # a Ctrl-C in a terminal reaches the parent, which ends all in order
        )

    def send(self, message: FromParent) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def leave(self) -> None:
        """It has a successor."""
        self.was_told_to_end = True
        self._turn("leaving")
        self.send(Leave())

    def terminate(self) -> None:
        """Have it answer what is under way and end."""
        self.was_told_to_end = True
        self._turn("leaving")
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def is_hung(self) -> bool:
        """Whether it serves, and is silent for too long. To be asked every `LOOK_S`."""
        return self._silence is not None and self._silence.is_hung() and self.state == "ready"

    def starts_for_s(self, now: float) -> float:
        """How long it has been starting; 0 where it serves or did."""
        return now - self.started_at if self.state == "starting" else 0.0

    def kill_hung(self) -> None:
        """End it for its silence, or for a start without an end."""
        assert self._silence is not None
        by = self._silence.end_by("for it hung in its start") if self.state == "starting" else self._silence.end_by()
        log.error("a process of this gateway hangs, and is killed", process=self.name, pid=self.pid, by=by.name)
        self._signal(by)

    async def gone(self, within_s: float) -> None:
        """Return when it is over; after so long it is killed."""
        try:
            async with asyncio.timeout(within_s):
                await self.over.wait()
        except TimeoutError:
            log.error("a process of this gateway does not end, and is killed", process=self.name, pid=self.pid)
            self.kill()
            await self.over.wait()

    async def aclose(self) -> None:
        """Kill it if it runs, and forget it."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
        await self._task.aclose()
        if self._channel is not None:
            await self._channel.aclose()

    async def _live(self) -> None:
        assert self._process is not None and self._channel is not None
        hearing = asyncio.create_task(self._hear(self._channel), name=f"messages of {self.name}")
        try:
            await self._process.wait()
            # What it said last is in the channel still; its end closes it, unless a grandchild holds it.
            await asyncio.wait({hearing}, timeout=1.0)
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        self._end()

    def _end(self) -> None:
        self.over.set()
        self.settled.set()
        self._turn("down")

    async def _hear(self, channel: ProcessChannel[FromProcess]) -> None:
        async for message in channel.messages():
            if self._silence is not None:
                self._silence.spoken()
            try:
                self._take(message)
            except Exception:  # a defect with one message must not end the hearing of all others
                log.exception("a message of a gateway's process is not understood", process=self.name)

    def _take(self, message: FromProcess) -> None:
        match message:
            case Serving():
                self.serving = message
                self._turn("ready")
                self.settled.set()
            case CannotStart(reason):
                self.why_not = reason
            case _:
                self._on_message(self, message)

    def _turn(self, state: MemberState) -> None:
        if self.state != "down" and not (self.state == "leaving" and state == "ready"):
            self.state = state
            self._on_change()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def __repr__(self) -> str:
        return f"<GatewayProcess {self.name} pid {self.pid} {self.state}>"
