"""Admission decides whether a request is let in, with a reason for each refusal and a time after which to retry.

A request passes these checks in this order, and the first that fails is the reason:

    over-budget   its tenant has neither pool- nor edge-seconds left, or too many requests inside   `tenants.py`
    shed          the fleet is overloaded and the request is above the cut                           `cut_level.py`
    full          as many are inside as the targets' queues stand, or as memory allows               `concurrency.py`
    hopeless      placed and judged: in overload, its calibrated odds are below 5 %, or its answer is
                  worth less than what it takes from others                                         `placement_guard.py`

What is provably late is refused later and further in, by the queues themselves, which know best. The checks here keep
those refusals rare: work that is refused before it is placed costs nothing.

Whether there is overload at all is a state with a memory (`overload.py`), and how much has to be refused is predicted
from what is placed (`rejection.py`). While the state is off nothing is shed, whatever the levels. Hedges, escalations
and exploration depend on it too and read `overloaded`.

`retry_after_s` is the time in which the requests inside should be gone, by Little's law one mean stay, or the predicted
wait if that is longer; times U(1, 1.3), since callers that were refused together shall not come back together.

Invariants: each `enter` that let a request in is followed by exactly one `leave`; counters are 0 when none is inside.
Source: docs/design/routing.md, "Load shedding"; Cinnamon; DAGOR; Zhou and others' and Google's rule that a retry must
not have a better chance than the first try (Beyer et al., "Site Reliability Engineering", 2016, ch. 21).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import Final, Literal, NamedTuple

from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.cut_level import CutLevel, level
from gateway.core.admission.overload import Overload
from gateway.core.admission.rejection import TICK_S, RejectionRate
from gateway.core.admission.tenants import TenantQuota, TenantQuotas
from gateway.core.fleet.pricing import Tier
from tidegate.outcome import Overloaded
from tidegate.priority import level_of

Reason = Literal["over-budget", "shed", "full", "hopeless"]
SHORTEST_S: Final = 0.05
LONGEST_S: Final = 30.0
_SPREAD: Final = 0.3
_STAY_WEIGHT: Final = 0.05  # a mean over some 20 stays
_SHEDDING: Final = 0.02  # a rate below this keeps nothing from coming back
_MOST_TICKS: Final = 200  # to catch up on after a pause: by then everything is forgotten


class AdmissionRequest(NamedTuple):
    """A request to be let in. `asked`, a fingerprint of what is asked, and `share` are worked out only in overload."""

    tenant: str
    priority: int
    asked: Callable[[], int]
    share: Callable[[], float] = lambda: 1.0  # the weight of its model
    also_pays: str = ""  # the quota of a credential with limits that acts for the tenant


class Admission:
    """Mutable: `enter` and `leave` for each request; the guard reports placements, its observers attempts."""

    def __init__(
        self,
        limit: AdaptiveLimit,
        tenants: TenantQuotas,
        *,
        draw: Callable[[], float],
        shed: bool = True,
        has_sites: bool = False,
        on_change: Callable[[bool, str], None] = lambda _on, _reason: None,
    ) -> None:
        """Args:
        draw: uniform in [0, 1).
        shed: whether requests are refused for the sake of others.
        has_sites: whether a site, which limits tenants itself, may answer for one whose own compute is used up.
        on_change: called with each change of the overload state, and why.
        """
        self.sheds = shed
        self._tiers: tuple[Tier, ...] = ("edge", "pool", "site") if has_sites else ("edge", "pool")
        self.limit = limit
        self.tenants = tenants
        self.overload = Overload()
        self.rejection = RejectionRate()
        self.cut = CutLevel()
        self.refused: Counter[Reason] = Counter()
        self._draw = draw
        self._on_change = on_change
        self._next_tick: float | None = None
        self._mean_stay_s = 0.0
        self._mean_wait_s = 0.0

    @property
    def in_flight(self) -> int:
        return self.limit.in_flight

    def weight_of(self, tenant: str) -> float:
        return self.tenants.weight_of(tenant)

    def overloaded(self) -> bool:
        return self.overload.on

    def enter(self, request: AdmissionRequest, now: float) -> Overloaded | None:
        """Let the request in, or say why not."""
        self._tick(now)
        quota = self.tenants.paying(request.tenant, request.also_pays)
        priority_level = level_of(request.priority)
        refusal = self._over_budget(quota, now)
        if refusal is None and self.overload.on and self.sheds:
            refusal = self._shed(quota, priority_level, request, now)
        if refusal is None and not self.limit.try_acquire(urgent=priority_level == 1):
            refusal = self._refuse("full", self._fullness(), self._drain_s)
        if refusal is None:
            quota.enter()
        return refusal

    def _fullness(self) -> str:
        inside = f"{self.limit.in_flight} requests are in flight"
        return f"{inside}, which is max_in_flight" if self.limit.in_flight >= self.limit.cap else inside

    def leave(self, tenant: str, stayed_s: float) -> None:
        """A request that was let in is over, of a tenant whose quota is what it was then. `stayed_s`: how long it was
        inside."""
        self.leave_quota(self.tenants.of(tenant), stayed_s)

    def leave_quota(self, quota: TenantQuota, stayed_s: float) -> None:
        """The same. `quota`: its tenant's when it entered, which may have got one of its own since."""
        self.limit.release()
        quota.leave()
        self._mean_stay_s += _STAY_WEIGHT * (stayed_s - self._mean_stay_s)

    def placed(self, wait_s: float, strain: float, loss: float) -> None:
        """A request was placed for the first time, see `AdmissionGuard`."""
        self.overload.placed(strain)
        self.rejection.placed(loss)
        self._mean_wait_s += _STAY_WEIGHT * (wait_s - self._mean_wait_s)

    def refuse_not_worth_it(self, why: str) -> Overloaded:
        """The refusal of a request that was placed and is not worth its place."""
        return self._refuse("hopeless", why, self._drain_s)

    def refuse_over_budget(self, quota: TenantQuota, wait_s: float) -> Overloaded:
        """The refusal of a request whose tenant can pay for it in `wait_s`. `quota`: the one that lacks, as below."""
        return self._refuse("over-budget", f"tenant {quota.name!r} has used up its compute", wait_s)

    def refuse_over_rate(self, quota: TenantQuota, wait_s: float) -> Overloaded:
        """The refusal of a request before it is read: its tenant asks, or sends, more than it may."""
        return self._refuse("over-budget", f"tenant {quota.name!r} has used up its requests or bytes", wait_s)

    def refuse_over_tokens(self, quota: TenantQuota, tokens: int, wait_s: float) -> Overloaded:
        """The refusal of a generation whose tenant can pay for its tokens in `wait_s`."""
        why = f"tenant {quota.name!r} has used up its tokens: {tokens} are asked for, fewer max_tokens take less"
        return self._refuse("over-budget", why, wait_s)

    def _over_budget(self, quota: TenantQuota, now: float) -> Overloaded | None:
        if quota.limitless:
            return None
        if not quota.has_place():
            full = quota.lacks_places()
            why = f"tenant {full.name!r} has {full.in_flight} requests in flight, its limit"
            return self._refuse("over-budget", why, self._drain_s)
        wait_s, tier = min([(quota.wait_s(tier, 0.0, now), tier) for tier in self._tiers])
        return self.refuse_over_budget(quota.lacks_compute(tier, 0.0, now), wait_s) if wait_s > 0.0 else None

    def _shed(
        self, quota: TenantQuota, priority_level: int, request: AdmissionRequest, now: float
    ) -> Overloaded | None:
        weight = quota.spec.weight * request.share()
        place = level(priority_level, quota.name, request.asked(), now, weight)
        self.cut.record(place)
        if not self.cut.refuses(place):
            return None
        return self._refuse("shed", f"overloaded: level {place} is not below the cut at {self.cut.cut}", self._drain_s)

    def _refuse(self, reason: Reason, why: str, wait_s: float) -> Overloaded:
        self.refused[reason] += 1
        return Overloaded(f"{reason}: {why}", retry_after_s=self._retry_after_s(wait_s))

    def _retry_after_s(self, wait_s: float) -> float:
        """Whole milliseconds: what is reported is what is meant."""
        spread_s = min(LONGEST_S, wait_s) * (1.0 + _SPREAD * self._draw())
        return min(LONGEST_S, max(SHORTEST_S, ceil(1e3 * spread_s) / 1e3))

    @property
    def _drain_s(self) -> float:
        return max(self._mean_stay_s, self._mean_wait_s)

    def _tick(self, now: float) -> None:
        if self._next_tick is None:
            self._next_tick = now + TICK_S
        ticks = 0
        while now >= self._next_tick:
            self._next_tick = now + TICK_S if ticks >= _MOST_TICKS else self._next_tick + TICK_S
            ticks += 1
            self.rejection.tick(active=self.overload.on)
        if ticks and self.overload.on:
            self.cut.tick(self.rejection.rate)
        if self.overload.observe(now, shedding=self.rejection.rate > _SHEDDING):
            self._changed()

    def _changed(self) -> None:
        if self.overload.on:
            self.rejection.begin()
            self.cut.tick(self.rejection.rate)
        else:
            self.rejection.end()
            self.cut.reset()
        self._on_change(self.overload.on, self.overload.reason)

    def __repr__(self) -> str:
        return f"<Admission {self.limit!r} {self.overload!r} {self.rejection!r} {dict(self.refused)}>"
