"""A recording becomes a scenario: the same requests at the same instants, on devices and links as measured.

    requests    instants, work, budgets and priorities as recorded; of a budget what was left when it was placed, since
                the gateway's own time is not simulated
    costs       each target's own table as it offered it, which the simulated gateway believes at first; what its calls
                really took by their size (`simulator/world/true_costs.py`) and by stretches of time (`measured.py`). Of
                a pool those are batches, put together again from their members (`recorded_calls.py`)
    links       the round trips of acknowledgements and the ways back of answers, each at its own instant; a target that
                was down is cut off for that time

All else is as in any scenario, so that a policy, devices or a link can be exchanged: each device is a group of its own
(edge/kiosk-1 is the group kiosk-1, simulated as edge/kiosk-1-1), each link a kind by its target's id.

It can be wrong: what a target was sent decides what is known of its link and its speed; a target that was sent nothing
has only its pings and its table. Clients that retry have their retries recorded as requests, also where another policy
would have answered the first. Demands of a variant, pins and attestation are not simulated, nor is a device's local
load. The simulated gateway begins knowing nothing, as after a restart, so the first seconds are for warming up and not
counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from gateway.core.history.trace_format import (
    RecordedAttempt,
    RecordedLink,
    RecordedModel,
    RecordedRequest,
    RecordedTarget,
    RecordedVariant,
)
from simulator.replay.measured import drift_of, slow_by_stretches
from simulator.replay.recorded_calls import calls_of, shape_of
from simulator.replay.recording import TrafficRecording, read
from simulator.scenarios.scenario import (
    ArrivalsSpec,
    ClassSpec,
    EdgeGroup,
    Fault,
    ModelSpec,
    PoolSpec,
    RecordedArrival,
    Scenario,
    Size,
)
from simulator.scenarios.scenario_file import LoadedScenario, ScenarioError
from simulator.world.conditions import SETTLING_S
from simulator.world.true_costs import Points, true_tables
from tidegate.estimate.cost_table import CostTable
from tidegate.netsim.links.profile import LinkProfile, RoundTrips

_WARMUP_S: Final = 5.0
_WARMUP_SHARE: Final = 0.2
_STRETCH_S: Final = 10.0
_STRETCHES: Final = 12  # of a target's speed, at most
_MOST_ROUND_TRIPS: Final = 20_000
_LEAST_RTT_S: Final = 1e-4
_SETTLED_S: Final = 1.5  # a target that is reported later than this was not there at the beginning
_NOT_REPLAYED: Final = frozenset({"cancelled", "invalid_request", "too_large", "not_supported", "model_not_found"})
_POLICIES: Final = {"value": "value", "cheapest": "cheapest"}


@dataclass(frozen=True, slots=True)
class Replay:
    """`attainment` is the recorded one, of those that a replay counts."""

    loaded: LoadedScenario
    policy: str
    attainment: float
    counted: int
    words: tuple[str, ...]  # what is not as it was

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "attainment": self.attainment,
            "policy": self.policy,
            "counted": self.counted,
            "not_as_it_was": self.words,
        }


def replay(path: Path) -> Replay:
    """Raises ScenarioError."""
    recording = read(path)
    asked = [one for one in recording.requests if one.units is not None and one.outcome not in _NOT_REPLAYED]
    if not asked:
        raise ScenarioError(f"{path}: nothing in it can be replayed: no request was placed in that time")
    parts = _Parts(recording, asked)
    warmup_s = min(_WARMUP_S, _WARMUP_SHARE * recording.seconds)
    counted = [one for one in asked if one.at_s >= warmup_s]
    attainment = sum(one.in_time for one in counted) / max(1, len(counted))
    scenario = parts.scenario(f"replay of {path.name}", warmup_s)
    policy = _POLICIES.get(recording.header.policy, "tidegate")
    words = _words(recording, asked, parts)
    return Replay(LoadedScenario(scenario, path.parent, str(path)), policy, attainment, len(counted), words)


def _words(recording: TrafficRecording, asked: Sequence[RecordedRequest], parts: _Parts) -> tuple[str, ...]:
    demanding = sum(bool(one.variant or one.attested or one.min_quality or one.pin != "any") for one in asked)
    left_out = Counter(one.outcome for one in recording.requests if one.outcome in _NOT_REPLAYED)
    words = [f"{count} that were {outcome} are left out" for outcome, count in left_out.items()]
    if demanding:
        words.append(f"{demanding} demanded a variant, a pin or attestation, which is not simulated")
    if parts.unknown:
        words.append(f"nothing is known of what {', '.join(parts.unknown)} take: left out")
    return tuple(words)


class _Parts:
    """The scenario's parts, each from what was recorded."""

    def __init__(self, recording: TrafficRecording, asked: Sequence[RecordedRequest]) -> None:
        self._recording = recording
        self._asked = asked
        self._targets = {one.id: one for one in recording.targets}
        self._versions = Counter((one.model, one.version) for one in asked)
        self._attempts: dict[str, list[tuple[RecordedRequest, RecordedAttempt]]] = defaultdict(list)
        for request in asked:
            for attempt in request.attempts:
                self._attempts[attempt.target].append((request, attempt))
        self._links: dict[str, list[RecordedLink]] = defaultdict(list)
        for link in recording.links:
            self._links[link.target].append(link)
        tables = {id: self._tables(target) for id, target in self._targets.items()}
        self.unknown = [id for id, found in tables.items() if not found]
        self.tables = {id: found for id, found in tables.items() if found}
        self._calls = {id: calls_of(self._attempts[id]) for id in self.tables}
        self.takes = self._truth()

    def scenario(self, summary: str, warmup_s: float) -> Scenario:
        seconds = self._recording.seconds
        classes, recorded = self._arrivals()
        rate = len(recorded) / seconds
        ids = list(self.tables)
        if not ids:
            raise ScenarioError("the recording has no costs of any target: there is nobody to replay on")
        drifts = {id: drift_of([ratio for _, ratio in self._ratios(id)]) for id in ids}
        return Scenario(
            summary=f"{summary}: {len(recorded)} requests in {seconds:.0f} s",
            duration_s=seconds,
            warmup_s=warmup_s,
            models=self._models(),
            links={id: self._link(id) for id in ids},
            classes=classes,
            arrivals=ArrivalsSpec(rate=rate, recorded=recorded, recorded_rate=rate),
            edges=tuple(
                EdgeGroup(
                    name=id.partition("/")[2],
                    count=1,
                    link=id,
                    models=tuple(self.tables[id]),
                    edge_ms=self.tables[id],
                    takes_ms=self.takes[id],
                    noise_sigma=drifts[id].sigma,
                )
                for id in ids
                if self._targets[id].tier == "edge"
            ),
            pools=tuple(
                PoolSpec(
                    name=id.partition("/")[2],
                    link=id,
                    slow=self._slow(id),
                    takes_ms=self.takes[id],
                    noise_sigma=drifts[id].sigma,
                )
                for id in ids
                if self._targets[id].tier == "pool"
            ),
            faults=tuple(fault for id in ids for fault in (*self._slowness(id), *self._away(id))),
        )

    # requests

    def _arrivals(self) -> tuple[tuple[ClassSpec, ...], tuple[RecordedArrival, ...]]:
        keys = list(dict.fromkeys(map(self._class_key, self._asked)))
        counts = Counter(map(self._class_key, self._asked))
        classes = tuple(
            ClassSpec(
                name="-".join([model, *([f"p{priority}"] if priority else []), *([tenant] if tenant else [])]),
                share=counts[model, priority, tenant] / len(self._asked),
                model=model,
                length=Size(median=1.0),
                budget_ms=1.0,  # each request has its own
                priority=priority,
                tenant=tenant,
            )
            for model, priority, tenant in keys
        )
        places = {key: place for place, key in enumerate(keys)}
        recorded = tuple(
            RecordedArrival(
                at_s=one.at_s,
                class_=places[self._class_key(one)],
                length=shape_of(one).length,
                rows=shape_of(one).rows,
                budget_ms=max(1e-3, 1e3 * ((one.budget_s or 0.0) - one.gateway_s)),
                body_bytes=one.body_bytes,
            )
            for one in self._asked
        )
        return classes, recorded

    def _class_key(self, one: RecordedRequest) -> tuple[str, int, str]:
        return self._model(one.model, one.version), one.priority, one.tenant

    def _model(self, name: str, version: str) -> str:
        """Simulated models have one version: where several were requested, each is a model."""
        versions = [one for model, one in self._versions if model == name]
        return name if len(versions) < 2 else f"{name}@{version}"

    # targets

    def _tables(self, target: RecordedTarget) -> dict[str, tuple[tuple[float, float], ...]]:
        """By model: (work units, milliseconds) there."""
        found = {}
        for model in target.models:
            if (model.name, model.version) in self._versions:
                variant = self._variant(target.id, model)
                points = variant.cost if variant else ()
                if not points:
                    points = self._met(target.id, model)
                if points:
                    found[self._model(model.name, model.version)] = tuple((u, 1e3 * s) for u, s in points)
        return found

    def _variant(self, target: str, model: RecordedModel) -> RecordedVariant | None:
        """The variant that was used the most there."""
        used = Counter(
            attempt.variant
            for request, attempt in self._attempts[target]
            if (request.model, request.version) == (model.name, model.version)
        )
        return max(model.variants, key=lambda one: (used[one.name], bool(one.cost)), default=None)

    def _met(self, target: str, model: RecordedModel) -> tuple[tuple[float, float], ...]:
        """The median of what its answers took, for a target that measured nothing (a foreign server)."""
        took = [
            (request.units or 1.0, attempt.compute_s or attempt.took_s - (attempt.link_s or 0.0))
            for request, attempt in self._attempts[target]
            if attempt.end == "answered" and (request.model, request.version) == (model.name, model.version)
        ]
        if not took:
            return ()
        return ((median(units for units, _ in took), max(1e-4, median(seconds for _, seconds in took))),)

    def _models(self) -> dict[str, ModelSpec]:
        found: dict[str, ModelSpec] = {}
        for name, version in self._versions:
            model = self._model(name, version)
            offers = {
                id: (one, variant)
                for id in self.tables
                for one in self._targets[id].models
                if (one.name, one.version) == (name, version)
                if (variant := self._variant(id, one)) is not None
            }
            edges = [id for id in offers if self._targets[id].tier == "edge" and model in self.tables[id]]
            pools = [id for id in offers if self._targets[id].tier == "pool" and model in self.tables[id]]
            if not edges and not pools:
                raise ScenarioError(f"the recording has requests for {name}, and no target with its costs")
            lengths = [offers[id][1].max_tokens for id in edges]
            batches = [offers[id][1].max_batch for id in pools or edges]
            found[model] = ModelSpec(
                feature=next(iter(offers.values()))[0].feature,
                edge_ms=self.tables[edges[0]][model] if edges else None,
                pool_ms=self.tables[pools[0]][model] if pools else None,
                edge_quality=_quality(offers[edges[0]][1]) if edges else 1.0,
                pool_quality=_quality(offers[pools[0]][1]) if pools else 1.0,
                edge_max_units=None if None in lengths else max((one for one in lengths if one), default=None),
                max_batch=max((one for one in batches if one), default=32),
            )
        return found

    def _slow(self, id: str) -> float:
        """A pool's table against that of the first pool, which the models have."""
        first = next(one for one in self.tables if self._targets[one].tier == "pool")
        common = [model for model in self.tables[id] if model in self.tables[first]]
        if id == first or not common:
            return 1.0
        own, other = (CostTable(self.tables[one][common[0]]) for one in (id, first))
        units = median(one.units or 1.0 for one in self._asked)
        return own.seconds_for(units) / other.seconds_for(units)

    def _truth(self) -> dict[str, dict[str, Points]]:
        """By target and model: what calls take by their size."""
        found: dict[str, dict[str, Points]] = {id: {} for id in self.tables}
        for name, version in self._versions:
            model = self._model(name, version)
            for tier in ("edge", "pool"):
                own = {
                    id: tables[model]
                    for id, tables in self.tables.items()
                    if self._targets[id].tier == tier and model in tables
                }
                calls = {id: [(units, times) for _, units, times in self._against(id, model, own[id])] for id in own}
                for id, points in true_tables(own, calls).items():
                    found[id][model] = points
        return found

    def _against(self, id: str, model: str, points: Points) -> list[tuple[float, float, float]]:
        """Of a target's calls of a model: instant, work, and how many times as long as by these points it took."""
        table = CostTable(points)
        return [
            (one.at_s, one.units, 1e3 * one.took_s / table.seconds_for(one.units))
            for one in self._calls[id]
            if self._model(one.model, one.version) == model
        ]

    def _ratios(self, id: str) -> list[tuple[float, float]]:
        """(instant, what the call took against what calls of its size take)."""
        takes = self.takes[id]
        return sorted((at_s, times) for model in takes for at_s, _, times in self._against(id, model, takes[model]))

    def _slowness(self, id: str) -> list[Fault]:
        seconds = self._recording.seconds
        stretch_s = max(_STRETCH_S, seconds / _STRETCHES)
        return slow_by_stretches(self._simulated(id), self._ratios(id), stretch_s, seconds)

    def _simulated(self, id: str) -> str:
        """The simulator numbers the devices of a group."""
        return f"{id}-1" if self._targets[id].tier == "edge" else id

    # links

    def _link(self, id: str) -> LinkProfile:
        met = [
            (request.at_s + attempt.at_s + after_s, rtt_s)
            for request, attempt in self._attempts[id]
            for after_s, rtt_s in _rtts(attempt)
        ]
        heard = {int(at_s) for at_s, _ in met}
        met += [(one.at_s, one.rtt_s) for one in self._links[id] if one.up and one.rtt_s and int(one.at_s) not in heard]
        if not met:
            return LinkProfile()
        met.sort()
        thin = met[:: len(met) // _MOST_ROUND_TRIPS + 1]
        rtts_ms = tuple(1e3 * max(_LEAST_RTT_S, rtt_s) for _, rtt_s in thin)
        trips = RoundTrips(at_s=tuple(SETTLING_S + at_s for at_s, _ in thin), rtt_ms=rtts_ms)
        per_byte = [one.s_per_byte for one in self._links[id] if one.s_per_byte > 0.0]
        mbit = 8e-6 / median(per_byte) if per_byte else None
        return LinkProfile(delay_ms=0.5 * min(rtts_ms), round_trips=trips, to_mbit=mbit, from_mbit=mbit)

    def _away(self, id: str) -> list[Fault]:
        """When nothing could be sent there."""
        rows = self._links[id]
        first_s = next((one.at_s for one in rows if one.up), None)
        gone: list[tuple[float, float]] = []
        since_s = 0.0 if first_s is not None and first_s > _SETTLED_S else None
        for one in rows:
            if not one.up and since_s is None:
                since_s = one.at_s
            elif one.up and since_s is not None:
                gone.append((since_s, one.at_s))
                since_s = None
        if since_s is not None or not rows:
            gone.append((since_s or 0.0, self._recording.seconds))
        return [
            Fault(kind="partition", at_s=start_s, for_s=end_s - start_s, target=self._simulated(id))
            for start_s, end_s in gone
            if end_s > start_s
        ]


def _rtts(attempt: RecordedAttempt) -> Iterable[tuple[float, float]]:
    """What an attempt shows of the link: (how long after it was sent, a round trip as of then).

    An answer comes back long after its request went out, on what may be another link by then: a link that stands still
    for a moment delays the answers that come back in it, whose requests were sent out before it and acknowledged at
    once.
    """
    acked_s, link_s = attempt.acked_s, attempt.link_s
    if acked_s is not None:
        yield 0.0, acked_s
    if link_s is not None:
        back_s = link_s - min(0.5 * acked_s, link_s) if acked_s is not None else 0.5 * link_s
        yield max(0.0, attempt.took_s - back_s), 2.0 * back_s
        if acked_s is None:
            yield 0.0, link_s
    elif acked_s is None and (attempt.end == "cancelled" or not attempt.end):
        yield 0.0, attempt.took_s  # it was not acknowledged: its round trip took longer than it was waited for


def _quality(variant: RecordedVariant) -> float:
    return 1.0 if variant.quality is None else variant.quality
