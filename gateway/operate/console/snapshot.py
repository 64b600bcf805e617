"""The screen's contents as JSON: bounded whatever the fleet's size, and made once a second for all who watch.

A page that held a row for each of a thousand edges would answer nothing, so edges are counted by health, and only the
`ROWS` that an operator would look for first are told one by one: pools, then whoever is ill, then the busiest. Anybody
else is found by name (`find`) and looked at closely (`detail`).

Names, reasons and addresses come from the network. They are values here, and text on the page: nothing makes markup of
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import isnan
from typing import Any, Final

from gateway.catalog import Catalog
from gateway.core.admission.admission import Admission
from gateway.core.estimate.sliding_stats import WindowSummary
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_health import LENGTH, SAMPLE_EVERY_S, WORST_FIRST, LinkState, link_state
from gateway.core.fleet.target import TargetView
from gateway.core.versions.canary import CanaryRollout
from gateway.observe.conditions import conditions_json
from gateway.operate.admin import target_of
from gateway.operate.console.history import ConsoleHistory, HistoryPoint
from gateway.operate.console.progress import rollout_findings, rollout_rows
from gateway.operate.console.verdict import NAMED, ConsoleFinding, ConsoleVerdict, HealthFinding, console_verdict
from tidegate import clock

ROWS: Final = 25
WITH_TIMELINE: Final = 24  # of the rows
TIMELINE: Final = 60  # samples of a row: two minutes
CLASSES: Final = 20
WAYS: Final = 24
FOUND: Final = 50
CONDITIONS: Final = 20
_MODELS_NAMED: Final = 6
_AT_ONCE: Final = 200  # targets between two breaths: a millisecond or two

States = dict[str, LinkState]


@dataclass(frozen=True, slots=True)
class ConsoleView:
    """What can be seen, and of what."""

    name: str
    watch: ConsoleHistory
    fleet: Fleet
    admission: Admission
    catalog: Catalog
    refused: Mapping[str, str]
    rollouts: Callable[[], Iterable[CanaryRollout]] = tuple
    trials: Callable[[], list[dict[str, Any]]] = list

    def history(self) -> dict[str, Any]:
        """The last five minutes of the whole, for charts; columns, oldest first."""
        points = [_point(point) for point in self.watch.points]
        return {"points": points, "sample_every_s": SAMPLE_EVERY_S}

    async def states(self, breathe: Callable[[], Awaitable[None]]) -> States:
        """How the link to each target is. A walk over all, with a breath for requests in between."""
        found: States = {}
        for place, target in enumerate(list(self.fleet.targets.values()), start=1):
            found[target.id] = self._link(target, clock.now())
            if place % _AT_ONCE == 0:
                await breathe()
        return found

    def snapshot(self, now: float, utc_s: float, states: States) -> dict[str, Any]:
        """Args: states: of `states`, just now."""
        here = [target for target in self.fleet.targets.values() if target.id in states]
        rates, recent = self.watch.targets.rates(now), self.watch.targets
        classes = sorted(self.watch.classes.items(now), key=lambda one: -one[1].per_s)
        total = self.watch.classes.total(now)
        conditions = conditions_json(self.fleet, now)
        said = self._verdict(states, classes, total, conditions)
        rows = nsmallest(ROWS, here, key=lambda one: _first(one, states[one.id], rates.get(one.id, 0.0)))
        return {
            "at": utc_s,
            "gateway": self.name,
            "verdict": {
                "state": said.state,
                "sentence": said.sentence,
                "findings": [one._asdict() for one in said.findings],
            },
            "total": _recent(total),
            "point": _point(self.watch.points[-1]) if self.watch.points else None,
            "door": self._door(),
            "health": _counts(here, states),
            "targets": [
                self._row(target, states[target.id], recent.read(target.id, now), now, timeline=place < WITH_TIMELINE)
                for place, target in enumerate(rows)
            ],
            "more_targets": len(here) - len(rows),
            "classes": [
                {"model": model, "priority": priority, **_recent(one)} for (model, priority), one in classes[:CLASSES]
            ],
            "ways": self._ways(now),
            "conditions": conditions[:CONDITIONS],
            "rollouts": rollout_rows(self.rollouts()),
            "trials": self.trials(),
        }

    def find(self, words: str, now: float) -> list[dict[str, Any]]:
        """The targets whose id holds `words`, ready or not, in the order of the screen."""
        wanted = words.lower()
        named = sorted(target.id for target in self.fleet.targets.values() if wanted in target.id.lower())
        found = [self.fleet.targets[target_id] for target_id in named[:FOUND]]
        return [self._now(target, now) for target in found]

    def detail(self, target_id: str, now: float) -> dict[str, Any] | None:
        """Everything of one target; None where there is none of this id."""
        target = self.fleet.targets.get(target_id)
        if target is None:
            return None
        row = self._now(target, now)
        timeline = self.watch.timelines.get(target_id)
        conditions = target.conditions
        return row | {
            "admin": target_of(target, self.fleet, now),
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
            "memory_bytes": conditions.memory_bytes,
            "memory_limit_bytes": conditions.memory_limit_bytes,
            "mode": conditions.mode,
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
        overload = self.admission.overload
        return console_verdict(
            targets=len(states),
            ill=[HealthFinding(name, *state) for name, state in states.items() if state.health != "well"],
            total=total,
            by_class=[(model, recent) for (model, _), recent in classes],
            homeless=self._homeless({model for (model, _), _ in classes}),
            overloaded=overload.reason if overload.on else "",
            panic=self.fleet.balance.panic,
            refused_devices=sorted(self.refused),
            others=[
                *rollout_findings(self.rollouts()),
                *(ConsoleFinding("attention", _condition(one), one["target"]) for one in conditions[:NAMED]),
            ],
        )

    def _homeless(self, asked: set[str]) -> list[str]:
        """Models of which nobody offers any version, of those that somebody wants: a repository may hold more."""
        manifests = self.catalog.manifests
        served = {one.name for one in manifests if self.fleet.offered(one.name, one.version)}
        wanted = self.watch.answered_models | asked
        return sorted(({one.name for one in manifests} & wanted) - served)

    def _door(self) -> dict[str, Any]:
        door = self.admission
        return {
            "in_flight": door.in_flight,
            "limit": door.limit.limit,
            "overloaded": door.overload.on,
            "shed": sum(door.refused.values()),
        }

    def _row(
        self, target: TargetView, state: LinkState, recent: WindowSummary, now: float, *, timeline: bool
    ) -> dict[str, Any]:
        load, link = target.queue_estimate.load, target.link
        kept = self.watch.timelines.get(target.id)
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
            "usual_ms": None if kept is None or isnan(kept.usual_s) else _ms(kept.usual_s),
            "queued": load.queued if load else 0,
            "in_flight": target.queue_estimate.in_flight,
            "wait_ms": _ms(target.wait_s(now)),
            "models": _models(target),
            "heard_s": round(now - target.queue_estimate.reported_at, 1) if load else None,
            **_recent(recent),
        }
        if timeline and kept is not None:
            row["timeline_ms"] = _timeline(kept.last(TIMELINE))
        return row

    def _ways(self, now: float) -> list[dict[str, Any]]:
        ways = sorted(self.watch.ways.items(now), key=lambda one: -one[1].per_s)
        return [{"to": to, "why": why, **_recent(recent)} for (to, why), recent in ways[:WAYS]]


def _first(target: TargetView, state: LinkState, per_s: float) -> tuple[bool, int, float, str]:
    """Pools are few and matter to all; then whoever is ill, the worst first; then whoever does most."""
    return target.spec.tier != "pool", WORST_FIRST.index(state.health), -per_s, target.id


def _counts(targets: Iterable[TargetView], states: States) -> dict[str, dict[str, int]]:
    """How many targets of each tier are in each health."""
    counts: dict[str, Counter[str]] = {"edge": Counter(), "pool": Counter()}
    for target in targets:
        counts[target.spec.tier][states[target.id].health] += 1
    return {tier: {health: count[health] for health in WORST_FIRST} for tier, count in counts.items()}


def _condition(one: Mapping[str, Any]) -> str:
    return f"{one['target']} has {one['condition']}: {one['evidence']}"


def _models(target: TargetView) -> list[str]:
    """In words; not those of a target that cannot be used."""
    offers = [offer for offer in target.offers if offer.state == "ready"] if target.up else []
    words = [f"{offer.name} {'/'.join(one.name for one in offer.variants)}" for offer in offers[:_MODELS_NAMED]]
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


def _point(point: HistoryPoint) -> list[float | None]:
    """[at, in time, late, failed, p50, p95, p99 in ms, in flight]: short, since there are three hundred."""
    times = [_ms(one) for one in (point.p50_s, point.p95_s, point.p99_s)]
    return [round(point.at, 1), point.in_time, point.late, point.failed, *times, point.in_flight]


def _timeline(rtts_s: Iterable[float | None]) -> list[float | None]:
    return [_ms(rtt_s) for rtt_s in rtts_s]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
