"""Where neighbours are, as a device hears it from a Mosquitto that `tidegate broker config` has configured."""

from __future__ import annotations

import os
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edge_agent.core.reporting import AgentState
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.sync import EdgeSync
from tests.edge_agent.test_app import eventually
from tests.support.certificates import FleetPki
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tidegate import clock
from tidegate.fleet.conditions import UNTOLD
from tidegate.fleet.messages import Birth, encode
from tidegate.fleet.topics import DeviceTopic, Topics
from tidegate.mqtt.link import MqttLink
from tidegate.tools.broker.cli import CONF, copy_certificate, write
from tidegate.tools.broker.mosquitto_config import MosquittoPlan
from tidegate.types import LoadReport

pytestmark = [pytest.mark.slow, pytest.mark.needs_mosquitto]


class Guarded(Mosquitto):
    """With the access list of the fleet f1."""

    def __init__(self, folder: Path, *, neighbours: bool) -> None:
        super().__init__(folder)
        self.pki = FleetPki(folder / "pki")
        self.pki.issue("broker/main")
        plan = MosquittoPlan("f1", ("main",), folder, port=self.port, address="127.0.0.1", neighbours=neighbours)
        write(replace(plan, data_dir=None, run_as="root" if os.geteuid() == 0 else None), folder, ())
        copy_certificate(self.pki.store, folder)

    @property
    def url(self) -> str:
        return f"mqtts://localhost:{self.port}"

    def command(self) -> list[str]:
        assert MOSQUITTO is not None
        return [MOSQUITTO, "-c", str(self._folder / CONF)]

    def sync(self, folder: Path, device: str, address: str, *neighbours: str) -> EdgeSync:
        return EdgeSync(
            self.url,
            fleet="f1",
            device=device,
            state=lambda: AgentState((), (address,), LoadReport(1, 1, 0, 0, 0.0), "open", UNTOLD),
            epochs=EpochStore(folder / device, draw=random.random),
            draw=random.random,
            tls=self.pki.tls(f"edge/{device}").client_context,
            neighbours=neighbours,
        )


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_device_hears_where_its_neighbours_are_if_the_broker_lets_it(tmp_path: Path, *, allowed: bool) -> None:
    async with AsyncExitStack() as stack:
        broker = stack.enter_context(Guarded(tmp_path, neighbours=allowed))
        two = await stack.enter_async_context(broker.sync(tmp_path, "kiosk-2", "10.0.0.2:9001"))
        three = await stack.enter_async_context(broker.sync(tmp_path, "kiosk-3", "10.0.0.3:9001"))
        await eventually(lambda: two.connected and three.connected)
        one = await stack.enter_async_context(broker.sync(tmp_path, "kiosk-1", "10.0.0.1:9001", "kiosk-2", "kiosk-9"))
        await eventually(lambda: one.connected)
        if allowed:
            await eventually(lambda: one.neighbours == {"kiosk-2": ("10.0.0.2:9001",)})
        else:
            await clock.sleep(1.0)  # nothing tells that nothing comes
            assert one.neighbours == {} and one.connected
        assert two.neighbours == {}


async def test_what_a_neighbour_says_counts_for_its_own_name_only(tmp_path: Path) -> None:
    topic = Topics("site").up("kiosk-2", DeviceTopic.BIRTH)

    def birth(device: str, url: str) -> bytes:
        return encode(Birth(device, 1, 1, 1, "b", (url,), (), 0))

    async with AsyncExitStack() as stack:
        broker = stack.enter_context(Mosquitto(tmp_path))
        sync = EdgeSync(
            broker.url,
            fleet="site",
            device="kiosk-1",
            state=lambda: AgentState((), (), LoadReport(1, 1, 0, 0, 0.0), "open", UNTOLD),
            epochs=EpochStore(tmp_path / "epoch", draw=random.random),
            draw=random.random,
            neighbours=("kiosk-2",),
        )
        await stack.enter_async_context(sync)
        liar = MqttLink(broker.url, client_id="liar", subscriptions=(), draw=random.random, on_activity=lambda: None)
        await stack.enter_async_context(liar)
        await eventually(lambda: sync.connected and liar.connected)
        for payload in (birth("kiosk-3", "10.0.0.3:1"), b"[" * 10_000, birth("kiosk-2", "10.0.0.2:1")):
            liar.publish(topic, payload, qos=1)  # in this order, which one topic keeps
        await eventually(lambda: bool(sync.neighbours))
        assert sync.neighbours == {"kiosk-2": ("10.0.0.2:1",)}
