"""The progress watch finds a target that takes requests, promises answers, and gives none.

A worker that has stopped computing is hard to see: its agent acknowledges, its link is quick, its heartbeats come. What
it cannot do is keep a promise. Every attempt that a target has accepted is due at an instant, by the target's own
accept-ack and with the spread that such predictions have. While an attempt is due and nothing is answered, the target
owes an answer:

    overdue = time since the last answer in which an attempt was due, was under way, and nothing came
    stalled   overdue > patience          patience = LEAST_S + TIMES · how late its answers usually are, at most MOST_S

A target that acknowledges nothing (a foreign server) is held to its own earlier answers: what 99 of 100 of that size
took at most is as good as a promise (`AttemptTelemetry` says when that is due). With six times as long, as a worker's
call may take, budgets of 0.3 s were over before it was known that nothing comes. Where a size says less, as of
generations, an answer still gets max(0.5 s, 6 × that): `UNPROMISED_S` of this is its patience and the rest comes before
it is due (`unpromised_s`), so that what is given up soon adds up here too.

A single late attempt is no evidence: it was overtaken by more urgent ones, or its queue was predicted wrongly, and
taking that for a fault feeds back on itself. Therefore any answer, also a late one and to whatever request, pays the
whole debt: a target that is slow or crowded makes progress, and its queue is another estimate's business. An attempt
that is given up before its target was due proves nothing; the time for which one was due and under way is kept, so that
requests with budgets shorter than the patience add up to the same evidence.

Where this process stood still itself, answers wait to be read, or came for attempts whose time ran out meanwhile. So
of a stretch in which nothing happened to the target here, `GAP_S` counts at most; and a stall must be seen twice,
`SEEN_TWICE_S` apart, since the first look may come before the answers.

Lateness follows its peaks within a few answers and forgets them over some thirty. What is later than the patience that
it makes says no more than that.

Invariants: overdue time never falls but by an answer, by the return of a path that was gone, or by `FORGET_S` without
any attempt under way; no debt without an attempt that was due. O(1), but for the end of the attempt that was due first:
O(attempts under way).
Source: docs/design/faults.md, "Gray failure"; Chen, Toueg and Aguilera, "On the Quality of Service of Failure
Detectors", 2002 (freshness points from expected arrivals); Huang et al., "Gray Failure: The Achilles' Heel of
Cloud-Scale Systems", HotOS 2017.
"""

from __future__ import annotations

from math import inf
from typing import Final

from tidegate.workers.watchdog import patience_s

LEAST_S: Final = 0.2  # a busy machine's worth: no answer is missed for less
UNPROMISED_S: Final = 0.4  # the same where no promise was given, and only what is usual is known
TIMES: Final = 4.0
MOST_S: Final = 1.0  # a caller with a budget of a second or two can still be answered elsewhere
SEEN_TWICE_S: Final = 0.02
GAP_S: Final = 0.18  # below LEAST_S: no stall is seen in one gap, ...
_LOOK_S: Final = 0.08  # ... and overdue attempts are looked after more often
FORGET_S: Final = 10.0  # a debt of which nothing was heard for so long, because nobody asked, is void
_LEARN_WEIGHT, _FORGET_WEIGHT = 1 / 4, 1 / 32


def unpromised_s(p99_s: float) -> float:
    """In how many seconds an answer without a promise is due, where 99 of 100 take `p99_s` at most."""
    return patience_s(p99_s) - UNPROMISED_S


class ProgressWatch:
    """Mutable: `due`, then once for each attempt `answered` or `ended`; `is_stalled` is the verdict."""

    __slots__ = (
        "_carried_s", "_counted_to", "_due", "_idle_since", "_late_s", "_least_s", "_models", "_owed_from",
        "_owed_model", "_seen_at", "answered_at", "look_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.answered_at = -inf  # when an answer, or another sign that it computes, came last
        self.look_at = inf  # before this instant it is surely not stalled, and nothing is to be counted
        self._due: dict[int, float] = {}  # attempt → when its answer is due, in order of acceptance
        self._models: dict[int, str] = {}  # attempt → its model, where that was said
        self._owed_model = ""  # of the last that ended without an answer that was due
        self._owed_from = inf  # when the earliest of them is due, or the last answer, if that came later
        self._carried_s = 0.0  # overdue time since the last answer, ...
        self._counted_to = 0.0  # ... up to here
        self._idle_since = 0.0  # when the last attempt ended, while none is under way
        self._late_s = 0.0  # how late answers have been lately
        self._least_s = LEAST_S  # UNPROMISED_S where the latest attempt has no promise
        self._seen_at: float | None = None  # the first look that found it stalled

    @property
    def patience_s(self) -> float:
        """How long it may owe an answer."""
        return min(MOST_S, self._least_s + TIMES * self._late_s)

    @property
    def under_way(self) -> int:
        """Attempts that are to be answered."""
        return len(self._due)

    def due(self, attempt: int, at: float, now: float, model: str = "", *, promised: bool = True) -> None:
        """The answer to this attempt is to come by `at`. A second word on the same attempt replaces the first.

        Args:
            promised: by its target's word, or by what its answers have taken; else only what is predicted is known.
        """
        self._least_s = LEAST_S if promised else UNPROMISED_S
        if not self._due and now - self._idle_since > FORGET_S:
            self._carried_s, self._seen_at = 0.0, None
        self._count(now)
        known = self._due.get(attempt)
        self._due[attempt] = at
        if model:
            self._models[attempt] = model
        if known is not None and known <= self._owed_from:
            self._owed_from = min(self._due.values())
        elif at < self._owed_from:
            self._owed_from = at
        self._set_look()

    def answered(self, attempt: int, now: float) -> None:
        """An answer came: whatever was owed is paid. How late it was is learned."""
        at = self._due.pop(attempt, None)
        self._models.pop(attempt, None)
        if at is not None:
            late_s = min(max(0.0, now - at), self.patience_s)
            self._late_s += (_LEARN_WEIGHT if late_s > self._late_s else _FORGET_WEIGHT) * (late_s - self._late_s)
        self.progressed(now)

    def progressed(self, now: float) -> None:
        """The target has shown otherwise that it computes."""
        self._carried_s, self._seen_at, self._counted_to = 0.0, None, now
        self.answered_at = now
        self._owed_from = max(now, next(iter(self._due.values()))) if self._due else inf
        self._idle_since = now
        self._set_look()

    def path_is_back(self, now: float) -> None:
        """Nothing could come over a path that was gone: what was owed meanwhile is owed from now on."""
        self._carried_s, self._seen_at, self._counted_to = 0.0, None, now
        self._owed_from = max(now, min(self._due.values())) if self._due else inf
        self._set_look()

    def ended(self, attempt: int, now: float) -> None:
        """The attempt is over without an answer: given up, refused, or failed."""
        at = self._due.pop(attempt, None)
        model = self._models.pop(attempt, "")
        if at is None:
            return
        if at < now:
            self._owed_model = model
        self._count(now)
        if at <= self._owed_from or not self._due:
            self._owed_from = min(self._due.values(), default=inf)
        self._idle_since = now
        self._set_look()

    def is_owed(self, attempt: int, now: float) -> bool:
        """Whether the answer to this attempt was due before now, and has not come."""
        at = self._due.get(attempt)
        return at is not None and at < now

    def owed_model(self, now: float) -> str:
        """The model whose answer is owed for longest, or was when the last such attempt ended; "" if it is unknown."""
        owed = [(at, attempt) for attempt, at in self._due.items() if at < now]
        return self._models.get(min(owed)[1], "") if owed else self._owed_model

    def overdue_s(self, now: float) -> float:
        """For how long an answer has been owed and none came."""
        return self._carried_s + min(GAP_S, max(0.0, now - max(self._owed_from, self._counted_to)))

    def is_stalled(self, now: float) -> bool:
        """Whether it has owed an answer for longer than its patience, by two looks some time apart."""
        if now < self.look_at:
            return False
        self._count(now)
        self._set_look()
        if self._carried_s <= self.patience_s:
            return False
        if self._seen_at is None:
            self._seen_at = now
        return now - self._seen_at >= SEEN_TWICE_S

    def _count(self, now: float) -> None:
        """Take the time since the last event into account."""
        if self._owed_from < now:
            self._carried_s = self.overdue_s(now)
        if now > self._counted_to:
            self._counted_to = now

    def _set_look(self) -> None:
        # Spelled out, here and in `_count`: both run several times for each attempt.
        patience_s = self._least_s + TIMES * self._late_s
        left_s = (patience_s if patience_s < MOST_S else MOST_S) - self._carried_s
        if left_s > 0.0:
            from_s = self._owed_from if self._owed_from > self._counted_to else self._counted_to
            self.look_at = from_s + (left_s if left_s < _LOOK_S else _LOOK_S)
        else:
            self.look_at = 0.0

    def __repr__(self) -> str:
        return (
            f"<ProgressWatch {len(self._due)} under way, {self._carried_s * 1e3:.0f} ms carried,"
            f" {self.patience_s * 1e3:.0f} ms patience>"
        )
