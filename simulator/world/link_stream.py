"""One gateway's link stream to one worker: the frames of `tidegate/link`, as sizes and instants.

    gateway ──request · cancel · ping──▶ worker        over `LinkModel.to_target`
            ◀──accepted · answer · refused · load · pong──    over `LinkModel.from_target`

Every frame takes the time that the link's model gives it, behind the frames before it. A request carries its budget, so
the worker's deadline is later than the caller's by the way there, as in service. Once a heartbeat both sides prove that
they are alive; after as many silent ones as the real session allows, the stream is given up, whatever is under way
fails, and it is dialled again: at once where it was steady, else a backoff after the last dial. A worker that crashes
resets its connections, which is known after one way back.

Simplified: both ends give a silent stream up in the same instant; a ping is answered together with the load that the
real worker sends on its own tick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Protocol

from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkLoad, LinkRtt, LinkUp, RedialFailed
from simulator.event_queue import EventQueue
from simulator.workers.job import SimulatedJob
from simulator.workers.worker import SimulatedWorker
from tidegate.fleet.offers import ModelOffer
from tidegate.netsim.links.profile import LinkModel
from tidegate.outcome import Disconnected, ServeError
from tidegate.runtime.backoff import Backoff
from tidegate.types import Accepted, LoadReport

# Bytes of frames, measured on the real ones; HTTP/2 and TCP/IP headers included.
REQUEST_BYTES: Final = 190
SMALL_BYTES: Final = 110
ANSWER_BYTES: Final = 200
TOKEN_BYTES: Final = 37  # of one token in a frame with others
HELLO_BYTES: Final = 2000
SPREAD_S: Final = 0.01  # as in `tidegate/link/service.py`
# As in `gateway/targets/link.py`, `gateway/targets/directory.py` and `tidegate/link/session.py`.
BACKOFF_BASE_S: Final = 0.25
BACKOFF_CAP_S: Final = 4.0
BACKOFF_CAP_STATIC_S: Final = 1.5
STEADY_S: Final = 1.0
PING_INTERVAL_S: Final = 1.0
SILENT_PINGS: Final = 3


class AttemptCallbacks(Protocol):
    """The callbacks of an attempt: called exactly once with its end, unless it withdrew."""

    def accepted(self, word: Accepted) -> None: ...
    def made(self, tokens: int) -> None:
        """So many tokens of its answer are here."""
        ...

    def answered(
        self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport, size_bytes: int
    ) -> None: ...
    def failed(self, error: ServeError) -> None: ...


class LoadSpread:
    """Mutable: one worker's streams, each of which hears soon of the work that the others brought or got back."""

    def __init__(self, events: EventQueue) -> None:
        self.streams: list[SimulatedStream] = []
        self._events = events
        self._workers: set[SimulatedStream] = set()  # whose work has changed since the others were told
        self._is_due = False

    def worked(self, stream: SimulatedStream) -> None:
        if len(self.streams) > 1:
            self._workers.add(stream)
            if not self._is_due:
                self._is_due = True
                self._events.schedule(self._events.now + SPREAD_S, self._spread)

    def _spread(self) -> None:
        workers, self._workers, self._is_due = self._workers, set(), False
        for one in self.streams:
            if workers != {one}:
                one.tell_load()

    def __repr__(self) -> str:
        return f"<LoadSpread over {len(self.streams)} streams>"


class SimulatedStream:
    """Mutable: `ask`, `withdraw`; calls `on_event` with the events that the real link reports.

    Args:
        phase: in [0, 1): where in the heartbeat interval this stream's falls.
    """

    def __init__(
        self,
        events: EventQueue,
        worker: SimulatedWorker,
        link: LinkModel,
        *,
        on_event: Callable[[LinkEvent], None],
        draw: Callable[[], float],
        phase: float,
        lasts_until: float = inf,
        spread: LoadSpread | None = None,
    ) -> None:
        self.worker = worker
        self._spread = spread or LoadSpread(events)
        self._spread.streams.append(self)
        self.up = False
        self._events = events
        self._link = link
        self._to_target, self._from_target = link.to_target, link.from_target
        self._on_event = on_event
        cap_s = BACKOFF_CAP_STATIC_S if worker.id.startswith(("pool/", "site/")) else BACKOFF_CAP_S
        self._backoff = Backoff(draw, BACKOFF_BASE_S, cap_s)
        self._phase = phase
        self._lasts_until = lasts_until
        self._session = 0  # frames of an older one are dropped
        self._pending: dict[SimulatedJob, AttemptCallbacks] = {}
        self._silent_ticks = 0
        self._dialled_at = 0.0
        self._up_at = inf

    @property
    def pending(self) -> int:
        return len(self._pending)

    # what the gateway does

    def dial(self) -> None:
        """Connect, greet; `LinkUp` when the hello is here. A dead worker refuses."""
        now = self._events.now
        self._session += 1
        self._dialled_at, self._up_at = now, inf
        self._to_target, self._from_target = self._link.to_target.connection(), self._link.from_target.connection()
        if not self.worker.alive:
            refused_at = self._from_target.delivered_at(SMALL_BYTES, self._sent(SMALL_BYTES))
            self._at(refused_at, self._lost, "connection refused")
            return
        hello_at = self._to_target.delivered_at(SMALL_BYTES, now)
        self._at(hello_at, self._greet)
        self._silent_ticks = 0
        self._at(now + PING_INTERVAL_S * (0.5 + 0.5 * self._phase), self._tick)

    def ask(self, job: SimulatedJob, waiting: AttemptCallbacks, size_bytes: int) -> None:
        """Send a request; its job's deadline is set where it arrives."""
        if not self.up:
            self._events.schedule(self._events.now, waiting.failed, Disconnected(f"{self.worker.id} has no link"))
            return
        self._pending[job] = waiting
        job.due = job.deadline
        budget_s = job.deadline - self._events.now
        self._at(self._sent(REQUEST_BYTES + size_bytes), self._arrive, job, budget_s)

    def withdraw(self, job: SimulatedJob) -> None:
        """Cancel it: the answer is not waited for any more; the worker learns of it when the frame arrives."""
        if self._pending.pop(job, None) is not None:
            self._at(self._sent(SMALL_BYTES), self._cancel, job)

    def reset(self) -> None:
        """The worker's process is gone: the gateway knows after one way back."""
        reset_at = self._from_target.delivered_at(SMALL_BYTES, self._events.now)
        self._at(reset_at, self._lost, "connection reset by peer")

    def probe(self, tell: Callable[[str, int, float], None]) -> None:
        """Request the number of requests there; `tell(target, in flight, now)` is called when the answer arrives."""
        if self.up:
            self._at(self._sent(SMALL_BYTES), self._probed, tell)

    # what the worker does (the JobCaller of its jobs)

    def accepted(self, job: SimulatedJob, word: Accepted) -> None:
        self._at(self._returned(SMALL_BYTES), self._take_accepted, job, word)

    def made(self, jobs: Sequence[SimulatedJob]) -> None:
        at = self._returned(SMALL_BYTES + TOKEN_BYTES * len(jobs))
        self._at(at, self._take_tokens, [(job, job.generation.made) for job in jobs if job.generation is not None])

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None:
        at = self._returned(ANSWER_BYTES + job.answer_bytes)
        self._at(at, self._take_answer, job, queue_s, compute_s, load)
        self._spread.worked(self)

    def tell_load(self) -> None:
        """Say the load, for what other gateways have sent."""
        now = self._events.now
        if self.up and self.worker.alive and self.worker.standing_until(now) <= now:
            load = self.worker.load_report(now)
            self._at(self._returned(SMALL_BYTES), self._take_load, load)

    def refused(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None:
        self._at(self._returned(SMALL_BYTES), self._take_refusal, job, error, load)

    # frames at the worker

    def _arrive(self, job: SimulatedJob, budget_s: float) -> None:
        if not self._while_standing(self._arrive, job, budget_s):
            now = self._events.now
            job.deadline = now + budget_s
            if job.generation is not None and job.generation.first_budget_s is not None:
                job.generation.first_by = now + job.generation.first_budget_s
            self.worker.receive(job, now)
            self._spread.worked(self)

    def _cancel(self, job: SimulatedJob) -> None:
        if not self._while_standing(self._cancel, job):
            self.worker.give_up(job, self._events.now)

    def _greet(self) -> None:
        if not self._while_standing(self._greet):
            self.worker.news(self._events.now)
            self._at(self._returned(HELLO_BYTES), self._greeted)

    def _pinged(self, sent_at: float) -> None:
        if not self._while_standing(self._pinged, sent_at):
            now = self._events.now
            at = self._from_target.delivered_at(SMALL_BYTES, now)
            self._at(at, self._ponged, sent_at, self.worker.load_report(now), self.worker.news(now))

    def _probed(self, tell: Callable[[str, int, float], None]) -> None:
        if not self._while_standing(self._probed, tell):
            in_flight = self.worker.queued + self.worker.in_flight
            self._at(self._returned(SMALL_BYTES), lambda: tell(self.worker.id, in_flight, self._events.now))

    def _while_standing(self, what: Callable[..., None], *arguments: object) -> bool:
        """A process that stands still reads nothing: what came is read when it goes on. A dead one never does."""
        if not self.worker.alive:
            return True
        now = self._events.now
        goes_on_at = self.worker.standing_until(now)
        if goes_on_at > now:
            self._at(goes_on_at, what, *arguments)
            return True
        return False

    # frames at the gateway

    def _greeted(self) -> None:
        self.up, self._up_at = True, self._events.now
        self._silent_ticks = 0
        self._on_event(LinkUp(self.worker.id, self.worker.id, self.worker.epoch, self.worker.offers))

    def _take_accepted(self, job: SimulatedJob, word: Accepted) -> None:
        self._silent_ticks = 0
        if (waiting := self._pending.get(job)) is not None:
            waiting.accepted(word)

    def _take_tokens(self, made: Sequence[tuple[SimulatedJob, int]]) -> None:
        self._silent_ticks = 0
        for job, tokens in made:
            if (waiting := self._pending.get(job)) is not None:
                waiting.made(tokens)

    def _take_answer(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None:
        self._silent_ticks = 0
        waiting = self._pending.pop(job, None)
        if waiting is None:
            self._on_event(LinkLoad(self.worker.id, load))
        else:
            waiting.answered(job, queue_s, compute_s, load, ANSWER_BYTES + job.answer_bytes)

    def _take_refusal(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None:
        self._silent_ticks = 0
        self._on_event(LinkLoad(self.worker.id, load))
        if (waiting := self._pending.pop(job, None)) is not None:
            waiting.failed(error)

    def _take_load(self, load: LoadReport) -> None:
        self._silent_ticks = 0
        self._on_event(LinkLoad(self.worker.id, load))

    def _ponged(self, sent_at: float, load: LoadReport, offers: tuple[ModelOffer, ...] | None) -> None:
        self._silent_ticks = 0
        self._on_event(LinkRtt(self.worker.id, self._events.now - sent_at))
        self._on_event(LinkLoad(self.worker.id, load, offers))

    # the session

    def _tick(self) -> None:
        now = self._events.now
        if self._silent_ticks >= SILENT_PINGS:
            self._lost(f"silent for {self._silent_ticks} heartbeats of {PING_INTERVAL_S:g} s")
            return
        self._silent_ticks += 1
        if self.up:
            self._at(self._sent(SMALL_BYTES), self._pinged, now)
        if now < self._lasts_until or self._pending:
            self._at(now + PING_INTERVAL_S, self._tick)

    def _lost(self, reason: str) -> None:
        now = self._events.now
        self._session += 1
        if self.up:
            self.up = False
            self._on_event(LinkDown(self.worker.id, reason))
        else:
            self._on_event(RedialFailed(self.worker.id))
        pending, self._pending = self._pending, {}
        for job, waiting in pending.items():
            self.worker.give_up(job, now)
            waiting.failed(Disconnected(f"{self.worker.id}: {reason}"))
        again_at = now
        if now - self._up_at > STEADY_S:
            self._backoff.reset()
        else:
            again_at = max(now, self._dialled_at + self._backoff.next_delay_s())
        if now < self._lasts_until:
            self._at(again_at, self.dial)

    def _sent(self, size_bytes: int) -> float:
        return self._to_target.delivered_at(size_bytes, self._events.now)

    def _returned(self, size_bytes: int) -> float:
        return self._from_target.delivered_at(size_bytes, self._events.now)

    def _at(self, at: float, what: Callable[..., None], *arguments: object) -> None:
        """Schedule `what` for this session; a blackhole's infinity never comes."""
        if at < inf:
            self._events.schedule(at, self._if_current, self._session, what, arguments)

    def _if_current(self, session: int, what: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if session == self._session:
            what(*arguments)

    def __repr__(self) -> str:
        return f"<SimulatedStream to {self.worker.id} {'up' if self.up else 'down'}, {len(self._pending)} pending>"
