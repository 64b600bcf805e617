"""The messages between a device that stored something and the gateway that takes it, over MQTT.

    device → gateway   Forwarded   one stored thing: a deferred request, a result or an event, with its age
                       Inquiry     asks for the state of these tickets
    gateway → device   Receipt     the ids taken (they are on the gateway's disk), the ids refused, and computed answers

A PUBACK says that a broker has a message, which a broker that crashes forgets; so the device deletes only what a
receipt names, and the gateway sends a receipt only for what it has committed. Both may be lost or come twice: the
device sends again, the gateway finds the same (device, id) and acknowledges again.

Ages and not instants cross, since a device may believe that it is 1970. As in `messages.py` everything here is taken
as hostile: sizes, counts and names are bounded before a value is used, and what does not fit raises `BadMessage`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from tidegate.fleet.messages import Milliseconds, Name, Text, decode_bounded

T = TypeVar("T")
Kind = Literal["request", "result", "event"]
Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{16,64}$")]
Words = Annotated[str, Meta(max_length=300)]

# JSON carries bytes as base64, and Mosquitto is configured to refuse messages beyond 64 KiB.
MAX_BODY_BYTES: Final = 44_000
MAX_MESSAGE_BYTES: Final = 65_536
MAX_IDS: Final = 64
MAX_WORDS: Final = 300


class Forwarded(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="t", tag="item"):
    """One stored thing. `historical`: it happened `age_ms` ago, so it is no news of the present."""

    device: Name = field(name="dev")
    id: Id
    kind: Kind
    age_ms: Milliseconds = field(name="age")
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)]
    key: Text = ""  # things of one key are sent one after another, in order
    priority: Annotated[int, Meta(ge=0, le=9)] = field(name="prio", default=0)  # 9 is kept longest
    model: Text = ""
    version: Text = ""
    variant: Text = ""  # that was not sure, or answered
    attempt: Annotated[int, Meta(ge=1, le=2**31)] = 1
    historical: bool = True
    v: Literal[1] = field(default_factory=lambda: 1)


class Inquiry(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="t", tag="ask"):
    """Tickets whose answers the device does not have yet."""

    device: Name = field(name="dev")
    ids: Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS)]
    v: Literal[1] = field(default_factory=lambda: 1)


class ItemRefusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """One that was not taken. `final`: nor will it ever be."""

    id: Id
    why: Words
    final: bool = False


class DeferredAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a deferred request: `body` is an OIP ModelInferResponse, or `code` says why there is none."""

    id: Id
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)] = b""
    code: Text = ""
    why: Words = ""


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True):
    gateway: Name = field(name="gw")
    taken: Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS)] = ()
    refused: Annotated[tuple[ItemRefusal, ...], Meta(max_length=MAX_IDS)] = ()
    answers: Annotated[tuple[DeferredAnswer, ...], Meta(max_length=MAX_IDS)] = ()
    unknown: Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS)] = ()  # ids of an inquiry that are not known here
    busy_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0  # it takes nothing for so long; this is about no single id
    v: Literal[1] = field(default_factory=lambda: 1)


_up_decoder: Final[msgspec.json.Decoder[Forwarded | Inquiry]] = msgspec.json.Decoder(Forwarded | Inquiry)
_receipt_decoder: Final = msgspec.json.Decoder(Receipt)


def encode_stored(message: Forwarded | Inquiry | Receipt) -> bytes:
    return msgspec.json.encode(message)


def decode_stored(payload: bytes) -> Forwarded | Inquiry:
    """What a device sends. Raises BadMessage."""
    return decode_bounded(_up_decoder, payload, MAX_MESSAGE_BYTES)


def decode_receipt(payload: bytes) -> Receipt:
    return decode_bounded(_receipt_decoder, payload, MAX_MESSAGE_BYTES)
