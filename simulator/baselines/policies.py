"""Policies that a simulation compares: Tidegate's own and published ones, over the same workers.

Every router stands in the same place, behind the same request machine (its retries after a failure or a refusal
included) and in front of the same queues, batcher and links, so what differs is the decision alone. None of the
baselines hedges, and none refuses: only Tidegate's policies are given the other candidates that a hedge needs, and
only they have Tidegate's admission before them.

    name           what it may see, as its authors run it
    random         which targets are up
    round-robin    which targets are up
    all-edge       which targets are up; edges in turn, the pool only for what no edge takes
    all-cloud      which targets are up; pools in turn
    static         the request's size: edges in turn up to `static_threshold`, else the pool (the deployer's rule)
    least-request  its own requests in flight, and each target's measured speed for this request as its weight
                   (Envoy, nginx: weighted least request, with the best of all weights, not static ones)
    p2c-ewma       of two drawn at random, peak-sensitive latency × (in flight + 1)   (Finagle, linkerd)
    prequal        in flight and latency as three probes a request reported them: hot/cold lexicographic
                   (Wydrowski et al., NSDI 2024); probes travel on the links and are at most a second old
    sedna          the request's home edge first; what is hard for the small model goes on to the pool afterwards
                   (joint inference); it knows of no deadline
    headroom       link, cost tables and the last load reports: least 90th percentile that fits the budget, else the
                   least of all (the rule of llm-d's latency predictor: pack where there is headroom)

With `+ledger` after its name a baseline also sees the in-flight ledger: what the target reported *and* what this
gateway has sent since; its notion of load becomes the predicted finish. random and round-robin have no notion of load.

`clairvoyant` sees the truth (`clairvoyant.py`): it is no rival, it shows what better estimates could bring.

`value-handover` is `value` with planned handovers of generations, as `planned_handover: true` of a gateway.
`value-nohedge` is `value` without hedges. `value-race` is `value` with races to the first token of generations, as
`first_token_race: true` of a gateway; without it they are hedged as single answers are, once the second attempt has
become the better bet.

`cheapest` and `value` are the rules of the live gateway's `policy`, `tidegate` is its default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import exp, inf
from typing import Final, NamedTuple

from gateway.config.gateway import GatewayConfig
from gateway.core.admission.admission import Admission
from gateway.core.admission.concurrency import MAX_IN_FLIGHT, AdaptiveLimit
from gateway.core.admission.placement_guard import AdmissionGuard
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import no_candidate_reason, variant_misfit
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Decision, Placer, predicted
from gateway.core.placement.probing import ProbePlacer
from gateway.core.placement.utility import COST_WEIGHT, UtilityPlacer, UtilityWeights
from gateway.core.request.handover import HandoverPolicy
from gateway.core.request.handover_by_chance import ChanceHandovers
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.request.hedging import DeadlineHedging, Hedge, HedgePolicy, PendingAttempt
from simulator.baselines.clairvoyant import Clairvoyant, PerfectKnowledge
from simulator.world.admission import AdmissionControl, FixedLimitAdmission
from simulator.world.arrivals import SimulatedRequest
from simulator.world.gateway import Router, SimulatedGateway
from simulator.world.link_stream import SimulatedStream
from tidegate.netsim.links.distributions import Draw
from tidegate.outcome import NothingAlive

LEDGER: Final = "+ledger"
_P90_SIGMAS: Final = 1.282
_MARGIN_SIGMAS: Final = 1.645


class Surroundings(NamedTuple):
    """What a router may be given: its gateway, chance of its own, and what a deployer would have set."""

    gateway: SimulatedGateway
    draw: Draw
    static_threshold: float
    truth: PerfectKnowledge  # for the clairvoyant alone
    shares_targets: bool = False  # with many other gateways
    tenants: Mapping[str, TenantSpec] = {}
    cost_weight: float = COST_WEIGHT  # of Tidegate's policy by value
    max_in_flight: int = MAX_IN_FLIGHT


class PlacerRouter:
    """Tidegate's own placement, with the hedging, the escalation and the admission that go with it."""

    judges = True

    def __init__(
        self,
        placement: Placement,
        placer: Placer,
        fleet: Fleet,
        hedges: HedgePolicy,
        admission: Admission,
        handovers: HandoverPolicy | None = None,
    ) -> None:
        self.hedges = hedges
        self.placer: Placer | None = placer
        self.handovers = handovers
        self.door: AdmissionControl = admission
        self._guard = AdmissionGuard(placement, fleet, admission)

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        return self._guard.decide(ask, now, exclude)

    def launched(self, target_id: str, now: float) -> None:
        """An attempt went there."""

    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        """An attempt there ended; None: without an answer."""

    def escalates(self, request: SimulatedRequest, target_id: str) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<PlacerRouter {self._guard!r}>"


class Baseline(ABC):
    """A router that chooses among the targets that take the work. `choose` sees the candidates and decides."""

    placer: Placer | None = None  # none of them cuts a model
    judges = False

    def __init__(self, around: Surroundings, *, queue_estimate: bool) -> None:
        self.fleet: Fleet = around.gateway.fleet
        self.draw = around.draw
        self.handovers: HandoverPolicy | None = None
        self.queue_estimate = queue_estimate
        self.door: AdmissionControl = FixedLimitAdmission(around.max_in_flight)
        self.hedges: HedgePolicy = (
            DeadlineHedging()
        )  # never has an alternative to hedge with; lets every failure fall back
        self._turns: dict[str, int] = {}

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        """One of `candidates`, of which there is at least one."""

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        candidates = [
            predicted(offered, ask, now)
            for offered in self.fleet.offered(ask.model, ask.version)
            if not variant_misfit(offered.variant, ask)
            and offered.target.allows(now)
            and offered.target.id not in exclude
        ]
        if not candidates:
            return Decision(now, ask, (), None, "", NothingAlive(no_candidate_reason(self.fleet, ask, now, exclude)))
        chosen = self.choose(candidates, ask, now)
        # Only the chosen one is shown: with the others the request machine would hedge.
        return Decision(now, ask, (chosen,), chosen, "baseline", None)

    def launched(self, target_id: str, now: float) -> None:
        """An attempt went there; most learn nothing from it."""
        return

    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        """An attempt there ended; None: without an answer."""
        return

    def escalates(self, request: SimulatedRequest, target_id: str) -> bool:
        return False

    def in_turn(self, of: Sequence[Candidate], what: str) -> Candidate:
        """The next in turn; with the ledger, the one that would be finished first."""
        if self.queue_estimate:
            return min(of, key=_finish)
        self._turns[what] = turn = self._turns.get(what, -1) + 1
        return of[turn % len(of)]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{LEDGER if self.queue_estimate else ''}>"


class RandomChoice(Baseline):
    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        return candidates[int(self.draw() * len(candidates))]


class RoundRobin(Baseline):
    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        return self.in_turn(candidates, "all")


class OneTier(Baseline):
    """All to one tier, as long as it takes the work."""

    tier = "edge"

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        return self.in_turn(_of_tier(candidates, self.tier), self.tier)


class AllEdge(OneTier):
    tier = "edge"


class AllCloud(OneTier):
    tier = "pool"


class Static(Baseline):
    """Small ones to the edge, large ones to the pool."""

    def __init__(self, around: Surroundings, *, queue_estimate: bool) -> None:
        super().__init__(around, queue_estimate=queue_estimate)
        self._threshold = around.static_threshold

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        tier = "edge" if ask.units <= self._threshold else "pool"
        return self.in_turn(_of_tier(candidates, tier), tier)


class LeastRequest(Baseline):
    """Fewest in flight for its speed. With the ledger: earliest finish."""

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        if self.queue_estimate:
            return min(candidates, key=_finish)
        return min(candidates, key=lambda one: (one.target.queue_estimate.in_flight + 1) * one.compute_s)


class P2cEwma(Baseline):
    """Of two drawn, the lesser of latency × load; a latency above the mean is believed at once, below it slowly."""

    _MEMORY_S = 10.0  # Finagle's decay time

    def __init__(self, around: Surroundings, *, queue_estimate: bool) -> None:
        super().__init__(around, queue_estimate=queue_estimate)
        self._ewma: dict[str, tuple[float, float]] = {}  # target → (latency, when)

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        count = len(candidates)
        first = int(self.draw() * count)
        second = (first + 1 + int(self.draw() * (count - 1))) % count if count > 1 else first
        return min((candidates[first], candidates[second]), key=lambda one: self._load(one, now))

    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        if latency_s is None:
            return
        mean_s, at = self._ewma.get(target_id, (0.0, now))
        kept = 0.0 if latency_s > mean_s else exp(-(now - at) / self._MEMORY_S)
        self._ewma[target_id] = mean_s * kept + latency_s * (1.0 - kept), now

    def _load(self, one: Candidate, now: float) -> float:
        if self.queue_estimate:
            return one.finish_s
        mean_s, at = self._ewma.get(one.target.id, (0.0, now))
        decayed_s = mean_s * exp(-(now - at) / self._MEMORY_S)
        return max(decayed_s, 1e-3) * (one.target.queue_estimate.in_flight + 1)


class _Probe(NamedTuple):
    in_flight: int
    latency_s: float
    at: float


class Prequal(Baseline):
    """Hot/cold lexicographic: targets in the upper part of requests in flight are hot; the fastest cold one, else the
    least hot."""

    PROBES, HOT_SHARE, KEPT_S = 3, 0.84, 1.0  # the paper's r_probe, Q_RIF and probe age

    def __init__(self, around: Surroundings, *, queue_estimate: bool) -> None:
        super().__init__(around, queue_estimate=queue_estimate)
        self._streams: Mapping[str, SimulatedStream] = around.gateway.streams
        self._probes: dict[str, _Probe] = {}
        self._server_s: dict[str, deque[float]] = {}

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        self._probe(candidates)
        known = [one for one in candidates if now - self._probes.get(one.target.id, _NEVER).at <= self.KEPT_S]
        if len(known) < 2:  # the paper falls back to a random replica
            return candidates[int(self.draw() * len(candidates))]
        loads = {one.target.id: self._in_flight(one) for one in known}
        hot_from = sorted(loads.values())[min(len(known) - 1, int(self.HOT_SHARE * len(known)))]
        cold = [one for one in known if loads[one.target.id] < hot_from or hot_from == 0]
        chosen = min(cold, key=self._latency_s) if cold else min(known, key=lambda one: loads[one.target.id])
        probe = self._probes[chosen.target.id]
        self._probes[chosen.target.id] = probe._replace(in_flight=probe.in_flight + 1)  # its own, not reported yet
        return chosen

    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        if latency_s is not None:
            self._server_s.setdefault(target_id, deque(maxlen=16)).append(latency_s)

    def _probe(self, candidates: Sequence[Candidate]) -> None:
        for _ in range(self.PROBES):
            target_id = candidates[int(self.draw() * len(candidates))].target.id
            self._streams[target_id].probe(self._probed)

    def _probed(self, target_id: str, in_flight: int, now: float) -> None:
        recent = sorted(self._server_s.get(target_id, ()))
        self._probes[target_id] = _Probe(in_flight, recent[len(recent) // 2] if recent else 0.0, now)

    def _in_flight(self, one: Candidate) -> int:
        return one.target.queue_estimate.in_flight if self.queue_estimate else self._probes[one.target.id].in_flight

    def _latency_s(self, one: Candidate) -> float:
        return one.finish_s if self.queue_estimate else self._probes[one.target.id].latency_s


_NEVER: Final = _Probe(0, 0.0, -inf)


class Sedna(Baseline):
    """Joint inference: the home edge answers, and what it is not sure of goes on to the cloud."""

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        edges = _of_tier(candidates, "edge")
        return self.in_turn(edges, "home")

    def escalates(self, request: SimulatedRequest, target_id: str) -> bool:
        return request.hard and target_id.startswith("edge/")

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        if exclude:  # after an edge's answer that would not do, or its failure: never a second edge
            exclude = {*exclude, *(target_id for target_id in self.fleet.targets if target_id.startswith("edge/"))}
        return super().decide(ask, now, exclude)


class Headroom(Baseline):
    """Least 90th percentile over the budget; among those within it, the one with the least room left."""

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Candidate:
        budget_s = ask.deadline - now
        fitting = [one for one in candidates if self._p90_s(one) <= budget_s]
        return max(fitting, key=self._p90_s) if fitting else min(candidates, key=self._p90_s)

    def _p90_s(self, one: Candidate) -> float:
        finish_s = one.finish_s
        if not self.queue_estimate:
            load = one.target.queue_estimate.load
            finish_s += (load.queue_delay_s if load is not None else 0.0) - one.wait_s
        return finish_s + one.margin_s * _P90_SIGMAS / _MARGIN_SIGMAS


_BASELINES: Final[dict[str, type[Baseline]]] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "all-edge": AllEdge,
    "all-cloud": AllCloud,
    "static": Static,
    "least-request": LeastRequest,
    "p2c-ewma": P2cEwma,
    "prequal": Prequal,
    "sedna": Sedna,
    "headroom": Headroom,
}
_LOADLESS: Final = ("random", "round-robin")


def _cheapest(around: Surroundings) -> PlacerRouter:
    fleet, admission = around.gateway.fleet, _admission(around)
    placer = Placer(fleet)
    placement = ProbePlacer(placer, fleet, around.draw, overloaded=_overloaded(fleet, admission))
    return PlacerRouter(placement, placer, fleet, DeadlineHedging(), admission)


def _value(
    around: Surroundings, hedging: Callable[..., HedgePolicy] = ChanceHedging, *, handing_over: bool = False
) -> PlacerRouter:
    fleet, admission = around.gateway.fleet, _admission(around)
    overloaded = _overloaded(fleet, admission)
    placer = UtilityPlacer(fleet, UtilityWeights.weighing(around.cost_weight), around.gateway.cloud_budget)
    placer.share_targets(around.draw if around.shares_targets else None)
    placement = ProbePlacer(placer, fleet, around.draw, overloaded=overloaded)
    hedges, handovers = hedging(placer, overloaded=admission.overloaded), None
    if handing_over and isinstance(hedges, ChanceHedging):
        handovers = ChanceHandovers(placer, hedges, overloaded=overloaded)
    return PlacerRouter(placement, placer, fleet, hedges, admission, handovers)


def _admission(around: Surroundings) -> Admission:
    limit = AdaptiveLimit(around.max_in_flight, targets=lambda: around.gateway.fleet.queues)
    return Admission(limit, TenantQuotas(around.tenants), draw=around.draw)


def _overloaded(fleet: Fleet, admission: Admission) -> Callable[[], bool]:
    return lambda: admission.overloaded() or fleet.balance.panic


class _Unhedged:
    """As `ChanceHedging`, but no second attempt beside a silent one: its absence shows what hedging is worth."""

    def __init__(self, placer: UtilityPlacer, *, overloaded: Callable[[], bool]) -> None:
        self._hedging = ChanceHedging(placer, overloaded=overloaded)

    def arrived(self) -> None:
        self._hedging.arrived()

    def may_hedge(self, share: float = 1.0) -> bool:
        return self._hedging.may_hedge(share)

    def may_fall_back(self, share: float = 1.0) -> bool:
        return self._hedging.may_fall_back(share)

    def avoid(self, tried: Sequence[Candidate], *, apart: bool = False) -> Collection[str]:
        return self._hedging.avoid(tried, apart=apart)

    def overdue(self, watched: PendingAttempt, now: float) -> None:
        self._hedging.overdue(watched, now)

    def plan(self, ask: Ask, watched: PendingAttempt, decision: Decision, now: float) -> Hedge | None:
        return self._hedging.plan(ask, watched, decision, now)

    def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
        return None

    def second_look(self, ask: Ask, watched: PendingAttempt, now: float) -> float | None:
        return None


def _handing_over(around: Surroundings) -> PlacerRouter:
    return _value(around, handing_over=True)


def _unhedged(around: Surroundings) -> PlacerRouter:
    return _value(around, _Unhedged)


def _racing(around: Surroundings) -> PlacerRouter:
    return _value(around, partial(ChanceHedging, races=True))


# As `gateway/app.py` builds them.
_RULES: Final = {"cheapest": _cheapest, "value": _value}
UNHEDGED: Final = "value-nohedge"
RACING: Final = "value-race"
HANDING_OVER: Final = "value-handover"
_OWN: Final = {
    "tidegate": _RULES[GatewayConfig.model_fields["policy"].default],
    **_RULES,
    UNHEDGED: _unhedged,
    RACING: _racing,
    HANDING_OVER: _handing_over,
}

AS_AUTHORS: Final = tuple(_BASELINES)
WITH_LEDGER: Final = tuple(f"{name}{LEDGER}" for name in _BASELINES if name not in _LOADLESS)
ORACLE: Final = "clairvoyant"
POLICIES: Final = (*_OWN, *AS_AUTHORS, *WITH_LEDGER, ORACLE)


def router(policy: str, around: Surroundings) -> Router:
    """The router of this name. Raises KeyError when there is none."""
    if policy in _OWN:
        return _OWN[policy](around)
    if policy == ORACLE:
        return Clairvoyant(around.gateway.fleet, around.gateway.streams, around.truth, around.max_in_flight)
    if policy not in POLICIES:
        raise KeyError(policy)
    name = policy.removesuffix(LEDGER)
    return _BASELINES[name](around, queue_estimate=policy.endswith(LEDGER))


def _of_tier(candidates: Sequence[Candidate], tier: str) -> Sequence[Candidate]:
    return [one for one in candidates if one.target.spec.tier == tier] or candidates


def _finish(candidate: Candidate) -> float:
    return candidate.finish_s
