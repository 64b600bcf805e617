"""What must hold of one request's life, and of every decision, whatever the order of events.

`Incarnation` checks the actions of one machine before they are performed. `WatchedPlaces` stands between the machines
and the placer, and checks what is decided.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf, isfinite
from typing import Final, NamedTuple

from gateway.core.estimate.link_estimate import LOST
from gateway.core.fleet.target import TargetView
from gateway.core.fleet.variant_rank import is_lesser
from gateway.core.placement.ask import Ask
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Decision, Placer
from gateway.core.placement.probing import REASON
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.escalation import provisional_due_at
from gateway.core.request.hedge_by_chance import failure_domain
from gateway.core.request.hedging import EARLY_S
from gateway.core.request.machine import HOLD_S, Action, Answer, Cancel, Launch, Refuse, RequestMachine, Show, WakeAt
from tidegate.outcome import DeadlineExceeded
from tidegate.placement_pin import INSIDE

_EVENTS: Final = (
    "arrived", "accepted", "answered", "unsure", "failed", "refused", "timer", "cancelled", "old news", "begun",
    "held", "doubted",
)  # fmt: skip
_ACTIONS: Final = {Launch: 100, WakeAt: 101, Cancel: 102, Answer: 103, Refuse: 104, Show: 105}


class Event(NamedTuple):
    """What the machine was told, about which attempt, and when. `overloaded`: whether the fleet was.

    `cut`: only the connection had ended under that attempt.
    """

    kind: str
    number: int
    now: float
    overloaded: bool
    cut: bool = False


class Life:
    """One request: its machine, its attempts under way, and what was seen of it so far."""

    __slots__ = (
        "_due_at",
        "_hedges",
        "_max_attempts",
        "_moved_from",
        "_promised",
        "_shown",
        "_targets",
        "_unsure",
        "_used",
        "arrived_at",
        "ask",
        "attempts",
        "doubted",
        "end",
        "has_begun",
        "held",
        "hides",
        "launched",
        "left",
        "lost_share",
        "machine",
        "places",
        "said",
        "signature",
        "wake_at",
        "words",
    )  # fmt: skip

    def __init__(
        self, machine: RequestMachine, ask: Ask, places: WatchedPlaces, max_attempts: int, arrived_at: float
    ) -> None:
        self.machine = machine
        self.ask = ask
        self.arrived_at = arrived_at
        self.places = places
        self.attempts: dict[int, AttemptTelemetry] = {}  # under way, by number
        self.launched: list[Candidate] = []
        self.end: Answer | Refuse | None = None
        self.left = False
        self.has_begun = False  # its caller sees one attempt's answer already
        self.held = ""  # by what kind of event it came to wait for anybody at all; its next timer is that event again
        self.wake_at = inf
        self.words: list[str] = []  # what it went through, to be counted
        self.signature = bytearray()  # the order of its events and actions
        self._due_at = provisional_due_at(arrived_at, ask.deadline)
        self._max_attempts = max_attempts
        self._targets: set[str] = set()
        self._hedges = 0
        self._moved_from: TargetView | None = None
        self._promised: set[int] = set()  # attempts that were acknowledged
        self.said: dict[int, float] = {}  # by attempt, when its target said that it would be done there
        self.lost_share = 1.0  # of the compute of the attempt that failed last
        self._unsure: list[int] = []  # attempts whose answers, or their beginnings, are in hand
        self.hides: set[int] = set()  # attempts whose beginnings are held back, or were
        self.doubted: set[int] = set()  # of those, the ones that were judged unsure
        self._shown: int | None = None  # of those, the one that was shown all the same
        self._used = -1

    @property
    def launches(self) -> int:
        return len(self.launched)

    @property
    def over(self) -> bool:
        return self.end is not None or self.left

    def note(self, kind: str, number: int = -1) -> None:
        self.signature.append(8 * _EVENTS.index(kind) + number + 1)

    def take(self, actions: list[Action], event: Event) -> None:
        """Check what an event led to, before it is performed."""
        self.note(event.kind, event.number)
        assert not self.over, f"{event.kind} after the end reached the machine"
        self.left = event.kind == "cancelled"
        if event.kind in ("unsure", "doubted") and event.number not in self._unsure:
            self._unsure.append(event.number)
        if event.kind in ("failed", "refused") and event.number in self._unsure:
            self._unsure.remove(event.number)  # it was a beginning
        if event.kind == "begun":
            self._begins()
        if event.kind == "accepted":
            self._promised.add(event.number)
        if event.cut:
            self._targets.discard(self.launched[event.number].target.id)
        under_way, moves = set(self.attempts), False
        for action in actions:
            self.signature.append(_ACTIONS[type(action)])
            match action:
                case Launch(attempt, candidate):
                    self._launches(attempt, candidate, event, under_way, moves)
                    under_way.add(attempt)
                    moves = False
                case WakeAt(at):
                    assert not self.over, "no timer is set after the end"
                    assert at <= self.ask.deadline, "no timer is later than the deadline"
                case Cancel(attempt, hopeless=hopeless):
                    assert attempt in under_way, "only what is under way is cancelled, and once"
                    under_way.discard(attempt)
                    moves, self._moved_from = hopeless, self.launched[attempt].target
                case Show(attempt):
                    assert attempt in under_way and attempt in self.hides, "what is shown was held back"
                    self._shown = attempt if attempt in self.doubted else None
                    self._begins()
                case Answer():
                    self._answers(action, event)
                case Refuse():
                    self._refuses(action, event)
        assert not self.has_begun or len(under_way) <= 1, "nobody is under way beside the one that the caller sees"
        assert not moves, "who is taken out of a queue is sent elsewhere in the same breath"
        self._check_progress(actions, event, under_way)

    def _begins(self) -> None:
        self.has_begun = True
        self.words.append("begun" if self._shown is None else "shown unsure")
        self._unsure.clear()

    def _launches(self, attempt: int, candidate: Candidate, event: Event, under_way: set[int], moves: bool) -> None:
        assert not self.over, "nothing is launched after the end"
        assert not self.has_begun, "nothing is launched beside or after an answer that the caller sees already"
        assert event.now < self.ask.deadline, "nothing is launched at or after the deadline"
        assert attempt == self.launches < 2 * self._max_attempts, "attempts are numbered, and bounded"
        assert len(self._targets) < self._max_attempts, "only those do not count whose connection ended"
        assert candidate.target.id not in self._targets, "no target is asked twice"
        assert candidate.offered.zone in INSIDE[self.ask.pin], "a pin is a promise"
        match event.kind:
            case "timer" | "accepted" if moves:
                self._move(candidate, event, under_way)
            case "timer" | "accepted":
                self._hedge(candidate, event)
            case "unsure" | "doubted":
                self._escalate(candidate, event, under_way)
            case _:
                assert event.kind in ("arrived", "failed", "refused"), f"{event.kind} launched something"
                assert not under_way and not self._unsure, "nobody is asked in place of one who is under way"
        self.words += {"failed": ["fallbacks"], "refused": ["placed again"]}.get(event.kind, [])
        self.launched.append(candidate)
        self._targets.add(candidate.target.id)

    def _hedge(self, candidate: Candidate, event: Event) -> None:
        self._hedges += 1
        self.words.append("hedges")
        before = {one.target.spec.tier for one in self.launched if one.target.id in self._targets}
        is_apart = self._hedges == 2 and len(self._targets) == 2 and candidate.target.spec.tier not in before
        assert self._hedges == 1 or is_apart, "one hedge a request, and a second to another tier than two that owe"
        assert not self._unsure, "an answer in hand is insurance enough"
        assert not self.hides & set(self.attempts), "nor is a beginning silence"
        if isinstance(self.places.placer, UtilityPlacer):
            self._helps(candidate, event)
        else:
            assert event.kind == "timer", "without chances nothing is judged by its promise"

    def _move(self, candidate: Candidate, event: Event, under_way: set[int]) -> None:
        self.words.append("moves")
        assert not self._unsure
        assert isinstance(self.places.placer, UtilityPlacer), "without chances nothing is judged by its promise"
        assert self._moved_from is not None
        if self._moved_from.progress.is_stalled(event.now):
            return  # at every load, and whatever else is under way: nothing is computed there
        if self._moved_from.siblings.trust(self._moved_from.id, event.now) < 1.0:
            return
        if self._moved_from.link.silent_since is not None and self._moved_from.link.trust(event.now) <= LOST:
            return  # nor is anything answered from there
        assert not under_way and not self._hedges, "who has a hedge beside it is not moved"
        assert self.launches - 1 in self._promised, "only a promise can be hopeless"
        self._helps(candidate, event)

    def _helps(self, candidate: Candidate, event: Event) -> None:
        last_resort = candidate.offered.price < self.launched[-1].offered.price
        assert last_resort or not event.overloaded, "nobody but a last resort is asked beside another in overload"
        # One whose connection ended was not asked, for help as for a fallback: its machine may be back.
        tried = {failure_domain(one.offered.target.spec) for one in self.launched if one.target.id in self._targets}
        assert failure_domain(candidate.target.spec) not in tried, "help comes from another failure domain"

    def _escalate(self, candidate: Candidate, event: Event, under_way: set[int]) -> None:
        self.words.append("escalations")
        unsure = self.launched[event.number].variant
        assert under_way <= {event.number}, "nothing is launched beside what is better already"
        assert not event.overloaded, "no escalation in overload"
        assert not self.ask.variant and self.ask.pin == "any"
        assert (candidate.variant.quality or 0.0) > (unsure.quality or inf), "only a better variant is worth it"

    def _refuses(self, end: Refuse, event: Event) -> None:
        self._ends(end)
        assert not [one for one in self._unsure if one not in self.attempts], "an error never beats an answer in hand"
        is_over = bool(self.hides & set(self.attempts)) and event.now + EARLY_S >= self.ask.deadline
        if event.kind == "timer" or is_over:
            assert event.now + EARLY_S >= self.ask.deadline, "nobody is given up before the deadline"
            assert isinstance(end.error, DeadlineExceeded)
        else:
            assert not self.attempts, "an error never beats an attempt that is under way"

    def _answers(self, end: Answer, event: Event) -> None:
        self._ends(end)
        if self._shown is not None:
            assert end.route.provisional and end.attempt == self._shown, "what was shown is declared"
        elif end.route.provisional:
            whole = [one for one in self._unsure if one not in self.attempts]
            assert end.attempt == whole[-1], "the better of two unsure answers is given"
            is_due = event.kind == "doubted" and event.now + EARLY_S >= self._due_at
            assert is_due or event.kind in ("unsure", "failed", "refused", "timer")
        else:
            assert event.kind == "answered" and end.attempt == event.number, "the answer is the attempt's that answered"
        assert end.attempt not in self.attempts and self._used < 0, "an attempt's answer is used once"
        self._used = end.attempt
        assert end.candidate is self.launched[end.attempt]
        assert end.route.attempts == self.launches
        assert end.route.hedged == (self._hedges > 0)
        assert end.route.reason and not (end.attempt == 0 and (end.route.fallback or end.route.degraded))
        self.words += [word for word in ("fallback", "degraded", "provisional") if getattr(end.route, word)]
        self.words.append(f"by {end.route.reason}")

    def _ends(self, end: Answer | Refuse) -> None:
        assert self.end is None, "exactly one terminal outcome"
        assert not self.left, "nobody is told after leaving"
        self.end = end

    def _check_progress(self, actions: list[Action], event: Event, under_way: set[int]) -> None:
        if self.over:
            assert not under_way, f"attempts {under_way} are orphaned"
            assert self.machine.done, "over, and not done"
            return
        assert not self.machine.done, "done, and nobody was told"
        assert event.kind != "answered", "the first sure answer wins"
        wakes = [action.at for action in actions if isinstance(action, WakeAt)]
        self._check_held(wakes, event, under_way)
        self._check_timer(wakes, event)
        if self._unsure:
            given = self.launched[self._unsure[-1]].variant
            assert all(is_lesser(given, than=self.launched[one].variant) for one in under_way - {self._unsure[-1]}), (
                "only better ones wait"
            )

    def _check_held(self, wakes: list[float], event: Event, under_way: set[int]) -> None:
        self.held = "" if under_way else event.kind
        if not under_way:
            self.words.append("held")
            assert event.kind in ("arrived", "failed", "refused"), "somebody is always being waited for"
            assert wakes and wakes[0] <= event.now + HOLD_S + 1e-9, "or looked for, very soon"
            assert not self._unsure, "with an answer in hand nobody is looked for"

    def _check_timer(self, wakes: list[float], event: Event) -> None:
        assert len(wakes) <= 1, "one timer"
        wake_at = wakes[0] if wakes else self.wake_at
        end_at = self._due_at if self._unsure else self.ask.deadline
        assert wake_at <= end_at, "a timer will end it in time"
        assert event.kind != "timer" or event.now + EARLY_S < end_at, "the last timer ends it"

    def check_over(self) -> None:
        assert not self.attempts, f"attempts {list(self.attempts)} never ended"

    def end_in_words(self) -> str:
        if self.left:
            return "end: left"
        return f"end: {self.end.error.code}" if isinstance(self.end, Refuse) else "end: answered"

    def __repr__(self) -> str:
        return f"<Incarnation {self.machine!r} wakes at {self.wake_at:.3f}, deadline {self.ask.deadline:.3f}>"


class WatchedPlaces:
    """Places as the real placer does, and checks each decision. A hopeful one sends also what is surely too late."""

    def __init__(self, placer: Placer, placement: Placement, hopeful: bool = False) -> None:
        """Args: placement: the placer with probing, and with admission where there is some."""
        self.placer = placer
        self._placement = placement
        self._hopeful = hopeful

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        decision = self._placement.decide(ask, now, exclude)
        check_decision(decision, self.placer, now, exclude)
        if self._hopeful and isinstance(decision.refusal, DeadlineExceeded):
            return decision._replace(chosen=decision.candidates[0], reason="hopeful", refusal=None)
        return decision


def check_decision(decision: Decision, placer: Placer, now: float, exclude: Collection[str]) -> None:
    assert (decision.chosen is None) != (decision.refusal is None), "chosen or refused"
    for one in decision.candidates:
        assert one.target.id not in exclude, "who had a chance is no candidate"
        assert one.target.up and placer.fleet.targets[one.target.id] is one.target, "candidates are there"
        # Where nobody else is left, a silent path alone keeps nobody from being asked.
        last_chance = decision.reason in (REASON, "") and one.target.breaker.allows(now)
        assert one.target.allows(now) or last_chance, "a breaker refuses before placing, not after"
        assert one.wait_s >= 0.0 and one.compute_s > 0.0 and one.link_s >= 0.0 and one.margin_s > 0.0
        assert isfinite(one.finish_s) and one.cost >= 0.0
        assert 0.0 < one.trust <= 1.0, "nobody is given up for good"
    for judged in decision.judged:
        if judged is not None:
            assert 0.0 <= judged.chance <= 1.0 and 0.0 <= judged.claimed <= 1.0, f"chances are chances: {judged}"
            assert judged.harm >= -1e-12 and isfinite(judged.value)
