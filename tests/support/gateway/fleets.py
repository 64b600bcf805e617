"""Small fleets for tests of the gateway's core: one model, a few targets, links that are up."""

from __future__ import annotations

from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from tidegate.fleet.offers import ModelOffer, ModelState, VariantOffer
from tidegate.placement_pin import Pin, Zone
from tidegate.types import LoadReport

NOW = 1000.0


def variant(
    name: str = "fp32",
    *,
    compute_s: float | None = 0.010,
    max_batch: int | None = None,
    max_tokens: int | None = None,
    quality: float | None = None,
) -> VariantOffer:
    """A variant that costs `compute_s` whatever the work; None: it was not measured."""
    cost = () if compute_s is None else ((1.0, compute_s),)
    return VariantOffer(name, name, cost, max_batch, max_tokens, quality)


def offer(*variants: VariantOffer, state: ModelState = "ready") -> ModelOffer:
    return ModelOffer("minilm", "1", variants or (variant(),), state)


def spec(target_id: str, *, static: bool = True, zone: Zone | None = None) -> TargetSpec:
    tier: Tier = "edge" if target_id.startswith("edge/") else "pool"
    return TargetSpec(target_id, tier, "127.0.0.1:1", static=static, zone=zone)


def fleet_of(*, up: bool = True, **variants: VariantOffer) -> Fleet:
    """A fleet with one target per keyword, `edge_a` being edge/a, all up since `NOW`."""
    fleet = Fleet(lambda model, version: "tokens")
    for key, one in variants.items():
        target_id = key.replace("_", "/", 1)
        fleet.add(spec(target_id), NOW)
        if up:
            fleet.fold(LinkUp(target_id, target_id, 1, (offer(one),)), NOW)
    return fleet


def ask(
    *,
    budget_s: float = 2.0,
    units: float = 16.0,
    rows: int = 1,
    longest_row: int = 16,
    variant: str = "",
    at: float = NOW,
    min_quality: float = 0.0,
    pin: Pin = "any",
    attested: bool = False,
) -> Ask:
    asked = Ask(
        model="minilm",
        version="1",
        units=units,
        rows=rows,
        longest_row=longest_row,
        deadline=at + budget_s,
        variant=variant,
        min_quality=min_quality,
        pin=pin,
    )
    return asked._replace(attested=attested)


def link_of(*rtts_s: float, every_s: float = 0.1, prior_rtt_s: float = 0.005) -> LinkEstimate:
    """An estimate that recorded these, the last one at `NOW`."""
    link = LinkEstimate(prior_rtt_s=prior_rtt_s)
    for index, rtt_s in enumerate(rtts_s):
        link.record(rtt_s, NOW - (len(rtts_s) - 1 - index) * every_s)
    return link


def report(queue_delay_s: float, sequence: int = 1, epoch: int = 1) -> LoadReport:
    return LoadReport(epoch, sequence, queued=1, in_flight=1, queue_delay_s=queue_delay_s)
