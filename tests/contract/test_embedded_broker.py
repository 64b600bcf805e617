"""The embedded broker as a process: says when it serves, why it cannot, and goes quietly."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edge_agent.core.reporting import AgentState
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.sync import EdgeSync
from gateway.fleet_sync.sync import FleetSync
from tests.support.mqtt.brokers import Embedded, Signal
from tests.support.mqtt.device_messages import offer
from tests.support.mqtt.tap import tapped
from tidegate import clock
from tidegate.testing.ports import free_port
from tidegate.types import LoadReport

pytestmark = pytest.mark.slow


def run_to_its_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate.tools.broker.embedded", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)


def test_a_taken_port_is_named_with_the_flag_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_to_its_end("--port", str(port))
    assert ended.returncode == 1
    failed = json.loads(ended.stdout)
    assert failed["event"] == "failed" and failed["role"] == "broker"
    assert str(port) in failed["reason"] and "--port" in failed["reason"]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2"])
def test_it_serves_no_network_and_names_what_does(host: str) -> None:
    ended = run_to_its_end("--host", host, "--port", "0")
    assert ended.returncode != 0 and ended.stdout == ""
    assert "not loopback" in ended.stderr and "tidegate broker config" in ended.stderr


def test_it_says_where_it_serves_and_that_anybody_may_enter(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidegate.tools.broker.embedded", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    host, _, port = ready["addresses"]["mqtt"].removeprefix("mqtt://").partition(":")
    assert (ready["event"], ready["role"], host) == ("ready", "broker", "127.0.0.1")
    with socket.create_connection((host, int(port)), timeout=30):
        pass
    process.send_signal(signal.SIGINT)
    _, logs = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "anonymous" in logs


def test_without_its_parent_it_does_not_stay() -> None:
    ended = run_to_its_end("--port", str(free_port()), "--die-with-parent", str(os.getpid() + 1))
    assert ended.returncode == 1


SLOW = """
import asyncio
import tidegate.tools.broker.embedded

class Slow(tidegate.tools.broker.embedded.EmbeddedBroker):
    async def _broadcast_message(self, *message, **words):
        await asyncio.sleep(0.05)
        await super()._broadcast_message(*message, **words)

tidegate.tools.broker.embedded.EmbeddedBroker = Slow
tidegate.tools.broker.embedded.main()
"""


class SlowToHandOn(Embedded):
    """One that is behind with what it has acknowledged."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", SLOW, "--port", str(self.port), "--die-with-parent", str(os.getpid())]


async def test_what_it_acknowledged_is_handed_on_though_the_sender_has_left(tmp_path: Path) -> None:
    said = [b"%d" % index for index in range(8)]
    with SlowToHandOn(tmp_path) as broker:
        async with tapped(broker.url, "here") as reader:
            async with tapped(broker.url) as speaker:
                for payload in said:
                    assert speaker.link.publish("here", payload, qos=1)
                assert await speaker.link.flush(30.0)
            assert [message.payload for message in await reader.messages(len(said))] == said


def knows(gateway: FleetSync, devices: int) -> bool:
    return len(gateway.register.devices(clock.now())) == devices


async def test_a_healthy_run_logs_no_warning_and_ends_on_sigterm_with_clients_connected(tmp_path: Path) -> None:
    """Version probe, port scan, an agent that comes and goes: all that happens every day."""
    broker = Embedded(tmp_path)
    broker.start()
    socket.create_connection(("127.0.0.1", broker.port)).close()
    state = AgentState((offer(),), ("h:1",), LoadReport(1, 1, 0, 0, 0.0))
    changed = Signal()
    gateway = FleetSync(broker.url, "f1", "main", changed, lambda: 0.5)
    stopping: tuple[int, str]
    async with gateway:
        for known, name in enumerate(("a", "b"), start=1):
            agent = EdgeSync(
                broker.url,
                fleet="f1",
                device=name,
                state=lambda: state,
                epochs=EpochStore(tmp_path / name),
                draw=lambda: 0.5,
            )
            async with agent:
                await changed.until(functools.partial(knows, gateway, known))
        stopping = await asyncio.to_thread(broker.stop)
    code, said = stopping
    assert code == 0
    assert [line for line in said.splitlines() if not broker.is_ready(line) and "lets anybody in" not in line] == []
