"""The service cost predicts the compute time of one request on one target in one variant.

Each target measures a table at its warm-up and offers it with the variant; a log residual corrects it by what the
answers report (`ServiceTime`). A target that offers no table (a foreign server) is priced by a conservative prior for
its kind of feature until its own answers correct it: too dear rather than too cheap, so that a sure target comes first,
but never proof that a request is hopeless (`floor_s` is 0), since a wrong prior could then never be unlearned.

What is learned survives a reconnect and is dropped when the target measures a different table: a new table is a new
start. Predictions are in the manifest's work units and know nothing of queues or links.

The class of a request (cheap, ambiguous, heavy) is derived from predictions for people and metrics; nothing routes
by it.

It can be wrong where a pool computes rows of several callers together: the residual then learns the usual batch-mates.
Source: docs/design/routing.md, "Service-time estimates".
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp
from typing import Final, Literal

from gateway.core.estimate.answer_times import AnswerTimes
from gateway.core.estimate.token_gaps import TokenGaps
from gateway.core.estimate.token_pace import TokenPace
from tidegate.estimate.service_time import ServiceTime
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.models.manifest import Feature

CostClass = Literal["cheap", "ambiguous", "heavy"]
P95_SIGMAS: Final = 1.645
# no call was ever faster than this share of its prediction; docs/design/routing.md, "Provable lateness"
OPTIMISTIC: Final = 0.6
MOST_LEFT: Final = 32  # variants of a target that it offers no more, whose costs are remembered
_CHEAP_SHARE: Final = 0.5  # of the budget, for an edge's unloaded p95; docs/design/routing.md, "Service-time estimates"
_UNMEASURED_SIGMA: Final = 0.5  # a prior is good to within a factor of e^±1 at two sigmas

# (work, seconds) of a slow single-board computer: too dear on purpose.
_PRIOR: Final[dict[Feature, tuple[tuple[float, float], ...]]] = {
    "tokens": ((1.0, 0.010), (512.0, 0.500)),
    "pixels": ((1.0, 0.010), (1e6, 0.500)),
    "items": ((1.0, 0.020), (64.0, 0.500)),
    "bytes": ((1.0, 0.010), (1e7, 0.500)),
}


class VariantCost:
    """Mutable: the cost of one variant on one target; `record` after each computed answer."""

    __slots__ = (
        "_call_s",
        "_factor",
        "_fixed_s",
        "_looked_up",
        "_looked_up_s",
        "_pace",
        "_service",
        "_wider",
        "answer_times",
        "feature",
        "measured",
        "points",
        "sigma",
        "token_gaps",
    )  # fmt: skip

    def __init__(self, points: tuple[tuple[float, float], ...], feature: Feature) -> None:
        self.points = points
        self.feature = feature
        self.measured = bool(points)
        self._service = ServiceTime(points or _PRIOR[feature])
        self._wider = 1.0
        self._fixed_s = self._looked_up_s = self._service.table.seconds_for(0.0)
        self._looked_up = 0.0  # the work that the table was asked for last: often it is the same again
        self.answer_times = AnswerTimes()  # where the target promises nothing
        self.token_gaps = TokenGaps()  # of a variant that generates
        self._pace: TokenPace | None = None
        self._read_residual()

    @property
    def pace(self) -> TokenPace:
        """Of its tokens, where it generates."""
        if self._pace is None:
            self._pace = TokenPace(self._service.table.points)
        return self._pace

    @property
    def factor(self) -> float:
        """How many times the table's seconds calls have lately taken."""
        return self._factor

    def predict_s(self, units: float) -> float:
        """Median seconds of compute for `units` of work, alone on the device."""
        if units != self._looked_up:
            self._looked_up, self._looked_up_s = units, self._service.table.seconds_for(units)
        return self._looked_up_s * self._factor

    def table_s(self, units: float) -> float:
        """The same by the table alone, whatever answers have shown since."""
        if units != self._looked_up:
            self._looked_up, self._looked_up_s = units, self._service.table.seconds_for(units)
        return self._looked_up_s

    def fixed_s(self) -> float:
        """Seconds of the fixed part of a call by the table alone."""
        return self._fixed_s

    def call_s(self) -> float:
        """Seconds of the fixed part of a call: what even the smallest takes."""
        return self._call_s

    def floor_s(self, units: float) -> float:
        """Seconds below which no answer is possible; 0 where nothing was measured."""
        if not self.measured:
            return 0.0
        # A device that was slow lately may be fast again: only a factor below 1 is taken at its word here.
        return OPTIMISTIC * min(1.0, self._factor) * self._service.table.floor_for(units)

    def record(self, units: float, observed_s: float) -> None:
        self._service.record(units, observed_s)
        self._read_residual()

    def relearn(self, factor: float) -> None:
        """Believe at once that calls take so many times the table's seconds, instead of a little more with each."""
        self._service.residual.relearn(factor)
        self._read_residual()

    def widen(self, times: float) -> None:
        """Claim so many times the spread that answers have shown; 1 for what they have."""
        self._wider = times
        self._read_residual()

    def relax(self, now: float) -> None:
        """Drift back to the table while no answer comes: a target thought slow gets no requests."""
        self._service.relax(now)
        if self._pace is not None:
            self._pace.relax(now)
        self._read_residual()

    def _read_residual(self) -> None:
        # Read once per answer instead of once per candidate: there are more candidates than answers.
        residual = self._service.residual
        self._factor = residual.factor
        self._call_s = self._fixed_s * self._factor
        self.sigma = self._wider * (residual.sigma if self.measured else max(residual.sigma, _UNMEASURED_SIGMA))

    def __repr__(self) -> str:
        return f"<VariantCost {'measured' if self.measured else 'prior'} {self._service!r}>"


class CostModel:
    """The costs of each (target, model, version, variant) that is offered here, and of some that were.

    What was unloaded may come back. Versions that others have replaced will not, and are forgotten in turn: `keep`.
    """

    def __init__(self) -> None:
        self._costs: dict[str, dict[tuple[str, str, str], VariantCost]] = {}

    def of(self, target_id: str, model: str, version: str, offer: VariantOffer, feature: Feature) -> VariantCost:
        """The cost that goes with this offer; the one already learned if its table is the same."""
        costs, key = self._costs.setdefault(target_id, {}), (model, version, offer.name)
        known = costs.pop(key, None)
        if known is None or known.points != offer.cost or known.feature != feature:
            known = VariantCost(offer.cost, feature)
        costs[key] = known  # in the order of their offers, the latest last
        return known

    def keep(self, target_id: str, offers: Iterable[ModelOffer]) -> None:
        """Forget all but what is offered and the latest `MOST_LEFT` of what was."""
        costs = self._costs.get(target_id, {})
        if len(costs) <= MOST_LEFT:
            return
        offered = {(model.name, model.version, variant.name) for model in offers for variant in model.variants}
        for key in [key for key in costs if key not in offered][:-MOST_LEFT]:
            del costs[key]

    def known(self, target_id: str, variant: tuple[str, str, str]) -> VariantCost | None:
        """The cost of a variant that was offered, by (model, version, variant)."""
        return self._costs.get(target_id, {}).get(variant)

    def relax(self, target_id: str, now: float) -> None:
        """Let what was learned of a target fade while it has no answers."""
        for cost in self._costs.get(target_id, {}).values():
            cost.relax(now)

    def restore(self, target_id: str, costs: dict[tuple[str, str, str], VariantCost]) -> None:
        """The costs of a target that is back, as `forget` returned them."""
        self._costs[target_id] = costs

    def forget(self, target_id: str) -> dict[tuple[str, str, str], VariantCost]:
        """Drop and return what was learned of a target that is gone: a fleet that comes and goes stays bounded."""
        return self._costs.pop(target_id, {})

    def __repr__(self) -> str:
        return f"<CostModel {sum(map(len, self._costs.values()))} variants>"


def unloaded_p95_s(cost: VariantCost, units: float, rtt_s: float) -> float:
    """The 95th percentile of an answer's time from an idle target."""
    return rtt_s + cost.predict_s(units) * exp(P95_SIGMAS * cost.sigma)


def cost_class(edge_p95_s: Iterable[float], budget_s: float) -> CostClass:
    """How hard a request is for the edges that may take it: `heavy` when none can be expected to make the budget."""
    best_s = min(edge_p95_s, default=None)
    if best_s is None or best_s > budget_s:
        return "heavy"
    return "cheap" if best_s <= _CHEAP_SHARE * budget_s else "ambiguous"
