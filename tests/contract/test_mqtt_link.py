"""`MqttLink` on real brokers, and against what only a broken one does. Numbers in brackets are pitfalls of paho."""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import struct
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from structlog.testing import capture_logs

from simulator.testing.links import LinkThread
from tests.support.brokers import MOSQUITTO, BrokerProcess, Embedded, Mosquitto, ScriptedBroker, Signal, free_port
from tidegate import clock
from tidegate.mqtt_link import BrokerUrl, Connected, Disconnected, LinkEvent, Message, MqttLink, Will
from tidegate.mqtt_session import MAX_OUTSTANDING


class Tap:
    """A link whose events are kept, in order."""

    def __init__(self, url: str, *filters: str, qos: int = 1, **settings: Any) -> None:
        self.activity = Signal()
        self.events: list[LinkEvent] = []
        self.filters = filters
        defaults: dict[str, Any] = {
            "client_id": f"test-{uuid.uuid4().hex[:12]}",
            "draw": random.random,
            "backoff_base_s": 0.05,
            "backoff_cap_s": 0.2,
        }
        self.link = MqttLink(
            url,
            subscriptions=tuple((one, qos) for one in filters),
            on_activity=self.activity,
            **(defaults | settings),
        )

    def look(self) -> list[LinkEvent]:
        # amqtt hands every new client what is retained for others' subscriptions as well.
        self.events += [
            event
            for event in self.link.take()
            if not isinstance(event, Message) or any(paho.topic_matches_sub(one, event.topic) for one in self.filters)
        ]
        return self.events

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.look() if isinstance(event, kind)]

    async def until_connected(self, session: int = 1) -> None:
        await self.activity.until(lambda: any(event.session == session for event in self.of(Connected)))

    async def messages(self, count: int) -> list[Message]:
        return await self.activity.until(lambda: self.of(Message) if len(self.of(Message)) >= count else [])


@asynccontextmanager
async def tapped(url: str, *filters: str, **settings: Any) -> AsyncIterator[Tap]:
    """A connected link; when it is left, neither task nor socket is."""
    before = asyncio.all_tasks()
    tap = Tap(url, *filters, **settings)
    async with tap.link:
        await tap.until_connected()
        yield tap
    assert {task for task in asyncio.all_tasks() - before if "ScriptedBroker" not in repr(task)} == set()
    assert not tap.link.connected


def topic() -> str:
    return f"test/{uuid.uuid4().hex[:12]}"


async def test_what_is_published_arrives_after_connected_once_and_in_order(broker: BrokerProcess) -> None:
    here = topic()
    async with tapped(broker.url, here) as tap:
        for index in range(30):
            assert tap.link.publish(here, b"%d" % index, qos=1)
        assert await tap.link.flush(30.0)
        messages = await tap.messages(30)
        assert [message.payload for message in messages] == [b"%d" % index for index in range(30)]
        assert {(message.topic, message.qos, message.retained) for message in messages} == {(here, 1, False)}
        assert isinstance(tap.events[0], Connected)


async def test_auto_speaks_5_where_it_can_and_3_1_1_where_it_must(broker: BrokerProcess) -> None:
    began_at = clock.now()
    async with tapped(broker.url, topic(), before_connect=_some_will, connect_timeout_s=60.0) as tap:
        assert tap.of(Connected) == [Connected(1, broker.versions[0])]
        assert clock.now() - began_at < 30.0  # a refused version is not waited for


async def _some_will() -> Will:
    return Will("test/will", b"gone")


async def test_3_1_1_can_be_asked_for(broker: BrokerProcess) -> None:
    async with tapped(f"{broker.url}?protocol=3.1.1") as tap:
        assert tap.of(Connected) == [Connected(1, "3.1.1")]


async def test_retained_messages_say_so_and_an_empty_one_deletes(broker: BrokerProcess) -> None:
    here = topic()
    async with tapped(broker.url) as speaker:
        speaker.link.publish(here, b"kept", qos=1, retain=True)
        assert await speaker.link.flush(30.0)
        async with tapped(broker.url, here) as late:
            assert [message.retained for message in await late.messages(1)] == [True]
            speaker.link.publish(here, b"fresh", qos=1, retain=True)
            assert [message.retained for message in await late.messages(2)] == [True, False]
        speaker.link.publish(here, b"", qos=1, retain=True)
        assert await speaker.link.flush(30.0)
        async with tapped(broker.url, here) as later:
            later.link.publish(here, b"end", qos=1)
            assert [message.payload for message in await later.messages(1)] == [b"end"]


async def test_the_will_is_kept_when_the_link_is_closed_and_told_when_it_breaks(broker: BrokerProcess) -> None:
    here = topic()

    async def will() -> Will:
        return Will(here, b"lost")

    async with tapped(broker.url, here) as listener:
        async with tapped(broker.url, before_connect=will) as leaver:
            await _has_spoken(leaver.link)
        async with tapped(broker.url, before_connect=will, draw=lambda: 1.0, backoff_base_s=60.0) as victim:
            await _has_spoken(victim.link)
            _cut(victim.link)
            assert [message.payload for message in await listener.messages(1)] == [b"lost"]
        listener.link.publish(here, b"end", qos=1)
        assert [message.payload for message in await listener.messages(2)] == [b"lost", b"end"]


async def _has_spoken(link: MqttLink) -> None:
    """amqtt loses or invents a will when a session ends in the millisecond of its CONNECT; nobody has such sessions."""
    assert link.publish("test/here-i-am", b"x", qos=1)
    assert await link.flush(30.0)


def _cut(link: MqttLink) -> None:
    """Break the connection under the link, as a network does."""
    assert link._session is not None and link._session._socket is not None
    link._session._socket.sock.shutdown(socket.SHUT_RDWR)


async def test_no_more_than_ten_wait_for_an_acknowledgement_and_the_rest_is_bounded(broker: BrokerProcess) -> None:
    """(6, 8): paho would have sent all of them at once, and queued without end."""
    here = topic()
    async with tapped(broker.url, here, max_outbox=64) as tap:
        session = tap.link._session
        assert session is not None
        taken = [tap.link.publish(here, b"%d" % index, qos=1) for index in range(200)]
        assert taken == [True] * (MAX_OUTSTANDING + 64) + [False] * (200 - MAX_OUTSTANDING - 64)
        most = 0
        while not await tap.link.flush(0.0):
            most = max(most, len(session._outstanding))
            await clock.sleep(0)
        assert most <= MAX_OUTSTANDING
        assert len(await tap.messages(sum(taken))) == sum(taken)


async def test_without_a_session_nothing_is_queued_for_the_next_one(broker: BrokerProcess) -> None:
    """(5): paho queues what it reports as failed."""
    here = topic()
    async with tapped(broker.url, here) as tap:
        _cut(tap.link)
        tap.link.publish(here, b"on the way down", qos=1)  # handed to the broken session, or refused
        await tap.activity.until(lambda: tap.of(Disconnected))
        assert not tap.link.publish(here, b"offline", qos=1)
        assert not tap.link.publish(here, b"offline", qos=0)
        assert not await tap.link.flush(1.0)
        await tap.until_connected(session=2)
        tap.link.publish(here, b"online", qos=1)
        await tap.activity.until(lambda: any(message.payload == b"online" for message in tap.of(Message)))
        assert b"offline" not in [message.payload for message in tap.of(Message)]


async def test_a_killed_broker_is_noticed_and_the_link_comes_back_with_its_subscriptions(
    own_broker: BrokerProcess,
) -> None:
    here = topic()
    async with tapped(own_broker.url, here) as tap:
        first_client = tap.link._session
        with capture_logs() as logs:
            own_broker.kill()
            await tap.activity.until(lambda: tap.of(Disconnected))
            own_broker.start()
            await tap.until_connected(session=2)
        assert [type(event) for event in tap.events] == [Connected, Disconnected, Connected]
        assert tap.link._session is not first_client  # (6, 7): a client of its own for each session
        assert [one["log_level"] for one in logs] == ["warning", "info"]  # once per change of state
        tap.link.publish(here, b"again", qos=1)
        assert len(await tap.messages(1)) == 1


async def test_a_second_link_of_the_same_id_takes_over(broker: BrokerProcess) -> None:
    async with tapped(broker.url, client_id="twin-of-test") as first:
        second = Tap(broker.url, client_id="twin-of-test")
        async with second.link:
            await second.until_connected()
            await first.activity.until(lambda: first.of(Disconnected))


async def test_restart_begins_another_session_without_the_will(broker: BrokerProcess) -> None:
    here = topic()
    wills = 0

    async def will() -> Will:
        nonlocal wills
        wills += 1
        return Will(here, b"lost")

    async with tapped(broker.url, here, before_connect=will) as tap:
        had = wills
        tap.link.restart("asked to")
        await tap.until_connected(session=2)
        assert wills == had + 1
        assert tap.of(Disconnected) == [Disconnected(1, "asked to")]
        tap.link.publish(here, b"end", qos=1)
        assert [message.payload for message in await tap.messages(1)] == [b"end"]


async def test_the_socket_does_not_wait_for_company(broker: BrokerProcess) -> None:
    """(12): without TCP_NODELAY a QoS 1 round trip takes 40 to 90 ms on loopback."""
    async with tapped(broker.url) as tap:
        assert tap.link._session is not None and tap.link._session._socket is not None
        assert tap.link._session._socket.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        trips = []
        for _ in range(30):
            began_at = clock.now()
            tap.link.publish("test/trip", b"x", qos=1)
            assert await tap.link.flush(30.0)
            trips.append(clock.now() - began_at)
        assert statistics.median(trips) < 0.03


async def test_a_slow_reader_of_a_flood_keeps_the_newest_of_each_topic(broker: BrokerProcess) -> None:
    """(10): the callback only hands over, so a reader that is busy elsewhere costs neither memory nor the keepalive."""
    here = topic()
    async with tapped(broker.url, f"{here}/+", qos=0, max_inbox=100) as reader, tapped(broker.url) as speaker:
        reader.look()
        for index in range(3000):
            while not speaker.link.publish(f"{here}/{index % 7}", b"%d" % index, qos=0):
                await clock.sleep(0)
            assert len(reader.link.inbox) <= 100
        speaker.link.publish(f"{here}/last", b"end", qos=1)
        waiting = reader.link.inbox._items.values()
        await reader.activity.until(
            lambda: any(isinstance(one, Message) and one.payload == b"end" for one, _ in waiting)
        )
        newest = {message.topic: message.payload for message in reader.of(Message)}
        del newest[f"{here}/last"]
        assert sorted(newest.values()) == [b"%d" % index for index in range(2993, 3000)]


# -- brokers that misbehave ------------------------------------------------------------------------------------------


async def test_a_broker_that_nobody_runs_is_tried_again_and_leaving_does_not_wait() -> None:
    tap = Tap(f"mqtt://127.0.0.1:{free_port()}")
    before = asyncio.all_tasks()
    with capture_logs() as logs:
        async with tap.link:
            async with asyncio.timeout(30.0):
                while tap.link._redial.failures < 3:
                    await clock.sleep(0.01)
            assert "down, " in repr(tap.link)
    assert asyncio.all_tasks() == before
    assert len(logs) == 1  # not once per attempt
    assert tap.look() == []


async def test_a_broker_that_never_answers_is_given_up_after_the_timeout() -> None:
    """(2): nothing blocks, the loop goes on and leaving is at once."""
    async with ScriptedBroker(connack=b"").serve() as broker:
        tap = Tap(broker.url, connect_timeout_s=0.1)
        with capture_logs() as logs:
            async with tap.link:
                async with asyncio.timeout(30.0):
                    while len(broker.connects) < 3:
                        await clock.sleep(0.01)
                left_at = clock.now()
            assert clock.now() - left_at < 30.0
        assert logs[0]["reason"] == "no session within 0.1 s"


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
        tap = Tap(broker.url, "a/#", connect_timeout_s=0.3 if reason == "no session within" else 60.0)
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
                    while tap.link._redial.failures < 5:
                        await clock.sleep(0.01)
                broker.start()
                await tap.until_connected(session=2)
                assert [event.protocol for event in tap.of(Connected)] == ["5", "5"]
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
        assert tap.of(Disconnected) == [Disconnected(1, "no acknowledgement for 0.2 s")]


async def test_what_hinders_a_connect_counts_as_a_failed_attempt() -> None:
    async def disk_full() -> Will:
        raise OSError(28, "No space left on device")

    async with ScriptedBroker().serve() as broker:
        tap = Tap(broker.url, before_connect=disk_full)
        with capture_logs() as logs:
            async with tap.link, asyncio.timeout(30.0):
                while tap.link._redial.failures < 2:
                    await clock.sleep(0.01)
        assert broker.connects == []
        assert "No space left" in logs[0]["reason"]


@pytest.mark.slow
async def test_asked_for_5_the_embedded_broker_refuses_in_words_of_5(tmp_path: Any) -> None:
    with Embedded(tmp_path) as broker:
        tap = Tap(f"{broker.url}?protocol=5", before_connect=_some_will)
        with capture_logs() as logs:
            async with tap.link, asyncio.timeout(30.0):
                while tap.link._redial.failures < 2:
                    await clock.sleep(0.01)
        assert logs[0]["reason"] == "the broker refused the connection: Unsupported protocol version"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mqtt://h", BrokerUrl("h", 1883, None, None, "auto")),
        ("mqtt://u:p%40ss@[::1]:99?protocol=5", BrokerUrl("::1", 99, "u", "p@ss", "5")),
        ("mqtt://10.0.0.1:1884?protocol=3.1.1", BrokerUrl("10.0.0.1", 1884, None, None, "3.1.1")),
    ],
)
def test_a_brokers_address_is_read(url: str, expected: BrokerUrl) -> None:
    assert BrokerUrl.parse(url) == expected
    assert str(expected) == f"mqtt://{expected.host}:{expected.port}"


@pytest.mark.parametrize("url", ["http://h", "mqtt://", "h:1883", "mqtt://h?protocol=4", "mqtt://h:port"])
def test_what_is_not_a_brokers_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        BrokerUrl.parse(url)


def test_the_contract_is_held_on_both_brokers() -> None:
    assert {Mosquitto.versions, Embedded.versions} == {("5", "3.1.1"), ("3.1.1",)}
