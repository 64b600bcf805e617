"""Targets between the parts: what devices say over MQTT, what gateways say to them, and frames of the link stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from hypothesis import strategies as st

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkLoad, LinkUp
from gateway.core.placement.placer import Placer
from gateway.fleet_sync.registry import FleetRegister
from tests.fuzz.hostile import TEXTS, as_json, bent, damaged
from tests.fuzz.target import Target
from tests.support.gateway.fleets import NOW, ask, spec
from tests.support.mqtt.device_messages import TOPICS, Device, register
from tests.support.serving.duplex import stream_pair
from tests.support.serving.hosts import EchoHost, echo_request
from tests.support.serving.link_pair import Heard, client_on, question
from tidegate import clock
from tidegate.fleet.messages import (
    BadMessage,
    Command,
    GatewayState,
    decode_command,
    decode_gateway_state,
    encode,
)
from tidegate.fleet.offers import ModelOffer, VariantOffer, encode_offers
from tidegate.link import frames
from tidegate.link.frames import Greeting, ProtocolViolation
from tidegate.link.service import LinkService
from tidegate.link.session import KeepaliveTiming
from tidegate.oip.grpc.codec import message_from_request
from tidegate.outcome import ServeError
from tidegate.rpc import link_pb2
from tidegate.types import LoadReport

MAX_BYTES = 64 * 1024

# MQTT: what devices say, into the register and on into the view that placement reads


class Fold:
    """A register, and the fleet view behind it."""

    def __init__(self) -> None:
        self.register: FleetRegister = register()
        self.device = Device("good")
        self.now = 10.0


@asynccontextmanager
async def _fold() -> AsyncIterator[Fold]:
    yield Fold()


def _spoken() -> list[tuple[str, bytes]]:
    device = Device()
    return [device.birth(1.0), device.heartbeat(2.0), device.inventory(3.0), device.will(), device.goodbye()]


_SPOKEN = _spoken()
_payloads = [payload for _, payload in _SPOKEN]
_topics = st.sampled_from(
    [topic for topic, _ in _SPOKEN] * 3 + [f"{TOPICS.root}/up/{text}/birth" for text in TEXTS] + list(TEXTS)
)
_BIRTH, _BEAT = (
    {
        "dev": "kiosk-1",
        "e": 100,
        "s": 1,
        "m": 5,
        "boot": "b",
        "urls": ["10.0.0.7:1"],
        "rev": 1,
        "v": 1,
        "offers": [{"name": "m", "version": "1", "variants": [{"name": "i", "precision": "i", "cost": [[1.0, 0.1]]}]}],
    },
    {
        "dev": "kiosk-1",
        "e": 100,
        "s": 9,
        "m": 5,
        "iv": 1000,
        "inv": "x",
        "q": 1,
        "qd": 1.5,
        "sys": {"bat": 0.5},
        "v": 1,
    },
)
_said = st.lists(
    st.tuples(_topics, damaged(_payloads) | bent(_BIRTH).map(as_json) | bent(_BEAT).map(as_json), st.booleans()),
    min_size=1,
    max_size=4,
)


async def fold(held: Fold, said: list[tuple[str, bytes, bool]]) -> None:
    for topic, payload, retained in said:
        for effect in held.register.fold(topic, payload, held.now, retained=retained):
            held.register.is_wanted(effect)
        held.now += 0.1
    _placed({view.name: view.offers for view in held.register.devices(held.now)})
    held.register.next_wake(held.now)


def _placed(offered: dict[str, tuple[ModelOffer, ...]]) -> None:
    """Have placement decide over what was offered: what it computes with must be numbers that can be computed with."""
    fleet = Fleet(lambda model, version: "tokens")
    for name, offers in [
        ("mine", (ModelOffer("minilm", "1", (VariantOffer("fp32", "fp32", ((1.0, 0.01),)),)),)),
        *offered.items(),
    ]:
        target = f"edge/{name}"
        fleet.add(spec(target), NOW)
        fleet.fold(LinkUp(target, target, 1, offers), NOW)
        fleet.fold(LinkLoad(target, LoadReport(1, 1, 2**31, 2**31, 1e9), offers), NOW)
    decision = Placer(fleet).decide(ask(), NOW)
    assert decision.chosen is not None or decision.refusal is not None


async def good_fold(held: Fold) -> None:
    held.now += 1.0
    held.register.fold(*held.device.birth(held.now), held.now)
    held.register.fold(*held.device.heartbeat(held.now), held.now)
    assert "good" in [view.name for view in held.register.devices(held.now)]


MQTT_UP = Target("mqtt-up", _fold, _said, fold, good_fold, limit_bytes=256 * 1024, weight=0.7)

_COMMANDS = [encode(Command("c-1", "resync")), encode(Command("c-2", "epoch_hint", seen=5, boot="b", minimum=6))]
_STATES = [encode(GatewayState("gw", True, 7, 1)), encode(GatewayState("gw", False, 2**53 - 1))]


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


async def heard_by_device(_: None, payload: bytes) -> None:
    for decode in (decode_command, decode_gateway_state):
        with suppress(BadMessage):
            decode(payload)


async def good_word(_: None) -> None:
    assert decode_command(_COMMANDS[0]).op == "resync"
    assert decode_gateway_state(_STATES[0]).online


MQTT_DOWN = Target("mqtt-down", _nothing, damaged(_COMMANDS + _STATES), heard_by_device, good_word)


# Link frames, at both ends

_OFFERS = (ModelOffer("echo", "3", (VariantOffer("int8", "int8", ((1.0, 0.1),)),)),)
_HELLO = frames.hello(Greeting("edge/a", 1, "0", _OFFERS))
_MESSAGE = message_from_request(echo_request()).SerializeToString()
_LOAD = LoadReport(1, 2, 3, 4, 0.5)
_REQUEST: dict[str, Any] = {"budget_s": 1.0, "priority": 1, "variant": "", "traceparent": ""}
_ENVELOPES = [
    frames.request(1, _MESSAGE, **_REQUEST),
    frames.request(2, b"", **_REQUEST, chunked_bytes=100),
    frames.chunk(2, b"x" * 50),
    frames.cancel(1),
    frames.ping(1.0),
    frames.pong(5),
    frames.load(_LOAD, encode_offers(_OFFERS)),
    frames.goodbye("update"),
    frames.accepted(1, frames.Accepted(1, 0.5)),
    frames.answer(1, frames.AnswerFrame(_MESSAGE, 0.1, 0.1, 1, "int8", _LOAD)),
    frames.answer(1, frames.AnswerFrame(b"", 0.1, 0.1, 1, "int8", None), chunked_bytes=2**62),
    frames.refused(1, ServeError("no"), _LOAD),
    _HELLO,
]


@st.composite
def _numbered(draw: st.DrawFn) -> bytes:
    """An envelope of the right form whose numbers are the largest that fit, or none."""
    envelope = link_pb2.Envelope.FromString(draw(st.sampled_from(_ENVELOPES)))
    frame = envelope.frames[0]
    inner = getattr(frame, str(frame.WhichOneof("kind")))
    for field in inner.DESCRIPTOR.fields:
        if field.name.endswith(("_us", "_bytes", "id", "epoch", "sequence", "priority")) and draw(st.booleans()):
            top = 2**32 - 1 if field.type in (field.TYPE_UINT32, field.TYPE_INT32) else 2**63 - 1
            setattr(
                inner,
                field.name,
                draw(st.sampled_from((0, 1, 2, top if field.type != field.TYPE_INT32 else 2**31 - 1))),
            )
    return envelope.SerializeToString()


_stream = st.tuples(
    st.sampled_from((_HELLO, _HELLO, b"", None)),
    st.lists(st.sampled_from(_ENVELOPES) | damaged(_ENVELOPES) | _numbered(), min_size=1, max_size=6),
)
Stream = tuple[bytes | None, list[bytes]]


class Ends:
    """A link service that stays, and a client for each throw."""

    def __init__(self) -> None:
        self.service = LinkService(
            EchoHost(),
            name="edge/attic",
            epoch=lambda: 9,
            offers=lambda: _OFFERS,
            load=lambda: _LOAD,
            heartbeat=KeepaliveTiming(0.02, 2),
            max_message_bytes=MAX_BYTES,
        )


@asynccontextmanager
async def _ends() -> AsyncIterator[Ends]:
    yield Ends()


async def stream_in(held: Ends, thrown: Stream) -> None:
    for serve in (held.service.serve, _asked_of):
        ours, theirs = stream_pair()
        hello, envelopes = thrown
        for envelope in [hello, *envelopes]:
            if envelope is not None:
                await theirs.write(envelope)
        theirs.close()
        assert isinstance(await serve(ours), str)
    for envelope in thrown[1]:
        with suppress(ProtocolViolation):
            for frame in frames.parse(envelope):
                if frame.WhichOneof("kind") == "load":
                    _placed({"other": frames.offers_of(frame.load.offers)})
    assert held.service.streams == 0


async def _asked_of(ours: Any) -> str:
    """A client with a question under way, whose other side says what was thrown."""
    client = client_on(ours, Heard())
    running = asyncio.create_task(client.run())
    await clock.sleep(0)
    asked = asyncio.create_task(client.ask(question(budget_s=0.2)))
    reason = await running
    with suppress(ServeError):
        await asked
    return reason


async def good_stream(held: Ends) -> None:
    ours, theirs = stream_pair()
    client = client_on(theirs, Heard())
    tasks = [asyncio.create_task(client.run()), asyncio.create_task(held.service.serve(ours))]
    until = clock.now() + 2.0
    while not client.open and clock.now() < until:
        await clock.sleep(0)
    answered = await client.ask(question(budget_s=2.0))
    assert answered.message
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


LINK = Target("link-frames", _ends, _stream, stream_in, good_stream, limit_bytes=4 * MAX_BYTES, weight=0.7)

TARGETS = (MQTT_UP, MQTT_DOWN, LINK)
