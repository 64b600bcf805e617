"""A gateway that connects to a broker with more devices than Mosquitto hands out by its own defaults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from structlog.testing import capture_logs

from gateway import sync
from gateway.sync import FleetSync
from tests.support.brokers import MOSQUITTO, Mosquitto
from tests.support.fleet import TOPICS, Device
from tests.support.rollouts import eventually
from tidegate import clock
from tidegate.broker_config import QUEUE_LINES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]

DEVICES = 1500
STOCK = 1020  # 20 on their way and 1,000 that wait


class Configured(Mosquitto):
    lines: tuple[str, ...] = ()

    def command(self) -> list[str]:
        command = super().command()
        with open(command[-1], "a", encoding="utf-8") as config:
            config.write("\n".join((*self.lines, "")))
        return command


@contextmanager
def speaking(broker: Mosquitto) -> Iterator[paho.Client]:
    client = paho.Client(CallbackAPIVersion.VERSION2, "devices")
    client.max_queued_messages_set(0)
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    try:
        yield client
    finally:
        client.loop_stop()
        client.disconnect()


def fleet_sync(broker: Mosquitto) -> FleetSync:
    return FleetSync(broker.url, TOPICS.fleet, "main", lambda: None, lambda: 0.5)


@pytest.fixture
def devices() -> list[Device]:
    return [Device(f"d{number}", interval_ms=60_000) for number in range(DEVICES)]


def tell_births(broker: Mosquitto, devices: list[Device]) -> None:
    with speaking(broker) as client:
        said = [client.publish(*device.birth(clock.now()), qos=1, retain=True) for device in devices]
        for one in said:
            one.wait_for_publish(60.0)


async def test_a_gateway_hears_all_births_from_a_broker_as_it_is_configured_for_it(
    tmp_path: Path, devices: list[Device]
) -> None:
    broker = Configured(tmp_path)
    broker.lines = QUEUE_LINES
    with broker:
        tell_births(broker, devices)
        async with fleet_sync(broker) as gateway:
            await eventually(lambda: len(gateway.register) == DEVICES)
            assert gateway.register.unborn == 0


async def test_births_that_a_stock_broker_keeps_back_are_asked_for_and_told_of(
    tmp_path: Path, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "HEARTBEAT_S", 0.5)
    with Mosquitto(tmp_path) as broker, capture_logs() as lines:
        tell_births(broker, devices)
        async with fleet_sync(broker) as gateway:
            await eventually(lambda: len(gateway.register) >= STOCK)
            with speaking(broker) as client:
                for device in devices:
                    client.publish(*device.heartbeat(clock.now()))
                await eventually(lambda: len(gateway.register) == DEVICES)
                await eventually(lambda: any("max_queued_messages" in line["event"] for line in lines))
                assert gateway.register.counts["asked"] > 0
