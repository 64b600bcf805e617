"""`MqttLink` before its session stands: brokers that are away, slow, broken, or will not have it.

Numbers in brackets are pitfalls of paho, those of the list in docs/design/edge-state.md, "Driving paho".
"""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.mqtt.brokers import MOSQUITTO, Embedded, Mosquitto, ScriptedBroker
from tests.support.mqtt.tap import Tap, some_will, tapped
from tidegate import clock
from tidegate.mqtt.link import MqttConnected, MqttDisconnected, Will
from tidegate.testing.links import LinkThread
from tidegate.testing.ports import free_port


async def test_a_broker_that_nobody_runs_is_tried_again_and_leaving_does_not_wait() -> None:
    tap = Tap(f"mqtt://127.0.0.1:{free_port()}")
    before = asyncio.all_tasks()
    with capture_logs() as logs:
        async with tap.link:
            async with asyncio.timeout(30.0):
                while tap.link.failures < 3:
                    await clock.sleep(0.01)
            assert "down, " in repr(tap.link)
    assert asyncio.all_tasks() == before
    assert len(logs) == 1  # not once per attempt
    assert tap.look() == []


@pytest.mark.slow
async def test_a_broker_that_never_answers_is_given_up_after_the_timeout() -> None:
    """(2): nothing blocks, the loop goes on and leaving is at once."""
    async with ScriptedBroker(connack=b"").serve() as broker:
        tap = Tap(broker.url, session_timeout_s=0.1)
        with capture_logs() as logs:
            async with tap.link:
                async with asyncio.timeout(30.0):
                    while len(broker.connects) < 3:
                        await clock.sleep(0.01)
                left_at = clock.now()
            assert clock.now() - left_at < 30.0
        assert logs[0]["reason"] == "no session within 0.1 s"


@pytest.mark.slow
async def test_a_broker_that_has_much_to_do_is_waited_for_and_not_asked_anew() -> None:
    """A fleet that comes back at once makes its broker slow; whoever begins anew makes it slower."""
    async with ScriptedBroker(silent_s=0.5).serve() as broker:
        async with tapped(broker.url, connect_timeout_s=0.05, session_timeout_s=60.0) as tap:
            assert tap.of(MqttConnected) == [MqttConnected(1, "3.1.1")]
        assert len(broker.connects) == 1


@pytest.mark.slow
async def test_an_address_that_takes_no_connection_is_given_up_long_before_a_slow_broker_is() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for taken in (first, second):  # the one place, and one beyond it; the system drops who comes after
            taken.setblocking(False)
            taken.connect_ex(full.getsockname())
        tap = Tap(f"mqtt://127.0.0.1:{full.getsockname()[1]}", connect_timeout_s=0.1, session_timeout_s=60.0)
        with capture_logs() as logs:
            async with tap.link, asyncio.timeout(30.0):
                while tap.link.failures < 3:
                    await clock.sleep(0.01)
    assert logs[0]["reason"] == "127.0.0.1 takes no connection within 0.1 s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"connack": b"\x20\x02\x00\x05"}, "the broker refused the connection: Not authorized"),
        # (4): at these two paho would reconnect from inside its read, and block the loop.
        ({"connack": b"\x20\x02\x00\x02"}, "the broker refused the connection: Client identifier not valid"),
        ({"connack": b"\x20\x02\x00\x01"}, "the broker hung up"),
        ({"connack": b"\x20\x01\x00"}, "the broker hung up: Protocol error"),
        ({"connack": b"HTTP/1.1 400 Bad Request\r\n\r\n"}, "no session within"),
        ({"connack": b"", "hang_up": True}, "the broker hung up"),
        ({"suback_code": 0x80}, "the broker refused a subscription"),
        ({"suback_code": None}, "no session within"),
    ],
)
async def test_whatever_a_broker_answers_the_link_says_why_and_tries_again(script: dict[str, Any], reason: str) -> None:
    async with ScriptedBroker(**script).serve() as broker:
        tap = Tap(broker.url, "a/#", session_timeout_s=0.3 if reason == "no session within" else 60.0)
        with capture_logs() as logs:
            async with tap.link:
                async with asyncio.timeout(30.0):
                    while len(broker.connects) < 2:
                        await clock.sleep(0.01)
        assert tap.look() == []
        assert reason in logs[0]["reason"]


async def test_a_connection_that_breaks_before_its_first_word_is_one_attempt_of_many() -> None:
    """A proxy whose broker is down accepts and resets; paho closes such a socket under our feet and says nothing."""
    accepted: list[float] = []
    broken = asyncio.Event()

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(clock.now())
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        broken.set()

    async def wait_until_it_is_broken() -> Will | None:
        await broken.wait()
        broken.clear()
        await clock.sleep(0.005)
        return None

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        tap = Tap(f"mqtt://127.0.0.1:{port}", before_connect=wait_until_it_is_broken)
        with capture_logs() as logs:
            async with tap.link, asyncio.timeout(30.0):
                while len(accepted) < 6:
                    await clock.sleep(0.01)
        assert [one["log_level"] for one in logs] == ["warning"]


@pytest.mark.slow
@pytest.mark.needs_mosquitto
@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
async def test_a_broker_that_restarts_behind_a_proxy_is_spoken_to_in_the_same_version(tmp_path: Path) -> None:
    links = LinkThread()
    try:
        with Mosquitto(tmp_path) as broker:
            proxy = links.link(broker.port)
            async with tapped(f"mqtt://{proxy.address}") as tap:
                broker.kill()
                async with asyncio.timeout(30.0):
                    while tap.link.failures < 5:
                        await clock.sleep(0.01)
                broker.start()
                await tap.until_connected(session=2)
                assert [event.protocol for event in tap.of(MqttConnected)] == ["5", "5"]
    finally:
        links.close()


async def test_a_defect_in_an_attempt_is_told_and_the_next_one_is_made() -> None:
    attempts: list[float] = []

    async def defect() -> Will:
        attempts.append(clock.now())
        raise ZeroDivisionError

    async with ScriptedBroker().serve() as broker:
        tap = Tap(broker.url, before_connect=defect)
        with capture_logs() as logs:
            async with tap.link, asyncio.timeout(30.0):
                while len(attempts) < 3:
                    await clock.sleep(0.01)
    assert logs[0]["event"] == "an attempt to reach the broker has a defect"


@pytest.mark.slow
async def test_a_message_that_is_never_acknowledged_ends_the_session() -> None:
    """(9): paho would wait for the PUBACK for ever."""
    async with ScriptedBroker().serve() as broker, tapped(broker.url, "a/#", ack_timeout_s=0.2) as tap:
        assert tap.link.publish("a/b", b"x", qos=1)
        assert not await tap.link.flush(0.01)
        await tap.until_connected(session=2)
        assert tap.of(MqttDisconnected) == [MqttDisconnected(1, "no acknowledgement for 0.2 s")]


async def test_what_hinders_a_connect_counts_as_a_failed_attempt() -> None:
    async def disk_full() -> Will:
        raise OSError(28, "No space left on device")

    async with ScriptedBroker().serve() as broker:
        tap = Tap(broker.url, before_connect=disk_full)
        with capture_logs() as logs:
            async with tap.link, asyncio.timeout(30.0):
                while tap.link.failures < 2:
                    await clock.sleep(0.01)
        assert broker.connects == []
        assert "No space left" in logs[0]["reason"]


@pytest.mark.slow
async def test_asked_for_5_the_embedded_broker_refuses_in_words_of_5(tmp_path: Any) -> None:
    with Embedded(tmp_path) as broker:
        tap = Tap(f"{broker.url}?protocol=5", before_connect=some_will)
        with capture_logs() as logs:
            async with tap.link, asyncio.timeout(30.0):
                while tap.link.failures < 2:
                    await clock.sleep(0.01)
        assert logs[0]["reason"] == "the broker refused the connection: Unsupported protocol version"
