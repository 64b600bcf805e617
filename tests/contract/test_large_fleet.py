"""A gateway that connects to a broker with more devices than Mosquitto queues messages for by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from structlog.testing import capture_logs

from gateway.fleet_sync import sync
from gateway.fleet_sync.sync import UNBORN_IS_ODD, FleetSync
from tests.support.edge.rollouts import eventually
from tests.support.mqtt.brokers import MOSQUITTO, Mosquitto
from tests.support.mqtt.device_messages import TOPICS, Device
from tidegate import clock
from tidegate.tools.broker.mosquitto_config import QUEUE_LINES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_mosquitto,
    pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed"),
]

DEVICES = 3000  # of a QoS 1 subscription a stock Mosquitto drops what is over 20 on their way and 1,000 that wait


class Configured(Mosquitto):
    def __init__(self, folder: Path, lines: tuple[str, ...]) -> None:
        super().__init__(folder)
        self._lines = lines

    def command(self) -> list[str]:
        command = super().command()
        with open(command[-1], "a", encoding="utf-8") as config:
            config.write("\n".join((*self._lines, "")))
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


@pytest.mark.parametrize("lines", [(), QUEUE_LINES], ids=["stock", "as configured for it"])
async def test_a_gateway_hears_every_birth_that_a_broker_has_kept(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with Configured(tmp_path, lines) as broker:
        with speaking(broker) as client:
            births = [Device(f"d{number}", interval_ms=60_000).birth(clock.now()) for number in range(DEVICES)]
            for said in [client.publish(*birth, qos=1, retain=True) for birth in births]:
                said.wait_for_publish(60.0)
        async with fleet_sync(broker) as gateway:
            await eventually(lambda: len(gateway.register) == DEVICES)
            assert gateway.register.unborn == 0


async def test_births_that_a_broker_keeps_back_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "HEARTBEAT_S", 0.5)
    with Mosquitto(tmp_path) as broker, capture_logs() as lines, speaking(broker) as client:
        async with fleet_sync(broker) as gateway:
            await eventually(lambda: gateway.connected)
            for number in range(UNBORN_IS_ODD):
                client.publish(*Device(f"d{number}").heartbeat(clock.now()))
            await eventually(lambda: any("max_queued_messages" in line["event"] for line in lines))
            assert gateway.register.unborn == UNBORN_IS_ODD
