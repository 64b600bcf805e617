"""A simulated gateway runs the real fleet view, placement and request machine on virtual time.

One `SimulatedExecution` performs a request's actions: a launch becomes a frame, a wake an event, an end an entry in the
tally. What an attempt teaches is noted by `gateway/core/request/attempt.py`, the file that the
gateway's `serving/execution.py` uses, so the estimators learn here exactly what they learn in service. Admission is
what `gateway/layers/admit.py` calls (`admission.py`).

An answer that has begun is gone on with elsewhere where its worker is lost, stalls or leaves, as in service, by the
same rules (`gateway/core/request/resumption.py`). Each token is named by its place in the answer, by the worker that
makes it, so that one that is lost or comes twice is found out (`GenerationTally.wrong`).

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
from zlib import crc32

from gateway.core.admission.admission import AdmissionRequest
from gateway.core.estimate.output_length import OutputLengths
from gateway.core.estimate.token_calibration import TokenClaim, TokenTimes
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkEvent
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.generation_time import GenerationAsk
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Placer
from gateway.core.placement.utility import token_objectives
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.attempt import AttemptTelemetry, ComputedTokens, ComputedWork
from gateway.core.request.escalation import Escalations
from gateway.core.request.handover import HandoverPolicy
from gateway.core.request.hedging import RACE, HedgePolicy
from gateway.core.request.machine import (
    Action,
    Answer,
    Cancel,
    Keep,
    Launch,
    Refuse,
    Release,
    RequestMachine,
    Show,
    WakeAt,
)
from gateway.core.request.resumption import Resumption, ResumptionTerms
from simulator.event_queue import Event, EventQueue
from simulator.scenarios.scenario import Unsure
from simulator.workers.job import VERSION, JobGeneration, SimulatedJob
from simulator.world.admission import AdmissionControl
from simulator.world.arrivals import SimulatedRequest
from simulator.world.generation_tally import TokenTally
from simulator.world.link_stream import SimulatedStream
from simulator.world.tally import OutcomeTally, RequestEnd
from tidegate.models.manifest import Feature
from tidegate.outcome import Outcome, Overloaded, ServeError
from tidegate.token_sink import TokenBatch
from tidegate.types import PLANNED, Accepted, LoadReport

_CLIENT_RTT_S = 0.002  # between a client that does not wait and its gateway
_MARGIN_SIGMAS = 1.645
_UNBOUNDED = 2**31  # tokens: callers read without pause
_SURE = 0.5  # between the confidences of hard requests, 0, and of easy ones, 1


class Router(Placement, Protocol):
    """The policy that decides, with the callbacks that report what came of its decisions."""

    hedges: HedgePolicy
    placer: Placer | None  # which weighs cuts between layers, of Tidegate's own policies
    handovers: HandoverPolicy | None
    judges: bool  # whether unsure answers are escalated, as Tidegate's own policies do
    door: AdmissionControl

    def launched(self, target_id: str, now: float) -> None: ...
    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        """An attempt is over. `latency_s` None: it failed or was given up."""
        ...

    def escalates(self, request: SimulatedRequest, target_id: str) -> bool:
        """Whether this answer is not good enough, so that the request should go to another target."""
        ...


class RequestCaller(Protocol):
    """The caller of a request that another gateway sent: it is told what its own callers are told."""

    def accepted(self, word: Accepted) -> None: ...
    def ended(self, end: Answer | Refuse, job: SimulatedJob | None, now: float) -> None:
        """The request is over. `job`: that was answered."""
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
        prompt_weights: Mapping[str, float] = MappingProxyType({}),
        execute: Callable[[SimulatedGateway, SimulatedRequest], None] | None = None,
        agreement: float = 1.0,
    ) -> None:
        """Args:
        execute: begins a request that was let in; None: as one execution.
        unsure: the models that judge their own answers.
        agreement: the share of tokens at which two targets say the same after the same tokens.
        prompt_weights: of generating models: how many tokens of an answer one of the prompt is worth.
        """
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
        self.lengths = OutputLengths()
        self.prompt_weights = prompt_weights
        self._execute = execute or (lambda gateway, request: SimulatedExecution(gateway, request).start())
        self._agreement = agreement
        self.router = router_of(self)

    def agrees(self, request: int, place: int, tokens: int) -> bool:
        """Whether a second target says the same as the first at so many places; it hangs on the request alone."""
        return all(crc32(f"{request} {one}".encode()) < self._agreement * 2**32 for one in range(place, place + tokens))

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
            self._execute(self, request)
            return
        refused = RequestEnd(
            kind.name,
            kind.priority,
            request.at,
            now,
            Outcome.OVERLOADED,
            in_time=False,
            tenant=kind.tenant,
            units=request.units,
        )
        self.end(request, refused)

    def __repr__(self) -> str:
        return f"<SimulatedGateway {self.fleet!r} {self.router.door!r}>"


class SimulatedExecution:
    """One request under way, from its arrival to its end."""

    __slots__ = (
        "_answer", "_ask", "_attempts", "_begun", "_caller", "_gateway", "_is_half", "_jobs", "_machine", "_repeated",
        "_request", "_started_at", "_timer", "_tokens",
    )  # fmt: skip

    def __init__(
        self,
        gateway: SimulatedGateway,
        request: SimulatedRequest,
        caller: RequestCaller | None = None,
        *,
        is_half: bool = False,
    ) -> None:
        """Args:
        caller: another gateway's job, or the request that this is a half of; None: a caller of this one's own, whom
            the tally counts.
        is_half: its place was taken by the request that it is a half of.
        """
        self._is_half = is_half
        kind = request.kind
        self._caller = caller
        self._gateway = gateway
        self._request = request
        self._started_at = gateway.events.now
        router = gateway.router
        escalations = gateway.escalations.get(kind.model) if router.judges else None
        generation = _generation_ask(gateway, request, self._started_at)
        self._ask = Ask(
            kind.model,
            VERSION,
            request.units if generation is None else generation.prompt_units - 1.0 + generation.mean_length,
            kind.rows,
            request.length if generation is None else request.length + generation.max_tokens,
            self._started_at + kind.budget_ms / 1e3,  # of this try
            priority=kind.priority,
            body_bytes=int(request.units * kind.bytes_per_unit),
            weight=gateway.router.door.weight_of(kind.tenant),
            tenant=kind.tenant,
            escalates=escalations is not None,
            generation=generation,
        )
        self._tokens = TokenTally()
        self._begun: int | None = None  # the attempt whose tokens the caller sees, or saw last
        self._repeated = 0  # tokens that it said again of what the caller had
        self._answer = AnswerSoFar(_UNBOUNDED)
        self._machine = RequestMachine(
            self._ask,
            router,
            hedges=router.hedges,
            escalations=escalations,
            resumption=self._resumption(),
            handovers=router.handovers,
        )
        self._attempts: dict[int, _SimulatedAttempt] = {}  # under way, by number
        self._timer: Event | None = None
        self._jobs: dict[int, SimulatedJob] = {}  # that were answered, by number

    def _resumption(self) -> Resumption | None:
        generation, kind = self._ask.generation, self._request.kind
        if generation is None:
            return None
        weight = self._gateway.prompt_weights[kind.model]
        terms = ResumptionTerms(self._request.length, generation.max_tokens, weight, next_s=generation.next_s)
        return Resumption(terms, self._answer)

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
                    attempt = self._attempts.pop(action.attempt)
                    attempt.give_up(hopeless=action.hopeless, error=action.error)
                    self._count_lost(action.attempt, attempt)
                case Keep(number):
                    self._attempts[number].keeps = True
                case Release(number):
                    self._release(number, self._attempts[number])
                case Show():
                    raise AssertionError("no beginning is held back here")
                case _:
                    self._end(action)

    def _count_lost(self, number: int, attempt: _SimulatedAttempt) -> None:
        """Count an attempt that was cancelled since another one's first token is here."""
        if not request_counts(self._request, self._gateway.tally):
            return
        generations = self._gateway.tally.generations
        if self._machine.reasons[number] == PLANNED and number != self._begun:
            generations.lost_handover(attempt.computed_tokens)
        elif self._begun is not None and number != self._begun:
            if self._machine.reasons[self._begun] == PLANNED and self._begun in self._attempts:
                generations.handed_over(attempt.made_in_vain + self._repeated)
            else:
                generations.lost_race(attempt.computed_tokens)

    def _release(self, number: int, attempt: _SimulatedAttempt) -> None:
        """What was kept of an attempt is given to the caller."""
        attempt.keeps = False
        if attempt.came > attempt.heard:
            self._give(number, attempt, attempt.came)

    def _launch(self, launch: Launch) -> None:
        self._gateway.tally.launches += self._request.at >= self._gateway.tally.counts_from
        if self._caller is not None and launch.attempt == 0:
            self._caller.accepted(Accepted(0, launch.candidate.finish_s))
        self._attempts[launch.attempt] = _SimulatedAttempt(self, launch)
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

    def made(self, number: int, tokens: int) -> None:
        """So many tokens of this attempt's answer are here."""
        now, attempt = self._gateway.events.now, self._attempts[number]
        attempt.came = tokens
        if self._begun is None or self._begun not in self._attempts:
            self._begins(number, attempt, now)
        elif self._begun != number:
            self._follows(number, attempt, now)
        if self._begun == number and not attempt.keeps:
            self._give(number, attempt, tokens)

    def _begins(self, number: int, attempt: _SimulatedAttempt, now: float) -> None:
        attempt.begun(now)
        self._begun, self._repeated = number, attempt.repeated_tokens
        self._perform(self._machine.begun(number, now))
        self._answer.speaks(_UNBOUNDED, None, now)

    def _follows(self, number: int, attempt: _SimulatedAttempt, now: float) -> None:
        """A successor speaks: it repeats what the caller has, says something else, or goes on."""
        if self._machine.reasons[number] != PLANNED:
            return
        repeated = min(attempt.came, len(self._answer) - attempt.goes_on_after)
        if repeated > 0 and not self._gateway.agrees(self._request.number, attempt.goes_on_after, repeated):
            self._perform(self._machine.differed(number, now))
        elif attempt.came > repeated:
            attempt.skip(repeated)
            self._begins(number, attempt, now)

    def _give(self, number: int, attempt: _SimulatedAttempt, tokens: int) -> None:
        now = self._gateway.events.now
        self._answer.took(attempt.take(tokens), attempt.candidate.offered.cost.token_gaps, now)
        self._tokens.add(len(self._answer), now, self._ask, self._request)
        if 0 < self._request.leaves_after <= len(self._answer):
            self._leave(now)

    def _leave(self, now: float) -> None:
        """The caller has read enough."""
        gateway, request = self._gateway, self._request
        self._perform(self._machine.cancelled(now))
        gateway.lengths.record(
            request.kind.model, request.kind.tenant, self._max_tokens, self._tokens.made, ended=False
        )
        self._close(now)
        in_time = self._tokens.kept(self._ask)
        gateway.end(request, self._ended(now, Outcome.CANCELLED, in_time=in_time, by=self._begun))

    @property
    def _max_tokens(self) -> int:
        generation = self._ask.generation
        return 0 if generation is None else generation.max_tokens

    def _is_over(self, number: int) -> _SimulatedAttempt:
        """An attempt has ended by itself: what was kept of it is given to the caller, who may leave with that."""
        attempt = self._attempts[number]
        attempt.is_over = True
        if attempt.keeps:
            self._release(number, attempt)
        return self._attempts.pop(number, attempt)

    def answered(self, number: int, job: SimulatedJob) -> None:
        now, target_id = self._gateway.events.now, self._is_over(number).candidate.target.id
        if self._gateway.router.escalates(self._request, target_id):
            # Joint inference has no state of its own in the machine: an answer that does not do is a failed attempt.
            self._perform(self._machine.failed(number, Overloaded("the answer is not sure enough"), now))
            return
        self._jobs[number] = job
        self._perform(self._machine.answered(number, now, self._confidence(target_id)))

    def failed(self, number: int, error: ServeError) -> None:
        self._is_over(number)
        self._perform(self._machine.failed(number, error, self._gateway.events.now))

    def computed(self, job: SimulatedJob, compute_s: float) -> ComputedWork | None:
        """As `AskBuilder.computed`."""
        generation = job.generation
        if generation is None:
            return None
        prompt_units = self._gateway.prompt_weights[job.model] * generation.prompt + 1.0
        tokens = ComputedTokens(generation.made, prompt_units, generation.first_s, generation.rest_s)
        return ComputedWork(prompt_units - 1.0 + generation.made, compute_s, tokens)

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
        self._close(now)
        self._learn_length(end)
        if self._caller is not None:
            self._caller.ended(end, self._jobs.get(end.attempt) if isinstance(end, Answer) else None, now)
            return
        gateway.end(request, self._request_end(end, now))
        if isinstance(end, Answer) and request.at >= gateway.tally.counts_from and end.attempt in self._jobs:
            gateway.tally.useful_s[end.candidate.target.spec.tier] += self._jobs[end.attempt].useful_s

    def cancel(self, now: float) -> None:
        """Its caller, another gateway, wants no answer any more."""
        self._perform(self._machine.cancelled(now))
        self._close(now)

    def _close(self, now: float) -> None:
        gateway = self._gateway
        if not self._is_half:
            gateway.router.door.leave(self._request.kind.tenant, now - self._started_at)
        if self._timer is not None:
            gateway.events.cancel(self._timer)
            self._timer = None
        if self._ask.generation is not None and self._request.at >= gateway.tally.counts_from:
            gateway.tally.generations.add(self._tokens, self._ask, self._request.length)
            gateway.tally.generations.hold_to_truth(self._answer.ids)

    def _learn_length(self, end: Answer | Refuse) -> None:
        """As `AskBuilder.learn_length`."""
        generation, kind, lengths = self._ask.generation, self._request.kind, self._gateway.lengths
        if generation is None:
            return
        job = self._jobs[end.attempt].generation if isinstance(end, Answer) and end.attempt in self._jobs else None
        made = self._tokens.made if job is None else job.answered + job.made
        ended = job is not None and job.made == job.length < job.max_tokens
        lengths.record(kind.model, kind.tenant, generation.max_tokens, made, ended=ended)

    def _ended(self, now: float, outcome: Outcome, *, in_time: bool, by: int | None) -> RequestEnd:
        kind = self._request.kind
        served_by = "" if by is None else self._machine.route_of(by).served_by
        return RequestEnd(
            kind.name,
            kind.priority,
            self._request.at,
            now,
            outcome,
            in_time,
            served_by=served_by,
            tenant=kind.tenant,
            units=self._request.units,
        )

    def _request_end(self, end: Answer | Refuse, now: float) -> RequestEnd:
        kind, at = self._request.kind, self._request.at
        if isinstance(end, Refuse):
            if len(self._answer) and request_counts(self._request, self._gateway.tally):
                self._gateway.tally.generations.broke_off(end.error)
            return self._ended(now, Outcome.of(end.error), in_time=False, by=None)
        if self._ask.generation is not None and request_counts(self._request, self._gateway.tally):
            self._gateway.tally.generations.ended(end.route.resumed, len(self._answer), self._wanted)
        in_time = now <= self._ask.deadline and self._tokens.kept(self._ask)
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
            hedge_won=end.route.reason in ("hedge", RACE),
            tenant=kind.tenant,
            units=self._request.units,
        )

    @property
    def _wanted(self) -> int:
        """Tokens of a whole answer."""
        return min(self._request.output, self._max_tokens)

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

    __slots__ = (
        "_body_bytes", "_chance", "_evidence", "_execution", "_first_at", "_job", "_number", "_stream", "came",
        "candidate", "goes_on_after", "heard", "is_over", "keeps",
    )  # fmt: skip

    def __init__(self, execution: SimulatedExecution, launch: Launch) -> None:
        gateway, request = execution.gateway, execution.request
        now, candidate = gateway.events.now, launch.candidate
        self.candidate = candidate
        self._execution = execution
        self._number = launch.attempt
        self.goes_on_after = launch.answered  # tokens of the answer that it goes on after
        self.came = 0  # tokens of this attempt, that are here
        self.heard = 0  # of those the caller has so many, from this attempt or from one before
        self.keeps = False  # back what comes
        self.is_over = False  # it has ended by itself, and its end is told
        self._body_bytes = execution.ask.body_bytes
        self._stream = gateway.streams[candidate.target.id]
        self._evidence = AttemptTelemetry(candidate, next(gateway.keys), launch.ask.units, now, self._body_bytes)
        self._first_at: float | None = None
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
            generation=job_generation(request, execution.ask, launch.answered),
            request=request,
        )
        if self._job.generation is not None:
            objectives = token_objectives(candidate, execution.ask, now, goes_on=launch.answered > 0)
            self._job.generation.first_budget_s = None if objectives is None else objectives.first_s
        gateway.router.launched(candidate.target.id, now)

    def send(self) -> None:
        self._stream.ask(self._job, self, self._body_bytes)

    def give_up(self, *, hopeless: bool, error: ServeError | None = None) -> None:
        """The machine has cancelled it. Args: error: what that counts as."""
        if self.is_over:
            return
        now = self._execution.gateway.events.now
        if error is None:
            self._evidence.cancelled(now, hopeless=hopeless)
        else:
            self._evidence.stalled(error, now, self._execution.gateway.draw())
        self._execution.gateway.router.ended(self.candidate.target.id, None, now)
        self._stream.withdraw(self._job)
        self._note(now, answered=False, given_up=True)

    @property
    def computed_tokens(self) -> int:
        """Of a generation, what its target has computed by now: of the prompt and of the answer."""
        asked = self._job.generation
        return 0 if asked is None else asked.prefilled + asked.made

    @property
    def made_in_vain(self) -> int:
        """Tokens of its answer that its target has made and the caller has not got."""
        asked = self._job.generation
        return 0 if asked is None else asked.made - self.heard

    @property
    def repeated_tokens(self) -> int:
        """What its target has computed as another one had: the prompt, and tokens that the caller has."""
        asked = self._job.generation
        return 0 if asked is None else asked.prompt + self.heard

    def skip(self, tokens: int) -> None:
        """The caller has its first tokens already."""
        self.heard = tokens

    def take(self, tokens: int) -> TokenBatch:
        """What has come since the last time. Args: tokens: of this attempt, that are here by now."""
        asked, first = self._job.generation, self.heard
        assert asked is not None
        self.heard = tokens
        return TokenBatch(first, tuple([asked.token(place) for place in range(first, tokens)]))

    # AttemptCallbacks

    def accepted(self, word: Accepted) -> None:
        self._evidence.accepted(self._execution.gateway.events.now, word)
        self._execution.accepted(self._number, word)

    def made(self, tokens: int) -> None:
        self._execution.made(self._number, tokens)

    def begun(self, now: float) -> None:
        """Its first token is here, and the caller is shown it."""
        self._first_at = now
        self._evidence.begun(now, 0)

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport, size_bytes: int) -> None:
        now = self._execution.gateway.events.now
        job.queue_s = queue_s
        work = self._execution.computed(job, compute_s)
        self._evidence.answered({"queue": queue_s, "compute": compute_s}, load, now, size_bytes, work=work)
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
        if self.candidate.tokens is not None:
            self._note_tokens(now, answered=answered, given_up=given_up)
            return
        if not given_up or now >= deadline:  # before it, how it would have ended is unknown
            tally.reliability.add(self._chance, answered and now <= deadline)
        expected_at = launched_at + self._evidence.within_s
        # No attempt is waited for beyond the deadline: what was expected later is not tested, however it ends.
        if expected_at <= deadline and (not given_up or now > expected_at):
            tally.within_margin[0] += answered and now <= expected_at
            tally.within_margin[1] += 1

    def _note_tokens(self, now: float, *, answered: bool, given_up: bool) -> None:
        claim, made = self.candidate.claim, self._job.generation
        if claim is None or made is None or not isinstance(claim.prediction, TokenClaim):
            return
        times = TokenTimes(made.made, self._first_at, now) if answered and self._first_at is not None else None
        self._execution.gateway.tally.generations.settle(
            claim.prediction, now, first_at=self._first_at, times=times, given_up=given_up
        )

    def __repr__(self) -> str:
        return f"<_SimulatedAttempt {self._number} at {self.candidate.target.id}>"


def _generation_ask(gateway: SimulatedGateway, request: SimulatedRequest, now: float) -> GenerationAsk | None:
    """As `gateway/serving/work_estimate.py` makes it."""
    kind = request.kind
    if kind.output is None:
        return None
    forecast = gateway.lengths.forecast(kind.model, kind.tenant, kind.output.max_tokens)
    prompt_units = gateway.prompt_weights[kind.model] * request.length + 1.0
    return GenerationAsk(
        prompt_units=prompt_units,
        certain_units=prompt_units,
        most_units=prompt_units - 1.0 + kind.output.max_tokens,
        lengths=forecast.lengths,
        mean_length=forecast.mean,
        max_tokens=kind.output.max_tokens,
        first_by=None if kind.ttft_ms is None else now + kind.ttft_ms / 1e3,
        next_s=None if kind.tpot_ms is None else kind.tpot_ms / 1e3,
    )


def request_counts(request: SimulatedRequest, tally: OutcomeTally) -> bool:
    """Whether a request came after the warm-up."""
    return request.at >= tally.counts_from


def job_generation(request: SimulatedRequest, ask: Ask, answered: int = 0) -> JobGeneration | None:
    """The part of a request's job that generates; None of one that does not. Args: answered: tokens that there are."""
    output, generation = request.kind.output, ask.generation
    if output is None or generation is None:
        return None
    budget = generation.budget(ask.deadline)
    return JobGeneration(
        request.length + answered,
        request.output - answered,
        max(1, output.max_tokens - answered),
        budget=budget,
        leaves_after=max(0, request.leaves_after - answered),
        answered=answered,
    )


def _chance_of(candidate: Candidate, budget_s: float) -> float:
    """The chance of being in time that this placement claims: the policy's claim, or what its margin implies."""
    if candidate.claim is not None:
        return min(1.0, max(0.0, candidate.claim.prediction.claimed))
    if candidate.margin_s <= 0.0:
        return float(candidate.finish_s <= budget_s)
    # The chance that a normal finish time, with the margin as its 95 % one-sided width, is within the budget.
    sigmas = (budget_s - candidate.finish_s) / (candidate.margin_s / _MARGIN_SIGMAS)
    return 0.5 * (1.0 + erf(sigmas / sqrt(2.0)))
