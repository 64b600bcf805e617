"""A simulated gateway runs the real fleet view, placement and request machine on virtual time.

One `SimulatedExecution` performs a request's actions: a launch becomes a frame, a wake an event, an end an entry in the
tally. What an attempt teaches is noted by `gateway/core/request/attempt.py`, the file that the
gateway's `serving/execution.py` uses, so the estimators learn here exactly what they learn in service. Admission is
what `gateway/layers/admit.py` calls (`admission.py`).

Where a model's scenario has `confidence`, an edge's answer to a hard request is unsure; the machine of Tidegate's own
policies does with it what it does in service, and for every policy it is an answer of lower quality.

A `Router` decides where, and brings its admission with it; baselines are routers too, and see what their docstrings
say. All other parts are the same for all of them. Time spent inside the gateway itself (tenths of a millisecond) is not
simulated. A client that retries sends to the same gateway again, as soon as it has the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from math import erf, sqrt
from types import MappingProxyType
from typing import Protocol

from gateway.core.admission.admission import AdmissionRequest
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkEvent
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.escalation import Escalations
from gateway.core.request.hedging import HedgePolicy
from gateway.core.request.machine import Action, Answer, Cancel, Launch, Refuse, RequestMachine, WakeAt
from simulator.event_queue import Event, EventQueue
from simulator.scenarios.scenario import Unsure
from simulator.workers.job import VERSION, SimulatedJob
from simulator.world.admission import AdmissionControl
from simulator.world.arrivals import SimulatedRequest
from simulator.world.link_stream import SimulatedStream
from simulator.world.tally import OutcomeTally, RequestEnd
from tidegate.models.manifest import Feature
from tidegate.outcome import Outcome, Overloaded, ServeError
from tidegate.types import Accepted, LoadReport

_CLIENT_RTT_S = 0.002  # between a client that does not wait and its gateway
_MARGIN_SIGMAS = 1.645
_SURE = 0.5  # between the confidences of hard requests, 0, and of easy ones, 1


class Router(Placement, Protocol):
    """The policy that decides, with the callbacks that report what came of its decisions."""

    hedges: HedgePolicy
    judges: bool  # whether unsure answers are escalated, as Tidegate's own policies do
    door: AdmissionControl

    def launched(self, target_id: str, now: float) -> None: ...
    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        """An attempt is over. `latency_s` None: it failed or was given up."""
        ...

    def escalates(self, request: SimulatedRequest, target_id: str) -> bool:
        """Whether this answer is not good enough, so that the request should go to another target."""
        ...


class SimulatedGateway:
    """Mutable: `connect` targets, then `take` requests."""

    def __init__(
        self,
        events: EventQueue,
        tally: OutcomeTally,
        feature_of: Callable[[str, str], Feature],
        router_of: Callable[[SimulatedGateway], Router],
        draw: Callable[[], float],
        cloud_budget: CloudBudget | None = None,
        unsure: Mapping[str, Unsure] = MappingProxyType({}),
    ) -> None:
        """Args: unsure: the models that judge their own answers."""
        self.events = events
        self.unsure = unsure
        self.escalations = {
            name: Escalations(_SURE, max_share=one.max_share, overloaded=self._overloaded)
            for name, one in unsure.items()
        }
        self.tally = tally
        self.draw = draw
        self.fleet = Fleet(feature_of, draw=draw)
        self.streams: dict[str, SimulatedStream] = {}
        self.keys = count()
        self.cloud_budget = cloud_budget  # of the policies that have one
        self.router = router_of(self)

    def _overloaded(self) -> bool:
        return self.router.door.overloaded()

    def know(self, target_id: str, tier: Tier, stream: SimulatedStream) -> None:
        """Add a target and its stream, which is not dialled yet."""
        self.fleet.add(TargetSpec(target_id, tier, "simulated"), self.events.now)
        self.streams[target_id] = stream

    def on_event(self, event: LinkEvent) -> None:
        self.fleet.fold(event, self.events.now)

    def heard(self, target_id: str, load: LoadReport) -> None:
        """A heartbeat came over MQTT."""
        self.fleet.heard(target_id, load=load, doubt="", now=self.events.now)

    def take(self, request: SimulatedRequest) -> None:
        """A caller's request is here."""
        self.tally.begin()
        self._try(request)

    def end(self, request: SimulatedRequest, end: RequestEnd) -> None:
        """A try is over: the request too, unless its client asks again."""
        if not end.served_by and request.tries <= request.kind.retries:
            self.tally.retries += 1
            self.events.schedule(self.events.now + _CLIENT_RTT_S, self._try, request._replace(tries=request.tries + 1))
        else:
            self.tally.end(end)

    def _try(self, request: SimulatedRequest) -> None:
        kind, now = request.kind, self.events.now
        if self.router.door.enter(AdmissionRequest(kind.tenant, kind.priority, lambda: request.number), now) is None:
            SimulatedExecution(self, request).start()
            return
        refused = RequestEnd(
            kind.name, kind.priority, request.at, now, Outcome.OVERLOADED, in_time=False, tenant=kind.tenant
        )
        self.end(request, refused)

    def __repr__(self) -> str:
        return f"<SimulatedGateway {self.fleet!r} {self.router.door!r}>"


class SimulatedExecution:
    """One request under way, from its arrival to its end."""

    __slots__ = ("_ask", "_attempts", "_gateway", "_jobs", "_machine", "_request", "_started_at", "_timer")

    def __init__(self, gateway: SimulatedGateway, request: SimulatedRequest) -> None:
        kind = request.kind
        self._gateway = gateway
        self._request = request
        self._started_at = gateway.events.now
        router = gateway.router
        escalations = gateway.escalations.get(kind.model) if router.judges else None
        self._ask = Ask(
            kind.model,
            VERSION,
            request.units,
            kind.rows,
            request.length,
            self._started_at + kind.budget_ms / 1e3,  # of this try
            priority=kind.priority,
            body_bytes=int(request.units * kind.bytes_per_unit),
            weight=gateway.router.door.weight_of(kind.tenant),
            tenant=kind.tenant,
            escalates=escalations is not None,
        )
        self._machine = RequestMachine(self._ask, router, hedges=router.hedges, escalations=escalations)
        self._attempts: dict[int, _SimulatedAttempt] = {}  # under way, by number
        self._timer: Event | None = None
        self._jobs: dict[int, SimulatedJob] = {}  # that were answered, by number

    def start(self) -> None:
        self._perform(self._machine.arrived(self._gateway.events.now))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self._launch(action)
                case WakeAt():
                    self._wake_at(action.at)
                case Cancel():
                    self._attempts.pop(action.attempt).give_up(hopeless=action.hopeless)
                case _:
                    self._end(action)

    def _launch(self, launch: Launch) -> None:
        self._gateway.tally.launches += self._request.at >= self._gateway.tally.counts_from
        self._attempts[launch.attempt] = _SimulatedAttempt(self, launch.attempt, launch.candidate)
        self._attempts[launch.attempt].send()

    def _wake_at(self, at: float) -> None:
        events = self._gateway.events
        if self._timer is not None:
            events.cancel(self._timer)
        self._timer = events.schedule(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._perform(self._machine.timer(self._gateway.events.now))

    # what attempts report

    def accepted(self, number: int, word: Accepted) -> None:
        self._perform(self._machine.accepted(number, word, self._gateway.events.now))

    def answered(self, number: int, job: SimulatedJob) -> None:
        now, target_id = self._gateway.events.now, self._attempts.pop(number).candidate.target.id
        if self._gateway.router.escalates(self._request, target_id):
            # Joint inference has no state of its own in the machine: an answer that does not do is a failed attempt.
            self._perform(self._machine.failed(number, Overloaded("the answer is not sure enough"), now))
            return
        self._jobs[number] = job
        self._perform(self._machine.answered(number, now, self._confidence(target_id)))

    def failed(self, number: int, error: ServeError) -> None:
        del self._attempts[number]
        self._perform(self._machine.failed(number, error, self._gateway.events.now))

    def _confidence(self, target_id: str) -> float | None:
        """An edge's confidence: 1 in an easy request, 0 in a hard one; None where answers are not judged."""
        if self._request.kind.model not in self._gateway.unsure or not target_id.startswith("edge/"):
            return None
        return 0.0 if self._request.hard else 1.0

    @property
    def gateway(self) -> SimulatedGateway:
        return self._gateway

    @property
    def ask(self) -> Ask:
        return self._ask

    @property
    def request(self) -> SimulatedRequest:
        return self._request

    # the end

    def _end(self, end: Answer | Refuse) -> None:
        gateway, request = self._gateway, self._request
        now = gateway.events.now
        gateway.router.door.leave(request.kind.tenant, now - self._started_at)
        if self._timer is not None:
            gateway.events.cancel(self._timer)
            self._timer = None
        gateway.end(request, self._request_end(end, now))
        if isinstance(end, Answer) and request.at >= gateway.tally.counts_from:
            gateway.tally.useful_s[end.candidate.target.spec.tier] += self._jobs[end.attempt].useful_s

    def _request_end(self, end: Answer | Refuse, now: float) -> RequestEnd:
        kind, at = self._request.kind, self._request.at
        if isinstance(end, Refuse):
            return RequestEnd(
                kind.name, kind.priority, at, now, Outcome.of(end.error), in_time=False, tenant=kind.tenant
            )
        in_time = now <= self._ask.deadline
        outcome = Outcome.LATE if not in_time else Outcome.DEGRADED if end.route.degraded else Outcome.OK
        return RequestEnd(
            kind.name,
            kind.priority,
            at,
            now,
            outcome,
            in_time,
            served_by=end.candidate.target.id,
            quality=self._quality(end),
            attempts=end.route.attempts,
            hedged=end.route.hedged,
            hedge_won=end.route.reason == "hedge",
            tenant=kind.tenant,
        )

    def _quality(self, end: Answer) -> float:
        quality = end.candidate.variant.quality or 0.0
        unsure = self._gateway.unsure.get(self._request.kind.model)
        if unsure is None or not self._request.hard or end.candidate.target.spec.tier != "edge":
            return quality
        return quality * unsure.hard_quality

    def __repr__(self) -> str:
        return f"<SimulatedExecution {self._request.number} {self._machine!r}>"


class _SimulatedAttempt:
    """One attempt: what its target reports, passed on as evidence and as an event of the machine."""

    __slots__ = ("_body_bytes", "_chance", "_evidence", "_execution", "_job", "_number", "_stream", "candidate")

    def __init__(self, execution: SimulatedExecution, number: int, candidate: Candidate) -> None:
        gateway, request = execution.gateway, execution.request
        now = gateway.events.now
        self.candidate = candidate
        self._execution = execution
        self._number = number
        self._body_bytes = execution.ask.body_bytes
        self._stream = gateway.streams[candidate.target.id]
        self._evidence = AttemptTelemetry(candidate, next(gateway.keys), request.units, now, self._body_bytes)
        self._chance = _chance_of(candidate, execution.ask.deadline - now)
        self._job = SimulatedJob(
            request.number,
            self._stream,
            request.kind.model,
            rows=request.kind.rows,
            length=request.length,
            deadline=execution.ask.deadline,
            priority=request.kind.priority,
            luck=request.noise,
            answer_bytes=request.kind.answer_bytes,
        )
        gateway.router.launched(candidate.target.id, now)

    def send(self) -> None:
        self._stream.ask(self._job, self, self._body_bytes)

    def give_up(self, *, hopeless: bool) -> None:
        """The machine has cancelled it."""
        now = self._execution.gateway.events.now
        self._evidence.cancelled(now, hopeless=hopeless)
        self._execution.gateway.router.ended(self.candidate.target.id, None, now)
        self._stream.withdraw(self._job)
        self._note(now, answered=False, given_up=True)

    # AttemptCallbacks

    def accepted(self, word: Accepted) -> None:
        self._evidence.accepted(self._execution.gateway.events.now, word)
        self._execution.accepted(self._number, word)

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport, size_bytes: int) -> None:
        now = self._execution.gateway.events.now
        self._evidence.answered({"queue": queue_s, "compute": compute_s}, load, now, size_bytes)
        self._execution.gateway.router.ended(self.candidate.target.id, now - self._evidence.launched_at, now)
        budget = self._execution.gateway.cloud_budget
        if budget is not None and self.candidate.offered.zone == "cloud":
            budget.spent(job.useful_s)
        self._note(now, answered=True)
        self._execution.answered(self._number, job)

    def failed(self, error: ServeError) -> None:
        gateway = self._execution.gateway
        self._evidence.failed(error, gateway.events.now, gateway.draw())
        gateway.router.ended(self.candidate.target.id, None, gateway.events.now)
        self._note(gateway.events.now, answered=False)
        self._execution.failed(self._number, error)

    def _note(self, now: float, *, answered: bool, given_up: bool = False) -> None:
        """Compare what placement predicted of a first attempt with what came, as far as that is known."""
        execution, launched_at = self._execution, self._evidence.launched_at
        tally, deadline = execution.gateway.tally, execution.ask.deadline
        if self._number > 0 or execution.request.at < tally.counts_from:
            return
        if not given_up or now >= deadline:  # before it, how it would have ended is unknown
            tally.reliability.add(self._chance, answered and now <= deadline)
        expected_at = launched_at + self._evidence.within_s
        # No attempt is waited for beyond the deadline: what was expected later is not tested, however it ends.
        if expected_at <= deadline and (not given_up or now > expected_at):
            tally.within_margin[0] += answered and now <= expected_at
            tally.within_margin[1] += 1

    def __repr__(self) -> str:
        return f"<_SimulatedAttempt {self._number} at {self.candidate.target.id}>"


def _chance_of(candidate: Candidate, budget_s: float) -> float:
    """The chance of being in time that this placement claims: the policy's claim, or what its margin implies."""
    if candidate.claim is not None:
        return min(1.0, max(0.0, candidate.claim.prediction.claimed))
    if candidate.margin_s <= 0.0:
        return float(candidate.finish_s <= budget_s)
    # The chance that a normal finish time, with the margin as its 95 % one-sided width, is within the budget.
    sigmas = (budget_s - candidate.finish_s) / (candidate.margin_s / _MARGIN_SIGMAS)
    return 0.5 * (1.0 + erf(sigmas / sqrt(2.0)))
