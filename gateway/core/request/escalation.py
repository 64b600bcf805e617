"""Escalation sends a request on to a better variant when the model itself is not sure of its answer.

A small model mostly errs where it is unsure, so a fleet of small models with a large one behind them comes close to
the large one's accuracy for a tenth of its work. An unsure answer (`tidegate/models/confidence.py`; the threshold is
the manifest's, from `tidegate model calibrate`) is kept as provisional: it is an answer in hand, and no error beats it.

    where     the same placement, with a floor of quality just above the variant that was not sure
    whether   its finish with its margin is before the provisional answer is due, its path is trusted, the fleet is
              not overloaded, and the model's budget has a token
    until     the provisional answer is due a moment before the deadline, so that it is in time for its caller

Escalations are no hedges: they are a model's ordinary work, foreseen when its threshold was chosen, so they spend no
tokens of hedges or fallbacks. Their own budget is against the unforeseen. A model whose world has drifted (a camera in
fog) is sure of nothing, and would move a fleet's whole load to the pool. So of a model's judged answers at most
`max_share` are escalated in the long run, with a burst on top; the others are given as they are, declared.

A variant of unmeasured quality has no floor above it: its unsure answers are only declared. So it is for a
demanded variant (nothing else would be an answer) and for a pinned request (its caller knows best where it may go).

It can be wrong where confidence is: a model that is sure of its mistakes is never asked twice.
Source: Sedna's joint inference (KubeEdge), which has neither deadline nor cap; Teerapittayanon et al., "Distributed
Deep Neural Networks over the Cloud, the Edge and End Devices", ICDCS 2017 (exits by entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nextafter
from typing import Final

from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Decision
from gateway.core.request.token_budget import TokenBudget
from tidegate.fleet.offers import VariantOffer

MAX_SHARE: Final = 0.5
_BURST: Final = 30.0
_RESERVE: Final = 0.02  # of the budget, ...
_LEAST_RESERVE_S: Final = 0.002  # ... above what event loops round, ...
_MOST_RESERVE_S: Final = 0.020  # ... and no more than a stall of a busy process


class Escalations:
    """The escalations of one model. Mutable: the token budget."""

    __slots__ = ("_overloaded", "threshold", "tokens", "window")

    def __init__(
        self,
        threshold: float,
        *,
        max_share: float = MAX_SHARE,
        overloaded: Callable[[], bool] = lambda: False,
        window: int = 0,
    ) -> None:
        """Args:
        max_share: of this model's judged answers, how many may be escalated in the long run, 0 to 1.
        window: of a generating model: by how many tokens of its beginning an answer is judged (`commit_window.py`).
        """
        self.threshold = threshold
        self.window = window
        self._overloaded = overloaded
        self.tokens = TokenBudget(share=max_share, cap=_BURST)

    def judge(self, confidence: float | None) -> bool:
        """Whether an answer will do as it is, which earns its model a share. None: it was not judged."""
        if confidence is None:
            return True
        self.tokens.earn()
        return confidence >= self.threshold

    def raised(self, ask: Ask, unsure: VariantOffer) -> Ask | None:
        """The same request to a better variant than `unsure`; None where it may not go to another."""
        if ask.variant or ask.pin != "any" or unsure.quality is None:
            return None
        return ask._replace(min_quality=nextafter(unsure.quality, inf))

    def is_promising(self, decision: Decision, due_at: float) -> bool:
        """Whether the decision's target is there, will surely answer before `due_at`, and has room for extra work."""
        chosen = decision.chosen
        if chosen is None or chosen.trust < 1.0 or self.is_suspended():
            return False
        return decision.at + chosen.finish_s + chosen.margin_s <= due_at

    def is_suspended(self) -> bool:
        """Whether the fleet has no room for extra work."""
        return self._overloaded()

    def may_escalate(self) -> bool:
        """Spend an escalation; False: too many of this model's answers were unsure lately."""
        return self.tokens.spend()

    def __repr__(self) -> str:
        return f"<Escalations below {self.threshold:g}, {self.tokens!r}>"


def provisional_due_at(arrived_at: float, deadline: float) -> float:
    """The last instant at which to give a provisional answer, so that it is in time for its caller."""
    budget_s = deadline - arrived_at
    reserve_s = min(max(_RESERVE * budget_s, _LEAST_RESERVE_S), _MOST_RESERVE_S, budget_s / 2)
    return deadline - reserve_s
