"""Workers hear the broker by way of the keeper: all that a newcomer is told, what comes, and when nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.workers.broker_relay import BrokerRelay, RelayedBroker
from tidegate import clock
from tidegate.fleet.topics import Topics
from tidegate.mqtt.link import LinkEvent, MqttConnected, MqttDisconnected, MqttMessage

ROOT = "tidegate/v1/f1"
UP = MqttConnected(1, "5")


def said(topic: str, payload: bytes = b"{}", *, retained: bool = False) -> MqttMessage:
    return MqttMessage(f"{ROOT}/{topic}", payload, 1, retained)


class Worker:
    """`heard` is what its link has given out."""

    def __init__(self, path: Path) -> None:
        self.news = asyncio.Event()
        self.heard: list[LinkEvent] = []
        self.link = RelayedBroker(
            path, "mqtt://broker", draw=lambda: 0.5, on_activity=self.news.set, max_inbox=1000
        )  # fmt: skip

    async def hears(self, enough: Callable[[list[LinkEvent]], bool]) -> list[LinkEvent]:
        async with asyncio.timeout(10):
            while not enough(self.heard):
                await self.news.wait()
                self.news.clear()
                self.heard += self.link.take()
        return self.heard


@asynccontextmanager
async def working(path: Path) -> AsyncIterator[Worker]:
    worker = Worker(path)
    async with worker.link:
        yield worker


def topics(events: list[LinkEvent]) -> list[str]:
    return [one.topic.removeprefix(f"{ROOT}/") for one in events if isinstance(one, MqttMessage)]


async def test_a_worker_that_begins_late_hears_the_newest_of_what_is_retained_and_then_what_comes(
    tmp_path: Path,
) -> None:
    relay, path = BrokerRelay(Topics("f1")), tmp_path / "broker.sock"
    async with relay.opened(path):
        for event in (
            UP,
            said("up/gone/birth", retained=True),
            said("up/edge-1/birth", b"old", retained=True),
            said("up/edge-1/birth", b"new"),
            said("up/edge-1/hb"),
            said("up/edge-1/evt/main"),
            said("gw/main/state"),
            said("gw/main/hb"),
            said("pool/cloud/state"),
            said("peer/second"),
            said("up/gone/birth", b""),
        ):
            relay.heard(event)
        async with working(path) as worker:
            found = await worker.hears(lambda heard: len(heard) >= 4)
            assert found == [
                UP,
                said("up/edge-1/birth", b"new", retained=True),
                said("gw/main/state", retained=True),
                said("pool/cloud/state", retained=True),
            ]
            assert worker.link.connected and not worker.link.publish(f"{ROOT}/gw/main/state", b"{}")
            relay.heard(said("up/edge-1/hb"))
            relay.heard(said("up/edge-1/res/main"))
            relay.heard(said("peer/second"))
            found = await worker.hears(lambda heard: len(heard) >= 6)
            assert topics(found[4:]) == ["up/edge-1/hb", "peer/second"], "what is stored is the keeper's alone"


async def test_what_was_deleted_while_the_broker_was_away_is_not_told_again(tmp_path: Path) -> None:
    relay, path = BrokerRelay(Topics("f1")), tmp_path / "broker.sock"
    async with relay.opened(path), working(path) as worker:
        relay.heard(UP)
        await worker.hears(lambda heard: UP in heard)
        relay.heard(said("up/edge-1/birth", retained=True))
        relay.heard(MqttDisconnected(1, "the broker hung up"))
        await worker.hears(lambda heard: MqttDisconnected(1, "the broker hung up") in heard)
        assert not worker.link.connected
        relay.heard(MqttConnected(2, "5"))
        relay.heard(said("up/edge-2/birth", retained=True))
        async with working(path) as late:
            assert topics(await late.hears(lambda heard: len(heard) >= 2)) == ["up/edge-2/birth"]


async def test_a_worker_outlives_its_keeper_and_hears_all_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    async with working(path) as worker:  # before there is any keeper
        for epoch in (b"1", b"2"):
            relay = BrokerRelay(Topics("f1"))
            async with relay.opened(path):
                relay.heard(UP)
                relay.heard(said("up/edge-1/birth", epoch))
                await worker.hears(lambda heard, epoch=epoch: epoch in [getattr(one, "payload", b"") for one in heard])
            await worker.hears(lambda heard: isinstance(heard[-1], MqttDisconnected))
            assert not worker.link.connected


async def test_a_worker_that_reads_nothing_is_cut_off_and_costs_the_others_nothing(tmp_path: Path) -> None:
    relay, path = BrokerRelay(Topics("f1")), tmp_path / "broker.sock"
    async with relay.opened(path):
        relay.heard(UP)
        reader, writer = await asyncio.open_unix_connection(path, limit=1)
        async with working(path) as other:
            await other.hears(lambda heard: len(heard) >= 1)
            for number in range(600):
                relay.heard(said(f"up/edge-{number}/inv", b"x" * 120_000))
                await clock.sleep(0.0)
            await other.hears(lambda heard: "up/edge-599/inv" in topics(heard))
        async with asyncio.timeout(10):
            while await reader.read(2**20):
                pass
        writer.close()
