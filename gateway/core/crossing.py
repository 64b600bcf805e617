"""Hedge when the second target's chance has overtaken the first's, and the gain pays for it.

While the first attempt is silent, the chance that it still makes the deadline falls; the chance of a fresh attempt
elsewhere falls too, as the time that is left gets shorter. The right instant is where the two curves cross: before it
the first is the better bet, and after it every millisecond is lost.

    P(u)   the first attempt's chance after u of silence           `chance.if_silent`
    H(u)   the second's chance with the time left at u             `chance` on its own candidate, calibrated
    due    the earliest u with  H(u) > P(u)  and  gain(u) = weight · (1 − P) · H − LAMBDA · cost >= MIN_GAIN

No chance is worked out while an attempt may still be in its usual time: the first look is when it is overdue, or when
its accept-ack is, whichever comes first; only an attempt that was a doubtful bet from the start is looked after at
once. Most requests are answered before their first look, so the rule costs them one timer.

Guards, since a hedge that is not needed is load: one purse for all requests (`TokenBudget`, shared with fallbacks);
another failure domain than the first's; a second target without a queue of its own; none while `overloaded` says so.

Last resort: where the pool is silent and no hedge pays, a cheaper target is started at the last instant at which its
answer, be it of lesser quality, would surely be here; unless the first is by then still a good bet.

It can be wrong where misses have one cause (a common uplink): two silent targets are then one, and both are paid.
Source: routing.md B4: p95-hedging lost 1.4 points at 0.6 load, the crossing rule is neutral there and gains elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from gateway.core.calibration import Calibration, calibrated
from gateway.core.chance import Timing, if_silent
from gateway.core.fleet import TargetSpec
from gateway.core.hedging import Hedge, Watched
from gateway.core.placement import Ask, Candidate, Decision
from gateway.core.token_budget import TokenBudget
from gateway.core.value import ValuePlacer, place_of, timing_of

MIN_GAIN: Final = 0.25  # in ordinary answers in time
SOONEST_S: Final = 0.006  # a timer that rings sooner costs more than it finds
_DOUBTFUL: Final = 0.9  # claims below this are looked after at once
_SUREST: Final = 0.995  # something is always lost: who was never wrong yet would be waited for to the end
_LOOKS: Final = 8  # instants at which the crossing is sought in the time that is left


class Crossing:
    """Mutable: the purse. The rest is read from the placer's own estimates."""

    def __init__(
        self,
        placer: ValuePlacer,
        *,
        overloaded: Callable[[], bool] = lambda: False,
        tokens: TokenBudget | None = None,
    ) -> None:
        self.tokens = tokens or TokenBudget()
        self._placer = placer
        self._overloaded = overloaded

    def arrived(self) -> None:
        self.tokens.earn()

    def may_hedge(self) -> bool:
        return self.tokens.spend()

    def may_fall_back(self) -> bool:
        return self.tokens.overdraw()

    def avoid(self, tried: Sequence[Candidate]) -> Collection[str]:
        domains = {domain_of(one.offered.target.spec) for one in tried}
        return [target.id for target in self._placer.fleet.targets.values() if domain_of(target.spec) in domains]

    def first_look(self, ask: Ask, chosen: Candidate, other: Candidate, now: float) -> float | None:
        link = chosen.offered.target.link
        if chosen.stake is not None and chosen.stake.prediction.claimed < _DOUBTFUL:
            after_s = SOONEST_S
        else:
            overdue_s = chosen.finish_s + chosen.margin_s
            after_s = min(overdue_s, link.patience_s(now) + SOONEST_S) if link.acknowledges else overdue_s
        at = now + max(SOONEST_S, after_s)
        # The first may not even be expected before it is too late for the second: look while there is a choice.
        at = max(now + SOONEST_S, min(at, ask.deadline - other.finish_s - other.margin_s))
        return at if at + other.finish_s < ask.deadline else None

    def plan(self, ask: Ask, watched: Watched, decision: Decision, now: float) -> Hedge | None:
        second = decision.chosen
        if second is None or self._overloaded() or second.wait_s > second.compute_s:
            return None
        last = ask.deadline - second.finish_s
        if now > last:
            return None
        first_takes = _timing_of_watched(watched, now)
        second_takes = timing_of(second, second.wait_s, now)
        step_s = max((last - now) / _LOOKS, 1e-9)
        for look in range(_LOOKS + 1):
            at = now + look * step_s
            left = self._left(watched, first_takes, ask.deadline, at)
            fresh = self._claimed(second, second_takes.by(ask.deadline - at))
            gain = place_of(ask).weight * (1.0 - left) * fresh - self._placer.prices.cost * second.cost
            if fresh > left and gain >= MIN_GAIN:
                return Hedge(at)
        if second.offered.price >= watched.candidate.offered.price:
            return None
        at = max(now, ask.deadline - second.finish_s - second.margin_s)
        left = self._left(watched, first_takes, ask.deadline, at)
        return Hedge(at, "last-resort") if left < _DOUBTFUL else None

    def _left(self, watched: Watched, takes: Timing, deadline: float, at: float) -> float:
        """The first attempt's chance, if nothing has come from it by `at`."""
        by_deadline = takes.by(deadline - watched.launched_at)
        claimed = min(_SUREST, self._claimed(watched.candidate, by_deadline))
        return if_silent(takes.by(at - watched.launched_at), by_deadline, claimed)

    def _claimed(self, candidate: Candidate, chance: float) -> float:
        calibration: Calibration = self._placer.calibrations[candidate.offered.target.spec.tier]
        return calibrated(chance, calibration.curve)

    def __repr__(self) -> str:
        return f"<Crossing {self.tokens!r}>"


def domain_of(spec: TargetSpec) -> str:
    """What fails together: targets on one machine. On loopback, or without a port, each is its own."""
    host = spec.address.rpartition(":")[0].strip("[]")
    return spec.id if host in ("", "localhost", "::1") or host.startswith("127.") else host


def _timing_of_watched(watched: Watched, now: float) -> Timing:
    """The distribution of the attempt's whole time, by its target's promise where it gave one."""
    candidate, wait_s = watched.candidate, watched.candidate.wait_s
    if watched.promised_at is not None:
        promised_s = watched.promised_at - watched.launched_at
        wait_s = max(0.0, promised_s - candidate.link_s - candidate.compute_s)
    return timing_of(candidate, wait_s, now)
