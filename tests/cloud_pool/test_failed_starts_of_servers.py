"""One of several servers does not start, or says what cannot be read: it is tried again, and the others serve on.

The parent is real. Its servers are small processes that say they serve and do nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cloud_pool import servers
from cloud_pool.config import PoolConfig
from cloud_pool.servers import PoolServer, serve_several
from tidegate import clock
from tidegate.config import load
from tidegate.runtime import events
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.process import StartError
from tidegate.runtime.spawned_process import PipedProcess, spawn_piped
from tidegate.testing.ports import free_ports

pytestmark = pytest.mark.slow

REASON = f"could not be started: [Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"
READY = 'print(\'{"event": "ready", "addresses": {"grpc": ""}, "models": []}\', flush=True)'
UNTIL_A_SIGNAL = "import signal; signal.pause()"
LONG_LINE = "print('x' * 300_000, flush=True)"
SERVES = f"{READY}; {UNTIL_A_SIGNAL}"


class Spawns:
    """In the place of `spawn_piped`.

    Attributes:
        failing: so many of the next calls fail, as they do where there are too many processes.
        programs: what the next processes do; all others serve.
    """

    def __init__(self) -> None:
        self.failing = 0
        self.programs: list[str] = []
        self.pids: list[int] = []

    async def __call__(self, _: Sequence[str], **keys: Any) -> PipedProcess:
        if self.failing:
            self.failing -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        program = self.programs.pop(0) if self.programs else SERVES
        process = await spawn_piped([sys.executable, "-I", "-S", "-c", program], **keys)
        self.pids.append(process.pid)
        return process


@pytest.fixture
def spawns(monkeypatch: pytest.MonkeyPatch) -> Spawns:
    made = Spawns()
    monkeypatch.setattr(servers, "spawn_piped", made)
    monkeypatch.setattr(random, "random", lambda: 0.05)  # pauses are short
    monkeypatch.setattr(servers, "MOST_LINE_BYTES", 2**16)
    return made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The events by name: of an end how it came, of other events the server's name."""
    heard: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        events, "emit", lambda event, **fields: heard.append((event, fields.get("how", fields["name"])))
    )
    return heard


def _pool() -> PoolConfig:
    return load(PoolConfig, servers=2, grpc_port=free_ports(2), host="127.0.0.1")


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():
            await clock.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_server_that_the_system_would_not_start_is_tried_again_and_the_other_serves_on(
    spawns: Spawns, told: list[tuple[str, Any]]
) -> None:
    serving = asyncio.create_task(serve_several(_pool()))
    try:
        await _until(lambda: serving.done() or ("ready", "pool") in told)
        first, second = spawns.pids
        spawns.failing = 2
        os.kill(second, signal.SIGKILL)
        await _until(lambda: serving.done() or ("server_ready", "pool-1") in told)
        assert not serving.done(), serving.exception()
        assert len(spawns.pids) == 3 and _lives(first) and _lives(spawns.pids[2])
    finally:
        await cancel_and_wait(serving)
    assert not any(map(_lives, spawns.pids))
    ends = [how for event, how in told if event == "server_ended"]
    assert ends == ["was ended by SIGKILL", "could not be started", "could not be started"]


async def test_a_server_that_the_system_will_not_start_ends_the_pools_start_with_the_reason(
    spawns: Spawns, told: list[tuple[str, Any]]
) -> None:
    spawns.failing = 1
    with pytest.raises(StartError) as refused:
        await serve_several(_pool())
    assert str(refused.value) == f"pool-0: {REASON}"
    assert told == []


async def test_a_server_that_says_a_line_beyond_measure_before_it_serves_is_ended_and_tried_again(
    spawns: Spawns, told: list[tuple[str, Any]]
) -> None:
    server = PoolServer(load(PoolConfig, name="pool-0"))
    spawns.programs = [SERVES, f"{LONG_LINE}; {UNTIL_A_SIGNAL}"]
    await server.start()
    keeping = asyncio.create_task(server.keep())
    try:
        os.kill(server.pid, signal.SIGKILL)
        await _until(lambda: keeping.done() or ("server_ready", "pool-0") in told)
        assert not keeping.done(), keeping.exception()
        assert len(spawns.pids) == 3 and not _lives(spawns.pids[1])
    finally:
        await cancel_and_wait(keeping)
        await server.aclose()


async def test_a_server_that_says_a_line_beyond_measure_while_it_serves_goes_on(
    spawns: Spawns, told: list[tuple[str, Any]]
) -> None:
    server = PoolServer(load(PoolConfig, name="pool-0"))
    spawns.programs = [f"{READY}; {LONG_LINE}; {LONG_LINE}; raise SystemExit(7)"]
    await server.start()
    keeping = asyncio.create_task(server.keep())
    try:
        await _until(lambda: keeping.done() or ("server_ready", "pool-0") in told)
        assert not keeping.done(), keeping.exception()
    finally:
        await cancel_and_wait(keeping)
        await server.aclose()
    assert told == [("server_ended", "ended with exit code 7"), ("server_ready", "pool-0")]
