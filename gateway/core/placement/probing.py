"""The probe placer sends a few requests to targets that placement would avoid, to learn how they do now.

Placement goes by what is known, so a target that is thought bad gets no requests and cannot show that it is better.
There are three cures, all paid for by requests that can bear it:

    trial     a target that was ejected, once its breaker lets a probe through, is sent one request. It may fail, so it
              should be one of low priority; when none came for `PATIENCE_S`, any will do. There must be time to answer
              it elsewhere afterwards, unless there is no other target, or it would hardly be answered in time there
              either (`LITTLE`): in overload those of low priority are refused before they are placed, and no other
              target has time for a second try.
    recheck   a target whose answers took DOUBTED times what it measured, and which for RECHECK_S had none for that
              reason, is sent one request that has time for a second try. What was learned fades over half a minute
              only (`ServiceTime`): one that was slow for a moment would be left alone long after it is well again.
    explore   of requests of low priority one in a hundred goes to the candidate that had none for the longest, and
              for `LONG_S` at least, if it is expected well in time there; like rechecks never in panic or overload.

This stands around the placer and changes which candidate of its decision is chosen, nothing else: the other
candidates stay for the hedge and the fallback. A refusal because no target is left says when the next trial is due.

Invariants: no request that was tried already is spent on a probe while another target would take it; one trial at a
time for each target (its breakers see to that); no two rechecks within GAP_S, however many targets are slow. Chance
is an argument.
Source: docs/design/routing.md, "Probing" (exploration, 1 %; one probe, by a sheddable request).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.target import TargetView
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import target_ineligible, variant_ineligible
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Decision, offers_of, predicted
from tidegate.outcome import NothingAlive
from tidegate.priority import level_of

REASON: Final = "probe"
LOW_LEVEL: Final = 3  # from here on a request may be spent on a probe
SHARE: Final = 0.01  # of those, on exploring
LONG_S: Final = 10.0
PATIENCE_S: Final = 1.0  # how long a trial that is due waits for a request of low priority
LITTLE: Final = 0.3  # a chance elsewhere below which a trial costs a request nothing worth keeping
_WELL_IN_TIME: Final = 0.5  # of the budget
DOUBTED: Final = 3.0  # times its table's seconds: noise and throttling are less
RECHECK_S: Final = 1.5
GAP_S: Final = 0.2  # from one recheck to the next, of any target
_TWICE: Final = 2.0  # a recheck has so many times as long as its target would take if it were well


class ProbePlacer:
    """Decides as `placement` does, or for a target to be probed.

    Mutable: when the last recheck was. What else is due stands in the fleet's view.
    """

    def __init__(
        self,
        placement: Placement,
        fleet: Fleet,
        draw: Callable[[], float],
        *,
        overloaded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._placement = placement
        self._fleet = fleet
        self._draw = draw
        self._overloaded = overloaded
        self._recheck_at = 0.0  # no sooner

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        """The decision, with a probe's target for the chosen one where there is one to be probed."""
        decision = self._placement.decide(ask, now, exclude)
        if isinstance(decision.refusal, NothingAlive):
            return self._last_chance(decision, exclude)
        if decision.chosen is None or exclude or ask.again:
            return decision
        probe = self._on_trial(decision, exclude) if self._fleet.balance.ejected else None
        if probe is None and now >= self._recheck_at:
            probe = self._doubted(decision)
        if probe is None and level_of(decision.ask.priority) >= LOW_LEVEL and self._draw() < SHARE:
            probe = self._long_unasked(decision)
        return decision if probe is None else _instead(decision, probe)

    def _on_trial(self, decision: Decision, exclude: Collection[str]) -> Candidate | None:
        ask, now = decision.ask, decision.at
        assert decision.chosen is not None
        otherwise_s = decision.chosen.finish_s + decision.chosen.margin_s
        has_little, left_s = _has_little_chance(decision.chosen), ask.deadline - now - otherwise_s
        due = [
            one
            for one in self._due(ask, now, exclude, at_once=has_little)
            if one.finish_s + one.margin_s <= left_s or (has_little and now + one.finish_s <= ask.deadline)
        ]
        return min(due, key=_finish, default=None)

    def _last_chance(self, decision: Decision, exclude: Collection[str]) -> Decision:
        probe = min(self._due(decision.ask, decision.at, exclude, anybody=True), key=_finish, default=None)
        if probe is not None:
            return _instead(decision, probe)
        assert decision.refusal is not None
        again_s = self._fleet.retry_after_s(decision.at)
        return decision._replace(refusal=NothingAlive(decision.refusal.message, retry_after_s=again_s))

    def _due(
        self, ask: Ask, now: float, exclude: Collection[str], *, at_once: bool = False, anybody: bool = False
    ) -> Sequence[Candidate]:
        """The targets on trial whose probe is due and may be spent on this request, each with its predictions.

        Args:
            at_once: whatever its priority. anybody: and those on whose path a probe is not due.
        """
        may_wait = level_of(ask.priority) < LOW_LEVEL and not (at_once or anybody)
        due = partial(_is_due, may_wait=may_wait, anybody=anybody)
        return [
            predicted(one, ask, now)
            for target_id in self._fleet.balance.ejected
            if target_id not in exclude and target_id not in ask.left_out and ask.home in ("", target_id)
            if target_ineligible(self._fleet.targets[target_id], ask, now, usable=due) is None
            for one in offers_of(self._fleet, ask, target_id)
            if variant_ineligible(one.variant, ask) is None
        ]

    def _doubted(self, decision: Decision) -> Candidate | None:
        """A target that is left alone because it was slow, and may be well again."""
        now, chosen = decision.at, decision.chosen
        assert chosen is not None
        patience_s = RECHECK_S if level_of(decision.ask.priority) >= LOW_LEVEL else RECHECK_S + PATIENCE_S
        left_s = decision.ask.deadline - now - chosen.finish_s - chosen.margin_s
        doubted = [
            one
            for one in decision.candidates
            if one.offered.cost.factor >= DOUBTED
            and one.target.asked_at <= now - patience_s
            and one.trust == 1.0
            and _TWICE * (one.link_s + one.compute_s / one.offered.cost.factor) <= left_s
        ]
        if not doubted or chosen in doubted or self._fleet.balance.panic or self._overloaded():
            return None
        self._recheck_at = now + GAP_S
        return min(doubted, key=lambda one: one.target.asked_at)

    def _long_unasked(self, decision: Decision) -> Candidate | None:
        if self._fleet.balance.panic or self._overloaded():
            return None
        budget_s, long_ago = decision.ask.deadline - decision.at, decision.at - LONG_S
        silent = [
            one
            for one in decision.candidates
            if one.target.asked_at <= long_ago
            and one.trust == 1.0
            and one.finish_s + one.margin_s <= _WELL_IN_TIME * budget_s
        ]
        return min(silent, key=lambda one: one.target.asked_at, default=None)

    def __repr__(self) -> str:
        return f"<ProbePlacer {self._fleet.balance!r}>"


def _is_due(target: TargetView, now: float, *, may_wait: bool, anybody: bool) -> bool:
    if not (target.breaker.allows(now) and (anybody or target.path_breaker.allows(now))):
        return False
    return not may_wait or now >= max(target.breaker.retry_at, target.path_breaker.retry_at) + PATIENCE_S


def _instead(decision: Decision, probe: Candidate) -> Decision:
    candidates, judged = decision.candidates, decision.judged
    if not any(one.target is probe.target and one.variant is probe.variant for one in candidates):
        candidates = (*candidates, probe)
        judged = (*judged, None) if judged else judged  # they go one by one: nobody judged the probe
    return decision._replace(candidates=candidates, judged=judged, chosen=probe, reason=REASON, refusal=None)


def _has_little_chance(candidate: Candidate) -> bool:
    """Whether the request would hardly be answered in time there, by a policy that claims chances."""
    return candidate.claim is not None and candidate.claim.prediction.claimed < LITTLE


def _finish(candidate: Candidate) -> float:
    return candidate.finish_s
