"""The offers of a target: its models and variants, the largest request of each, and its measured cost.

The same JSON travels in an edge's MQTT birth and inventory and in the link stream's Hello, so both paths feed one view.
Unknown keys are ignored, so that a newer agent can talk to an older gateway.

Placement computes with these numbers for every request of a model, whichever target answers it, and a variant's name
ends up in headers. So one bad offer could take a model away from everybody, and offers are bounded as they come in, by
either way: numbers by their types, and by `check_offers` what no type can say.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from tidegate.placement_pin import Zone

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
#   "demoted"   one whose answers disagree with the reference's: requests that no other variant or target takes. Set by
#               gateways (`gateway/core/agreement`), and marked as degraded
Standing = Literal["", "spare", "relief", "relieved", "demoted"]

# What a generating variant takes and gives, and so whether it can go on with an answer that another one has begun:
#   "ids"      token ids both ways: it goes on behind the ids that there are
#   "prefill"  text both ways: it goes on behind the text that there is, whose ids are not known
#   "text"     text both ways, each answer from its beginning
Grade = Literal["ids", "prefill", "text"]

MOST_PLACES: Final = 1e6
Places = Annotated[float, Meta(ge=0.0, le=MOST_PLACES)]
Wait = Annotated[float, Meta(ge=0.0, le=3600.0)]
Price = Annotated[float, Meta(ge=0.0, le=1e6)]

MOST_SLOTS: Final = 65_536  # of a site all its devices' together
Slots = Annotated[int, Meta(ge=0, le=MOST_SLOTS)]
SizeLimit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Quality = Annotated[float, Meta(ge=-1, le=1)]  # a share of right answers from 0, a cosine from -1

# A table of costs is read by its slopes, which have to be numbers too: so no work is too near another, and no time 0.
MOST_COST_POINTS: Final = 256  # a warm-up measures a dozen
LEAST_STEP: Final = 1e-6  # in units of work, from one point to the next
WorkUnits = Annotated[float, Meta(ge=0.0, le=1e15)]
CostSeconds = Annotated[float, Meta(ge=1e-9, le=1e6)]
MeasuredCosts = Annotated[tuple[tuple[WorkUnits, CostSeconds], ...], Meta(max_length=MOST_COST_POINTS)]

# Of one target. A site tells all models of its devices and pools, which fill the bytes of a Hello before that.
MOST_OFFERS: Final = 16_384
MOST_VARIANTS: Final = 256  # of one model: as many offers as a site's summary walks
MOST_MODEL_NAME: Final = 256  # characters: of another maker's server, which a site tells as well
MOST_NAME: Final = 128  # of a version or a variant, as of a manifest's
_SEPARATORS: Final = frozenset(';,\\"')  # in a header, which tells the variant


class VariantOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way in which a target answers a model. `cost`: (work units, seconds) measured on this device."""

    name: str
    precision: str
    cost: MeasuredCosts = ()
    max_batch: SizeLimit | None = None
    max_tokens: SizeLimit | None = None
    quality: Quality | None = None
    paced: bool = False  # it waits instead of computing, and answers with zeros
    standing: Standing = ""
    slots: Slots = 0  # generations at a time, on all workers together; 0: it does not generate
    schemas: bool = False  # its generations can be held to a JSON schema
    grade: Grade = "ids"  # of one that generates
    # Of a site, whose variant stands for all its places that have it (gateway/core/fleet/site_summary.py):
    places: Places = 1.0  # how many computations of this cost go on there side by side
    wait_s: Wait = 0.0  # for the soonest of these places, beyond the wait of the site's load report
    price: Price | None = None  # of a second of it there, in seconds of a pool; None: what is usual for the tier
    zone: Zone | None = None  # the innermost one that it is computed in; None: the target's

    def __post_init__(self) -> None:
        # Only the sum that a site makes of its devices' slots comes here with more: what is decoded is refused before.
        if self.slots > MOST_SLOTS:
            force_setattr(self, "slots", MOST_SLOTS)

    @property
    def resumable(self) -> bool:
        """Whether it can go on with an answer that another target has begun."""
        return self.grade != "text"


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
    # Which server of another maker serves it, and why its grade is no better; "": one of ours.
    upstream: Annotated[str, Meta(max_length=REASON_CHARS)] = ""
    # Seconds until it would be served if it was asked for now, of a model that is loaded on demand and not in memory.
    cold_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0

    @property
    def answers(self) -> bool:
        """Whether requests for it are answered, at once or after a cold start."""
        return self.state in SERVING or self.cold_s > 0.0


_decoder = msgspec.json.Decoder(tuple[ModelOffer, ...])


def encode_offers(offers: tuple[ModelOffer, ...]) -> bytes:
    return msgspec.json.encode(offers)


def decode_offers(raw: bytes) -> tuple[ModelOffer, ...]:
    """Raises msgspec.ValidationError (with the path of the bad value) or msgspec.DecodeError."""
    if not raw:
        return ()
    offers = _decoder.decode(raw)
    try:
        check_offers(offers)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from error
    return offers


def check_offers(offers: tuple[ModelOffer, ...]) -> None:
    """Check counts, names and tables of offers from the network, whose numbers were bounded as they were decoded.

    Raises:
        ValueError: they are not what a target can offer. Raised inside of a decoder, it is a msgspec.ValidationError.
    """
    if len(offers) > MOST_OFFERS:
        raise ValueError(f"{len(offers)} models: at most {MOST_OFFERS}")
    for offer in offers:
        if not 0 < len(offer.name) <= MOST_MODEL_NAME or len(offer.version) > MOST_NAME:
            words = f"1 to {MOST_MODEL_NAME} characters and its version at most {MOST_NAME}"
            raise ValueError(f"a model's name has {words}")
        if not (offer.name.isprintable() and offer.version.isprintable()):
            raise ValueError(f"the model's name {offer.name!r} or its version has characters that cannot be printed")
        if len(offer.variants) > MOST_VARIANTS:
            raise ValueError(f"{len(offer.variants)} variants of {offer.name}: at most {MOST_VARIANTS}")
        for variant in offer.variants:
            _check_variant(offer.name, variant)


def _check_variant(model: str, variant: VariantOffer) -> None:
    if not _is_name(variant.name) or len(variant.precision) > MOST_NAME:
        raise ValueError(f"a variant of {model} has a name that no header can say, or of over {MOST_NAME} characters")
    work = sorted([units for units, _ in variant.cost])
    if any(after - before < LEAST_STEP for before, after in pairwise(work)):
        raise ValueError(f"cost points of {model} must have distinct work")


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MOST_NAME and text.isascii() and text.isprintable() and _SEPARATORS.isdisjoint(text)
