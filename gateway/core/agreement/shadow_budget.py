"""The shadow budget bounds what second answers cost: a small share of the pools' time, and none of it while they work.

    may be spent = share · what pools have computed for callers, and IDLE_SHARE of the pools' time if that is more

The second term is for pools that rest because devices answer nearly everything, which is when devices have to be
watched most. Each term has an account, every second answer is paid from both, and one may begin while either holds
something: so the larger of the two sums bounds what is spent, and not the sum of whichever was larger at the time. An
account saves up to `_SAVED_S` seconds of compute, so that a small budget is enough for a long request now and then, and
one that turned out longer is paid off before the next. The poorer account is never more than `_APART_S` behind, so that
weeks of rest, paid by time, do not forbid what the work of a busy day allows. A reference that costs money by the token
is never asked.

Invariants: what is spent is at most one second answer more than the larger of what the two terms have allowed, where
the accounts are never further apart than `_APART_S`; else at most their sum.

Quiet is a pool with no attempt of ours under way and no wait that is worth a word, by its last report: a second answer
is of the lowest priority, and still holds up what comes while it is computed.

Pure.
"""

from __future__ import annotations

from typing import Final

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.offer_index import Offer
from gateway.core.fleet.target import TargetView
from gateway.core.fleet.variant_rank import deferred_to
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import variant_misfit

QUIET_WAIT_S: Final = 0.002
IDLE_SHARE: Final = 0.001
_SAVED_S: Final = 1.0
_APART_S: Final = 2.0 * _SAVED_S


class ShadowBudget:
    """Mutable: `affords` asks, `spent` pays, and `worked` earns.

    Args:
        share: of what pools compute for callers, from 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._by_work_s = self._by_time_s = 0.1 * _SAVED_S
        self._at: float | None = None
        self.spent_s = 0.0  # altogether

    def affords(self, pools: int, now: float) -> bool:
        """Whether another second answer may begin, with so many pools up."""
        if self._at is not None:
            self._by_time_s = min(_SAVED_S, self._by_time_s + IDLE_SHARE * pools * (now - self._at))
        self._at = now
        return self._by_work_s > 0.0 or self._by_time_s > 0.0

    def worked(self, pool_s: float) -> None:
        """A pool has computed so long for a caller."""
        self._by_work_s = min(_SAVED_S, self._by_work_s + self._share * pool_s)

    def spent(self, pool_s: float) -> None:
        least_s = max(self._by_work_s, self._by_time_s) - pool_s - _APART_S
        self._by_work_s = max(least_s, self._by_work_s - pool_s)
        self._by_time_s = max(least_s, self._by_time_s - pool_s)
        self.spent_s += pool_s

    def __repr__(self) -> str:
        return f"<ShadowBudget {max(self._by_work_s, self._by_time_s):.3g} s left, {self.spent_s:.3g} s spent>"


def is_quiet(target: TargetView, now: float) -> bool:
    """Whether a target computes nothing now, as far as is known."""
    queue = target.queue_estimate
    return not target.ejected and queue.in_flight == 0 and target.wait_s(now) <= QUIET_WAIT_S


def reference_offers(fleet: Fleet, ask: Ask, quality: float) -> list[Offer]:
    """The pools' offers that may say whether a device's answer is right, the best variant first.

    Args:
        quality: of the device's variant; a lesser one is no reference.
    """
    found = [
        one
        for one in fleet.offers(ask.model, ask.version).pools.items
        if one.zone == "cloud"
        and one.quality >= quality
        and one.target.spec.token_price.is_free
        and not one.variant.paced
        and not deferred_to(one.variant, "", 0.0)
        and not variant_misfit(one.variant, ask)
    ]
    return sorted(found, key=lambda one: -one.quality)
