"""A gateway: the real fleet view, placement and request machine; what `gateway/conductor.py` does, on virtual time.

One `Flight` performs a request's actions: a launch becomes a frame, a wake an event, an end an entry in the tally. What
an attempt teaches is noted by `gateway/core/evidence.py`, the file that the conductor uses, so the estimators learn
here exactly what they learn in life. The limit on requests in flight is the admission layer's, with its default.

A `Router` decides where; baselines are routers too, and see what their docstrings say. All other parts are the same
for all of them. Time spent inside the gateway itself (tenths of a millisecond) is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import erf, sqrt
from typing import Protocol

from gateway.core.events import LinkEvent
from gateway.core.evidence import Attempt
from gateway.core.fleet import Fleet, TargetSpec, Tier
from gateway.core.hedging import Hedges
from gateway.core.placement import Ask, Candidate
from gateway.core.request import Action, Answer, Cancel, Launch, Places, Refuse, RequestMachine, WakeAt
from simulator.arrivals import Request
from simulator.events import Event, EventQueue
from simulator.tally import End, Tally
from simulator.wire import Stream
from simulator.workers import VERSION, Job
from tidegate.limit import Limit
from tidegate.models.manifest import Feature
from tidegate.outcome import Outcome, Overloaded, ServeError
from tidegate.types import Accepted, LoadReport

MAX_IN_FLIGHT = 1024  # as in `gateway/config.py`
_MARGIN_SIGMAS = 1.645


class Router(Places, Protocol):
    """Who decides, and what it is told of what came of it."""

    hedges: Hedges

    def launched(self, target_id: str, now: float) -> None: ...
    def ended(self, target_id: str, latency_s: float | None, now: float) -> None:
        """An attempt is over. `latency_s` None: it failed or was given up."""
        ...

    def escalates(self, request: Request, target_id: str) -> bool:
        """Whether this answer is not good enough, so that another target should be asked."""
        ...


class Gateway:
    """Mutable: `connect` targets, then `take` requests."""

    def __init__(
        self,
        events: EventQueue,
        tally: Tally,
        feature_of: Callable[[str, str], Feature],
        router_of: Callable[[Gateway], Router],
        draw: Callable[[], float],
    ) -> None:
        self.events = events
        self.tally = tally
        self.draw = draw
        self.fleet = Fleet(feature_of)
        self.streams: dict[str, Stream] = {}
        self.limit = Limit(MAX_IN_FLIGHT)
        self.keys = count()
        self.router = router_of(self)

    def know(self, target_id: str, tier: Tier, stream: Stream) -> None:
        """Add a target and its stream, which is not dialled yet."""
        self.fleet.add(TargetSpec(target_id, tier, "simulated"), self.events.now)
        self.streams[target_id] = stream

    def on_event(self, event: LinkEvent) -> None:
        self.fleet.fold(event, self.events.now)

    def heard(self, target_id: str, load: LoadReport) -> None:
        """A heartbeat came over MQTT."""
        self.fleet.heard(target_id, load=load, doubt="", now=self.events.now)

    def take(self, request: Request) -> None:
        """A caller's request is here."""
        self.tally.begin()
        if not self.limit.try_acquire():
            end = End(
                request.kind.name, request.kind.priority, request.at, self.events.now, Outcome.OVERLOADED, in_time=False
            )
            self.tally.end(end)
            return
        Flight(self, request).start()

    def __repr__(self) -> str:
        return f"<Gateway {self.fleet!r} {self.limit!r}>"


class Flight:
    """One request under way, from its arrival to its end."""

    __slots__ = ("_ask", "_attempts", "_gateway", "_machine", "_request", "_timer", "_winner")

    def __init__(self, gateway: Gateway, request: Request) -> None:
        kind = request.kind
        self._gateway = gateway
        self._request = request
        self._ask = Ask(
            kind.model,
            VERSION,
            request.units,
            kind.rows,
            request.length,
            request.at + kind.budget_ms / 1e3,
            priority=kind.priority,
            body_bytes=int(request.units * kind.bytes_per_unit),
        )
        self._machine = RequestMachine(self._ask, gateway.router, hedges=gateway.router.hedges)
        self._attempts: dict[int, _Try] = {}  # under way, by number
        self._timer: Event | None = None
        self._winner: Job | None = None

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
                    self._attempts.pop(action.attempt).give_up()
                case _:
                    self._end(action)

    def _launch(self, launch: Launch) -> None:
        self._attempts[launch.attempt] = _Try(self, launch.attempt, launch.candidate)
        self._attempts[launch.attempt].send()

    def _wake_at(self, at: float) -> None:
        events = self._gateway.events
        if self._timer is not None:
            events.cancel(self._timer)
        self._timer = events.schedule(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._perform(self._machine.timer(self._gateway.events.now))

    # what attempts tell

    def accepted(self, number: int, word: Accepted) -> None:
        self._perform(self._machine.accepted(number, word, self._gateway.events.now))

    def answered(self, number: int, job: Job) -> None:
        now, target_id = self._gateway.events.now, self._attempts.pop(number).candidate.target.id
        if self._gateway.router.escalates(self._request, target_id):
            # Joint inference has no state of its own in the machine: an answer that does not do is a failed attempt.
            self._perform(self._machine.failed(number, Overloaded("the answer is not sure enough"), now))
            return
        actions = self._machine.answered(number, now)
        if actions:
            self._winner = job
        self._perform(actions)

    def failed(self, number: int, error: ServeError) -> None:
        del self._attempts[number]
        self._perform(self._machine.failed(number, error, self._gateway.events.now))

    @property
    def gateway(self) -> Gateway:
        return self._gateway

    @property
    def ask(self) -> Ask:
        return self._ask

    @property
    def request(self) -> Request:
        return self._request

    # the end

    def _end(self, end: Answer | Refuse) -> None:
        gateway, request = self._gateway, self._request
        now = gateway.events.now
        gateway.limit.release(now - request.at)
        if self._timer is not None:
            gateway.events.cancel(self._timer)
            self._timer = None
        gateway.tally.end(self._told(end, now))
        if isinstance(end, Answer) and self._winner is not None and request.at >= gateway.tally.counts_from:
            gateway.tally.useful_s[end.candidate.target.spec.tier] += self._winner.useful_s

    def _told(self, end: Answer | Refuse, now: float) -> End:
        kind, at = self._request.kind, self._request.at
        if isinstance(end, Refuse):
            return End(kind.name, kind.priority, at, now, Outcome.of(end.error), in_time=False)
        in_time = now <= self._ask.deadline
        outcome = Outcome.LATE if not in_time else Outcome.DEGRADED if end.degraded else Outcome.OK
        return End(
            kind.name,
            kind.priority,
            at,
            now,
            outcome,
            in_time,
            served_by=end.candidate.target.id,
            quality=end.candidate.variant.quality or 0.0,
            attempts=end.attempts,
            hedged=end.hedged,
            hedge_won=end.reason == "hedge",
        )

    def __repr__(self) -> str:
        return f"<Flight {self._request.number} {self._machine!r}>"


class _Try:
    """One attempt: what the far side tells, passed on as evidence and as an event of the machine."""

    __slots__ = ("_body_bytes", "_chance", "_evidence", "_flight", "_job", "_number", "_stream", "candidate")

    def __init__(self, flight: Flight, number: int, candidate: Candidate) -> None:
        gateway, request = flight.gateway, flight.request
        now = gateway.events.now
        self.candidate = candidate
        self._flight = flight
        self._number = number
        self._body_bytes = flight.ask.body_bytes
        self._stream = gateway.streams[candidate.target.id]
        self._evidence = Attempt(candidate, next(gateway.keys), request.units, now, self._body_bytes)
        self._chance = _chance_of(candidate, flight.ask.deadline - now)
        self._job = Job(
            request.number,
            self._stream,
            request.kind.model,
            rows=request.kind.rows,
            length=request.length,
            deadline=flight.ask.deadline,
            priority=request.kind.priority,
            luck=request.noise,
            answer_bytes=request.kind.answer_bytes,
        )
        gateway.router.launched(candidate.target.id, now)

    def send(self) -> None:
        self._stream.ask(self._job, self, self._body_bytes)

    def give_up(self) -> None:
        """The machine wants it no more."""
        now = self._flight.gateway.events.now
        self._evidence.cancelled(now)
        self._flight.gateway.router.ended(self.candidate.target.id, None, now)
        self._stream.withdraw(self._job)
        if now >= self._flight.ask.deadline:  # before it, nobody knows how it would have gone
            self._note(now, answered=False)

    # Waiting

    def accepted(self, word: Accepted) -> None:
        self._evidence.accepted(self._flight.gateway.events.now)
        self._flight.accepted(self._number, word)

    def answered(self, job: Job, queue_s: float, compute_s: float, load: LoadReport, size_bytes: int) -> None:
        now = self._flight.gateway.events.now
        self._evidence.answered({"queue": queue_s, "compute": compute_s}, load, now, size_bytes)
        self._flight.gateway.router.ended(self.candidate.target.id, now - self._evidence.launched_at, now)
        self._note(now, answered=True)
        self._flight.answered(self._number, job)

    def failed(self, error: ServeError) -> None:
        gateway = self._flight.gateway
        self._evidence.failed(error, gateway.events.now, gateway.draw())
        gateway.router.ended(self.candidate.target.id, None, gateway.events.now)
        self._note(gateway.events.now, answered=False)
        self._flight.failed(self._number, error)

    def _note(self, now: float, *, answered: bool) -> None:
        flight = self._flight
        tally = flight.gateway.tally
        if self._number > 0 or flight.request.at < tally.counts_from:
            return
        tally.reliability.add(self._chance, answered and now <= flight.ask.deadline)
        took_s = now - self._evidence.launched_at
        tally.within_margin[0] += answered and took_s <= self.candidate.finish_s + self.candidate.margin_s
        tally.within_margin[1] += 1

    def __repr__(self) -> str:
        return f"<_Try {self._number} at {self.candidate.target.id}>"


def _chance_of(candidate: Candidate, budget_s: float) -> float:
    """The chance of being in time that this placement claims: the policy's word, or what its margin implies."""
    if candidate.stake is not None:
        return min(1.0, max(0.0, candidate.stake.prediction.claimed))
    if candidate.margin_s <= 0.0:
        return float(candidate.finish_s <= budget_s)
    sigmas = (budget_s - candidate.finish_s) / (candidate.margin_s / _MARGIN_SIGMAS)
    return 0.5 * (1.0 + erf(sigmas / sqrt(2.0)))
