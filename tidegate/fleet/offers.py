"""The offers of a target: its models and variants, the largest request of each, and its measured cost.

The same JSON travels in an edge's MQTT birth and inventory and in the link stream's Hello, so both paths feed one view.
Unknown keys are ignored, so that a newer agent can talk to an older gateway.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

# "soaking": it answers like "ready", but the generation is new and not committed yet
# (edge_agent/core/rollout_machine.py); placement prefers other targets, except for the share that the soak needs.
ModelState = Literal["ready", "loading", "warming", "soaking", "evicted", "bad"]
SERVING: Final = frozenset({"ready", "soaking"})  # how many requests find one that soaks: gateway/layers/versions.py

# Which requests get a variant, on a target that lowers its precision while its answers are late
# (`cloud_pool/core/health/adaptive_control.py`):
#   ""          every request
#   "spare"     the lesser variant, while there is no need: requests that demand it
#   "relief"    the lesser variant, while there is: every request, and the answer is marked as degraded
#   "relieved"  the full variant, meanwhile: requests that demand it, or a floor of quality
Standing = Literal["", "spare", "relief", "relieved"]


class VariantOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way in which a target answers a model. `cost`: (work units, seconds) measured on this device."""

    name: str
    precision: str
    cost: tuple[tuple[float, float], ...] = ()
    max_batch: int | None = None
    max_tokens: int | None = None
    quality: float | None = None
    paced: bool = False  # it waits instead of computing, and answers with zeros
    standing: Standing = ""
    slots: int = 0  # generations at a time, on all workers together; 0: it does not generate
    schemas: bool = False  # its generations can be held to a JSON schema


REASON_CHARS: Final = 200


class WorkerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a model's workers since their agent or pool started: how many hung or died, and why the last."""

    lost: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    reason: Annotated[str, Meta(max_length=REASON_CHARS)] = ""


class ModelOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    version: str
    variants: tuple[VariantOffer, ...]
    state: ModelState = "ready"
    digest: str = ""
    worker: WorkerReport | None = None  # None: none was lost
    # What its workers have of the network and the disk, and why; "": neither; None: it does not say.
    sandbox: Annotated[str, Meta(max_length=REASON_CHARS)] | None = None


_decoder = msgspec.json.Decoder(tuple[ModelOffer, ...])


def encode_offers(offers: tuple[ModelOffer, ...]) -> bytes:
    return msgspec.json.encode(offers)


def decode_offers(raw: bytes) -> tuple[ModelOffer, ...]:
    """Raises msgspec.ValidationError (with the path of the bad value) or msgspec.DecodeError."""
    return _decoder.decode(raw) if raw else ()
