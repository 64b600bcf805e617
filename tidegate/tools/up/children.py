"""`Child` starts a process, reads its events, restarts it when it dies, and stops it for certain.

`Child` owns one process of the plan and, while the system runs, everything that process ever started: it runs in a
session of its own, so that a Ctrl-C in the terminal reaches only `tidegate up` (which then stops its children in the
right order) and so that a kill reaches the child's workers too. The child gets its parent's process id
(`--die-with-parent`) and ends by itself when that parent is killed.

One task per child reads the events on its stdout (`tidegate/runtime/events.py`) until the process ends, and starts it
again after `RESTART_AFTER_S` unless `--no-restart` was given. Before it was ready for the first time, a death is not
repaired but reported: something is wrong that a restart will not mend, and the user is waiting.

Stopping is polite for a while and certain afterwards: SIGTERM, then SIGKILL to the child's whole session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import yaml

from tidegate.tools.up.plan import ProcessPlan
from tidegate.workers import exit_status

RESTART_AFTER_S: Final = 2.0
LOG_TAIL_LINES: Final = 12
_MOST_TAIL_BYTES: Final = 64 * 1024
EVENT_LINE_MAX_BYTES: Final = 1 << 20

OURS: Final = frozenset({"gateway", "edge_agent", "cloud_pool", "simulator", "tidegate"})
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '(\w+)")

Event = Mapping[str, Any]


class ChildFailed(Exception):
    """A part did not start; the message says which, why, and where its log is."""


class Child:
    """One process of the plan. Use `async with`, then `await ready()`.

    Args:
        on_event: called with each event of the child but `ready` and `failed`.
        on_change: called with a sentence when the child dies or is back.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        *,
        on_event: Callable[[ProcessPlan, Event], None],
        on_change: Callable[[str], None],
        restart: bool = True,
    ) -> None:
        self.plan = plan
        self._on_event = on_event
        self._on_change = on_change
        self._restart = restart
        self._process: asyncio.subprocess.Process | None = None
        self._first_ready: asyncio.Future[None] | None = None
        self._failed_reason = ""
        self._log_start_bytes = 0
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.ready_event: Event = {}

    async def __aenter__(self) -> Child:
        self._first_ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(), name=f"child {self.plan.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        if self._task:
            await self._task

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def ready(self) -> None:
        """Return once the child serves.

        Raises:
            ChildFailed: it ended before.
        """
        assert self._first_ready is not None, "enter the child first"
        await asyncio.shield(self._first_ready)

    def terminate(self) -> None:
        """Ask the child to drain and end, and do not start it again."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the child and whatever it started, at once."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def gone(self) -> None:
        """Return once the child has ended for good."""
        if self._task:
            await asyncio.shield(self._task)

    @property
    def ended(self) -> bool:
        """Whether the child has ended and will not be started again."""
        return self._task is not None and self._task.done()

    def __repr__(self) -> str:
        state = "stopping" if self._stopping.is_set() else f"pid {self.pid}" if self.pid else "down"
        return f"<Child {self.plan.name} {state}>"

    async def _live(self) -> None:
        try:
            while not self._stopping.is_set():
                how = await self._one_life()
                if self._stopping.is_set() or not self._was_ready():
                    return
                self._on_change(self._obituary(how))
                if not self._restart:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RESTART_AFTER_S):
                        await self._stopping.wait()
        finally:
            self._settle(ChildFailed(f"{self.plan.name} was stopped before it was ready"))

    async def _one_life(self) -> str:
        """Run the process until it ends; how it ended."""
        self._failed_reason = ""
        try:
            write_config(self.plan)
            with append_to(self.plan.log_path) as log:
                self._log_start_bytes = log.tell()
                how = await self._run(log)
        except OSError as error:
            how = f"could not be started: {error}"
            self._failed_reason = str(error)
        if not self._was_ready():
            self._settle(ChildFailed(self._why_not_ready(how)))
        return how

    async def _run(self, log: BinaryIO) -> str:
        self._process = process = await self._spawn(log)
        try:
            if self._stopping.is_set():  # stopped while it was being started
                self._signal(signal.SIGTERM)
            await self._read_events(process, log)
            return describe_exit(await process.wait())
        finally:
            self._kill_session(process.pid)  # workers that outlived it, if any

    async def _spawn(self, log: BinaryIO) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=self.plan.environment(os.environ),
            start_new_session=True,
            limit=EVENT_LINE_MAX_BYTES,
        )

    def _command(self) -> list[str]:
        config = ["--config", str(self.plan.config_path)] if self.plan.config_path else []
        lifeline = ["--die-with-parent", str(os.getpid())]
        return [sys.executable, "-P", "-m", self.plan.module, *config, *self.plan.arguments, *lifeline]

    async def _read_events(self, process: asyncio.subprocess.Process, log: BinaryIO) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line over the limit is no event of ours; the reader has skipped it
                continue
            if not line:
                return
            event = parse_event(line)
            if event is None:  # a library that prints: worth keeping, not worth showing
                log.write(line)
                log.flush()
            else:
                self._take(event)

    def _take(self, event: Event) -> None:
        match event["event"]:
            case "ready":
                self.ready_event = event
                if self._was_ready():
                    self._on_change(f"{self.plan.name} is back")
                self._settle(None)
            case "failed":
                self._failed_reason = str(event.get("reason", ""))
            case _:
                self._on_event(self.plan, event)

    def _was_ready(self) -> bool:
        ready = self._first_ready
        return ready is not None and ready.done() and ready.exception() is None

    def _settle(self, failure: ChildFailed | None) -> None:
        ready = self._first_ready
        if ready is None or ready.done():
            return
        if failure is None:
            ready.set_result(None)
        else:
            ready.set_exception(failure)
            ready.exception()  # mark as seen: it is not awaited when another part failed first

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        if number == signal.SIGKILL:
            self._kill_session(self._process.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    @staticmethod
    def _kill_session(leader_pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader_pid, signal.SIGKILL)

    def _why_not_ready(self, how: str) -> str:
        name, log = self.plan.name, self.plan.log_path
        if self._failed_reason:
            return f"{name} did not start: {self._failed_reason}\n(log: {log})"
        tail = log_tail(log, self._log_start_bytes)
        if package := missing_package(tail):
            return f"{name} did not start: it needs {package}: pip install 'tidegate[demo]'\n(log: {log})"
        return "\n".join([f"{name} did not start: it {how}. The end of {log}:", *(f"  {line}" for line in tail)])

    def _obituary(self, how: str) -> str:
        reason = f" ({self._failed_reason})" if self._failed_reason else ""
        what_now = f"starting it again in {RESTART_AFTER_S:g} s" if self._restart else "it stays down"
        return f"{self.plan.name} {how}{reason}; {what_now} (log: {self.plan.log_path})"


def write_config(plan: ProcessPlan) -> None:
    """Write the process's configuration, anew for each start: edits of the file are lost."""
    if plan.config_path is None:
        return
    plan.config_path.parent.mkdir(parents=True, exist_ok=True)
    plan.config_path.touch(mode=0o600)  # a broker's address may hold a password
    plan.config_path.write_text(yaml.safe_dump(dict(plan.config or {}), sort_keys=False), encoding="utf-8")


def append_to(log_path: Path) -> BinaryIO:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return open(log_path, "ab")


def parse_event(line: bytes) -> Event | None:
    """The event on a line of a child's stdout, or None when the line is something else."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def describe_exit(code: int) -> str:
    """How a part of the system ended, for the person who started it."""
    return exit_status.describe_exit(code, exited="ended with exit code", killed="was ended by")


def missing_package(tail: Sequence[str]) -> str:
    """The package without which a child ended, by its last words; "" for any other end, and for a module of ours."""
    found = _MISSING.match(tail[-1]) if tail else None
    return found[1] if found is not None and found[1] not in OURS else ""


def log_tail(path: Path, start_bytes: int) -> list[str]:
    """The last lines that a log has gained since it was `start_bytes` long."""
    try:
        with open(path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start_bytes, size - _MOST_TAIL_BYTES))
            return log.read(_MOST_TAIL_BYTES).decode("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:  # it was deleted or rotated away
        return []
