"""The fallback placer places requests by least request when the predictor fails.

Placement rests on a dozen estimators, and a defect in one of them must not be an outage: the request in whose decision
it shows is placed all the same, in the same call, by a rule that needs none of them. Among the eligible targets, it
takes the one with the fewest of our own attempts in flight for its speed:

    (in flight + 1) × seconds of the measured table, of the first point that is not below the work

which is Envoy's and nginx's weighted least request, with the offered table as the weight. Neither queue reports nor
links nor chances are looked at; breakers are, since they only count. Such a decision names no other candidates, so
it causes no hedge.

A decision whose chosen finish is no finite number is a failure of the predictor like one that raises: a NaN compares
as false with everything, and would send all traffic to the first target of the list.

The admission guard's part (a tenant's tokens, early shedding) is skipped. `on_change` is called once when placement
begins to fail, and once when `HEALED` decisions in a row have been sound again.

Source: docs/design/faults.md, "Placement fallback".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import isfinite
from typing import Final

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.offer_index import Offer
from gateway.core.fleet.target import TargetView
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import ineligible, no_candidate_reason
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate, Decision
from tidegate.outcome import NothingAlive

HEALED: Final = 100
_UNMEASURED_S: Final = 0.05  # of a target without a table: any number, the same for all of them


class PredictionFailed(Exception):
    """A decision rests on a number that is not finite."""


class FallbackPlacer:
    """Decides as `placement` does, and by least request where that raises.

    Args:
        on_change: called with the error with which placement began to fail, and with None when it has healed.
    """

    def __init__(self, placement: Placement, fleet: Fleet, *, on_change: Callable[[Exception | None], None]) -> None:
        self._placement = placement
        self._fleet = fleet
        self._on_change = on_change
        self._unsound = 0  # sound decisions that are still needed until it counts as healed

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        try:
            decision = self._placement.decide(ask, now, exclude)
            if decision.chosen is not None and not isfinite(decision.chosen.finish_s):
                raise PredictionFailed(f"{decision.chosen.target.id} would answer in {decision.chosen.finish_s} s")
        except Exception as error:
            self._failed(error)
            return least_request(self._fleet, ask, now, exclude)
        if self._unsound:
            self._sound()
        return decision

    def _failed(self, error: Exception) -> None:
        if not self._unsound:
            self._on_change(error)
        self._unsound = HEALED

    def _sound(self) -> None:
        self._unsound -= 1
        if not self._unsound:
            self._on_change(None)

    def __repr__(self) -> str:
        return f"<FallbackPlacer {'failing: by least request' if self._unsound else 'sound'} {self._placement!r}>"


def least_request(fleet: Fleet, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
    """Where `ask` goes by this rule alone."""
    offers = [
        one
        for one in fleet.offered(ask.model, ask.version)
        if one.target.id not in exclude and one.target.id not in ask.left_out and ask.home in ("", one.target.id)
    ]
    found = [one for one in offers if _is_eligible(one, ask, now)]
    found = found or [one for one in offers if _is_eligible(one, ask, now, deferred=True)]
    if not found:
        return Decision(now, ask, (), None, "", NothingAlive(no_candidate_reason(fleet, ask, now, exclude)))
    chosen = min([_plain(one, ask.units) for one in found], key=_load)
    return Decision(now, ask, (chosen,), chosen, "least-request", None)


def _is_eligible(offered: Offer, ask: Ask, now: float, *, deferred: bool = False) -> bool:
    return ineligible(offered.target, offered.variant, ask, now, usable=_by_breakers, deferred=deferred) is None


def _by_breakers(target: TargetView, now: float) -> bool:
    """By the breakers alone; `takes` reads the link's estimates too, which may be what fails."""
    return not target.ejected or (target.breaker.allows(now) and target.path_breaker.allows(now))


def _plain(offered: Offer, units: float) -> Candidate:
    """A candidate of which only its table is known."""
    compute_s = next((seconds for work, seconds in offered.variant.cost if work >= units), None)
    if compute_s is None:
        compute_s = offered.variant.cost[-1][1] if offered.variant.cost else _UNMEASURED_S
    wait_s = offered.target.queue_estimate.in_flight * compute_s
    return Candidate(
        offered=offered,
        compute_s=compute_s,
        wait_s=wait_s,
        link_s=0.0,
        margin_s=compute_s,
        finish_s=wait_s + compute_s,
        cost=compute_s,
    )


def _load(candidate: Candidate) -> float:
    return candidate.finish_s  # (in flight + 1) × seconds
