"""A gateway whose pools announce themselves through a real Mosquitto."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cloud_pool.announcer import PoolAnnouncer
from gateway.app import Gateway
from gateway.config.discovery import SourceConfig
from gateway.config.gateway import GatewayConfig
from tests.support.gateway.app import Far, ask, configured, gateway_for, running, target, until
from tests.support.mqtt.brokers import Mosquitto
from tidegate import clock
from tidegate.fleet.pool_messages import PoolState, encode_pool
from tidegate.fleet.topics import DEFAULT_FLEET, PoolTopic, Topics
from tidegate.mqtt.link import MqttLink

pytestmark = pytest.mark.slow
TOPICS = Topics(DEFAULT_FLEET)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path) as broker:
        yield broker


def announced(far: Far, broker: Mosquitto, **more: Any) -> PoolAnnouncer:
    values: dict[str, Any] = {"pool": far.name.split("/")[1], "address": far.address, "zone": None, **more}
    return PoolAnnouncer(broker.url, fleet=DEFAULT_FLEET, draw=random.random, **values)


def config(folder: Path, broker: Mosquitto, *targets: Any, **more: Any) -> GatewayConfig:
    return configured(folder, *targets, mqtt=broker.url, discovery=(SourceConfig(source="announce"),), **more)


async def ailing(gateway: Gateway, session: aiohttp.ClientSession) -> list[tuple[str, str, str]]:
    async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
        found = (await response.json())["ailing"]
    return [(one["target"], one["condition"], one["evidence"]) for one in found]


def talker(broker: Mosquitto) -> MqttLink:
    return MqttLink(broker.url, client_id="stranger", subscriptions=(), draw=random.random, on_activity=lambda: None)


def state_of(pool: str, address: str, epoch: int = 1) -> bytes:
    return encode_pool(PoolState(pool, epoch, 1, "stranger", address))


async def test_pools_come_and_go_as_they_say(tmp_path: Path, broker: Mosquitto) -> None:
    one, two = Far("pool/one"), Far("pool/two")
    async with running(one, two), announced(one, broker), gateway_for(config(tmp_path, broker)) as (gateway, session):
        await until(lambda: gateway.host.model_ready("echo"))
        assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/one"
        async with announced(two, broker, zone="site"):
            await until(lambda: len(gateway.fleet.offered("echo", "3")) == 2)
            assert gateway.fleet.targets["pool/two"].spec.zone == "site"
        await until(lambda: gateway.fleet.targets["pool/two"].leaving != "")
        assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/one"
        assert gateway.found.sources["announce"].why == ""


async def test_a_pool_that_drains_says_so_and_gets_nothing_new(tmp_path: Path, broker: Mosquitto) -> None:
    one, two = Far("pool/one"), Far("pool/two")
    async with (
        running(one, two),
        announced(one, broker),
        announced(two, broker) as leaves,
        gateway_for(config(tmp_path, broker)) as (gateway, session),
    ):
        await until(lambda: len(gateway.fleet.offered("echo", "3")) == 2)
        leaves.drain()
        await until(lambda: "says that it ends" in gateway.fleet.targets["pool/two"].leaving, within_s=2.0)
        assert gateway.fleet.targets["pool/two"].up
        for _ in range(5):
            assert (await ask(gateway, session))[2]["tidegate-served-by"] == "pool/one"


async def test_a_broker_that_is_away_takes_no_target(tmp_path: Path, broker: Mosquitto) -> None:
    far = Far("pool/one")
    async with running(far), announced(far, broker), gateway_for(config(tmp_path, broker)) as (gateway, session):
        await until(lambda: gateway.host.model_ready("echo"))
        broker.kill()
        await until(lambda: gateway.found.sources["announce"].why != "")
        for _ in range(10):
            assert (await ask(gateway, session))[0] == 200
            await clock.sleep(0.1)
        assert ("source/announce", "source_away") in [one[:2] for one in await ailing(gateway, session)]
        broker.start()  # and it has forgotten all that was retained
        await until(lambda: gateway.found.sources["announce"].why == "")
        for _ in range(10):
            assert (await ask(gateway, session))[0] == 200
            await clock.sleep(0.1)
        assert gateway.fleet.targets["pool/one"].leaving == ""


async def test_a_gateway_without_a_broker_starts_and_says_so(tmp_path: Path, broker: Mosquitto) -> None:
    far = Far("pool/one")
    broker.kill()
    async with running(far), announced(far, broker), gateway_for(config(tmp_path, broker)) as (gateway, session):
        assert gateway.found.settled
        assert (await ask(gateway, session))[0] == 503
        broker.start()
        await until(lambda: gateway.host.model_ready("echo"))
        assert (await ask(gateway, session))[0] == 200


async def test_a_lost_pool_whose_link_works_stays(tmp_path: Path, broker: Mosquitto) -> None:
    far = Far("pool/one")
    async with running(far), talker(broker) as stranger:
        await until(lambda: stranger.connected)
        async with gateway_for(config(tmp_path, broker)) as (gateway, session):
            stranger.publish(TOPICS.pool("one", PoolTopic.STATE), state_of("one", far.address), qos=1, retain=True)
            await until(lambda: gateway.host.model_ready("echo"))
            stranger.publish(TOPICS.pool("one", PoolTopic.STATE), b"", qos=1, retain=True)
            await until(lambda: gateway.found.targets["pool/one"].found.lost)
            for _ in range(5):
                assert (await ask(gateway, session))[0] == 200
                await clock.sleep(0.1)
            await far.kill()
            await until(lambda: "pool/one" not in gateway.fleet.targets)


@pytest.mark.parametrize(
    ("address", "words"),
    [("169.254.169.254:80", "no network of advertised_networks"), ("unix:/run/x.sock", "no HOST:PORT"), ("h", "")],
)
async def test_an_address_that_is_not_allowed_is_refused_by_name(
    tmp_path: Path, broker: Mosquitto, address: str, words: str
) -> None:
    async with talker(broker) as stranger, gateway_for(config(tmp_path, broker)) as (gateway, session):
        await until(lambda: stranger.connected)
        stranger.publish(TOPICS.pool("bad", PoolTopic.STATE), state_of("bad", address), qos=1)
        stranger.publish(TOPICS.pool("good", PoolTopic.STATE), state_of("good", "127.0.0.1:1"), qos=1)
        await until(lambda: "pool/good" in gateway.found.targets)
        assert list(gateway.found.targets) == ["pool/good"]
        said = [evidence for _, condition, evidence in await ailing(gateway, session) if condition == "source_unusable"]
        assert (words in said[0] and "pool/bad" in said[0]) if words else said == []


async def test_a_name_that_resolves_outside_the_networks_is_not_dialled(tmp_path: Path, broker: Mosquitto) -> None:
    far = Far("pool/one")
    async with running(far):
        by_name = "localhost:" + far.address.rpartition(":")[2]
        async with announced(far, broker, address=by_name):
            elsewhere = config(tmp_path, broker, advertised_networks=("10.0.0.0/8",))
            async with gateway_for(elsewhere) as (gateway, _):
                await until(lambda: "pool/one" in gateway.fleet.targets and gateway.fleet.targets["pool/one"].tried)
                assert "advertised_networks" in gateway.fleet.targets["pool/one"].reason


async def test_two_live_pools_of_one_name_are_a_conflict_and_the_first_is_used(
    tmp_path: Path, broker: Mosquitto
) -> None:
    first, second = Far("pool/one"), Far("pool/one")
    async with (
        running(first, second),
        announced(first, broker),
        gateway_for(config(tmp_path, broker)) as (gateway, session),
    ):
        await until(lambda: gateway.host.model_ready("echo"))
        async with announced(second, broker):
            await until(lambda: bool(list(gateway.found.refusals())))
            (refusal,) = gateway.found.refusals()
            assert refusal[1] == "pool/one" and second.address in refusal[2]
            view = gateway.fleet.targets["pool/one"]
            await until(lambda: view.spec.address == first.address and view.up)
            assert (await ask(gateway, session))[0] == 200


async def test_an_id_of_the_gateways_own_list_cannot_be_announced(tmp_path: Path, broker: Mosquitto) -> None:
    own, other = Far("pool/one"), Far("pool/one")
    async with (
        running(own, other),
        announced(other, broker),
        gateway_for(config(tmp_path, broker, target(own))) as (gateway, session),
    ):
        await until(lambda: bool(list(gateway.found.refusals())))
        assert gateway.fleet.targets["pool/one"].spec.address == own.address
        assert (await ask(gateway, session))[0] == 200


async def test_a_flood_of_names_is_bounded(tmp_path: Path, broker: Mosquitto) -> None:
    far = Far("pool/one")
    async with running(far), announced(far, broker), talker(broker) as stranger:
        await until(lambda: stranger.connected)
        async with gateway_for(config(tmp_path, broker)) as (gateway, session):
            await until(lambda: gateway.host.model_ready("echo"))
            for number in range(300):
                topic = TOPICS.pool(f"p{number}", PoolTopic.STATE)
                await until(
                    lambda topic=topic, number=number: stranger.publish(
                        topic, state_of(f"p{number}", f"169.254.0.{number % 250}:1"), qos=1
                    )
                )
            await until(lambda: "and 2" in gateway.found.sources["announce"].warning)
            assert list(gateway.found.targets) == ["pool/one"]
            assert len(gateway.found.sources["announce"].warning) < 2000
            assert (await ask(gateway, session))[0] == 200
