"""The clairvoyant policy is greedy with perfect knowledge, which shows what better estimates could still bring.

For every target it plays the true future of that target forward, as if no other request came: the way there (weather
and outages of that moment, jitter at its median), the real queue with the true time of every request in it and of this
one (its luck, the device's heat), and the way back as it will be then. Of generations it knows the true lengths, and
whether their tokens will keep their budgets (`simulator/workers/generation_foresight.py`). Requests of its own that are
still on their way count as well. It chooses, in this order, the outcome that is best for all:

    the weight that will be in time: this request's, less that of the requests it makes late   (weights of `value`)
    soonest

Cheapest before soonest would be a poor oracle: it spends all the room on price and leaves none for what is not
foreseen (11 points fewer answers in time on `office_wifi` at 0.6 and at 1.2 of the knee).

It is no upper bound. It takes requests as they come, one after another, and knows nothing of requests to come: a policy
that leaves room for them, or hedges against the jitter and the losses that are not foreseen here, may beat it.
It sees one gateway's own requests under way; those of other gateways only once they are in a queue.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from math import inf
from typing import NamedTuple

from gateway.core.estimate.token_calibration import TokenTimes
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import no_candidate_reason, variant_misfit
from gateway.core.placement.placer import Candidate, Decision, Placer, predicted
from gateway.core.request.handover import HandoverPolicy
from gateway.core.request.hedging import DeadlineHedging, HedgePolicy
from simulator.optimum.reach import LinkReach, reaches
from simulator.scenarios.scenario import Scenario
from simulator.workers.job import NO_CALLER, ForeseenEnd, SimulatedJob
from simulator.world.admission import AdmissionControl, FixedLimitAdmission
from simulator.world.arrivals import SimulatedRequest, requests
from simulator.world.conditions import SETTLING_S, WorldConditions
from simulator.world.gateway import job_generation
from simulator.world.link_stream import ANSWER_BYTES, REQUEST_BYTES, SMALL_BYTES, TOKEN_BYTES, SimulatedStream
from tidegate.outcome import NothingAlive
from tidegate.priority import WEIGHTS, level_of


class PerfectKnowledge:
    """What links will be like and which requests come: laid out when first asked, and the same for all gateways."""

    def __init__(self, scenario: Scenario, seed: int, conditions: WorldConditions) -> None:
        self._scenario = scenario
        self._seed = seed
        self._conditions = conditions
        self._until = SETTLING_S + scenario.duration_s + max(kind.budget_ms for kind in scenario.classes) / 1e3
        self._ways: dict[str, tuple[LinkReach, LinkReach]] = {}

    def request(self, ask: Ask) -> SimulatedRequest:
        """The request behind an ask, which does not say how unlucky it is."""
        due = self._requests[ask.deadline]
        prompt = ask.longest_row if ask.generation is None else ask.longest_row - ask.generation.max_tokens
        # The rest of a generation counts given tokens to its prompt; hardly ever are two requests due at one instant.
        return next((one for one in due if one.length == prompt), due[0])

    @cached_property
    def _requests(self) -> dict[float, list[SimulatedRequest]]:
        """By the instant at which they are due."""
        found: dict[float, list[SimulatedRequest]] = {}
        for one in requests(self._scenario, self._seed):
            asked = one._replace(at=one.at + SETTLING_S)
            found.setdefault(asked.at + asked.kind.budget_ms / 1e3, []).append(asked)
        return found

    def ways(self, id: str) -> tuple[LinkReach, LinkReach]:
        """There and back."""
        if id not in self._ways:
            scenario = self._scenario
            profile = scenario.links[scenario.link_of[id]]
            self._ways[id] = reaches(self._conditions, id, profile, scenario.jitter_times, self._until, usual=True)
        return self._ways[id]

    def __repr__(self) -> str:
        return f"<PerfectKnowledge of {self._conditions!r}>"


class _PlannedAttempt(NamedTuple):
    arrives_at: float
    job: SimulatedJob


class _ForeseenOutcome(NamedTuple):
    """What would come of it; larger is better."""

    in_time: float  # weight of those in time, beyond what would be without this request
    earliness: float


class Clairvoyant:
    """A router that sees everything but the future's requests, jitter and losses. Mutable: what it has sent."""

    judges = False  # it foresees time, not answers
    placer: Placer | None = None  # it cuts no model

    def __init__(
        self, fleet: Fleet, streams: Mapping[str, SimulatedStream], truth: PerfectKnowledge, max_in_flight: int
    ) -> None:
        self.door: AdmissionControl = FixedLimitAdmission(max_in_flight)
        self.handovers: HandoverPolicy | None = None
        self.hedges: HedgePolicy = DeadlineHedging()  # is shown no alternative to hedge with
        self._fleet = fleet
        self._streams = streams
        self._truth = truth
        self._under_way: dict[str, list[_PlannedAttempt]] = {}

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        candidates = [
            predicted(offered, ask, now)
            for offered in self._fleet.offered(ask.model, ask.version)
            if not variant_misfit(offered.variant, ask) and offered.target.id not in exclude
        ]
        if not candidates:
            return Decision(now, ask, (), None, "", NothingAlive(no_candidate_reason(self._fleet, ask, now, exclude)))
        chosen = max(candidates, key=lambda one: self._outcome(one, ask, now))
        self._under_way[chosen.target.id].append(self._sent(chosen.target.id, ask, now))
        return Decision(now, ask, (chosen,), chosen, "foreseen", None)

    def launched(self, target_id: str, now: float) -> None:
        """An attempt went there."""

    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        """An attempt there ended; None: without an answer."""

    def escalates(self, request: SimulatedRequest, target_id: str) -> bool:
        return False

    def _outcome(self, candidate: Candidate, ask: Ask, now: float) -> _ForeseenOutcome:
        id = candidate.target.id
        others = [sent for sent in self._under_way.get(id, ()) if sent.arrives_at > now]
        self._under_way[id] = others
        sent = self._sent(id, ask, now)
        worker, (_, back) = self._streams[id].worker, self._truth.ways(id)
        before = worker.foreseen(others, now)
        after = worker.foreseen([*others, sent], now)
        end = after.get(sent.job)
        gained = _weight_in_time(after, back) - _weight_in_time(before, back)
        return _ForeseenOutcome(gained, -inf if end is None else -end.done_at)

    def _sent(self, id: str, ask: Ask, now: float) -> _PlannedAttempt:
        request = self._truth.request(ask)
        arrives_at = self._truth.ways(id)[0].arrival(now, REQUEST_BYTES + ask.body_bytes)
        job = SimulatedJob(
            request.number, NO_CALLER, ask.model,
            rows=ask.rows, length=ask.longest_row, deadline=ask.deadline + arrives_at - now,
            priority=ask.priority, luck=request.noise, answer_bytes=request.kind.answer_bytes,
            generation=job_generation(request, ask),
        )  # fmt: skip
        job.due = ask.deadline
        return _PlannedAttempt(arrives_at, job)

    def __repr__(self) -> str:
        return f"<Clairvoyant {sum(map(len, self._under_way.values()))} under way>"


def _weight_in_time(ends: Mapping[SimulatedJob, ForeseenEnd], back: LinkReach) -> float:
    return sum(
        WEIGHTS[level_of(job.priority)] for job, end in ends.items() if job.due > 0.0 and _in_time(job, end, back)
    )


def _in_time(job: SimulatedJob, end: ForeseenEnd, back: LinkReach) -> bool:
    """Whether its caller will have it in time: of a generation also the first token, and each further one."""
    asked, here_at = job.generation, back.arrival(end.done_at, ANSWER_BYTES + job.answer_bytes)
    if here_at > job.due:
        return False
    if asked is None or asked.budget is None or end.first_at is None:
        return True
    first_at = back.arrival(end.first_at, SMALL_BYTES + TOKEN_BYTES)
    if asked.budget.first_by is not None and first_at > asked.budget.first_by:
        return False
    each_s = TokenTimes(asked.wanted, first_at, here_at).each_s
    return asked.budget.next_s is None or each_s is None or each_s <= asked.budget.next_s
