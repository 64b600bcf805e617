"""Hedging launches a second attempt beside a silent first one, as late as it can still help.

Insurance is bought only when it is needed. The alternative is launched at the last instant at which it can still make
the deadline, not after a fixed delay: until then the first attempt may answer and the second would have been waste.
Where that instant comes before the first attempt is even expected back, it is pushed to when the first is overdue, as
long as the alternative's median answer would then still be in time; where not even that holds, there is no hedge.

An accepted attempt with a promise is not silent: while its promised finish is ahead and within the deadline, the
promise is better evidence than the clock.

`HedgePolicy` is what the request machine asks; `DeadlineHedging` is this rule, with margins and without a limit of its
own. Where placement deals in chances `hedge_by_chance.py` takes its place: the rule is then the crossing of the two
chances.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Protocol

from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate, Decision

EARLY_S: Final = 0.001  # event loops round: a timer that is this early counts as due
OVERDUE_AGAIN_S: Final = 0.1
AGAIN_S: Final = 0.05  # what is not looked at again sooner than this would be too late for any request


class PendingAttempt(NamedTuple):
    """An attempt that has not answered. `promised_at`: when its target said that the answer would be here.

    `is_probe`: it was sent to find out whether a distrusted target works, and is watched as if that were trusted.
    `other`: what would have been asked in its place when it was launched, in another tier if there was one, since what
    keeps its target from answering may be shared by all of its tier; None: there was none.
    """

    candidate: Candidate
    launched_at: float
    promised_at: float | None = None
    is_probe: bool = False
    other: Candidate | None = None


HOPELESS: Final = "it promised its answer for after the deadline"
STALLED: Final = "it promised an answer and gives none"
RACE: Final = "race"  # why an attempt was launched beside a silent one, for the first token of either
DOUBTED: Final = "its siblings promised answers and give none"
CUT_OFF: Final = "the way to it has gone silent"


class Hedge(NamedTuple):
    """A second attempt at `at`, which may be now; `reason` is what its answer would say."""

    at: float
    reason: str = "hedge"
    instead: str = ""  # one of the reasons above: the first attempt will not be in time, and is taken out
    share: float = 1.0  # of an attempt's work that it is expected to lose: what it takes from the purse


class HedgePolicy(Protocol):
    """When a second attempt is due, and whether it may be paid. One for all requests."""

    def arrived(self) -> None:
        """A request was placed: it earns its share of second attempts."""

    def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
        """When to look after the attempt that is launched now, `other` being the alternative; None: never."""

    def second_look(self, ask: Ask, watched: PendingAttempt, now: float) -> float | None:
        """When to look after an attempt that was acknowledged now, and made its promise; None: as it was."""

    def avoid(self, tried: Sequence[Candidate], *, apart: bool = False) -> Collection[str]:
        """The targets that are no help beside those that were tried.

        Args: apart: all of their tier as well, where they are of one; nothing where they are of several.
        """

    def overdue(self, watched: PendingAttempt, now: float) -> None:
        """An attempt is looked after whose answer was promised for before now: evidence, before anything is placed."""

    def plan(self, ask: Ask, watched: PendingAttempt, decision: Decision, now: float) -> Hedge | None:
        """The hedge beside a silent attempt, if there is to be one, where `decision` says. Nothing is spent yet."""

    def may_hedge(self, share: float = 1.0) -> bool:
        """Spend so much of a hedge; False: there is nothing to spend."""

    def may_fall_back(self, share: float = 1.0) -> bool:
        """Spend a fallback after a failure that lost this share of an attempt's work; False: too much was, lately."""


class DeadlineHedging:
    """Hedges at the last instant at which they can still help, as many as requests want. Immutable."""

    def arrived(self) -> None:
        pass

    def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
        return fallback_at(now, ask.deadline, chosen, other)

    def second_look(self, ask: Ask, watched: PendingAttempt, now: float) -> float | None:
        return None

    def avoid(self, tried: Sequence[Candidate], *, apart: bool = False) -> Collection[str]:
        return [] if apart else [one.offered.target.id for one in tried]

    def overdue(self, watched: PendingAttempt, now: float) -> None:
        pass

    def plan(self, ask: Ask, watched: PendingAttempt, decision: Decision, now: float) -> Hedge | None:
        # Beside an attempt that may still answer, only one that is expected in time is worth its cost.
        if not is_silent(watched.promised_at, now + EARLY_S, ask.deadline):
            assert watched.promised_at is not None
            return Hedge(watched.promised_at)  # it has until then to keep its word
        if decision.chosen is None or now + decision.chosen.finish_s > ask.deadline:
            return None
        return Hedge(now)

    def may_hedge(self, share: float = 1.0) -> bool:
        return True

    def may_fall_back(self, share: float = 1.0) -> bool:
        return True

    def __repr__(self) -> str:
        return "<DeadlineHedging>"


def fallback_at(now: float, deadline: float, primary: Candidate, alternative: Candidate) -> float | None:
    """The instant at which to launch `alternative` if `primary` has not answered; None where it could not help."""
    latest = deadline - alternative.finish_s - alternative.margin_s
    overdue = now + primary.finish_s + primary.margin_s
    if latest >= overdue:
        return latest
    return overdue if overdue + alternative.finish_s <= deadline else None


def next_look_at(
    now: float, deadline: float, *, first_by: float | None = None, is_overdue: bool = False
) -> float | None:
    """When to look again after a look that found no help: after half of the time that is left; None near the deadline.

    Too much went on, no other target was there, or no token was left: any of these may pass. Where the attempt's own
    target is overdue it may soon be known to have stalled, so that is looked for sooner.

    Args:
        first_by: the instant by which the first token is due, where there is one: until then it is what is left.
    """
    half_s = (deadline - now) / 2
    if half_s < AGAIN_S:
        return None
    if first_by is not None and first_by - now > 2 * AGAIN_S:
        half_s = min(half_s, (first_by - now) / 2)
    return now + (min(half_s, OVERDUE_AGAIN_S) if is_overdue else half_s)


def computed_share(watched: PendingAttempt, now: float) -> float:
    """The share of an attempt's compute that its target has done by now, 0 to 1: nothing while it is in a queue.

    By its target's promise, or without one by what was foreseen at its launch.
    """
    candidate = watched.candidate
    shown_at = watched.launched_at + candidate.finish_s if watched.promised_at is None else watched.promised_at
    left_s = shown_at - candidate.link_s / 2 - now
    return min(1.0, max(0.0, 1.0 - left_s / candidate.compute_s)) if candidate.compute_s > 0.0 else 1.0


def is_silent(promised_at: float | None, now: float, deadline: float) -> bool:
    """Whether an attempt gives no reason to wait. `promised_at`: when its target said the answer would be here."""
    return promised_at is None or not now < promised_at <= deadline
