"""One request's whole life, without IO: events go in with `now`, actions come out.

    events    arrived · accepted · answered · failed · timer · cancelled
    actions   Launch(attempt) · WakeAt(t) · Cancel(attempt) · Answer(attempt) · Refuse(error)

    NEW ──arrived──▶ WAITING ──answered──▶ DONE        (Answer)
      │                │ └─ failed with nothing else under way: next target, or DONE (Refuse)
      │                └─ timer: a hedge beside a silent attempt, or at the deadline DONE (Refuse)
      └─ nowhere to go, or already late ──▶ DONE        (Refuse)        cancelled ──▶ DONE (nothing: nobody listens)

The live gateway performs the actions with tasks and connections, the simulator with a virtual clock; neither decides
anything. Attempts are numbered from 0 in the order of their launch; a new attempt never goes where one went before.

Invariants, kept under any interleaving of events:
- exactly one terminal action (Answer or Refuse) unless cancelled, and nothing after it but the Cancels beside it;
- the first answer wins; an error never beats an attempt that is still under way;
- at most `max_attempts` launches, none at or after the deadline;
- when the request is done, every attempt has ended or is cancelled: no work is orphaned;
- one timer: each WakeAt replaces the one before.

An answer that is here after the deadline but before its timer is still given: it exists, and `late` is for the metrics
to say. Timers may come up to a millisecond early (event loops round), which counts as due.

Which error to tell when everything failed: the one that helps the caller most (`_last_word`). When the targets were
all unreachable that is `nothing_alive`, since then there is nobody left to ask.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

from gateway.core.hedging import EARLY_S, Hedges, LatestUseful, Watched, is_silent
from gateway.core.placement import Ask, Candidate, Decision
from gateway.core.precision import is_lesser
from tidegate.outcome import (
    DeadlineExceeded,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    ServeError,
    TooLarge,
    Unreachable,
)
from tidegate.types import Accepted

MAX_ATTEMPTS: Final = 3
_LATEST_USEFUL: Final = LatestUseful()


class Launch(NamedTuple):
    """Send the request to the candidate's target, in its variant."""

    attempt: int
    candidate: Candidate


class WakeAt(NamedTuple):
    """Call `timer` at this instant; replaces the one before."""

    at: float


class Cancel(NamedTuple):
    """Nobody waits for this attempt any more."""

    attempt: int


class Answer(NamedTuple):
    """Give the caller this attempt's answer, and say how it came about. Terminal."""

    attempt: int
    candidate: Candidate
    reason: str
    attempts: int
    hedged: bool
    fallback: bool
    degraded: bool


class Refuse(NamedTuple):
    """Give the caller this error. Terminal."""

    error: ServeError


Action = Launch | WakeAt | Cancel | Answer | Refuse


class Places(Protocol):
    """Who decides where: `gateway.core.placement.Placer`, or a fake in tests."""

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision: ...


class RequestMachine:
    """Mutable: call one of the six events at a time and perform what it returns, in order."""

    __slots__ = (
        "_ask", "_errors", "_hedge_at", "_hedge_reason", "_hedges", "_hedging", "_launched", "_max_attempts",
        "_pending", "_places", "_watched", "decision", "done",
    )  # fmt: skip

    def __init__(
        self, ask: Ask, places: Places, *, max_attempts: int = MAX_ATTEMPTS, hedges: Hedges = _LATEST_USEFUL
    ) -> None:
        self.done = False
        self.decision: Decision | None = None  # the first one, for explanations
        self._ask = ask
        self._places = places
        self._hedges = hedges
        self._max_attempts = max_attempts
        self._launched: list[Candidate] = []  # by attempt
        self._pending: set[int] = set()
        self._errors: list[tuple[str, ServeError]] = []  # (target, why), in order
        self._hedge_at: float | None = None
        self._hedging: int | None = None  # the attempt that was launched beside a silent one
        self._hedge_reason = ""
        self._watched: Watched | None = None  # the latest attempt, with its target's promise

    def arrived(self, now: float) -> list[Action]:
        """The request is here: place it."""
        if now >= self._ask.deadline:
            return [self._refuse(_too_late(self._ask, self._errors))]
        self.decision = decision = self._places.decide(self._ask, now)
        if decision.refusal is not None:
            return [self._refuse(decision.refusal)]
        self._hedges.arrived()
        return self._launch(decision, now)

    def accepted(self, attempt: int, accepted: Accepted, now: float) -> list[Action]:
        """The target took it into its queue and says when it will be done."""
        if self._watched is not None and attempt == len(self._launched) - 1:
            promised_at = now + accepted.finish_in_s + self._watched.candidate.link_s / 2
            self._watched = self._watched._replace(promised_at=promised_at)
        return []

    def answered(self, attempt: int, now: float) -> list[Action]:
        """A good answer is here."""
        if self.done or attempt not in self._pending:
            return []
        self._pending.discard(attempt)
        losers = self._finish()
        candidate = self._launched[attempt]
        first, hedge = attempt == 0, attempt == self._hedging
        answer = Answer(
            attempt,
            candidate,
            reason=self._reason() if first else self._hedge_reason if hedge else "fallback",
            attempts=len(self._launched),
            hedged=self._hedging is not None,
            fallback=not (first or hedge),
            degraded=not first and is_lesser(candidate.variant, than=self._launched[0].variant),
        )
        return [answer, *losers]

    def failed(self, attempt: int, error: ServeError, now: float) -> list[Action]:
        """An attempt ended without an answer."""
        if self.done or attempt not in self._pending:
            return []
        self._pending.discard(attempt)
        self._errors.append((self._launched[attempt].target.id, error))
        if self._pending:
            return []
        if not self._may_launch(now) or not all(_another_may_do_better(error) for _, error in self._errors):
            return [self._refuse(_last_word(self._ask, self._errors))]
        decision = self._next_place(now)
        if decision.refusal is not None:
            return [self._refuse(_last_word(self._ask, self._errors, decision.refusal))]
        # A refusal costs nobody anything and is re-placed for free.
        if not isinstance(error, Overloaded) and not self._hedges.may_fall_back():
            return [self._refuse(_last_word(self._ask, self._errors))]
        return self._launch(decision, now)

    def timer(self, now: float) -> list[Action]:
        """The instant of the latest WakeAt has come."""
        if self.done:
            return []
        due = now + EARLY_S
        if due >= self._ask.deadline:
            return [self._refuse(_too_late(self._ask, self._errors)), *self._finish()]
        if self._hedge_at is None or due < self._hedge_at:
            return [self._wake()]
        self._hedge_at = None
        return self._hedge(now)

    def cancelled(self, now: float) -> list[Action]:
        """The caller went away."""
        return [] if self.done else self._finish()

    def _launch(self, decision: Decision, now: float) -> list[Action]:
        chosen, other = decision.chosen, decision.best_other()
        assert chosen is not None  # a decision without refusal has one
        attempt = len(self._launched)
        self._launched.append(chosen)
        self._pending.add(attempt)
        self._watched = Watched(chosen, now)
        # One hedge a request: more than that is load, not insurance.
        may_hedge = self._hedging is None and len(self._launched) < self._max_attempts
        self._hedge_at = self._hedges.first_look(self._ask, chosen, other, now) if other and may_hedge else None
        return [Launch(attempt, chosen), self._wake()]

    def _hedge(self, now: float) -> list[Action]:
        watched = self._watched
        assert watched is not None  # only a launch sets the timer that leads here
        if not is_silent(watched.promised_at, now + EARLY_S, self._ask.deadline):
            self._hedge_at = watched.promised_at  # it has until then to keep its word
            return [self._wake()]
        decision = self._places.decide(self._ask, now, self._hedges.avoid(self._launched))
        hedge = self._hedges.plan(self._ask, watched, decision, now)
        if hedge is not None and hedge.at > now + EARLY_S:
            self._hedge_at = hedge.at
            return [self._wake()]
        if hedge is None or not self._hedges.may_hedge():
            return [self._wake()]
        self._hedging, self._hedge_reason = len(self._launched), hedge.reason
        return self._launch(decision, now)

    def _next_place(self, now: float) -> Decision:
        return self._places.decide(self._ask, now, [candidate.target.id for candidate in self._launched])

    def _may_launch(self, now: float) -> bool:
        return len(self._launched) < self._max_attempts and now < self._ask.deadline

    def _wake(self) -> WakeAt:
        return WakeAt(self._ask.deadline if self._hedge_at is None else min(self._hedge_at, self._ask.deadline))

    def _reason(self) -> str:
        return self.decision.reason if self.decision else ""

    def _refuse(self, error: ServeError) -> Refuse:
        self.done = True
        return Refuse(error)

    def _finish(self) -> list[Action]:
        self.done = True
        losers: list[Action] = [Cancel(attempt) for attempt in sorted(self._pending)]
        self._pending.clear()
        return losers

    def __repr__(self) -> str:
        state = "DONE" if self.done else f"WAITING for {sorted(self._pending)}" if self._launched else "NEW"
        return f"<RequestMachine {self._ask.model} {state} {len(self._launched)} launched, {len(self._errors)} failed>"


def _another_may_do_better(error: ServeError) -> bool:
    """Whether a target's refusal leaves hope elsewhere. The request itself was checked before it was sent."""
    # A target that cannot make the deadline or lacks the model (an offer that is out of date) speaks for itself only.
    return error.retry_elsewhere or isinstance(error, DeadlineExceeded | NotSupported | ModelNotFound | TooLarge)


def _last_word(ask: Ask, errors: list[tuple[str, ServeError]], refusal: ServeError | None = None) -> ServeError:
    """The error for the caller after the last attempt failed. `refusal`: why there is nowhere else to go."""
    final = [error for _, error in errors if not _another_may_do_better(error)]
    if final:
        return final[0]
    busy = [error for _, error in errors if isinstance(error, Overloaded)]
    if busy:
        waits = [error.retry_after_s for error in busy if error.retry_after_s is not None]
        return Overloaded(_story(errors), retry_after_s=min(waits, default=None))
    if isinstance(refusal, NothingAlive) and all(isinstance(error, Unreachable) for _, error in errors):
        return NothingAlive(f"{_story(errors)}; {refusal.message}")
    return errors[-1][1]


def _too_late(ask: Ask, errors: list[tuple[str, ServeError]]) -> DeadlineExceeded:
    tried = f" ({_story(errors)})" if errors else ""
    return DeadlineExceeded(f"no answer from {ask.model} before the deadline{tried}")


def _story(errors: list[tuple[str, ServeError]]) -> str:
    return "; ".join(f"{target}: {error.message}" for target, error in errors)
