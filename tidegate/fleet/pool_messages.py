"""The messages by which a pool says over MQTT that it is there: its state, which is retained, and its death.

A pool needs no heartbeat of its own here: gateways hold link streams to it, and these tell sooner and surer whether it
lives. What is left to say is where it is and whether it drains. Ordering is as for devices (`messages.py`): `e`, the
session's number, grows with each CONNECT, since the last will is bound to one; `s` counts within a session; and `boot`
names the process, so that two processes of one name can be told apart. Unknown keys are ignored; another `v` is
refused.

Everything here comes from the network and is taken as hostile: whatever does not fit raises `BadMessage`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, field

from tidegate.fleet.messages import BadMessage, Epoch, Name, Sequence, Text, decode_bounded
from tidegate.fleet.topics import PoolTopic
from tidegate.placement_pin import Zone

RESAY_S: Final = 20.0  # a pool says its state again so often: what was lost on the way heals
MAX_POOL_BYTES: Final = 2048


class PoolState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pool is there, at this address; while it drains it finishes what it has and takes nothing new."""

    pool: Name
    epoch: Epoch = field(name="e")
    sequence: Sequence = field(name="s")
    boot: Text
    address: Annotated[str, Meta(min_length=3, max_length=261)]  # HOST:PORT of its gRPC server
    zone: Zone | None = None
    draining: bool = False
    v: Literal[1] = field(default_factory=lambda: 1)  # a factory: a default would be omitted from the JSON

    @property
    def order(self) -> tuple[int, int]:
        """Of two states of one process, the greater one is the later."""
        return self.epoch, self.sequence


class PoolDeath(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session has ended. `lost` is the broker's guess (the will), `shutdown` the pool's own word."""

    pool: Name
    epoch: Epoch = field(name="e")
    boot: Text
    reason: Literal["lost", "shutdown"]
    v: Literal[1] = field(default_factory=lambda: 1)


PoolMessage = PoolState | PoolDeath
_DECODERS: Final[dict[PoolTopic, msgspec.json.Decoder[Any]]] = {
    PoolTopic.STATE: msgspec.json.Decoder(PoolState),
    PoolTopic.DEATH: msgspec.json.Decoder(PoolDeath),
}


def encode_pool(message: PoolMessage) -> bytes:
    return msgspec.json.encode(message)


def decode_pool(pool: str, kind: PoolTopic, payload: bytes) -> PoolMessage:
    """The message of this pool's topic. Raises BadMessage, also where it names another pool than its topic does."""
    message: PoolMessage = decode_bounded(_DECODERS[kind], payload, MAX_POOL_BYTES)
    if message.pool != pool:  # the broker's ACL vouches only for the name in the topic
        raise BadMessage(f"it names the pool {message.pool}")
    return message
