"""Gateways side by side at a real broker: one quota over all of them, whichever of them the callers come to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from gateway.core.fleet.scaling import KNOWN_S
from tests.support.gateway.app import TRIALS, Far, configured, gateway_for, running, target, until
from tests.support.lost_time import LostTime
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tests.support.serving.hosts import echo_request
from tidegate import clock
from tidegate.outcome import ServeError
from tidegate.types import Call

RATE = 40.0
RATES = (80.0, 8.0, 8.0)  # of callers, at three gateways
TENANTS = {"acme": {"requests_per_s": RATE}}
STEADY_S = 0.25  # a quarter of what a quota saves up: callers who are late by more get less of it


@asynccontextmanager
async def side_by_side(folder: Path, url: str, pool: Far, count: int) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        gateways = []
        base = configured(folder, target(pool), tenants=TENANTS, mqtt=url)
        for number in range(count):
            config = GatewayConfig.model_validate({**base.model_dump(exclude_unset=True), "name": f"g{number}"})
            gateways.append((await stack.enter_async_context(gateway_for(config)))[0])
        yield gateways


async def call(gateway: Gateway, rate: float, seconds: float) -> Counter[str]:
    """How many were answered or refused, by code, of requests at a steady rate.

    They come in behind the front ends: three gateways and all of their callers share one core here.
    """
    answers: Counter[str] = Counter()

    async def one() -> None:
        now = clock.now()
        try:
            await gateway.host.infer(Call(echo_request(b"abc"), "oip-http", now, now + 20.0, tenant="acme"))
        except ServeError as error:
            answers[error.code] += 1
        else:
            answers["ok"] += 1

    began_at = clock.now()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            await clock.sleep(max(0.0, began_at + number / rate - clock.now()))
            tasks.create_task(one())
    return answers


async def call_all(
    gateways: list[Gateway], seconds: float, meanwhile: Callable[[], Awaitable[object]] = lambda: clock.sleep(0.0)
) -> list[Counter[str]]:
    """What each gateway answered, once more where the machine stood still: then no rate was steady.

    Args:
        meanwhile: is done beside the calls, each time.
    """
    for _ in range(TRIALS):
        async with LostTime() as lost:
            calls = (call(one, rate, seconds) for one, rate in zip(gateways, RATES, strict=True))
            *told, _ = await asyncio.gather(*calls, meanwhile())
        if lost.longest_s < STEADY_S:
            break
    return told  # type: ignore[return-value]  # of `gather` with a star


@pytest.mark.slow
@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
async def test_a_quota_holds_over_gateways_of_which_one_is_asked_ten_times_as_much(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker:
        async with running(pool), side_by_side(tmp_path, broker.url, pool, 3) as gateways:
            await until(lambda: all(one.peers.count(clock.now()) == 3 for one in gateways))
            await call_all(gateways, 4.0)
            told = await call_all(gateways, 8.0)
            answered = [one["ok"] for one in told]
            assert set().union(*told) <= {"ok", "overloaded"}
            # An equal part of each would be 13.3 + 8 + 8 a second, the whole for each 40 + 8 + 8.
            assert RATE * 8.0 * 0.9 <= sum(answered) <= RATE * 8.0 * 1.1
            assert min(answered[1:]) >= 0.9 * 8.0 * 8.0


@pytest.mark.slow
@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
async def test_a_gateway_that_goes_leaves_its_part_and_the_number_is_known_from_the_start(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker:
        async with running(pool), side_by_side(tmp_path, broker.url, pool, 1) as (first,):
            quota = first.admission.tenants.of("acme")
            assert quota.requests.rate == RATE
            config = GatewayConfig.model_validate({**first.config.model_dump(exclude_unset=True), "name": "second"})
            async with gateway_for(config) as (second, _):
                await until(lambda: first.peers.names(clock.now()) == ["second"])
                await until(lambda: quota.requests.rate < RATE)
                await until(lambda: second.peers.reports(clock.now()) != [])
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(first.addresses["admin"] + "/v1/state") as response,
                ):
                    state = (await response.json())["gateways"]
                assert state["count"] == 2 and [one["name"] for one in state["others"]] == ["second"]
            await until(lambda: first.peers.count(clock.now()) == 1)
            await until(lambda: quota.requests.rate == pytest.approx(RATE))


@pytest.mark.slow
async def test_without_a_broker_the_expected_number_divides(tmp_path: Path) -> None:
    pool = Far("pool/main")
    async with running(pool):
        config = configured(tmp_path, target(pool), tenants=TENANTS, gateways=4)
        async with gateway_for(config) as (gateway, _):
            await until(lambda: gateway.admission.tenants.of("acme").requests.rate == pytest.approx(RATE / 4))


@pytest.mark.slow
@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
async def test_quiet_gateways_ask_for_the_least_number_of_replicas_once(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker:
        async with running(pool), side_by_side(tmp_path, broker.url, pool, 2) as gateways:
            now = clock.now()
            for one in gateways:
                await until(lambda one=one: len(one.peers.reports(clock.now())) == 1)  # type: ignore[misc]
                scaler = one.telemetry.scaling.scaling
                for second in range(KNOWN_S + 2):  # as if it had looked for a minute
                    scaler.arrived(0.3, 0.0, 1.0, now - KNOWN_S - 2 + second)
                one.telemetry.scaling.look(now)
            await until(lambda: all(one.peers.reports(clock.now())[0].need is not None for one in gateways))
            for one in gateways:
                one.telemetry.scaling.look(clock.now())
            told = [one.telemetry.scaling.told() for one in gateways]
            assert told[0]["pool_replicas_needed"] == told[1]["pool_replicas_needed"]
            assert told[0]["gateways"] == 2


@pytest.mark.slow
@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
async def test_two_gateways_of_one_name_are_noticed_and_the_one_that_stays_is_counted(tmp_path: Path) -> None:
    pool = Far("pool/main")
    with Mosquitto(tmp_path) as broker:
        async with running(pool), side_by_side(tmp_path, broker.url, pool, 2) as (first, second):
            await until(lambda: second.peers.names(clock.now()) == ["g0"])
            async with gateway_for(first.config) as (double, _):
                await until(lambda: any(one.peers.has_namesake(clock.now()) for one in (first, double)), 30.0)
                assert not second.peers.has_namesake(clock.now())
            await until(lambda: second.peers.names(clock.now()) == ["g0"], 30.0)
            await until(lambda: len(second.peers.reports(clock.now())) == 1, 30.0)
