"""Who may announce a pool, and as whom: Mosquitto as `tidegate broker config` configures it, and certificates."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from cloud_pool.announcer import PoolAnnouncer
from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from tests.support.certificates import FleetPki
from tests.support.gateway.app import MAX_BYTES, Far, configured, until
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tidegate import clock
from tidegate.fleet.pool_messages import PoolState, encode_pool
from tidegate.fleet.topics import PoolTopic, Topics
from tidegate.mqtt.link import MqttLink, PublishAck
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.role_guard import ServerSecurity
from tidegate.tools.broker.cli import CONF, copy_certificate, write
from tidegate.tools.broker.mosquitto_config import MosquittoPlan

pytestmark = [pytest.mark.slow, pytest.mark.needs_mosquitto]
TOPICS = Topics("f1")


class Guarded(Mosquitto):
    """With the ACL of a fleet with the pools pool-0 and pool-1, and devices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pki = FleetPki(folder / "pki")
        self.pki.issue("broker/main")
        plan = MosquittoPlan("f1", ("main",), folder, port=self.port, address="127.0.0.1", pools=("pool-0", "pool-1"))
        write(replace(plan, data_dir=None, run_as="root" if os.geteuid() == 0 else None), folder, ())
        copy_certificate(self.pki.store, folder)

    @property
    def url(self) -> str:
        return f"mqtts://localhost:{self.port}"

    def command(self) -> list[str]:
        assert MOSQUITTO is not None
        return [MOSQUITTO, "-c", str(self._folder / CONF)]

    def announcer(self, pool: str, address: str) -> PoolAnnouncer:
        tls = self.pki.tls(f"pool/{pool}").client_context
        return PoolAnnouncer(self.url, fleet="f1", pool=pool, address=address, zone=None, draw=random.random, tls=tls)

    @asynccontextmanager
    async def far(self, pool: str) -> AsyncIterator[Far]:
        """A pool's server, with its certificate."""
        far = Far(f"pool/{pool}")
        secured = ServerSecurity(self.pki.tls(f"pool/{pool}"), frozenset({"gateway"}))
        async with open_grpc_server(
            far.add_to, "127.0.0.1", 0, max_message_bytes=MAX_BYTES, grace_s=0.1, secured=secured
        ) as door:
            await door.server.start()
            far.port = int(door.address.rpartition(":")[2])
            yield far

    @asynccontextmanager
    async def gateway(self, folder: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
        plain = configured(folder).model_dump()
        more = {"mqtt": self.url, "fleet": "f1", "discovery": ({"source": "announce"},)}
        config = GatewayConfig(**plain | more | {"tls": self.pki.config("gateway/main").model_dump()})
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.pki.client()))
        async with Gateway(config) as gateway, session:
            await until(lambda: gateway.found.sources["announce"].heard_at is not None)
            yield gateway, session


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Guarded]:
    (tmp_path / "broker").mkdir()
    with Guarded(tmp_path / "broker") as broker:
        yield broker


@dataclass
class Speaker:
    """Somebody with a certificate at the broker."""

    link: MqttLink

    async def may_say(self, topic: str, payload: bytes) -> bool:
        assert self.link.publish(topic, payload, qos=1, retain=True, answered=True)
        async with asyncio.timeout(10.0):
            while True:
                for event in self.link.take():
                    if isinstance(event, PublishAck):
                        return not event.refusal
                await clock.sleep(0.01)


@asynccontextmanager
async def speaker(broker: Guarded, who: str) -> AsyncIterator[Speaker]:
    link = MqttLink(
        broker.url,
        client_id=who.replace("/", "~"),
        subscriptions=(),
        draw=random.random,
        on_activity=lambda: None,
        tls=broker.pki.tls(who).client_context,
    )
    async with link:
        await until(lambda: link.connected)
        yield Speaker(link)


async def test_a_pool_announces_itself_and_nobody_else_can(tmp_path: Path, broker: Guarded) -> None:
    async with (
        broker.far("pool-0") as far,
        broker.announcer("pool-0", far.address),
        broker.gateway(tmp_path) as (gateway, _),
    ):
        await until(lambda: gateway.host.model_ready("echo"))
        topic = TOPICS.pool("pool-0", PoolTopic.STATE)
        lie = encode_pool(PoolState("pool-0", 2**53 - 1, 1, "liar", "127.0.0.1:1"))
        for who in ("pool/pool-1", "edge/device-1", "pool/pool-9"):
            async with speaker(broker, who) as liar:
                assert not await liar.may_say(topic, lie)
                assert not await liar.may_say(topic, b"")
        async with speaker(broker, "edge/device-1") as device:  # nor as a pool of its own name
            assert not await device.may_say(TOPICS.pool("device-1", PoolTopic.STATE), lie)
        assert gateway.found.targets["pool/pool-0"].spec.address == far.address


async def test_where_a_pool_is_said_to_be_its_certificate_must_be_shown(tmp_path: Path, broker: Guarded) -> None:
    async with (
        broker.far("pool-0") as far,
        broker.announcer("pool-1", far.address),
        broker.gateway(tmp_path) as (gateway, _),
    ):  # pool-1 points at pool-0
        await until(lambda: "pool/pool-1" in gateway.fleet.targets and gateway.fleet.targets["pool/pool-1"].tried)
        await clock.sleep(1.0)
        assert not gateway.fleet.targets["pool/pool-1"].up
        assert not gateway.host.model_ready("echo")
