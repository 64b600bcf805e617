"""The request machine is the state machine of one request, without IO: events go in with `now`, actions come out.

    events    arrived · accepted · held · judged · begun · differed · answered · failed · timer · cancelled
    actions   Launch(attempt) · WakeAt(t) · Cancel(attempt) · Show(attempt) · Keep(attempt) · Release(attempt)
              · Answer(attempt) · Refuse(error)

    NEW ──arrived──▶ WAITING ──answered, sure──▶ DONE        (Answer)
      │                │ │ └─ answered, unsure: PROVISIONAL while a better variant works on it, else DONE (Answer)
      │                │ └─ failed with nothing else under way: next target, HELD, or DONE (Refuse)
      │                └─ timer: a hedge beside a silent attempt, or at the deadline DONE (Refuse)
      ├─ no target, but one is expected soon ──▶ HELD ──timer──▶ WAITING, HELD or DONE (Refuse)
      └─ nowhere to go, or already late ──▶ DONE (Refuse)     any ──cancelled──▶ DONE (nothing: no caller)

    WAITING ──begun──▶ BEGUN ──answered──▶ DONE (Answer)
                       │ ▲ ├─ failed, and it may not be gone on with; or the deadline ──▶ DONE (Refuse)
                       │ │ └─ failed, and the caller has all its tokens ──▶ DONE (Answer)
                 failed  begun
    timer: stalled, left │
                       ▼ │
                    RESUMING ──▶ as WAITING (HELD, hedges, fallbacks), with the rest of the answer for a request

    PROVISIONAL ──answered, sure──▶ DONE (Answer)
      └─ nothing better under way any more, or the timer just before the deadline ──▶ DONE (the provisional Answer)

    WAITING ──held──▶ WAITING with a held beginning (`commit_window.py`) ──judged, sure──▶ BEGUN (Show)
      └─ judged, unsure: a better variant is asked beside it, whose `begun` is the answer's; its failure, or the timer
         at the end of the window ──▶ BEGUN by the held one (Show). What was provisional before it stays in hand, and is
         given if the held one fails, or is not whole just before the deadline

    BEGUN with a successor (`handover.py`) ──begun by it──▶ BEGUN by it (Cancel of the one that spoke)
      └─ the successor failed, differed or is given up: BEGUN as before; the one that speaks failed: as without it

How sure an answer is comes with its event: a confidence from 0 to 1, or None where it is not judged, which counts as
sure. An unsure answer makes every attempt of no better a variant pointless, so those are cancelled; one of a better
variant that is under way already (a hedge) is as good as an escalation, and none is launched (`escalation.py`).

An answer that comes in parts is shown to the caller as it comes, so the first part settles which attempt answers: every
other one is cancelled (a hedge is a race to the first token). What fails from then on fails the request, unless the
answer may be gone on with elsewhere (`resumption.py`). Then all begins anew with what is left of it: from its launch on
an attempt is told how many tokens there are, and the first that begins goes on from there. A target that has not
failed, but stalls or leaves, is left only for another one: without one its answer goes on as it did.

With `handovers` an answer may also leave a target that is well, for a better place: its successor is asked beside it,
and begins where the caller has come to by then. What the one that speaks says meanwhile may be kept back (`Keep`), and
is given to the caller with `Release`, or to no one where it is cancelled. One is tried an answer.

Where the model judges itself by its first tokens, an attempt of a variant that may be outdone holds them back: it says
`held` at the first one instead of `begun`, and `judged` once there are enough. It has begun when it is told to `Show`.

The live gateway performs the actions with tasks and connections, the simulator with a virtual clock; neither decides
anything. Attempts are numbered from 0 in the order of their launch; a new attempt never goes where one went before,
unless only the connection had ended under that one: over a new connection the same target is as good as any. While an
answer is to be gone on with, and no other is left, it may go to any but the one that failed last.

HELD: every connection may be lost in one instant (a switch, a NAT, a proxy that restarts) and most are back within a
few round trips. A refusal for want of a target that says when one may be back (`retry_after_s` of at most `HOLD_S`)
is therefore looked at again then, instead of being handed to the caller.

Invariants, kept under any interleaving of events:
- exactly one terminal action (Answer or Refuse) unless cancelled, and nothing after it but the Cancels beside it;
- the first sure answer wins, or the first to begin, and nothing replaces that one;
- an error never beats an attempt that is still under way, nor a provisional answer;
- a provisional answer is declared, is given before the deadline, and is only beaten by a better variant's;
- at most `max_attempts` launches, and twice as many with those whose connections ended, before the first part and after
  each resumption, of which there are at most `resumption.MOST`; none at or after the deadline;
- at most one attempt has begun and is under way: none begins before the one that had begun has ended or is cancelled,
  which a successor's beginning does;
- when the request is done, every attempt has ended or is cancelled: no work is orphaned;
- one timer: each WakeAt replaces the one before.

An answer that is here after the deadline but before its timer is still given: it exists, and `late` is for the metrics
to say. Timers may come up to a millisecond early (event loops round), which counts as due.

A target that calls the request invalid is contradicted by one that answers it; so one other is asked, and no more.

When everything failed, the error that helps the caller most is reported. When the targets were all unreachable that is
`nothing_alive`, since then there is no target left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.core.fleet.variant_rank import is_degraded_answer, is_lesser
from gateway.core.placement.ask import Ask
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Decision
from gateway.core.placement.probing import REASON as PROBE
from gateway.core.request.commit_window import HeldBeginning, awaited_until, judged_by, window_ends_at
from gateway.core.request.escalation import Escalations, provisional_due_at
from gateway.core.request.handover import BEGINS, HandoverPlan, HandoverPolicy, Successor
from gateway.core.request.hedging import (
    EARLY_S,
    HOPELESS,
    DeadlineHedging,
    HedgePolicy,
    PendingAttempt,
    computed_share,
    next_look_at,
)
from gateway.core.request.resumption import STALLED, Resumption, StreamTrouble, shown_in_s
from tidegate.fleet.offers import VariantOffer
from tidegate.outcome import (
    DeadlineExceeded,
    Disconnected,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NothingAlive,
    NotSupported,
    Overloaded,
    ServeError,
    TooLarge,
    Unauthenticated,
    Unreachable,
)
from tidegate.types import PLANNED, Accepted, Resumed, Route

MAX_ATTEMPTS: Final = 3
HOLD_S: Final = 0.02  # beyond, an early refusal serves the caller better
HANDOVER_LOOK_S: Final = 0.02  # after the first token: its instant has to be known
RESUMED: Final = "resumed"  # why an attempt was launched that goes on with another one's answer
_LATEST_USEFUL: Final = DeadlineHedging()


class Launch(NamedTuple):
    """Send the request to the candidate's target, in its variant."""

    attempt: int
    candidate: Candidate
    ask: Ask  # for which the candidate was chosen
    answered: int = 0  # tokens of the answer that the caller has: it goes on after these


class WakeAt(NamedTuple):
    """Call `timer` at this instant; replaces the one before."""

    at: float


class Cancel(NamedTuple):
    """The result of this attempt is not needed any more."""

    attempt: int
    hopeless: bool = False  # its answer would be late, by all that is known: its request is placed elsewhere
    error: ServeError | None = None  # it had begun, and gave nothing more: what that counts as


class Show(NamedTuple):
    """Give the caller the beginning that this attempt holds back, and what comes: it is the one."""

    attempt: int


class Keep(NamedTuple):
    """Keep back what this attempt says from now on: it is given to nobody, until `Release` or its end."""

    attempt: int


class Release(NamedTuple):
    """Give the caller what was kept of this attempt, and what comes."""

    attempt: int


class Answer(NamedTuple):
    """Give the caller this attempt's answer, and say how it came about. Terminal."""

    attempt: int
    candidate: Candidate
    route: Route


class Refuse(NamedTuple):
    """Give the caller this error. Terminal."""

    error: ServeError


Action = Launch | WakeAt | Cancel | Show | Keep | Release | Answer | Refuse


class RequestMachine:
    """Mutable: call one of the ten events at a time and perform what it returns, in order."""

    __slots__ = (
        "_arrived_at", "_ask", "_beginning", "_begun", "_due_at", "_errors", "_escalations", "_handovers", "_hedge_at",
        "_hedges", "_hedging", "_held", "_launched", "_launched_before", "_lost", "_lost_share", "_max_attempts",
        "_may_look", "_pending", "_placement", "_provisional", "_reasons", "_resumed", "_resumption", "_shown_unsure",
        "_successor", "_tried", "_watched", "_whole", "decision", "done",
    )  # fmt: skip

    def __init__(
        self,
        ask: Ask,
        placement: Placement,
        *,
        max_attempts: int = MAX_ATTEMPTS,
        hedges: HedgePolicy = _LATEST_USEFUL,
        escalations: Escalations | None = None,
        resumption: Resumption | None = None,
        handovers: HandoverPolicy | None = None,
    ) -> None:
        """Args:
        escalations: None: every answer will do.
        resumption: None: an answer that has begun is not gone on with elsewhere.
        handovers: None: nor for a better place. Of no account without `resumption`.
        """
        self.done = False
        self.decision: Decision | None = None  # the first one, for explanations
        self._ask = ask
        self._placement = placement
        self._hedges = hedges
        self._escalations = escalations
        self._max_attempts = max_attempts
        self._launched: list[Candidate] = []  # by attempt
        self._reasons: list[str] = []  # by attempt: why it was launched
        self._tried: list[str] = []  # targets that had their chance: those whose connection ended under it had none
        self._pending: set[int] = set()
        self._errors: list[tuple[str, ServeError]] = []  # (target, why), in order
        self._lost_share = 1.0  # of the compute of the attempt that failed last
        self._hedge_at: float | None = None
        self._may_look = False
        self._hedging: int | None = None  # the attempt that was launched beside a silent one
        self._watched: list[PendingAttempt] = []  # by attempt, with its target's promise
        self._held = False  # no target is there, one may be at the next timer
        self._begun: int | None = None  # the attempt whose answer the caller sees already
        self._provisional: int | None = None  # the attempt whose unsure answer is in hand
        self._beginning: HeldBeginning | None = None
        self._shown_unsure: int | None = None  # the attempt whose beginning was shown though it was unsure
        self._arrived_at = 0.0
        self._due_at = ask.deadline  # when that answer has to be given
        self._whole = ask  # `_ask` is what is left of it
        self._resumption = resumption
        self._lost: _Lost | None = None  # the attempt whose answer is to be gone on with
        self._launched_before = 0  # attempts before the latest resumption
        self._resumed: list[Resumed] = []
        may_leave = ask.generation is not None and resumption is not None and not resumption.terms.barred
        self._handovers = handovers if may_leave else None  # None as well once one was tried
        self._successor: Successor | None = None  # that is to go on with what another one still says

    @property
    def reasons(self) -> Sequence[str]:
        """By attempt: why it was launched. For explanations."""
        return self._reasons

    def arrived(self, now: float) -> list[Action]:
        """The request is here: place it."""
        self._arrived_at = now
        if self._escalations is not None:
            self._due_at = provisional_due_at(now, self._ask.deadline)
        return self._place_first(now)

    def _place_first(self, now: float) -> list[Action]:
        """Launch the first attempt: on arrival, or after a wait for a target that may come."""
        if now >= self._ask.deadline:
            return [self._refuse(_too_late(self._ask, self._errors))]
        self.decision = decision = self._placement.decide(self._ask, now)
        if decision.refusal is not None:
            return self._hold(decision.refusal, now) or [self._refuse(decision.refusal)]
        self._hedges.arrived()
        if self._handovers is not None:
            return self._begin(self._handovers, decision, now)
        return self._launch(decision, now, decision.reason)

    def accepted(self, attempt: int, accepted: Accepted, now: float) -> list[Action]:
        """The target took it into its queue and says when it will be done."""
        if attempt not in self._pending or self._begun is not None:
            return []
        watched = self._watched[attempt]
        candidate = watched.candidate
        promised_at = now + accepted.finish_in_s + candidate.link_s / 2
        watched = watched._replace(promised_at=promised_at)
        self._watched[attempt] = watched
        if self._beginning is not None:
            return []
        if attempt != len(self._launched) - 1 or not self._may_look or now + EARLY_S >= self._ask.deadline:
            return []
        look_at = self._hedges.second_look(self._ask, watched, now)
        if look_at is None:
            return []
        if look_at > now + EARLY_S:
            self._hedge_at = look_at
            return [self._wake()]
        self._hedge_at = None
        return self._hedge(now)

    def begun(self, attempt: int, now: float) -> list[Action]:
        """The beginning of this attempt's answer is here, which is shown to the caller at once: it is the one."""
        if self.done or attempt not in self._pending:
            return []
        if self._begun is not None:
            return self._take_over(attempt, self._begun, now)
        self._begun, self._hedge_at = attempt, None
        self._beginning = self._provisional = None
        losers: list[Action] = [Cancel(one) for one in sorted(self._pending) if one != attempt]
        self._pending = {attempt}
        if self._resumption is not None:
            candidate = self._launched[attempt]
            self._note_resumed(candidate, now)
            self._hedge_at = self._resumption.begun(candidate, now)
            if self._handovers is not None:
                self._hedge_at = min(self._hedge_at, now + HANDOVER_LOOK_S)
        return [*losers, self._wake()]

    def held(self, attempt: int, now: float) -> list[Action]:
        """The first token of this attempt's answer is here, and is held back with those that come."""
        if self.done or attempt not in self._pending or self._begun is not None:
            return []
        if self._beginning is not None or self._provisional is not None or self._escalations is None:
            return []  # there is something in hand already
        by = judged_by(self._launched[attempt], self._escalations.window, now)
        self._beginning = HeldBeginning(attempt, min(by, self._window_ends_at()))
        self._hedge_at = None
        return self._show(self._beginning, now) if now + EARLY_S >= self._beginning.due_at else [self._wake()]

    def judged(self, attempt: int, confidence: float | None, now: float) -> list[Action]:
        """So many tokens are held as judge an answer. `confidence`: as in `answered`."""
        if self.done or attempt not in self._pending or self._begun is not None or self._escalations is None:
            return []
        if self._escalations.judge(confidence):
            return [Show(attempt), *self.begun(attempt, now)]
        unsure = self._launched[attempt].variant
        self._beginning = HeldBeginning(attempt, self._window_ends_at(), is_unsure=True)
        if self._provisional is not None:  # it was waited for that beginning, and is for its end from here on
            self._due_at = provisional_due_at(self._arrived_at, self._ask.deadline)
        dropped = self._drop_pointless(unsure, but=attempt)
        if now + EARLY_S >= self._beginning.due_at:
            return [*dropped, *self._show(self._beginning, now)]
        if len(self._pending) > 1:
            return [*dropped, self._wake()]
        return [*dropped, *self._escalate(attempt, self._escalations, now)]

    def differed(self, attempt: int, now: float) -> list[Action]:
        """A successor's tokens are others than those that the caller has: it can go on with nothing."""
        return [] if self.done or not self._is_successor(attempt) else self._go_on_alone(now)

    def answered(self, attempt: int, now: float, confidence: float | None = None) -> list[Action]:
        """A good answer is here. `confidence`: how sure the model is of it, 0 to 1; None: that is not asked of it."""
        if self.done or attempt not in self._pending:
            return []
        if self._is_successor(attempt):  # it ends where the caller has come to by then, or sooner
            self._pending.discard(attempt)
            return self._go_on_alone(now)
        self._pending.discard(attempt)
        if self._beginning is not None and self._beginning.attempt == attempt:
            return self._whole_of_beginning(self._beginning, now, confidence)
        if self._lost is not None:
            self._note_resumed(self._launched[attempt], now)  # the rest came at once, or there was none
        if self._escalations is None or self._begun is not None or self._escalations.judge(confidence):
            return self._give(attempt)
        return self._unsure(attempt, self._escalations, now)

    def failed(self, attempt: int, error: ServeError, now: float) -> list[Action]:
        """An attempt ended without an answer."""
        if self.done or attempt not in self._pending:
            return []
        if self._is_successor(attempt):  # nothing is lost
            self._pending.discard(attempt)
            return self._go_on_alone(now)
        self._pending.discard(attempt)
        self._errors.append((self._launched[attempt].target.id, error))
        if self._begun is not None:
            return [*self._drop_successor(gone=True), *self._go_on(error, now)]
        self._lost_share = 1.0
        if isinstance(error, Disconnected | DeadlineExceeded):
            self._lost_share = computed_share(self._watched[attempt], now)
        if isinstance(error, Disconnected):
            self._tried.remove(self._launched[attempt].target.id)
        held = self._beginning
        if held is not None:
            if attempt != held.attempt:
                is_alone = held.is_unsure and self._pending == {held.attempt}
                return self._show(held, now) if is_alone else []
            # What is left is insured no longer, but for a whole answer in hand.
            self._beginning, self._hedge_at = None, now if self._provisional is None else None
        if self._pending:
            return self._look_sooner(now)
        if self._provisional is not None:
            return self._give(self._provisional)
        if not self._may_launch(now) or not self._is_hope_elsewhere(attempt):
            return [self._refuse(_last_word(self._ask, self._errors))]
        return self._fall_back(error, now)

    def _is_hope_elsewhere(self, attempt: int) -> bool:
        """Whether a target that was not asked yet may answer after all these refusals, the last one of `attempt`.

        What was sent had been checked here, so a target that calls it invalid may be what is wrong: it holds other
        files than it says, and would draw more and more requests, since a refusal is fast. One other is asked then;
        two are believed, and so is one that has bounds of its own.
        """
        errors = [error for _, error in self._errors]
        final = [error for error in errors if not _another_may_do_better(error)]
        if not final:
            return True
        if final != errors[-1:] or type(final[0]) is not InvalidRequest:
            return False
        return not self._launched[attempt].target.spec.has_bounds_of_its_own

    def timer(self, now: float) -> list[Action]:
        """The instant of the latest WakeAt has come."""
        if self.done:
            return []
        due = now + EARLY_S
        if self._provisional is not None and due >= self._due_at:
            return self._give(self._provisional)
        if self._beginning is not None:
            return self._show(self._beginning, now) if due >= self._beginning.due_at else [self._wake()]
        if self._provisional is not None:
            return [self._wake()]
        if due >= self._ask.deadline:
            if self._begun is not None and self._resumption is not None and self._resumption.is_complete:
                dropped = self._drop_successor(gone=True)
                return [*dropped, *self._complete(self._begun, Cancel(self._begun))]
            return [self._refuse(_too_late(self._ask, self._errors)), *self._finish()]
        if self._begun is not None:
            return self._look(now)
        if self._held:
            return self._fall_back(self._errors[-1][1], now) if self._errors else self._place_first(now)
        if self._hedge_at is None or due < self._hedge_at:
            return [self._wake()]
        self._hedge_at = None
        return self._hedge(now)

    def cancelled(self, now: float) -> list[Action]:
        """The caller went away."""
        return [] if self.done else self._finish()

    def _fall_back(self, error: ServeError, now: float) -> list[Action]:
        """Another attempt after the last one failed with `error`, if there is a target and it may be paid."""
        if not self._ask.again and isinstance(error, Disconnected):
            self._ask = self._ask._replace(again=True)
        decision = self._placement.decide(self._ask, now, self._tried)
        if decision.refusal is not None and self._lost is not None:
            # The caller has a part of the answer: a target that was left before may be well again.
            decision = self._placement.decide(self._ask, now, (self._errors[-1][0],))
        if decision.refusal is not None:
            last_word = _last_word(self._ask, self._errors, decision.refusal)
            held = [] if isinstance(last_word, InvalidRequest) else self._hold(decision.refusal, now)
            return held or [self._refuse(last_word)]
        # A refusal has cost no compute, and is placed again for free.
        if not isinstance(error, Overloaded) and not self._may_pay(error):
            return [self._refuse(_last_word(self._ask, self._errors))]
        return self._launch(decision, now, "fallback" if self._lost is None else RESUMED)

    def _may_pay(self, error: ServeError) -> bool:
        """Spend another attempt after `error`. A second opinion overdraws nothing, which failovers may need."""
        if isinstance(error, InvalidRequest):
            return self._hedges.may_hedge()
        return self._hedges.may_fall_back(self._lost_share)

    # an answer that has begun

    def _look(self, now: float) -> list[Action]:
        """Leave the target that speaks, if it has stalled or is leaving, and another is there."""
        assert self._begun is not None
        if self._resumption is None:
            return [self._wake()]
        if self._successor is not None:
            is_given_up = now + EARLY_S >= self._successor.gives_up_at
            return self._go_on_alone(now) if is_given_up else self._await_successor(self._successor, now)
        found = self._resumption.look(self._launched[self._begun], now)
        if isinstance(found, StreamTrouble):
            left = self._leave(self._begun, found, self._resumption, now)
            if left is not None:
                return left
            found = self._resumption.put_off(now)
        self._hedge_at = found
        if self._handovers is not None:
            return self._plan_handover(self._begun, self._handovers, self._resumption, now)
        return [self._wake()]

    def _leave(self, attempt: int, trouble: StreamTrouble, resumption: Resumption, now: float) -> list[Action] | None:
        """None: it stays where it is."""
        words = f"no token came for {trouble.silent_s:.2f} s" if trouble.why == STALLED else "it is leaving"
        error = Unreachable(words) if trouble.why == STALLED else None
        if resumption.is_complete:
            return None if error is None else self._complete(attempt, Cancel(attempt, error=error))
        if resumption.why_never(None, len(self._resumed)):
            return None
        decision = self._place_rest(attempt, resumption, now)
        if decision.chosen is None or (trouble.why == STALLED and shown_in_s(decision.chosen) > trouble.silent_s):
            return None
        self._pending.discard(attempt)
        self._resume(attempt, trouble.why, Unreachable(words), decision)
        return [Cancel(attempt, error=error), *self._launch(decision, now, RESUMED)]

    # a better place for the rest of an answer

    def _begin(self, handovers: HandoverPolicy, decision: Decision, now: float) -> list[Action]:
        """Launch the first attempt: where the decision says, or where the answer begins better for another to end."""
        first = handovers.begins(self._ask, decision, now)
        if first is not None:
            others = [one.target.id for one in decision.candidates if one.target is not first.target]
            begun = self._placement.decide(self._ask, now, others).chosen  # with what its tenant pays there
            if begun is not None and begun.target is first.target:
                self.decision = decision.choosing(begun)
                return self._launch(self.decision, now, BEGINS)
        return self._launch(decision, now, decision.reason)

    def _plan_handover(
        self, attempt: int, handovers: HandoverPolicy, resumption: Resumption, now: float
    ) -> list[Action]:
        """Ask a better place for the rest beside the one that speaks, or look again."""
        assert self._hedge_at is not None
        if not len(resumption.answer) or resumption.is_complete or resumption.why_never(None, len(self._resumed)):
            return [self._wake()]
        speaks = self._launched[attempt]
        decision = self._place_rest(attempt, resumption, now)
        found = handovers.plan(self._whole, speaks, resumption, decision, now)
        if not isinstance(found, HandoverPlan):
            self._hedge_at = min(self._hedge_at, found)
            return [self._wake()]
        if not handovers.may_hand_over(found.share):
            return [self._wake()]
        self._handovers = None  # one is tried
        return self._launch_successor(attempt, decision, found, len(resumption.answer), now)

    def _launch_successor(
        self, speaks: int, decision: Decision, plan: HandoverPlan, answered: int, now: float
    ) -> list[Action]:
        chosen = decision.chosen
        assert chosen is not None
        attempt = len(self._launched)
        self._launched.append(chosen)
        self._reasons.append(PLANNED)
        self._pending.add(attempt)
        self._watched.append(PendingAttempt(chosen, now))
        self._successor = successor = Successor(attempt, plan.keeps_until, plan.gives_up_at)
        self._hedge_at = successor.look_at
        kept: list[Action] = [] if plan.keeps_until is None else [Keep(speaks)]
        return [*kept, Launch(attempt, chosen, decision.ask, answered), self._wake()]

    def _is_successor(self, attempt: int) -> bool:
        return self._successor is not None and self._successor.attempt == attempt

    def _await_successor(self, successor: Successor, now: float) -> list[Action]:
        """Its answer stays where it is for now; what was kept back long enough is given to the caller."""
        released: list[Action] = []
        if successor.keeps_until is not None and now + EARLY_S >= successor.keeps_until:
            assert self._begun is not None
            released = [Release(self._begun)]
            successor = self._successor = successor._replace(keeps_until=None)
        self._hedge_at = successor.look_at
        return [*released, self._wake()]

    def _go_on_alone(self, now: float) -> list[Action]:
        """No successor comes of it. The target that speaks is looked at again once what was kept of it is given."""
        assert self._resumption is not None
        dropped = self._drop_successor()
        self._hedge_at = self._resumption.look_again(now)
        return [*dropped, self._wake()]

    def _drop_successor(self, *, gone: bool = False) -> list[Action]:
        """Cancel it. Args: gone: the one that speaks has ended, and what was kept of it is given already."""
        successor, self._successor = self._successor, None
        if successor is None:
            return []
        dropped: list[Action] = []
        if successor.attempt in self._pending:
            self._pending.discard(successor.attempt)
            dropped.append(Cancel(successor.attempt))
        if successor.keeps_until is not None and not gone and self._begun is not None:
            dropped.append(Release(self._begun))
        return dropped

    def _take_over(self, attempt: int, left: int, now: float) -> list[Action]:
        """The successor's first token that the caller does not have is here: from here on the answer is its own."""
        if not self._is_successor(attempt) or self._resumption is None:
            return []
        by = self._launched[attempt]
        self._resumed.append(self._resumption.resumed(self._launched[left], by, PLANNED, now))
        self._begun, self._successor = attempt, None
        self._pending.discard(left)
        self._hedge_at = self._resumption.begun(by, now)
        return [Cancel(left), self._wake()]

    def _go_on(self, error: ServeError, now: float) -> list[Action]:
        """The attempt that had begun has failed: what was shown cannot be taken back, but it may be gone on with."""
        attempt, resumption = self._begun, self._resumption
        assert attempt is not None
        if resumption is None:
            return [self._refuse(error)]
        if resumption.is_complete:
            return self._complete(attempt)
        why_never = resumption.why_never(error, len(self._resumed))
        if why_never or now + EARLY_S >= self._ask.deadline:
            words = _broken_off_words(error, resumption, why_never or "its time is over")
            return [self._refuse(type(error)(words, retry_after_s=error.retry_after_s))]
        decision = self._place_rest(attempt, resumption, now, same=isinstance(error, Disconnected))
        self._resume(attempt, error.code, error, decision)
        if decision.refusal is not None:
            return self._hold(decision.refusal, now) or [self._refuse(decision.refusal)]
        return self._launch(decision, now, RESUMED)

    def _place_rest(self, attempt: int, resumption: Resumption, now: float, *, same: bool = False) -> Decision:
        """Where the rest of the answer may go. Args: same: also to the same target, over another connection."""
        exclude = () if same else (self._launched[attempt].target.id,)
        return self._placement.decide(resumption.remaining(self._whole), now, exclude)

    def _resume(self, attempt: int, why: str, error: ServeError, decision: Decision) -> None:
        """From here on the rest of the answer is the request."""
        target = self._launched[attempt].target.id
        self._lost, self._begun, self._hedge_at = _Lost(attempt, why, error), None, None
        self._ask, self._launched_before = decision.ask, len(self._launched)
        self._tried = [] if isinstance(error, Disconnected) else [target]
        self._errors = [(target, error)]

    def _note_resumed(self, by: Candidate, now: float) -> None:
        """Another target goes on, where one was lost."""
        if self._lost is None or self._resumption is None:
            return
        lost, self._lost = self._lost, None
        self._resumed.append(self._resumption.resumed(self._launched[lost.attempt], by, lost.why, now))

    def _complete(self, attempt: int, *cancel: Cancel) -> list[Action]:
        """The caller has all the tokens that it asked for: their target need not say so."""
        end = Answer(attempt, self._launched[attempt], self.route_of(attempt))
        self._pending.discard(attempt)
        self.done = True
        return [end, *cancel]

    def _hold(self, refusal: ServeError, now: float) -> list[Action]:
        """Look again when a target may be there; nothing where that is too far off, or too late."""
        again_s = refusal.retry_after_s if isinstance(refusal, NothingAlive) else None
        self._held = False
        if again_s is None or not 0.0 < again_s <= HOLD_S or now + again_s + EARLY_S >= self._ask.deadline:
            return []
        self._held, self._hedge_at = True, None
        return [WakeAt(now + again_s)]

    def _launch(self, decision: Decision, now: float, reason: str) -> list[Action]:
        chosen, other = decision.chosen, decision.best_other()
        assert chosen is not None  # a decision without refusal has one
        attempt = len(self._launched)
        self._held = False
        self._launched.append(chosen)
        self._tried.append(chosen.offered.target.spec.id)
        self._reasons.append(reason)
        self._pending.add(attempt)
        self._watched.append(PendingAttempt(chosen, now, None, reason == PROBE, decision.best_apart() or other))
        # A provisional answer is insurance enough. After the one hedge a request may still move (`_hedge`).
        is_insured = self._provisional is not None or self._beginning is not None
        self._may_look = may_look = not is_insured and self._may_launch(now)
        self._hedge_at = self._hedges.first_look(self._ask, chosen, other, now) if other and may_look else None
        answered = 0 if self._lost is None or self._resumption is None else len(self._resumption.answer)
        return [Launch(attempt, chosen, decision.ask, answered), self._wake()]

    def _hedge(self, now: float) -> list[Action]:
        latest = max(self._pending)  # only a launch sets the timer that leads here, and the last end sets it anew
        watched = self._watched[latest]
        if self._is_overdue(latest, now):
            self._hedges.overdue(watched, now)
        decision, is_apart = self._place_beside(now)
        hedge = self._hedges.plan(self._ask, watched, decision, now)
        is_due = hedge is not None and hedge.at <= now + EARLY_S
        if hedge is not None and hedge.instead and is_due and (self._hedging is None or hedge.instead != HOPELESS):
            return self._move(latest, decision, hedge.instead, now)
        # One hedge a request: more than that is load, not insurance. It may still leave a target that has stalled, and
        # where two of a tier owe their answers what they share may be at fault: another tier is worth a second.
        may_hedge = self._hedging is None or (is_apart and all(self._is_overdue(one, now) for one in self._pending))
        if hedge is not None and hedge.at > now + EARLY_S and may_hedge:
            self._hedge_at = hedge.at
            return [self._wake()]
        if hedge is None or not may_hedge or not self._hedges.may_hedge(hedge.share):
            self._hedge_at = next_look_at(
                now, self._ask.deadline, first_by=_first_by(self._ask), is_overdue=self._is_overdue(latest, now)
            )
            return [self._wake()]
        self._hedging = len(self._launched)
        return self._launch(decision, now, hedge.reason)

    def _is_overdue(self, attempt: int, now: float) -> bool:
        """Whether its target has broken its promise, or has not given one that it should have given by now."""
        watched = self._watched[attempt]
        if watched.promised_at is None:
            return watched.candidate.offered.target.link.acknowledges
        return now > watched.promised_at

    def _look_sooner(self, now: float) -> list[Action]:
        """One of several attempts has failed: what is left is insured no longer, and is looked after at once."""
        if self._hedge_at is None or self._provisional is not None:
            return []
        self._hedge_at = now
        return [self._wake()]

    def _place_beside(self, now: float) -> tuple[Decision, bool]:
        """Where an attempt beside the silent ones would go, and whether that is another tier than all of theirs.

        The last one goes to another tier, where one takes it: what two targets of a tier have in common may be broken.
        """
        tried = [one for one in self._launched if one.target.id in self._tried]
        if self._launched_before == 0 and 1 < len(tried) == self._max_attempts - 1:
            apart = self._hedges.avoid(tried, apart=True)
            if apart:
                decision = self._placement.decide(self._ask, now, apart)
                if decision.refusal is None:
                    return decision, True
        return self._placement.decide(self._ask, now, self._hedges.avoid(tried)), False

    def _move(self, hopeless: int, decision: Decision, why: str, now: float) -> list[Action]:
        """Take the attempt that will not be in time out of its queue, as if it had been refused."""
        self._pending.discard(hopeless)
        self._errors.append((self._launched[hopeless].target.id, Overloaded(why)))
        return [Cancel(hopeless, hopeless=True), *self._launch(decision, now, "fallback")]

    def _unsure(self, attempt: int, escalations: Escalations, now: float) -> list[Action]:
        """Keep the answer, and escalate the request to a better variant if one has time for it."""
        self._provisional, self._beginning, self._hedge_at = attempt, None, None
        dropped = self._drop_pointless(self._launched[attempt].variant)
        if now + EARLY_S >= self._due_at:
            return [*dropped, *self._give(attempt)]
        if self._pending:
            return [*dropped, self._wake()]
        return [*dropped, *self._escalate(attempt, escalations, now)]

    def _drop_pointless(self, unsure: VariantOffer, *, but: int | None = None) -> list[Action]:
        """Cancel what is under way of no better a variant than the one that was not sure."""
        pointless = [
            one
            for one in sorted(self._pending)
            if one != but and not is_lesser(unsure, than=self._launched[one].variant)
        ]
        self._pending.difference_update(pointless)
        return [Cancel(one) for one in pointless]

    def _escalate(self, unsure: int, escalations: Escalations, now: float) -> list[Action]:
        """Ask a better variant than that of an attempt whose answer, or its beginning, is in hand; or give that."""
        raised = escalations.raised(self._ask, self._launched[unsure].variant)
        if raised is None or not self._may_launch(now):
            return self._settle(unsure, now)
        decision = self._placement.decide(raised, now, self._tried)
        if self._ask.generation is None:
            is_promising = escalations.is_promising(decision, self._due_at)
        else:
            due_at = provisional_due_at(self._arrived_at, self._ask.deadline)
            until = awaited_until(decision, self._window_ends_at(), due_at)
            is_promising = until is not None and not escalations.is_suspended()
            if until is not None and self._beginning is not None:
                self._beginning = self._beginning._replace(due_at=until)
            elif until is not None:
                self._due_at = until
        if not is_promising or not escalations.may_escalate():
            return self._settle(unsure, now)
        return self._launch(decision, now, "escalated")

    def _settle(self, unsure: int, now: float) -> list[Action]:
        """Nothing better comes: what is in hand is given."""
        return self._give(unsure) if self._beginning is None else self._show(self._beginning, now)

    # an answer whose beginning is held back

    def _window_ends_at(self) -> float:
        return window_ends_at(self._ask, self._arrived_at)

    def _show(self, held: HeldBeginning, now: float) -> list[Action]:
        """The beginning in hand is the answer's, whatever was thought of it; or a whole answer, once it is due."""
        if self._provisional is not None and now + EARLY_S >= self._due_at:
            return self._give(self._provisional)
        if now + EARLY_S >= self._ask.deadline:  # nobody is shown what is broken off in the same breath
            return [self._refuse(_too_late(self._ask, self._errors)), *self._finish()]
        if held.is_unsure:
            self._shown_unsure = held.attempt
        return [Show(held.attempt), *self.begun(held.attempt, now)]

    def _whole_of_beginning(self, held: HeldBeginning, now: float, confidence: float | None) -> list[Action]:
        """The answer whose beginning is held ended. Args: confidence: of the whole, if it had not been judged."""
        self._beginning = None
        assert self._escalations is not None
        if not held.is_unsure:
            self._due_at = min(self._due_at, self._window_ends_at())
            is_sure = self._escalations.judge(confidence)
            return self._give(held.attempt) if is_sure else self._unsure(held.attempt, self._escalations, now)
        self._provisional, self._due_at = held.attempt, held.due_at
        return [self._wake()] if self._pending else self._give(held.attempt)

    def _give(self, attempt: int) -> list[Action]:
        """The end, with this attempt's answer."""
        return [Answer(attempt, self._launched[attempt], self.route_of(attempt)), *self._finish()]

    def route_of(self, attempt: int) -> Route:
        """How this attempt's answer came about, as it stands now."""
        candidate, reason = self._launched[attempt], self._reasons[attempt]
        return Route(
            candidate.offered.target.spec.id,
            reason,
            candidate.offered.variant.name,
            attempts=len(self._launched),
            hedged=self._hedging is not None,
            fallback=reason == "fallback",
            degraded=is_degraded_answer(candidate.variant, demanded=bool(self._ask.variant))
            or (attempt > 0 and is_lesser(candidate.variant, than=self._launched[0].variant)),
            provisional=attempt in (self._provisional, self._shown_unsure),
            resumed=tuple(self._resumed),
        )

    def _may_launch(self, now: float) -> bool:
        # One whose connection ended under it had no chance: where many end, one after another, it may need a few.
        made = len(self._launched) - self._launched_before
        within = len(self._tried) < self._max_attempts and made < 2 * self._max_attempts
        return within and now < self._ask.deadline

    def _wake(self) -> WakeAt:
        end, hedge_at = self._ask.deadline if self._provisional is None else self._due_at, self._hedge_at
        if self._beginning is not None:
            end = min(end, self._beginning.due_at)
        return WakeAt(end if hedge_at is None or hedge_at > end else hedge_at)

    def _refuse(self, error: ServeError) -> Refuse:
        self.done = True
        if self._lost is not None and self._resumption is not None:
            kind = type(error) if isinstance(error, DeadlineExceeded) else type(self._lost.error)
            error = kind(_broken_off_words(self._lost.error, self._resumption, error.message))
        return Refuse(error)

    def _finish(self) -> list[Action]:
        self.done = True
        if not self._pending:
            return []
        losers: list[Action] = [Cancel(attempt) for attempt in sorted(self._pending)]
        self._pending.clear()
        return losers

    def __repr__(self) -> str:
        begun = self._launched or self._held
        stage = "WAITING" if self._provisional is None else "PROVISIONAL, waiting"
        stage = stage if self._lost is None else "RESUMING, waiting"
        waiting = "BEGUN, waiting" if self._begun is not None else "HELD, waiting" if self._held else stage
        state = "DONE" if self.done else f"{waiting} for {sorted(self._pending)}" if begun else "NEW"
        return f"<RequestMachine {self._ask.model} {state} {len(self._launched)} launched, {len(self._errors)} failed>"


class _Lost(NamedTuple):
    """An attempt that had begun, and is gone."""

    attempt: int
    why: str
    error: ServeError


def _first_by(ask: Ask) -> float | None:
    """The instant by which the first token of a generation is due; None without such a budget."""
    return None if ask.generation is None else ask.generation.first_by


def _broken_off_words(error: ServeError, resumption: Resumption, why: str) -> str:
    """What the caller is told at the end of an answer that is not gone on with. Args: error: by which it was lost."""
    return f"{error.message}; after {len(resumption.answer)} tokens it could not be gone on with: {why}"


def _another_may_do_better(error: ServeError) -> bool:
    """Whether a target's refusal leaves hope elsewhere. The request itself was checked before it was sent."""
    # A target that cannot make the deadline or lacks the model (an offer that is out of date) speaks for itself only.
    # One that does not know this gateway speaks of us, not of the caller. A site without a place for it is one of many.
    return error.retry_elsewhere or isinstance(
        error, DeadlineExceeded | NotSupported | ModelNotFound | TooLarge | Unauthenticated | Forbidden | NothingAlive
    )


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
        return NothingAlive(f"{_story(errors)}; {refusal.message}", retry_after_s=refusal.retry_after_s)
    last = errors[-1][1]
    # The caller was let in here; that a target lets us not in is ours to mend, and no 401 for it to puzzle over.
    return Unreachable(_story(errors)) if isinstance(last, Unauthenticated | Forbidden) else last


def _too_late(ask: Ask, errors: list[tuple[str, ServeError]]) -> DeadlineExceeded:
    tried = f" ({_story(errors)})" if errors else ""
    return DeadlineExceeded(f"no answer from {ask.model} before the deadline{tried}")


def _story(errors: list[tuple[str, ServeError]]) -> str:
    return "; ".join(f"{target}: {error.message}" for target, error in errors)
