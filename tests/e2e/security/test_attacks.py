"""Attacks on a gateway process over real sockets, while real traffic keeps its deadlines and its memory its bounds.

The gateway serves from a pool that answers at once; a caller sends requests all the while, with a budget that holds
even if the machine stalls for seconds. After each attack no request was late or refused, and the process has not grown
beyond twice the largest body.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.gateway.app import BODY, Far, repository, running
from tidegate import clock

pytestmark = pytest.mark.slow

MAX_BODY_BYTES = 32 * 2**20
IDLE = 10_000
BUDGET_S = 10.0  # whoever is kept out waits for as long as the attack lasts
BUDGET = {"tidegate-budget-ms": f"{1e3 * BUDGET_S:.0f}"}


@dataclass
class Attacked:
    process: psutil.Process
    addresses: dict[str, str]
    before_bytes: int
    statuses: list[int] = field(default_factory=list)
    longest_s: float = 0.0

    @property
    def url(self) -> str:
        return f"{self.addresses['http']}/v2/models/echo/infer"

    @property
    def grown_bytes(self) -> int:
        return self.process.memory_info().rss - self.before_bytes

    async def ask(self, session: aiohttp.ClientSession) -> None:
        began_at = clock.now()
        async with session.post(self.url, json=BODY, headers=BUDGET) as response:
            self.statuses.append(response.status)
        self.longest_s = max(self.longest_s, clock.now() - began_at)

    async def keep_asking(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                await self.ask(session)
                await clock.sleep(0.01)

    @asynccontextmanager
    async def meanwhile(self) -> AsyncIterator[None]:
        """Real traffic, with new connections of its own, for as long as the attack goes on; then what came of it."""
        asking = asyncio.create_task(self.keep_asking(), name="real traffic")
        try:
            yield
            served = len(self.statuses)
            async with asyncio.timeout(60.0):
                while len(self.statuses) < served + 5:  # and it goes on afterwards
                    await clock.sleep(0.01)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert set(self.statuses) == {200}
        assert self.longest_s < BUDGET_S


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncIterator[Attacked]:
    far = Far("pool/main")
    async with running(far):
        config = {
            **dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0),
            "model_repository": str(repository(tmp_path)),
            "max_body_bytes": MAX_BODY_BYTES,
            "targets": [{"name": "main", "address": far.address}],
        }
        path = tmp_path / "gateway.yaml"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "gateway", "--config", str(path)]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
        try:
            assert process.stdout is not None
            ready = json.loads(await process.stdout.readline())
            seen = psutil.Process(process.pid)
            one = Attacked(seen, ready["addresses"], 0)
            async with aiohttp.ClientSession() as session:
                for _ in range(20):
                    await one.ask(session)
            one.before_bytes, one.longest_s = seen.memory_info().rss, 0.0
            yield one
        finally:
            process.terminate()
            await process.wait()


async def _statuses(one: Attacked, bodies: list[Any], **headers: str) -> set[int]:
    async def post(body: Any) -> int:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.post(one.url, data=body, headers=headers) as response:
                    return response.status
            except aiohttp.ClientConnectionError:  # hung up on while it was still sending
                return 413

    return set(await asyncio.gather(*map(post, bodies)))


async def _gigabyte() -> AsyncIterator[bytes]:
    piece = b" " * 2**20
    for _ in range(1024):
        yield piece


async def test_a_body_of_a_gigabyte_is_refused_announced_or_not(attacked: Attacked) -> None:
    async with attacked.meanwhile():
        assert await _statuses(attacked, [_gigabyte()]) == {413}
        assert await _statuses(attacked, [_gigabyte()], **{"Content-Length": str(2**30)}) == {413}
    assert attacked.grown_bytes < 2 * MAX_BODY_BYTES


async def test_json_a_hundred_thousand_levels_deep_is_refused(attacked: Attacked) -> None:
    deep = b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    async with attacked.meanwhile():
        assert await _statuses(attacked, [deep] * 20) == {400}
    assert attacked.grown_bytes < 2 * MAX_BODY_BYTES


async def test_a_zip_bomb_is_refused_before_it_has_grown(attacked: Attacked) -> None:
    bomb = await asyncio.to_thread(gzip.compress, bytes(2**29), 6)  # aside: the pool lives on this loop
    async with attacked.meanwhile():
        assert await _statuses(attacked, [bomb] * 10, **{"Content-Encoding": "gzip"}) == {413}
    assert attacked.grown_bytes < 2 * MAX_BODY_BYTES


async def _hold(address: str, count: int, opened: list[asyncio.StreamWriter]) -> None:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    for _ in range(count):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            opened.append(writer)


async def test_ten_thousand_idle_connections_keep_nobody_out(attacked: Attacked) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(IDLE, files[1] - 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    opened: list[asyncio.StreamWriter] = []
    try:
        async with attacked.meanwhile():
            await asyncio.gather(*(_hold(attacked.addresses["http"], count // 50, opened) for _ in range(50)))
            assert len(opened) > 0.9 * count
            for _ in range(20):  # newcomers get a place as well
                async with aiohttp.ClientSession() as session:
                    await attacked.ask(session)
            assert len(attacked.process.net_connections()) < 2000
    finally:
        for writer in opened:
            writer.transport.abort()
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert attacked.grown_bytes < 2 * MAX_BODY_BYTES
