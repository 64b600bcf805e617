"""The console snapshot: the screen's contents as JSON, of bounded size, made once a second for all readers.

A page with a row for each of a thousand edges would help no operator, so edges are counted by health, and only `ROWS`
targets have a row: pools first, then unhealthy targets, then the busiest. Any other target is found by name (`find`)
and shown in full (`detail`).

Names, reasons and addresses come from the network. They are values here and text on the page, never markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import isnan
from typing import Any, Final

from gateway.catalog import Catalog
from gateway.core.admission.admission import Admission
from gateway.core.estimate.sliding_stats import WindowSummary
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.found_targets import FoundTargets
from gateway.core.fleet.link_health import LENGTH, SAMPLE_EVERY_S, WORST_FIRST, LinkState, link_state
from gateway.core.fleet.target import TargetView
from gateway.core.versions.canary import CanaryRollout
from gateway.observe.conditions import OtherCondition, conditions_json
from gateway.operate.admin import target_of
from gateway.operate.console.generations import GenerationSummary
from gateway.operate.console.history import ConsoleHistory, HistoryPoint
from gateway.operate.console.models import model_rows
from gateway.operate.console.progress import rollout_findings, rollout_rows
from gateway.operate.console.verdict import NAMED, ConsoleFinding, ConsoleVerdict, HealthFinding, console_verdict
from gateway.operate.sources import source_of
from tidegate import clock
from tidegate.fleet.offers import ModelOffer

ROWS: Final = 25
WITH_TIMELINE: Final = 24  # of the rows
TIMELINE: Final = 60  # samples of a row: two minutes
CLASSES: Final = 20
WAYS: Final = 24
FOUND: Final = 50
CONDITIONS: Final = 20
MODELS: Final = 20
_MODELS_NAMED: Final = 6
_AT_ONCE: Final = 200  # targets between two yields to the event loop: a millisecond or two

States = dict[str, LinkState]


@dataclass(frozen=True, slots=True)
class ConsoleView:
    """Renders a gateway's state for the console."""

    name: str
    watch: ConsoleHistory
    fleet: Fleet
    admission: Admission
    catalog: Catalog
    refused: Mapping[str, str]
    rollouts: Callable[[], Iterable[CanaryRollout]] = tuple
    trials: Callable[[], list[dict[str, Any]]] = list
    agreement: Callable[[float], list[dict[str, Any]]] = lambda _now: []  # of devices' answers with the pool's
    others: Callable[[float], list[OtherCondition]] = lambda _now: []  # conditions of no target
    found: FoundTargets = field(default_factory=FoundTargets)  # by which source
    admitted: Callable[[], dict[str, Any]] | None = None  # by all processes of the gateway; None: this is all

    def history(self) -> dict[str, Any]:
        """Return the last five minutes of the whole gateway for charts, oldest first."""
        points = [_point(point) for point in self.watch.points]
        return {"points": points, "sample_every_s": SAMPLE_EVERY_S}

    async def states(self, pause: Callable[[], Awaitable[None]]) -> States:
        """Return the state of the link to each target; the walk over all targets yields to requests in between."""
        found: States = {}
        for place, target in enumerate(list(self.fleet.targets.values()), start=1):
            found[target.id] = self._link(target, clock.now())
            if place % _AT_ONCE == 0:
                await pause()
        return found

    def snapshot(self, now: float, utc_s: float, states: States) -> dict[str, Any]:
        """Return the screen's contents.

        Args:
            states: the present result of `states`.
        """
        here = [target for target in self.fleet.targets.values() if target.id in states]
        rates, recent = self.watch.targets.rates(now), self.watch.targets
        classes = sorted(self.watch.classes.items(now), key=lambda one: -one[1].per_s)
        total = self.watch.classes.total(now)
        conditions = conditions_json(self.fleet, now, self.others(now))
        verdict = self._verdict(states, classes, total, conditions)
        rows = nsmallest(ROWS, here, key=lambda one: _first(one, states[one.id], rates.get(one.id, 0.0)))
        return {
            "at": utc_s,
            "now": now,  # on the machine's clock, as requests are dated
            "gateway": self.name,
            "verdict": {
                "state": verdict.state,
                "sentence": verdict.sentence,
                "findings": [one._asdict() for one in verdict.findings],
            },
            "total": _recent(total),
            "point": _point(self.watch.points[-1]) if self.watch.points else None,
            "door": self._admission(),
            "health": _counts(here, states),
            "targets": [
                self._row(target, states[target.id], recent.read(target.id, now), now, timeline=place < WITH_TIMELINE)
                for place, target in enumerate(rows)
            ],
            "more_targets": len(here) - len(rows),
            "classes": [
                {"model": model, "priority": priority, **_recent(one)} for (model, priority), one in classes[:CLASSES]
            ],
            "generations": self._generations(now),
            "models": model_rows(here)[:MODELS],
            "ways": self._ways(now),
            "conditions": conditions[:CONDITIONS],
            "rollouts": rollout_rows(self.rollouts()),
            "trials": self.trials(),
            "agreement": self.agreement(now),
        }

    def find(self, words: str, now: float) -> list[dict[str, Any]]:
        """Return the targets whose id contains `words`, ready or not, in order of their ids."""
        wanted = words.lower()
        named = sorted(target.id for target in self.fleet.targets.values() if wanted in target.id.lower())
        found = [self.fleet.targets[target_id] for target_id in named[:FOUND]]
        return [self._now(target, now) for target in found]

    def detail(self, target_id: str, now: float) -> dict[str, Any] | None:
        """Return every detail of one target; None if there is no target of this id."""
        target = self.fleet.targets.get(target_id)
        if target is None:
            return None
        row = self._now(target, now)
        timeline = self.watch.timelines.get(target_id)
        conditions = target.conditions
        return row | {
            "admin": target_of(target, self.fleet, now),
            "source": source_of(self.found, target_id),
            "timeline_ms": _timeline(timeline.last(LENGTH)) if timeline else [],
            "up_for_s": round(now - target.since, 1) if target.up else None,
            "epoch": target.epoch,
            "breaker": target.breaker.state.name.lower(),
            "path_breaker": target.path_breaker.state.name.lower(),
            "battery": conditions.battery,
            "charging": conditions.charging,
            "temperature_c": conditions.temperature_c,
            "throttled": conditions.throttled,
            "metered": conditions.metered,
            "unwritable": conditions.unwritable,
            "memory_bytes": conditions.memory_bytes,
            "memory_limit_bytes": conditions.memory_limit_bytes,
            "mode": conditions.mode,
            "places": getattr(target.queue_estimate, "places", None) if target.spec.tier == "site" else None,
            "kept": conditions.kept,
        }

    def _now(self, target: TargetView, now: float) -> dict[str, Any]:
        return self._row(target, self._link(target, now), self.watch.targets.read(target.id, now), now, timeline=False)

    def _link(self, target: TargetView, now: float) -> LinkState:
        return link_state(target, self.watch.timelines.get(target.id), now)

    def _verdict(
        self,
        states: Mapping[str, LinkState],
        classes: Sequence[tuple[tuple[str, int], WindowSummary]],
        total: WindowSummary,
        conditions: Sequence[Mapping[str, Any]],
    ) -> ConsoleVerdict:
        overload, admitted = self.admission.overload, self._admission()
        return console_verdict(
            targets=len(states),
            unhealthy=[HealthFinding(name, *state) for name, state in states.items() if state.health != "well"],
            total=total,
            by_class=[(model, recent) for (model, _), recent in classes],
            unoffered=self._unoffered({model for (model, _), _ in classes}),
            overloaded=overload.reason if overload.on else "a worker is" if admitted["overloaded"] else "",
            panic=self.fleet.balance.panic,
            refused_devices=sorted(self.refused),
            in_flight=admitted["in_flight"],
            others=[
                *rollout_findings(self.rollouts()),
                *(ConsoleFinding("attention", _condition(one), one["target"]) for one in conditions[:NAMED]),
            ],
        )

    def _unoffered(self, asked: set[str]) -> list[str]:
        """Return the models that are requested and that no target offers in any version."""
        manifests = self.catalog.manifests
        served = {one.name for one in manifests if self.fleet.offered(one.name, one.version)}
        wanted = self.watch.answered_models | asked
        return sorted(({one.name for one in manifests} & wanted) - served)

    def _admission(self) -> dict[str, Any]:
        if self.admitted is not None:
            return self.admitted()
        admission = self.admission
        return {
            "in_flight": admission.in_flight,
            "limit": admission.limit.limit,
            "overloaded": admission.overload.on,
            "shed": sum(admission.refused.values()),
        }

    def _row(
        self, target: TargetView, state: LinkState, recent: WindowSummary, now: float, *, timeline: bool
    ) -> dict[str, Any]:
        load, link = target.queue_estimate.load, target.link
        timeline_of = self.watch.timelines.get(target.id)
        row = {
            "id": target.id,
            "tier": target.spec.tier,
            "health": state.health,
            "reason": state.reason,
            "notes": target.state(now)[1] if state.health == "well" else "",
            "conditions": target.conditions.in_words(),
            "rtt_ms": _ms(link.rtt_s) if target.up and link.samples else None,
            "jitter_ms": _ms(link.jitter_s) if target.up and link.samples else None,
            "loss_ratio": round(link.loss_ratio, 4) if target.up and link.samples else None,
            "usual_ms": None if timeline_of is None or isnan(timeline_of.usual_s) else _ms(timeline_of.usual_s),
            "queued": load.queued if load else 0,
            "in_flight": target.queue_estimate.in_flight,
            "wait_ms": _ms(target.wait_s(now)),
            "models": _models(target),
            "heard_s": round(now - target.queue_estimate.reported_at, 1) if load else None,
            **_recent(recent),
        }
        if timeline and timeline_of is not None:
            row["timeline_ms"] = _timeline(timeline_of.last(TIMELINE))
        return row

    def _generations(self, now: float) -> list[dict[str, Any]]:
        """Return the models that generate, or could: the busiest first, then those at rest."""
        busy = self.watch.generations.read(now)
        rest = {one.name for one in self.catalog.manifests if one.generative} - {one.model for one in busy}
        found = [*busy, *(GenerationSummary(name, 0, 0.0, 0.0, ()) for name in sorted(rest))]
        return [_generation(one) for one in found[:CLASSES]]

    def _ways(self, now: float) -> list[dict[str, Any]]:
        ways = sorted(self.watch.ways.items(now), key=lambda one: -one[1].per_s)
        return [
            {"to": to, "why": why, "answered": recent.failed < recent.asked, **_recent(recent)}
            for (to, why), recent in ways[:WAYS]
        ]


def _first(target: TargetView, state: LinkState, per_s: float) -> tuple[bool, int, float, str]:
    """Return the sort key of a row: pools, then unhealthy targets with the worst first, then the busiest."""
    return target.spec.tier != "pool", WORST_FIRST.index(state.health), -per_s, target.id


def _counts(targets: Sequence[TargetView], states: States) -> dict[str, dict[str, int]]:
    """Return the number of targets by tier and health; sites only where there are any."""
    counts: dict[str, Counter[str]] = {"edge": Counter(), "pool": Counter()}
    if any(target.spec.tier == "site" for target in targets):
        counts["site"] = Counter()
    for target in targets:
        counts[target.spec.tier][states[target.id].health] += 1
    return {tier: {health: count[health] for health in WORST_FIRST} for tier, count in counts.items()}


def _condition(one: Mapping[str, Any]) -> str:
    return f"{one['target']} has {one['condition']}: {one['evidence']}"


def _offer_in_words(offer: ModelOffer) -> str:
    grades = {one.grade for one in offer.variants}
    of_another = f" by {'/'.join(sorted(grades))} of {offer.upstream.partition(':')[0]}" if offer.upstream else ""
    return f"{offer.name} {'/'.join(one.name for one in offer.variants)}{of_another}"


def _models(target: TargetView) -> list[str]:
    """Return the ready models as words; none of a target that cannot be used."""
    offers = [offer for offer in target.offers if offer.state == "ready"] if target.up else []
    words = [_offer_in_words(offer) for offer in offers[:_MODELS_NAMED]]
    return words + ([f"and {len(offers) - _MODELS_NAMED} more"] if len(offers) > _MODELS_NAMED else [])


def _recent(recent: WindowSummary) -> dict[str, Any]:
    p50, p95, p99 = recent.quantiles_s or (None, None, None)
    return {
        "per_s": round(recent.per_s, 2),
        "goodput_per_s": round(recent.in_time_per_s, 2),
        "late_share": round(recent.late_share, 4),
        "asked": recent.asked,
        "late": recent.late,
        "failed": recent.failed,
        "p50_ms": _ms(p50),
        "p95_ms": _ms(p95),
        "p99_ms": _ms(p99),
    }


def _generation(one: GenerationSummary) -> dict[str, Any]:
    p50, p95, _ = one.first_token_s or (None, None, None)
    return {
        "model": one.model,
        "under_way": one.under_way,
        "in_per_s": round(one.in_per_s, 2),
        "out_per_s": round(one.out_per_s, 2),
        "first_p50_ms": _ms(p50),
        "first_p95_ms": _ms(p95),
    }


def _point(point: HistoryPoint) -> list[float | None]:
    """Return [at, in time, late, failed, p50, p95, p99 in ms, in flight], without names as there are 300 of them."""
    times = [_ms(one) for one in (point.p50_s, point.p95_s, point.p99_s)]
    return [round(point.at, 1), point.in_time, point.late, point.failed, *times, point.in_flight]


def _timeline(rtts_s: Iterable[float | None]) -> list[float | None]:
    return [_ms(rtt_s) for rtt_s in rtts_s]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
