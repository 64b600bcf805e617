"""Topics and messages: names that fit one level, payloads that are bounded and either understood or refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.mqtt.device_messages import Device, offer
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.messages import (
    MAX_BYTES,
    MAX_EPOCH,
    BadMessage,
    Command,
    Death,
    GatewayState,
    Heartbeat,
    decode_command,
    decode_gateway_state,
    decode_up,
    encode,
    inventory_hash,
)
from tidegate.fleet.offers import decode_offers, encode_offers
from tidegate.fleet.topics import DeviceTopic, Topics

DEVICE = Device(name="kiosk-1")
BIRTH = json.loads(DEVICE.birth(1.0)[1])
BEAT = json.loads(DEVICE.heartbeat(1.0)[1])


def test_topics_read_like_the_table() -> None:
    topics = Topics("f1")
    assert topics.up("kiosk-1", DeviceTopic.HEARTBEAT) == "tidegate/v1/f1/up/kiosk-1/hb"
    assert topics.command("kiosk-1") == "tidegate/v1/f1/down/kiosk-1/cmd"
    assert topics.gateway_state("main") == "tidegate/v1/f1/gw/main/state"
    assert topics.gateway_heartbeat("main") == "tidegate/v1/f1/gw/main/hb"
    of_gateways = ["tidegate/v1/f1/gw/+/state", "tidegate/v1/f1/gw/+/hb", "tidegate/v1/f1/peer/+"]
    of_devices = [f"tidegate/v1/f1/up/+/{kind}" for kind in DeviceTopic]
    assert [one for one, _ in topics.for_gateways] == of_devices + of_gateways
    assert topics.parse_peer(topics.peer("main")) == "main"
    assert topics.parse_peer("tidegate/v1/f1/peer/a/b") is None
    assert topics.parse_peer("tidegate/v1/f2/peer/main") is None
    assert topics.for_device("kiosk-1")[0] == ("tidegate/v1/f1/down/kiosk-1/cmd", 1)


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("tidegate/v1/f1/up/kiosk-1/hb", ("kiosk-1", DeviceTopic.HEARTBEAT)),
        ("tidegate/v1/f1/up/kiosk-1/birth", ("kiosk-1", DeviceTopic.BIRTH)),
        ("tidegate/v1/f2/up/kiosk-1/hb", None),
        ("tidegate/v1/f1/up/kiosk-1/unknown", None),
        ("tidegate/v1/f1/up/a/b/hb", None),
        ("tidegate/v1/f1/up//hb", None),
        ("tidegate/v1/f1/up/kiosk-1", None),
        ("", None),
    ],
)
def test_only_topics_of_devices_of_this_fleet_are_parsed(topic: str, expected: object) -> None:
    assert Topics("f1").parse_up(topic) == expected


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("tidegate/v1/f1/gw/main/state", "main"),
        ("tidegate/v1/f1/gw/main/hb", "main"),
        ("tidegate/v1/f1/gw/main/other", None),
        ("tidegate/v1/f1/up/kiosk-1/hb", None),
        ("tidegate/v1/f1/gw/a b/hb", None),
    ],
)
def test_gateways_are_parsed_too(topic: str, expected: object) -> None:
    assert Topics("f1").parse_gateway(topic) == expected


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "a#", "-a", "x" * 65, "ä", "a\n"])
def test_a_name_that_is_not_one_level_of_a_topic_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 64"):
        Topics(name)
    with pytest.raises(BadMessage):
        decode_up(DeviceTopic.HEARTBEAT, json.dumps(BEAT | {"dev": name}).encode())


def test_every_message_survives_the_wire() -> None:
    for kind, message in (
        (DeviceTopic.BIRTH, DEVICE.birth_message(1.0, agent="0.1.0", utc_ms=5, admission="draining")),
        (DeviceTopic.HEARTBEAT, DEVICE.heartbeat_message(2.0, queued=3, in_flight=1, queue_delay_ms=0.5)),
        (DeviceTopic.DEATH, Death("kiosk-1", 7, "lost")),
    ):
        assert decode_up(kind, encode(message)) == message
    assert decode_command(encode(command := Command("c1", "epoch_hint", seen=1, minimum=9))) == command
    assert decode_gateway_state(encode(state := GatewayState("main", True, 5, utc_ms=1))) == state


def test_every_message_says_its_schema_and_another_is_refused() -> None:
    assert BIRTH["v"] == BEAT["v"] == 1
    with pytest.raises(BadMessage, match="v"):
        decode_up(DeviceTopic.HEARTBEAT, json.dumps(BEAT | {"v": 2}).encode())


def test_unknown_keys_are_ignored() -> None:
    decoded = decode_up(DeviceTopic.HEARTBEAT, json.dumps(BEAT | {"bat": 0.4, "nested": {"a": [1]}}).encode())
    assert isinstance(decoded, Heartbeat) and decoded.device == "kiosk-1"


def test_a_heartbeat_is_small() -> None:
    full = DEVICE.heartbeat_message(1e6, queued=999, in_flight=99, queue_delay_ms=12345.678, epoch=MAX_EPOCH)
    assert len(encode(full)) <= 250
    weak = DeviceConditions(battery=0.42, temperature_c=81.5, throttled=True, metered=True)
    assert len(encode(msgspec.structs.replace(full, conditions=weak))) <= 300


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (DeviceTopic.HEARTBEAT, {"e": 0}),
        (DeviceTopic.HEARTBEAT, {"e": 2**53}),
        (DeviceTopic.HEARTBEAT, {"s": 0}),
        (DeviceTopic.HEARTBEAT, {"m": -1}),
        (DeviceTopic.HEARTBEAT, {"iv": 1}),
        (DeviceTopic.HEARTBEAT, {"iv": 10**9}),
        (DeviceTopic.HEARTBEAT, {"q": -1}),
        (DeviceTopic.HEARTBEAT, {"qd": -0.1}),
        (DeviceTopic.HEARTBEAT, {"adm": "maybe"}),
        (DeviceTopic.HEARTBEAT, {"inv": "x" * 33}),
        (DeviceTopic.HEARTBEAT, {"e": "100"}),
        (DeviceTopic.HEARTBEAT, {"sys": {"bat": 1.1}}),
        (DeviceTopic.HEARTBEAT, {"sys": {"bat": -0.1}}),
        (DeviceTopic.HEARTBEAT, {"sys": {"t": 1e9}}),
        (DeviceTopic.HEARTBEAT, {"sys": {"met": "yes"}}),
        (DeviceTopic.HEARTBEAT, {"sys": None}),
        (DeviceTopic.BIRTH, {"urls": ["x" * 257]}),
        (DeviceTopic.BIRTH, {"urls": ["h:1"] * 9}),
        (DeviceTopic.BIRTH, {"boot": "x" * 129}),
        (DeviceTopic.BIRTH, {"offers": [{"name": "", "version": "1", "variants": []}]}),
        (DeviceTopic.BIRTH, {"offers": [{"name": "m", "version": "1" * 129, "variants": []}]}),
    ],
)
def test_what_is_out_of_range_is_refused(kind: DeviceTopic, changes: dict[str, Any]) -> None:
    base = BIRTH if kind is DeviceTopic.BIRTH else BEAT
    decode_up(kind, json.dumps(base).encode())
    with pytest.raises(BadMessage):
        decode_up(kind, json.dumps(base | changes).encode())


@pytest.mark.parametrize("cost", [[[1, 0]], [[-1, 1]], [[1, 1], [1, 2]], [[1, -0.5]]])
def test_costs_that_cannot_be_computed_with_are_refused(cost: list[list[float]]) -> None:
    bad = [{"name": "m", "version": "1", "variants": [{"name": "v", "precision": "p", "cost": cost}]}]
    inventory = {"dev": "kiosk-1", "e": 1, "s": 1, "m": 1, "rev": 1, "offers": bad, "v": 1}
    with pytest.raises(BadMessage, match=r"cost points of m|variants\[0\].cost\[0\]"):
        decode_up(DeviceTopic.INVENTORY, json.dumps(inventory).encode())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"x":' + b"[" * 60_000,
        b'{"dev":"\xff"}',
        b" " * (MAX_BYTES[DeviceTopic.BIRTH] + 1),
    ],
)
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_up(DeviceTopic.BIRTH, payload)


@given(st.sampled_from(DeviceTopic), st.binary(max_size=200))
def test_no_bytes_make_a_decoder_raise_anything_else(kind: DeviceTopic, payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_up(kind, payload)


def test_the_inventory_hash_tells_offers_apart() -> None:
    assert inventory_hash((offer(),)) == inventory_hash((offer(),))
    assert inventory_hash((offer(),)) != inventory_hash((offer(state="loading"),))
    assert len(inventory_hash(())) == 16


def test_offers_of_a_stream_that_says_none_are_none() -> None:
    assert decode_offers(b"") == ()
    assert decode_offers(encode_offers((offer(),))) == (offer(),)
