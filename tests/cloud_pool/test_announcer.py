"""What a pool says at a real Mosquitto, by what a listener there hears."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cloud_pool.announcer import PoolAnnouncer
from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from tests.support.gateway.app import until
from tests.support.mqtt.brokers import Mosquitto
from tidegate import clock
from tidegate.fleet.messages import BadMessage
from tidegate.fleet.pool_messages import PoolDeath, PoolState, decode_pool, encode_pool
from tidegate.fleet.topics import PoolTopic, Topics
from tidegate.mqtt.link import MqttLink, MqttMessage
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process import StartError

TOPICS = Topics("f1")
pytestmark = [pytest.mark.slow, pytest.mark.needs_mosquitto]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path) as broker:
        yield broker


def announcer(broker: Mosquitto, **more: Any) -> PoolAnnouncer:
    words: dict[str, Any] = {"pool": "a", "address": "10.0.0.1:8101", "zone": "site", "draw": random.random, **more}
    return PoolAnnouncer(broker.url, fleet="f1", **words)


class Listener:
    """Everything that pools say, in order; what was removed is None."""

    def __init__(self, broker: Mosquitto) -> None:
        self.strict = True  # otherwise what cannot be read is left out
        self.heard: list[PoolState | PoolDeath | None] = []
        self.link = MqttLink(
            broker.url,
            client_id="listener",
            subscriptions=TOPICS.of_pools,
            draw=random.random,
            on_activity=lambda: None,
        )

    async def run(self) -> None:
        while True:
            for event in self.link.take():
                if isinstance(event, MqttMessage):
                    parsed = TOPICS.parse_pool(event.topic)
                    assert parsed is not None
                    try:
                        self.heard.append(decode_pool(*parsed, event.payload) if event.payload else None)
                    except BadMessage:
                        assert not self.strict
            await clock.sleep(0.01)

    def states(self) -> list[PoolState]:
        return [one for one in self.heard if isinstance(one, PoolState)]

    def deaths(self) -> list[PoolDeath]:
        return [one for one in self.heard if isinstance(one, PoolDeath)]


@asynccontextmanager
async def listener(broker: Mosquitto) -> AsyncIterator[Listener]:
    one = Listener(broker)
    async with one.link, OwnedTask(one.run, name="listener"):
        await until(lambda: one.link.connected)
        yield one


async def test_it_says_where_it_is_that_it_drains_and_goodbye(broker: Mosquitto) -> None:
    async with listener(broker) as ear:
        async with announcer(broker) as pool:
            await until(lambda: ear.states() != [])
            pool.drain()
            await until(lambda: ear.states()[-1].draining)
        await until(lambda: ear.deaths() != [])
        first, last = ear.states()[0], ear.states()[-1]
        assert (first.address, first.zone, first.draining) == ("10.0.0.1:8101", "site", False)
        assert last.order > first.order and last.boot == first.boot
        assert (ear.deaths()[0].reason, ear.deaths()[0].epoch) == ("shutdown", first.epoch)
    async with listener(broker) as late:  # nothing is kept of a pool that has ended
        await clock.sleep(0.3)
        assert late.heard == []


async def test_a_greater_epoch_of_an_earlier_life_is_exceeded(broker: Mosquitto) -> None:
    """As after a restart with a clock that was set back."""
    async with listener(broker) as ear:
        await until(lambda: ear.link.connected)
        future = PoolState("a", 2**52, 3, "earlier", "10.0.0.9:1")
        ear.link.publish(TOPICS.pool("a", PoolTopic.STATE), encode_pool(future), qos=1, retain=True)
        await until(lambda: ear.states() != [])
        async with announcer(broker):
            await until(lambda: ear.states()[-1].epoch == 2**52 + 1 and ear.states()[-1].boot != "earlier")


async def test_after_a_broker_that_forgot_everything_it_is_said_again(broker: Mosquitto) -> None:
    async with announcer(broker):
        async with listener(broker) as ear:
            await until(lambda: ear.states() != [])
            epoch = ear.states()[-1].epoch
        broker.kill()
        broker.start()
        async with listener(broker) as ear:
            await until(lambda: ear.states() != [])
            assert ear.states()[-1].epoch > epoch and ear.deaths() == []


async def test_garbage_in_its_own_topic_is_ignored(broker: Mosquitto) -> None:
    async with announcer(broker) as pool, listener(broker) as ear:
        await until(lambda: ear.states() != [])
        ear.strict = False
        for payload in (b"{", b"\xff", b"x" * 5000, encode_pool(PoolState("b", 2**52, 1, "x", "h:1"))):
            assert ear.link.publish(TOPICS.pool("a", PoolTopic.STATE), payload, qos=1)
        pool.drain()
        await until(lambda: any(one.draining for one in ear.states()))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mqtt": "mqtt://127.0.0.1", "host": "0.0.0.0"}, "key 'advertise' is needed"),
        ({"mqtt": "http://127.0.0.1"}, "key 'mqtt'"),
    ],
)
async def test_a_pool_that_could_not_be_announced_does_not_start(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(StartError, match=words):
        async with PoolApp(PoolConfig(model_repository=tmp_path, grpc_port=0, **keys)):
            pass
