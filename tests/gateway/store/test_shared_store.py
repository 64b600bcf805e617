"""The connection to the shared store: how many may use it at once, and what each gets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.config.store import SharedStoreConfig
from gateway.store.shared_store import MAX_CONNECTIONS, SharedStore, StoreScript, StoreUnavailable
from tests.support.stores import REDIS, RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")]

ECHO = StoreScript("echo", "return ARGV[1]")


def store_at(url: str) -> SharedStore:
    return SharedStore(SharedStoreConfig(url=url, timeout_ms=500), "site", lambda: 0.5)


async def test_more_callers_than_connections_wait_and_are_all_answered(tmp_path: Path) -> None:
    """A device's inquiries about tickets come by the dozen when a gateway has died: the store is not away for that."""
    with RedisServer(tmp_path) as server:
        async with store_at(server.url) as store:
            calls = [store.run(ECHO, [store.key("x")], [number]) for number in range(10 * MAX_CONNECTIONS)]
            answers = await asyncio.gather(*calls)
            assert [int(one) for one in answers] == list(range(10 * MAX_CONNECTIONS))
            assert store.trouble is None


async def test_a_store_that_hangs_costs_those_that_wait_one_timeout_and_not_one_each(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with store_at(server.url) as store:
            await store.run(ECHO, [store.key("x")], [1])
            server.stop_answering()
            try:
                async with asyncio.timeout(5.0):
                    calls = [store.run(ECHO, [store.key("x")], [2]) for _ in range(10 * MAX_CONNECTIONS)]
                    failed = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                server.go_on()
            assert all(isinstance(one, StoreUnavailable) for one in failed)
