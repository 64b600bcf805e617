"""The three chances of a generation, each with a calibration of its own, and the claim that is made of them.

    first    the first token by its instant
    next     each further one within its budget, on average, given that the first was
    whole    the answer by its deadline, given that both were

So the chance that all three budgets are kept is their product, by the chain rule and not by independence: a target
whose first token is late is slow with the others too. Each calibration therefore learns from those attempts alone in
which the budgets before its own were kept. A budget that a request does not have is kept, and teaches nothing.

A target that is lost or stalls in the middle of an answer loses its time and not the answer, with which another target
goes on. How it would have ended there is not known, so that teaches nothing of the whole but at its deadline; it is in
the target's own account. Counted as misses, stalls made every claim of a whole answer too low by as much as a seventh.

`TokenClaim` is one claim under way, as `Prediction` is of a single answer (`calibration.py`): it is settled once, when
its attempt ends. Of an attempt that was given up, what is known by then is settled: a first token that was overdue.

Source: docs/design/routing.md, "Answers in parts".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.core.estimate.calibration import Calibration, TargetBias, apply_curve

_EARLY_S: Final = 0.001  # a timer may ring this early


class TokenChances(NamedTuple):
    """Of the first token in time, of each further one, and of the whole answer; 1 where there is no such budget."""

    first: float
    next: float
    whole: float

    @property
    def all(self) -> float:
        """That all three budgets are kept."""
        return self.first * self.next * self.whole


class GenerationBudget(NamedTuple):
    """What a request asks of its tokens: `first_by` and `whole_by` are instants; None: without such a budget."""

    first_by: float | None
    next_s: float | None
    whole_by: float


class TokenTimes(NamedTuple):
    """The tokens of an answer as they came: how many, and the instants of the first and the last."""

    made: int
    first_at: float
    last_at: float

    @property
    def each_s(self) -> float | None:
        """Seconds for each token after the first, on average; None where there is none."""
        return (self.last_at - self.first_at) / (self.made - 1) if self.made > 1 else None


class TokenCalibration:
    """Mutable: the calibrations of the three chances, for all targets."""

    __slots__ = ("first", "next", "whole")

    def __init__(self) -> None:
        self.first = Calibration()
        self.next = Calibration()
        self.whole = Calibration()

    def surest(self, budget: GenerationBudget) -> float:
        """The most that may be claimed of all three together."""
        first = 1.0 if budget.first_by is None else self.first.surest
        return first * (1.0 if budget.next_s is None else self.next.surest) * self.whole.surest

    def errors(self) -> list[tuple[tuple[str], float]]:
        """How far the claims of each chance are from what came, on average; of those that were ever claimed."""
        named = (("first", self.first), ("next", self.next), ("whole", self.whole))
        return [((name,), one.claimed.ece) for name, one in named if one.claimed.bins()]

    def claims(self, raw: TokenChances, budget: GenerationBudget) -> TokenChances:
        """The chances as calibrated."""
        return TokenChances(
            1.0 if budget.first_by is None else _applied(raw.first, self.first),
            1.0 if budget.next_s is None else _applied(raw.next, self.next),
            _applied(raw.whole, self.whole),
        )

    def __repr__(self) -> str:
        return f"<TokenCalibration first {self.first!r} next {self.next!r} whole {self.whole!r}>"


class TokenClaim(NamedTuple):
    """A claim that an answer keeps its budgets. Settle it once: `answered`, `failed` or `given_up`."""

    raw: TokenChances
    claims: TokenChances
    claimed: float  # of all three, with what the target does worse than claimed taken off
    budget: GenerationBudget
    calibration: TokenCalibration
    bias: TargetBias

    def answered(self, now: float, times: TokenTimes | None) -> None:
        """Args: times: None of an answer that came in one piece, which only the deadline can judge."""
        budget = self.budget
        kept = True
        if times is not None and budget.first_by is not None:
            kept = times.first_at <= budget.first_by
            self.calibration.first.record(self.raw.first, self.claims.first, kept)
        if kept and times is not None and budget.next_s is not None:
            kept = times.each_s is None or times.each_s <= budget.next_s
            self.calibration.next.record(self.raw.next, self.claims.next, kept)
        if kept:
            kept = now <= budget.whole_by
            self.calibration.whole.record(self.raw.whole, self.claims.whole, kept)
        self.bias.record(self.claimed, kept, now)

    def failed(self, now: float, *, first_at: float | None = None, is_fault: bool = False) -> None:
        """No more will come. Args: first_at: when its first token came; None: none did."""
        self.bias.record(self.claimed, False, now)
        if is_fault:
            return
        calibration, first_by = self.calibration, self.budget.first_by
        in_time = first_by is None or (first_at is not None and first_at <= first_by)
        if first_by is not None:
            calibration.first.record(self.raw.first, self.claims.first, in_time)
        if in_time and (first_at is None or now >= self.budget.whole_by - _EARLY_S):
            calibration.whole.record(self.raw.whole, self.claims.whole, False)

    def given_up(
        self, now: float, *, first_at: float | None = None, is_fault: bool = False, left: float | None = None
    ) -> None:
        """The attempt was given up. What was due by then is a miss; of the rest nothing is known.

        Args:
            left: the chance that its first token would still have been in time; None: not known.
        """
        first_by = self.budget.first_by
        if now >= self.budget.whole_by - _EARLY_S:
            self.failed(now, first_at=first_at, is_fault=is_fault)
        elif first_by is not None and (first_at is not None or now >= first_by - _EARLY_S) and not is_fault:
            in_time = first_at is not None and first_at <= first_by
            self.calibration.first.record(self.raw.first, self.claims.first, in_time)
        elif first_by is not None and first_at is None and left is not None and not is_fault:
            # Those that are slow lose their races: if only the others were counted, slow ones would look fast.
            self.calibration.first.record(self.raw.first, self.claims.first, left)


def _applied(chance: float, calibration: Calibration) -> float:
    return max(0.0, min(1.0, apply_curve(chance, calibration.curve)))
