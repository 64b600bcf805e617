"""The trace format is the versioned form of a recording of real traffic: JSON lines, each one a struct here.

    header     once, first              when, for how long, by which gateway, under which policy
    target     at first, and changed    a target, with what it offers and what that costs
    request    each, at its end         one that arrived in the time: instants, work, wishes, attempts, outcome
    link       each second              how a target's link was at that instant
    end        once, last               how much there was, and how much was lost on the way

A recording says what work came and what became of it. It has no tensors, no text, no ids, no headers and no addresses;
tenants are aliases that mean something within one recording only. What it does have is the names of models and of
targets, and when how much was asked for: enough to see a business' day.

Times are seconds from the recording's beginning; `simulator/replay/replay.py` reads them. A reader refuses a version
that it does not know, and ignores fields that it does not: fields are only added within a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.core.estimate.service_cost import VariantCost
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.target import TargetView
from gateway.core.history.recorder import RequestRecord
from gateway.core.history.waterfall import AttemptBar, waterfall
from tidegate.caller import tenant_of
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Feature

FORMAT: Final = "tidegate-recording"
VERSION: Final = 1


class RecordedLine(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """What every line is."""


class RecordedHeader(RecordedLine, frozen=True, tag="header"):
    format: str
    version: int
    made_by: str  # Tidegate's version
    gateway: str
    policy: str
    began_utc_s: float
    for_s: float


class RecordedVariant(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    precision: str
    cost: tuple[tuple[float, float], ...]  # (work units, seconds) as measured at its warm-up
    factor: float = 1.0  # how much longer than that calls have taken lately, as the gateway learned
    sigma: float = 0.0
    max_batch: int | None = None
    max_tokens: int | None = None
    quality: float | None = None


class RecordedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    version: str
    variants: tuple[RecordedVariant, ...]
    feature: Feature = "tokens"  # what a work unit is


class RecordedTarget(RecordedLine, frozen=True, tag="target"):
    at_s: float
    id: str
    tier: str
    models: tuple[RecordedModel, ...] = ()
    price: float = 0.0
    standby: bool = False


class RecordedAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds; `at_s` is from the request's arrival. What is not known is left out."""

    target: str
    variant: str
    reason: str
    at_s: float
    took_s: float
    end: str = ""  # answered, failed, cancelled
    acked_s: float | None = None
    first_token_s: float | None = None
    queue_s: float | None = None
    compute_s: float | None = None
    link_s: float | None = None
    batch: int = 0


class RecordedRequest(RecordedLine, frozen=True, tag="request"):
    at_s: float
    model: str
    protocol: str
    outcome: str
    elapsed_s: float
    budget_s: float | None  # from its arrival
    gateway_s: float  # of it, until it was placed
    late: bool = False
    served_by: str = ""
    version: str = ""
    units: float | None = None  # None: it was refused before its work was known
    rows: int = 1
    longest_row: int = 1
    body_bytes: int = 0
    priority: int = 0
    tenant: str = ""  # an alias
    variant: str = ""  # demanded
    pin: str = "any"
    min_quality: float = 0.0
    attested: bool = False
    prompt_tokens: int = 0  # of a generation, as its answer said; 0: it is none, or was not answered
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None  # its budgets for the first token, from its arrival, and for each further one
    tpot_s: float | None = None
    resumes: int = 0  # times that another target went on with it
    attempts: tuple[RecordedAttempt, ...] = ()

    @property
    def in_time(self) -> bool:
        return self.outcome in ("ok", "degraded") and not self.late


class RecordedLink(RecordedLine, frozen=True, tag="link"):
    at_s: float
    target: str
    up: bool
    rtt_s: float = 0.0
    calm_s: float = 0.0
    jitter_s: float = 0.0
    loss_ratio: float = 0.0  # of round trips lately that were as late as one whose packets were sent again
    s_per_byte: float = 0.0  # what a byte of body takes; 0: never seen to matter
    lost: int = 0  # attempts in this second whose connection ended, or that were never acknowledged
    sent: int = 0
    in_flight: int = 0
    queued: int = 0


class RecordedEnd(RecordedLine, frozen=True, tag="end"):
    requests: int
    lost: int  # lines that were not written because the reader was too slow
    seconds: float


AnyRecordedLine = RecordedHeader | RecordedTarget | RecordedRequest | RecordedLink | RecordedEnd


def request_line(record: RequestRecord, began_at: float, alias: Callable[[str], str]) -> RecordedRequest:
    """Args: alias: another name for a tenant."""
    line = RecordedRequest(
        at_s=_s(record.arrived_at - began_at),
        model=record.model,
        protocol=record.protocol,
        outcome=record.outcome,
        elapsed_s=_s(record.elapsed_s),
        budget_s=None if record.deadline is None else _s(record.deadline - record.arrived_at),
        gateway_s=_s(record.placed_at - record.arrived_at),
        late=record.late,
        served_by=record.served_by,
        tenant=alias(tenant_of(record.tenant)) if record.tenant else "",
        attempts=tuple([_attempt(bar, record) for bar in waterfall(record).bars]),
    )
    if record.answer is not None and (usage := record.answer.usage) is not None:
        line = msgspec.structs.replace(
            line,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            resumes=len(record.answer.route.resumed),
        )
    if record.decision is None:
        return line
    ask = record.decision.ask
    generation = ask.generation
    return msgspec.structs.replace(
        line,
        version=ask.version,
        units=ask.units,
        rows=ask.rows,
        longest_row=ask.longest_row,
        body_bytes=ask.body_bytes,
        priority=ask.priority,
        variant=ask.variant,
        pin=ask.pin,
        min_quality=ask.min_quality,
        attested=ask.attested,
        ttft_s=_s(first_by - record.arrived_at) if (first_by := generation and generation.first_by) else None,
        tpot_s=None if generation is None else generation.next_s,
    )


def _attempt(bar: AttemptBar, record: RequestRecord) -> RecordedAttempt:
    own = [note for note in record.notes if note.attempt == bar.attempt]
    acked_at = next((note.at for note in own if note.what == "accepted"), None)
    begun_at = next((note.at for note in own if note.what == "begun"), None)
    answer = next((note for note in own if note.what == "answered"), None)
    stages = (answer.stages or {}) if answer else {}
    launched_at = record.arrived_at + bar.start_s
    return RecordedAttempt(
        target=bar.target,
        variant=bar.variant,
        reason=bar.why,
        at_s=_s(bar.start_s),
        took_s=_s(bar.took_s),
        end=bar.end,
        acked_s=None if acked_at is None else _s(acked_at - launched_at),
        first_token_s=None if begun_at is None else _s(begun_at - launched_at),
        queue_s=_known(stages.get("queue")),
        compute_s=_known(stages.get("compute")),
        link_s=_s(answer.seconds) if answer else None,
        batch=answer.batch if answer else 0,
    )


def target_line(target: TargetView, fleet: Fleet, at_s: float) -> RecordedTarget:
    costs = {
        (one.model, one.version, one.variant.name): one.cost
        for offer in target.offers
        for one in fleet.offered(offer.name, offer.version)
        if one.target is target
    }
    models = [
        RecordedModel(
            offer.name,
            offer.version,
            tuple([_variant(one, costs.get((offer.name, offer.version, one.name))) for one in offer.variants]),
            next(
                (cost.feature for (name, version, _), cost in costs.items() if (name, version) == _key(offer)), "tokens"
            ),
        )
        for offer in target.offers
    ]
    spec = target.spec
    return RecordedTarget(_s(at_s), target.id, spec.tier, tuple(models), round(target.price, 6), spec.standby)


def _key(offer: ModelOffer) -> tuple[str, str]:
    return offer.name, offer.version


def _variant(one: VariantOffer, cost: VariantCost | None) -> RecordedVariant:
    return RecordedVariant(
        one.name,
        one.precision,
        tuple([(float(units), float(seconds)) for units, seconds in one.cost]),
        factor=1.0 if cost is None else round(cost.factor, 4),
        sigma=0.0 if cost is None else round(cost.sigma, 4),
        max_batch=one.max_batch,
        max_tokens=one.max_tokens,
        quality=one.quality,
    )


def link_line(target: TargetView, at_s: float, lost: int, sent: int) -> RecordedLink:
    link, load = target.link, target.queue_estimate.load
    return RecordedLink(
        at_s=_s(at_s),
        target=target.id,
        up=target.up,
        rtt_s=_s(link.rtt_s) if link.samples else 0.0,
        calm_s=_s(link.calm_s) if link.samples else 0.0,
        jitter_s=_s(link.jitter_s) if link.samples else 0.0,
        loss_ratio=round(link.loss_ratio, 4),
        s_per_byte=link.s_per_byte,
        lost=lost,
        sent=sent,
        in_flight=target.queue_estimate.in_flight,
        queued=load.queued if load else 0,
    )


def _known(seconds: float | None) -> float | None:
    return None if seconds is None else _s(seconds)


def _s(seconds: float) -> float:
    return round(seconds, 6)
