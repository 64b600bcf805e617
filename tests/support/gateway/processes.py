"""A gateway of several processes as an operator starts it, and callers that count what becomes of their requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from tests.support.gateway.app import BODY, INFER
from tidegate import clock

READY_WITHIN_S = 120.0
HEADERS = {"tidegate-budget-ms": "20000"}


class GatewayProcesses:
    """`async with` starts `python -m gateway` with this configuration and waits until it is ready."""

    def __init__(self, folder: Path, **keys: object) -> None:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "admin_port": 0}
        self.path = folder / "gateway.yaml"
        self.keys = {**ports, "workers": 2, "drain_s": 10.0, **keys}
        self.log = folder / "gateway.log"
        self.events: list[dict[str, Any]] = []
        self.addresses: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    def configure(self, **keys: object) -> None:
        """Write the file anew, with these keys changed."""
        self.keys.update(keys)
        self.path.write_text(yaml.safe_dump(self.keys))

    async def __aenter__(self) -> Self:
        self.configure()
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "gateway", "--config", str(self.path), "--die-with-parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        self._reading = asyncio.create_task(self._read(), name="events")
        await self.event("ready")
        self.addresses = self.events[-1]["addresses"]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None and self._reading is not None
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(30.0):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            self.events.append(json.loads(line))

    def count(self, name: str) -> int:
        """How many events of this name there have been."""
        return sum(one["event"] == name for one in self.events)

    async def event(self, name: str, count: int = 1) -> None:
        """Wait for the n-th event of a name; fails where the process has ended."""
        async with asyncio.timeout(READY_WITHIN_S):
            while self.count(name) < count:
                assert self._reading is not None and not self._reading.done(), self.log.read_text()
                await clock.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        assert self._process is not None
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def ended(self) -> int:
        assert self._process is not None
        async with asyncio.timeout(30.0):
            return await self._process.wait()

    async def state(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        async with session.get(self.addresses["admin"] + "/v1/state") as answer:
            assert answer.status == 200
            found: dict[str, Any] = await answer.json()
            return found

    async def members(self, session: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in (await self.state(session))["workers"]}

    async def until_members(self, session: aiohttp.ClientSession, within_s: float = 60.0, **pids_before: int) -> None:
        """Wait until all processes serve, those named here with other process ids than these."""
        async with asyncio.timeout(within_s):
            while True:
                try:
                    found = await self.members(session)
                except aiohttp.ClientError:  # the keeper itself is away
                    found = {}
                fresh = all(found[name]["pid"] != pid for name, pid in pids_before.items()) if found else False
                if fresh and all(one["state"] == "ready" for one in found.values()):
                    return
                await clock.sleep(0.05)


@dataclass
class Outcomes:
    """What became of requests: by status, and those without an answer in words."""

    statuses: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    refused: int = 0  # connections

    @property
    def others(self) -> dict[int, int]:
        return {status: count for status, count in self.statuses.items() if status != 200}


@asynccontextmanager
async def calling(url: str, callers: int, *, keep: bool = True, pause_s: float = 0.0) -> AsyncIterator[Outcomes]:
    """So many callers, each of which sends a request when its last is answered, until the end of this context.

    Args:
        keep: whether a caller keeps its connection; otherwise each request has its own.
    """
    told, over = Outcomes(), asyncio.Event()

    async def caller() -> None:
        connector = aiohttp.TCPConnector(force_close=not keep)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not over.is_set():
                try:
                    async with session.post(url + INFER, json=BODY, headers=HEADERS) as answer:
                        await answer.read()
                        told.statuses[answer.status] += 1
                except aiohttp.ClientConnectorError as error:
                    told.refused += 1
                    told.broken.append(str(error))
                except aiohttp.ClientError as error:
                    told.broken.append(repr(error))
                await clock.sleep(pause_s)

    tasks = [asyncio.create_task(caller(), name=f"caller {number}") for number in range(callers)]
    try:
        yield told
    finally:
        over.set()
        await asyncio.gather(*tasks)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
