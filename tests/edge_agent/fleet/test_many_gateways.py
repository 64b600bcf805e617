"""Gateways whose names come and go by the hundred: a device goes on hearing of those that are there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edge_agent.core.reporting import AgentState
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.sync import MAX_GATEWAYS, EdgeSync
from tests.edge_agent.test_app import eventually
from tests.support.mqtt.brokers import Mosquitto
from tidegate.fleet.conditions import UNTOLD
from tidegate.fleet.messages import GatewayState, encode
from tidegate.fleet.topics import Topics
from tidegate.mqtt.link import MqttLink
from tidegate.types import LoadReport

pytestmark = [pytest.mark.slow, pytest.mark.needs_mosquitto]


class Heard:
    """An ear that notes gateways."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def session(self, *, up: bool) -> None: ...

    def heard(self, state: GatewayState, *, retained: bool) -> None:
        self.names.append(state.gateway)

    def receipt(self, receipt: object) -> None: ...


async def test_names_that_are_gone_leave_room_for_those_that_come(tmp_path: Path) -> None:
    """As pods are named: each deployment leaves a retained farewell at the broker, for good."""
    topics, ear = Topics("site"), Heard()
    with Mosquitto(tmp_path) as broker:
        async with MqttLink(
            broker.url, client_id="gateways", subscriptions=(), draw=random.random, on_activity=lambda: None
        ) as voice:
            await eventually(lambda: voice.connected)

            async def say(name: str, *, online: bool) -> None:
                state = encode(GatewayState(name, online, 1, links=("10.0.0.1:8006",) if online else ()))
                await eventually(lambda: voice.publish(topics.gateway_state(name), state, qos=1, retain=True))

            await say("kept", online=True)
            for number in range(2 * MAX_GATEWAYS):
                await say(f"gone-{number}", online=False)
            sync = EdgeSync(
                broker.url,
                fleet="site",
                device="kiosk-1",
                state=lambda: AgentState((), (), LoadReport(1, 1, 0, 0, 0.0), "open", UNTOLD),
                epochs=EpochStore(tmp_path / "epoch", draw=random.random),
                draw=random.random,
                ear=ear,
            )
            async with sync:
                await eventually(lambda: len(ear.names) == 2 * MAX_GATEWAYS + 1)
                await say("new", online=True)
                await eventually(lambda: "new" in sync.gateways)
                assert ear.names[-1] == "new"
                assert sync.gateways["kept"].online and sync.gateways["new"].links == ("10.0.0.1:8006",)
                assert len(sync.gateways) == MAX_GATEWAYS
                for number in range(MAX_GATEWAYS):
                    await say(f"also-{number}", online=True)
                await eventually(lambda: f"also-{MAX_GATEWAYS - 1}" in sync.gateways)
                assert len(sync.gateways) == MAX_GATEWAYS and "kept" not in sync.gateways, "heard of longest ago"
