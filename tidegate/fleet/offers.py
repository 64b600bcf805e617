"""What a target offers: which models, in which variants, how large a request each takes, and what it costs there.

The same JSON travels in an edge's MQTT birth and inventory and in the link stream's Hello, so both roads feed one view.
Unknown keys are ignored, so that a newer agent can talk to an older gateway.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ModelState = Literal["ready", "loading", "warming", "evicted", "bad"]


class VariantOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way in which a target answers a model. `cost`: (work units, seconds) measured on this very device."""

    name: str
    precision: str
    cost: tuple[tuple[float, float], ...] = ()
    max_batch: int | None = None
    max_tokens: int | None = None
    quality: float | None = None


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
