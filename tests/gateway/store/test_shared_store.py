"""The connection to the shared store: how many may use it at once, and what each gets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.config.store import SharedStoreConfig
from gateway.store.shared_store import MAX_CONNECTIONS, SharedStore, StoreScript, StoreUnavailable
from gateway.store.store_pause import FIRST_PAUSE_S
from tests.support.stores import REDIS, RedisServer
from tidegate import clock

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


async def test_one_silence_with_many_calls_in_flight_costs_one_short_pause(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with store_at(server.url) as store:
            await store.run(ECHO, [store.key("x")], [1])
            server.stop_answering()
            try:
                calls = [store.run(ECHO, [store.key("x")], [2]) for _ in range(MAX_CONNECTIONS)]
                failed = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                server.go_on()
            assert all(isinstance(one, StoreUnavailable) for one in failed)
            await clock.sleep(1.25 * FIRST_PAUSE_S)
            assert await store.run(ECHO, [store.key("x")], [3]) == b"3"


async def answers_in_the_end(store: SharedStore) -> None:
    async with asyncio.timeout(30.0):
        while True:
            try:
                assert await store.run(ECHO, [store.key("x")], [1]) == b"1"
                return
            except StoreUnavailable:
                await clock.sleep(0.05)


async def test_a_password_that_was_changed_is_read_again_after_the_refusal(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    server = RedisServer(tmp_path, "--requirepass", "first")
    section = SharedStoreConfig(url=server.url, password_file=file, timeout_ms=500)
    with server:
        async with SharedStore(section, "site", lambda: 0.5) as store:
            await answers_in_the_end(store)
            server.kill()
            server.options = ("--requirepass", "second")
            server.start()
            for _ in range(2):  # the connection that is gone, and then the password
                with pytest.raises(StoreUnavailable):
                    await store.run(ECHO, [store.key("x")], [1])
                await clock.sleep(0.1)
            file.unlink()  # a renewal is under way
            with capture_logs() as logs:
                await clock.sleep(2.0)
                with pytest.raises(StoreUnavailable, match="password"):
                    await store.run(ECHO, [store.key("x")], [1])
                file.write_text("second\n")
                await answers_in_the_end(store)
            assert [one["log_level"] for one in logs] == ["warning", "info", "info"]


async def test_connections_that_were_made_anew_leave_no_old_ones(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret")
    server = RedisServer(tmp_path, "--requirepass", "secret")
    section = SharedStoreConfig(url=server.url, password_file=file, timeout_ms=500)
    with server:
        async with SharedStore(section, "site", lambda: 0.5) as store:
            await asyncio.gather(*(store.run(ECHO, [store.key("x")], [1]) for _ in range(MAX_CONNECTIONS)))

            def connections() -> int:
                return server.say("-a", "secret", "CLIENT", "LIST").count("name=tidegate")

            assert connections() > 1
            file.write_text("secret\n")
            server.stop_answering()
            with pytest.raises(StoreUnavailable):
                await store.run(ECHO, [store.key("x")], [1])
            server.go_on()
            await answers_in_the_end(store)
            assert connections() == 1
