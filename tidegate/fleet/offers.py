"""The offers of a target: its models and variants, the largest request of each, and its measured cost.

The same JSON travels in an edge's MQTT birth and inventory and in the link stream's Hello, so both paths feed one view.
Unknown keys are ignored, so that a newer agent can talk to an older gateway.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# "soaking": it answers like "ready", but the generation is new and not committed yet
# (edge_agent/core/rollout_machine.py); whoever can should be answered elsewhere, up to the share that the soak needs.
ModelState = Literal["ready", "loading", "warming", "soaking", "evicted", "bad"]

# Who gets a variant, where a target lessens its precision while its answers are late
# (`cloud_pool/core/health/adaptive_control.py`):
#   ""          anybody
#   "spare"     the lesser one, while there is no need: who demands it
#   "relief"    the lesser one, while there is: anybody, and the answer says that it is degraded
#   "relieved"  the full one, meanwhile: who demands it, or a floor of quality
Standing = Literal["", "spare", "relief", "relieved"]


class VariantOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way in which a target answers a model. `cost`: (work units, seconds) measured on this very device."""

    name: str
    precision: str
    cost: tuple[tuple[float, float], ...] = ()
    max_batch: int | None = None
    max_tokens: int | None = None
    quality: float | None = None
    paced: bool = False  # it waits instead of computing, and answers with zeros
    standing: Standing = ""


class ModelOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    version: str
    variants: tuple[VariantOffer, ...]
    state: ModelState = "ready"
    digest: str = ""


_decoder = msgspec.json.Decoder(tuple[ModelOffer, ...])


def encode_offers(offers: tuple[ModelOffer, ...]) -> bytes:
    return msgspec.json.encode(offers)


def decode_offers(raw: bytes) -> tuple[ModelOffer, ...]:
    """Raises msgspec.ValidationError (with the path of the bad value) or msgspec.DecodeError."""
    return _decoder.decode(raw) if raw else ()
