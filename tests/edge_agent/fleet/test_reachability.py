"""The reachability probe waits for an absent gateway, also behind a path that drops packets."""

from __future__ import annotations

import asyncio

import pytest

from edge_agent.fleet.reachability import MOST, wait_until_open
from tidegate.netsim.proxy.link import LinkProxy
from tidegate.testing.ports import free_port

pytestmark = pytest.mark.slow


async def test_it_returns_once_the_gateway_listens_again() -> None:
    port = free_port()
    probe = asyncio.create_task(wait_until_open(f"127.0.0.1:{port}", lambda: 0.0))
    done, _ = await asyncio.wait((probe,), timeout=0.6)
    assert not done

    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port)
    async with server, asyncio.timeout(30.0):
        await probe


async def test_what_is_swallowed_is_tried_again_beside_and_no_more_than_a_few_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge_agent.fleet.reachability.EVERY_S", 0.02)
    waiting, most, open_now = asyncio.Event(), 0, 0

    async def swallowed(_host: str, _port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        nonlocal most, open_now
        open_now += 1
        most = max(most, open_now)
        if open_now == MOST:
            waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            open_now -= 1
        raise AssertionError

    monkeypatch.setattr("asyncio.open_connection", swallowed)
    probe = asyncio.create_task(wait_until_open("10.0.0.1:8004", lambda: 0.5))
    async with asyncio.timeout(30.0):
        await waiting.wait()
    await asyncio.wait((probe,), timeout=0.2)
    assert (most, probe.done()) == (MOST, False)

    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert open_now == 0


async def test_an_open_path_costs_one_connection() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server, LinkProxy(("127.0.0.1", server.sockets[0].getsockname()[1])) as link, asyncio.timeout(30.0):
        await wait_until_open(f"127.0.0.1:{link.port}", lambda: 0.5)
        assert link.accepted == 1
