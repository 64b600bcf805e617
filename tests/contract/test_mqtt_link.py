"""`MqttLink` on real brokers, and against what only a broken one does. Numbers in brackets are pitfalls of paho."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid

import pytest
from structlog.testing import capture_logs

from tests.support.mqtt.brokers import BrokerProcess, Embedded, Mosquitto
from tests.support.mqtt.tap import Tap, some_will, tapped
from tidegate import clock
from tidegate.mqtt.link import BrokerUrl, MqttConnected, MqttDisconnected, MqttLink, MqttMessage, Will
from tidegate.mqtt.session import MAX_OUTSTANDING


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
        assert isinstance(tap.events[0], MqttConnected)


async def test_auto_speaks_5_where_it_can_and_3_1_1_where_it_must(broker: BrokerProcess) -> None:
    began_at = clock.now()
    async with tapped(broker.url, topic(), before_connect=some_will, session_timeout_s=60.0) as tap:
        assert tap.of(MqttConnected) == [MqttConnected(1, broker.versions[0])]
        assert clock.now() - began_at < 30.0  # a refused version is not waited for


@pytest.mark.slow
async def test_who_connects_hears_only_what_it_asked_for_while_others_come_and_go(broker: BrokerProcess) -> None:
    here = topic()
    async with tapped(broker.url, f"{here}/+") as other:
        for index in range(20):
            assert other.link.publish(f"{here}/{index}", b"kept", qos=1, retain=True)
            assert await other.link.flush(30.0)
        began_at = clock.now()
        while clock.now() < began_at + 3.0:
            async with tapped(broker.url, topic()), tapped(broker.url, f"{here}/7") as late:
                assert await late.messages(1) == [MqttMessage(f"{here}/7", b"kept", 1, True)]
                late.link.publish(f"{here}/7", b"end", qos=1)
                assert [message.payload for message in await late.messages(2)] == [b"kept", b"end"]
                assert late.of(MqttDisconnected) == []


async def test_3_1_1_can_be_asked_for(broker: BrokerProcess) -> None:
    async with tapped(f"{broker.url}?protocol=3.1.1") as tap:
        assert tap.of(MqttConnected) == [MqttConnected(1, "3.1.1")]


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
    assert link.session is not None and link.session.socket is not None
    link.session.socket.sock.shutdown(socket.SHUT_RDWR)


async def test_no_more_than_ten_wait_for_an_acknowledgement_and_the_rest_is_bounded(broker: BrokerProcess) -> None:
    """(6, 8): paho would have sent all of them at once, and queued without end."""
    here = topic()
    async with tapped(broker.url, here, max_outbox=64) as tap:
        session = tap.link.session
        assert session is not None
        taken = [tap.link.publish(here, b"%d" % index, qos=1) for index in range(200)]
        assert taken == [True] * (MAX_OUTSTANDING + 64) + [False] * (200 - MAX_OUTSTANDING - 64)
        most = 0
        while not await tap.link.flush(0.0):
            most = max(most, session.unacknowledged)
            await clock.sleep(0)
        assert most <= MAX_OUTSTANDING
        assert len(await tap.messages(sum(taken))) == sum(taken)


async def test_without_a_session_nothing_is_queued_for_the_next_one(broker: BrokerProcess) -> None:
    """(5): paho queues what it reports as failed."""
    here = topic()
    async with tapped(broker.url, here) as tap:
        _cut(tap.link)
        tap.link.publish(here, b"on the way down", qos=1)  # handed to the broken session, or refused
        await tap.activity.until(lambda: tap.of(MqttDisconnected))
        assert not tap.link.publish(here, b"offline", qos=1)
        assert not tap.link.publish(here, b"offline", qos=0)
        assert not await tap.link.flush(1.0)
        await tap.until_connected(session=2)
        tap.link.publish(here, b"online", qos=1)
        await tap.activity.until(lambda: any(message.payload == b"online" for message in tap.of(MqttMessage)))
        assert b"offline" not in [message.payload for message in tap.of(MqttMessage)]


async def test_a_killed_broker_is_noticed_and_the_link_comes_back_with_its_subscriptions(
    own_broker: BrokerProcess,
) -> None:
    here = topic()
    async with tapped(own_broker.url, here) as tap:
        first_client = tap.link.session
        with capture_logs() as logs:
            own_broker.kill()
            await tap.activity.until(lambda: tap.of(MqttDisconnected))
            own_broker.start()
            await tap.until_connected(session=2)
        assert [type(event) for event in tap.events] == [MqttConnected, MqttDisconnected, MqttConnected]
        assert tap.link.session is not first_client  # (6, 7): a client of its own for each session
        assert [one["log_level"] for one in logs] == ["warning", "info"]  # once per change of state
        tap.link.publish(here, b"again", qos=1)
        assert len(await tap.messages(1)) == 1


async def test_a_second_link_of_the_same_id_takes_over(broker: BrokerProcess) -> None:
    async with tapped(broker.url, client_id="twin-of-test") as first:
        second = Tap(broker.url, client_id="twin-of-test")
        async with second.link:
            await second.until_connected()
            await first.activity.until(lambda: first.of(MqttDisconnected))


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
        assert tap.of(MqttDisconnected) == [MqttDisconnected(1, "asked to")]
        tap.link.publish(here, b"end", qos=1)
        assert [message.payload for message in await tap.messages(1)] == [b"end"]


async def test_the_socket_does_not_wait_for_company(broker: BrokerProcess) -> None:
    """(12): without TCP_NODELAY a QoS 1 round trip takes 40 to 90 ms on loopback."""
    async with tapped(broker.url) as tap:
        assert tap.link.session is not None and tap.link.session.socket is not None
        assert tap.link.session.socket.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_slow_reader_of_a_flood_keeps_the_newest_of_each_topic(broker: BrokerProcess) -> None:
    """(10): the callback only hands over, so a reader that is busy elsewhere costs neither memory nor the keepalive."""
    here = topic()
    async with (
        tapped(broker.url, f"{here}/+", qos=0, max_inbox=100) as reader,
        tapped(broker.url, ack_timeout_s=60.0) as speaker,  # its last word is acknowledged behind all others
    ):
        reader.look()
        for index in range(3000):
            while not speaker.link.publish(f"{here}/{index % 7}", b"%d" % index, qos=0):
                await clock.sleep(0)
            assert len(reader.link.inbox) <= 100
        speaker.link.publish(f"{here}/last", b"end", qos=1)
        await reader.activity.until(
            lambda: any(isinstance(one, MqttMessage) and one.payload == b"end" for one in reader.link.inbox)
        )
        newest = {message.topic: message.payload for message in reader.of(MqttMessage)}
        del newest[f"{here}/last"]
        assert sorted(newest.values()) == [b"%d" % index for index in range(2993, 3000)]


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
    assert "p@ss" not in repr(BrokerUrl.parse(url))
    assert str(expected) == f"mqtt://{expected.host}:{expected.port}"


@pytest.mark.parametrize("url", ["http://h", "mqtt://", "h:1883", "mqtt://h?protocol=4", "mqtt://h:port"])
def test_what_is_not_a_brokers_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        BrokerUrl.parse(url)


def test_the_contract_is_held_on_both_brokers() -> None:
    assert {Mosquitto.versions, Embedded.versions} == {("5", "3.1.1"), ("3.1.1",)}


async def test_of_connections_that_begin_at_once_under_one_id_all_but_one_are_closed(broker: BrokerProcess) -> None:
    name = f"one-{uuid.uuid4().hex[:8]}".encode()
    body = b"\x00\x04MQTT\x04\x02\x00\x0f" + len(name).to_bytes(2) + name  # 3.1.1, a clean session
    connect = b"\x10" + bytes((len(body),)) + body
    streams = [await asyncio.open_connection("127.0.0.1", broker.port) for _ in range(12)]
    try:
        for _, writer in streams:
            writer.write(connect)
        ends = {asyncio.ensure_future(_end_of(reader)) for reader, _ in streams}
        while len(ends) > 1:
            done, ends = await asyncio.wait(ends, timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
            assert done, f"{len(ends)} connections of one id stand"
        await clock.sleep(0.2)
        (last,) = ends
        assert not last.done(), "one of them is served"
        last.cancel()
    finally:
        for _, writer in streams:
            writer.close()


async def _end_of(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read(-1)
