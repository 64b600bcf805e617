"""Gateways and agents of tests as far as MQTT can tell, over a real broker, and words said to it from outside."""

from __future__ import annotations

import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edge_agent.core.reporting import AgentState
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.sync import EdgeSync
from gateway.fleet_sync.freshness import DeviceView, Freshness
from gateway.fleet_sync.registry import FleetRegister
from gateway.fleet_sync.sync import FleetSync
from tests.support.mqtt.brokers import BrokerProcess, Signal
from tests.support.mqtt.device_messages import offer
from tidegate import clock
from tidegate.fleet.topics import Topics
from tidegate.types import LoadReport

WILL_GRACE_S = 0.3


class Gateway:
    """A gateway as far as MQTT can tell, with everything its core was told of."""

    def __init__(self, broker: BrokerProcess, fleet: str, name: str = "main", **settings: Any) -> None:
        self.changed = Signal()
        self.told = 0
        topics = Topics(fleet)
        register = FleetRegister(topics, draw=lambda: 0.05, will_grace_s=WILL_GRACE_S)
        chosen: dict[str, Any] = {"draw": random.random, "backoff_cap_s": 0.5} | settings
        self.sync = FleetSync(broker.url, fleet, f"{name}-{fleet}", self._on_change, register=register, **chosen)

    def _on_change(self) -> None:
        self.told += 1
        self.changed()

    def view(self, device: str) -> DeviceView | None:
        return next((view for view in self.sync.register.devices(clock.now()) if view.name == device), None)

    async def sees(self, device: str, *freshness: Freshness, epoch_over: int = 0) -> DeviceView:
        def look() -> DeviceView | None:
            view = self.view(device)
            return view if view and view.freshness in freshness and view.epoch > epoch_over else None

        view = await self.changed.until(look)
        assert view is not None
        return view


class Agent:
    """An agent in this process; `state` may be replaced at any time."""

    def __init__(self, broker: BrokerProcess, fleet: str, device: str, folder: Path, **settings: Any) -> None:
        self.state = agent_state()
        defaults: dict[str, Any] = {
            "epochs": EpochStore(folder / device),
            "interval_s": 0.2,
            "draw": random.random,
            "backoff_cap_s": 0.5,
        }
        self.sync = EdgeSync(
            broker.url,
            fleet=fleet,
            device=device,
            state=lambda: self.state,
            **(defaults | settings),
        )


def agent_state(**changes: Any) -> AgentState:
    """Of an agent with one model, which is idle."""
    load = LoadReport(1, 1, queued=0, in_flight=0, queue_delay_s=0.0)
    return replace(AgentState((offer(),), ("127.0.0.1:9001",), load), **changes)


@contextmanager
def agent_process(broker: BrokerProcess, fleet: str, device: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent in a process of its own, which may be stopped and killed."""
    command = [sys.executable, "-m", "tests.support.mqtt.agent", broker.url, fleet, device, str(folder / "epoch")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def say(broker: BrokerProcess, topic: str, payload: bytes, *, retain: bool = False) -> None:
    """Publish one message from outside; blocks until the broker has it."""
    say_all(broker, [(topic, payload)], qos=1, retain=retain)


def say_all(broker: BrokerProcess, messages: list[tuple[str, bytes]], *, qos: int = 0, retain: bool = False) -> None:
    """Publish from outside, as an operator's tool would. Blocks until the broker has it all."""
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"tool-{uuid.uuid4().hex[:10]}")
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    try:
        for topic, payload in messages[:-1]:
            client.publish(topic, payload, qos, retain)
        client.publish(*messages[-1], 1, retain).wait_for_publish(timeout=60)
    finally:
        client.disconnect()
        client.loop_stop()
