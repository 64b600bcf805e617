"""The messages of devices and gateways over MQTT: small JSON documents that contain everything needed to order them.

Correctness must not need MQTT 5 (the embedded broker speaks 3.1.1), so epoch, sequence and age travel in the payload:

- `e` epoch: the device's session number, persisted before every CONNECT, so it only grows.
- `s` sequence: per topic, from 1 within an epoch, never reset inside it.
- `m` the device's monotonic milliseconds when the message was made; the receiver makes ages of it without clocks.
- `v` the schema. Unknown keys are ignored, so a newer agent can talk to an older gateway; another `v` is refused.

Everything here comes from the network and is taken as hostile: sizes, counts, ranges and names are bounded before a
value is used, and whatever does not fit raises `BadMessage`, nothing else. Only heartbeats are hot; their keys are
short so that one fits a small radio frame.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.name_conflict import MOST_WORDS
from tidegate.fleet.offers import ModelOffer, check_offers, encode_offers
from tidegate.fleet.reported import Reported
from tidegate.fleet.topics import NAME_PATTERN, DeviceTopic

T = TypeVar("T")
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
# JSON numbers are exact up to 2^53 in every parser that a device may use.
MAX_EPOCH: Final = 2**53 - 1
Epoch = Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
Sequence = Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Url = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=128)]
Offers = Annotated[tuple[ModelOffer, ...], Meta(max_length=256)]
Interval = Annotated[int, Meta(ge=100, le=60_000)]
Admission = Literal["open", "closed", "draining"]

MAX_BYTES: Final = {
    DeviceTopic.BIRTH: 65_536,
    DeviceTopic.DEATH: 1024,
    DeviceTopic.HEARTBEAT: 2048,
    DeviceTopic.INVENTORY: 65_536,
    DeviceTopic.REPORTED: 65_536,
}
MAX_COMMAND_BYTES: Final = 8192


class BadMessage(ValueError):
    """A payload that is not a message of its topic; the text says why."""


class Birth(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session has begun: the name of the device, its address, and everything it offers."""

    device: Name = field(name="dev")
    epoch: Epoch = field(name="e")
    sequence: Sequence = field(name="s")
    mono_ms: Milliseconds = field(name="m")
    boot: Text
    urls: Annotated[tuple[Url, ...], Meta(max_length=8)]
    offers: Offers
    revision: Count = field(name="rev")
    interval_ms: Interval = field(name="iv", default=1000)
    admission: Admission = field(name="adm", default="open")
    agent: Text = ""
    utc_ms: int | None = field(name="utc", default=None)  # for people; never orders anything
    v: Literal[1] = field(default_factory=lambda: 1)  # a factory: a default would be omitted from the JSON

    def __post_init__(self) -> None:
        check_offers(self.offers)


class Inventory(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the device offers now. `revision` counts its changes, over births and inventories alike."""

    device: Name = field(name="dev")
    epoch: Epoch = field(name="e")
    sequence: Sequence = field(name="s")
    mono_ms: Milliseconds = field(name="m")
    offers: Offers
    revision: Count = field(name="rev")
    v: Literal[1] = field(default_factory=lambda: 1)

    def __post_init__(self) -> None:
        check_offers(self.offers)


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """I am here, this busy, and my inventory hashes to `inventory`."""

    device: Name = field(name="dev")
    epoch: Epoch = field(name="e")
    sequence: Sequence = field(name="s")
    mono_ms: Milliseconds = field(name="m")
    interval_ms: Interval = field(name="iv")
    inventory: Annotated[str, Meta(max_length=32)] = field(name="inv")
    queued: Count = field(name="q", default=0)
    in_flight: Count = field(name="in", default=0)
    queue_delay_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = field(name="qd", default=0.0)
    admission: Admission = field(name="adm", default="open")
    conditions: DeviceConditions = field(name="sys", default=UNTOLD)
    v: Literal[1] = field(default_factory=lambda: 1)


class Death(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session has ended. `lost` is the broker's guess (the will); any other reason is the device's own."""

    device: Name = field(name="dev")
    epoch: Epoch = field(name="e")
    reason: Literal["lost", "shutdown", "sleep", "update"]
    v: Literal[1] = field(default_factory=lambda: 1)

    @property
    def is_own_word(self) -> bool:
        return self.reason != "lost"


class GatewayState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's presence (retained, with a will), and its heartbeat, which gives clockless devices the time."""

    gateway: Name = field(name="gw")
    online: bool
    epoch: Epoch = field(name="gepoch")
    utc_ms: int = 0
    ingest: bool = False  # whether it takes what devices have stored
    shares: bool = False  # whether it can say what became of what other gateways took
    links: Annotated[tuple[Url, ...], Meta(max_length=4)] = ()  # HOST:PORT where a device may dial it
    v: Literal[1] = field(default_factory=lambda: 1)


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A command of a gateway to a device. Never retained: a command that finds no device is lost, and sent again."""

    id: Annotated[str, Meta(max_length=64)] = field(name="cid")
    op: Annotated[str, Meta(max_length=32)]  # open, so that an older agent can ignore a newer gateway's wish
    seen: Epoch | None = None  # epoch_hint, name_taken: the session that is complained about …
    boot: Text = ""  # … of this start of the agent, when two claim the same epoch or name
    minimum: Epoch | None = field(name="min", default=None)  # epoch_hint: the least epoch that will be believed
    reason: Annotated[str, Meta(max_length=MOST_WORDS)] = ""  # name_taken: which agent keeps the name, for people
    v: Literal[1] = field(default_factory=lambda: 1)


UpMessage = Birth | Death | Heartbeat | Inventory | Reported
Sequenced = Birth | Heartbeat | Inventory
_DECODERS: Final[dict[DeviceTopic, msgspec.json.Decoder[Any]]] = {
    DeviceTopic.BIRTH: msgspec.json.Decoder(Birth),
    DeviceTopic.DEATH: msgspec.json.Decoder(Death),
    DeviceTopic.HEARTBEAT: msgspec.json.Decoder(Heartbeat),
    DeviceTopic.INVENTORY: msgspec.json.Decoder(Inventory),
    DeviceTopic.REPORTED: msgspec.json.Decoder(Reported),
}
_command_decoder: Final = msgspec.json.Decoder(Command)
_gateway_decoder: Final = msgspec.json.Decoder(GatewayState)


def encode(message: UpMessage | Command | GatewayState) -> bytes:
    return msgspec.json.encode(message)


def decode_up(kind: DeviceTopic, payload: bytes) -> UpMessage:
    """The message that a device's topic of this kind carries. Raises BadMessage."""
    message: UpMessage = decode_bounded(_DECODERS[kind], payload, MAX_BYTES[kind])
    return message


def decode_command(payload: bytes) -> Command:
    return decode_bounded(_command_decoder, payload, MAX_COMMAND_BYTES)


def decode_gateway_state(payload: bytes) -> GatewayState:
    return decode_bounded(_gateway_decoder, payload, MAX_COMMAND_BYTES)


def inventory_hash(offers: tuple[ModelOffer, ...]) -> str:
    """The digest of the inventory in a heartbeat, by which a gateway notices a missed change."""
    return hashlib.blake2b(encode_offers(offers), digest_size=8).hexdigest()


def decode_bounded(decoder: msgspec.json.Decoder[T], payload: bytes, max_bytes: int) -> T:
    """What the decoder makes of a payload from the network. Raises BadMessage, and nothing else."""
    if len(payload) > max_bytes:
        raise BadMessage(f"{len(payload)} bytes, at most {max_bytes} are allowed")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from error
