"""Gateways that lease quotas from a real redis-server, which is killed, stopped, flushed and given a password."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from tests.gateway.test_side_by_side import RATE, call_all
from tests.support.gateway.app import Far, configured, gateway_for, running, target, until
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tests.support.stores import REDIS, RedisServer
from tidegate import clock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]


@asynccontextmanager
async def leasing(
    folder: Path, broker: str | None, pool: Far, count: int, **store: Any
) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        gateways = []
        base = configured(folder, target(pool), tenants={"acme": {"requests_per_s": RATE}}, mqtt=broker, store=store)
        for number in range(count):
            config = GatewayConfig.model_validate({**base.model_dump(exclude_unset=True), "name": f"g{number}"})
            gateways.append((await stack.enter_async_context(gateway_for(config)))[0])
        yield gateways


def leased(gateway: Gateway) -> bool:
    return gateway.admission.tenants.of("acme").requests.leased


async def granted(gateways: list[Gateway], seconds: float, **meanwhile: Any) -> float:
    """Of the quota."""
    told = await call_all(gateways, seconds, **meanwhile)
    assert set().union(*told) <= {"ok", "overloaded"}
    return sum(one["ok"] for one in told) / (RATE * seconds)


async def test_a_quota_holds_by_leases_and_goes_on_by_shares_when_the_store_is_killed(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker, RedisServer(tmp_path) as store:
        async with (
            running(pool),
            leasing(tmp_path, broker.url, pool, 3, url=store.url) as gateways,
        ):
            await until(lambda: all(one.peers.count(clock.now()) == 3 and leased(one) for one in gateways))
            await granted(gateways, 3.0)
            assert await granted(gateways, 8.0) == pytest.approx(1.0, abs=0.05)
            store.kill()
            await until(lambda: not any(map(leased, gateways)))
            async with (
                aiohttp.ClientSession() as http,
                http.get(gateways[0].addresses["admin"] + "/debug/conditions") as response,
            ):
                (condition,) = (await response.json())["conditions"]
            assert (condition["target"], condition["condition"]) == (f"store/127.0.0.1:{store.port}/0", "store_away")
            assert await granted(gateways, 8.0) <= 1.2
            store.start()
            await until(lambda: all(map(leased, gateways)))
            await granted(gateways, 2.0)  # what was saved up meanwhile
            assert await granted(gateways, 8.0) <= 1.05


async def test_a_store_that_hangs_costs_no_request_anything_and_is_used_again(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker, RedisServer(tmp_path) as store:
        async with (
            running(pool),
            leasing(tmp_path, broker.url, pool, 3, url=store.url) as gateways,
        ):
            await until(lambda: all(one.peers.count(clock.now()) == 3 and leased(one) for one in gateways))
            await granted(gateways, 3.0)
            store.stop_answering()
            try:
                assert 0.8 <= await granted(gateways, 8.0) <= 1.2
            finally:
                store.go_on()
            await until(lambda: all(map(leased, gateways)))
            await granted(gateways, 2.0)  # what was saved up meanwhile

            async def forgets() -> None:
                await clock.sleep(3.0)
                store.flush()

            assert await granted(gateways, 8.0, meanwhile=forgets) <= 1.08, (
                "a store that has forgotten everything lends no second burst"
            )


async def test_without_a_broker_the_store_alone_is_enough(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with RedisServer(tmp_path) as store:
        async with (
            running(pool),
            leasing(tmp_path, None, pool, 3, url=store.url) as gateways,
        ):
            await until(lambda: all(map(leased, gateways)))
            await granted(gateways, 2.0)
            assert await granted(gateways, 6.0) == pytest.approx(1.0, abs=0.07)


async def test_a_store_that_is_full_or_wants_a_password_is_as_good_as_none(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with RedisServer(tmp_path, "--requirepass", "secret") as store:
        async with running(pool), leasing(tmp_path / "first", None, pool, 1, url=store.url) as (gateway,):
            assert gateway.store is not None
            await until(lambda: "uthentication" in (gateway.store.trouble or ""))  # type: ignore[union-attr]
        (tmp_path / "password").write_text("secret\n")
        file = tmp_path / "password"
        async with (
            running(pool),
            leasing(tmp_path / "second", None, pool, 1, url=store.url, password_file=file) as (gateway,),
        ):
            await until(lambda: leased(gateway))
    with RedisServer(tmp_path, "--maxmemory", "1kb", "--maxmemory-policy", "noeviction") as store:
        async with running(pool), leasing(tmp_path / "third", None, pool, 1, url=store.url) as (gateway,):
            assert gateway.store is not None
            await until(lambda: "maxmemory" in (gateway.store.trouble or ""))  # type: ignore[union-attr]
            assert not leased(gateway)


async def test_fleets_share_no_key_and_every_key_expires(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with RedisServer(tmp_path) as store:
        async with running(pool), leasing(tmp_path, None, pool, 1, url=store.url) as (gateway,):
            await until(lambda: leased(gateway))
            keys = store.say("KEYS", "*").split()
            assert keys and all(one.startswith(f"tidegate:{{{gateway.config.fleet}}}:") for one in keys)
            assert all(int(store.say("PTTL", one)) > 0 for one in keys)
