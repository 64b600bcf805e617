"""Admission as the gateway has it, and books of its own on what may leak there: places, and tenants' compute.

    places    who was let in is inside until its life ends, once; a tenant's share of them, and the limit's count
    compute   charged at launch; an answer is settled by what it took, an error is given back, what was given up stays

The books are kept by tenant and tier from the tolls that attempts carry. The amounts are the tolls' own, what is
checked is that each of them arrives exactly once, whatever the order of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf, isclose
from typing import Final

from gateway.core.admission.admission import LONGEST_S, SHORTEST_S, Admission, AdmissionRequest
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.placement_guard import TenantCharge, charged_cost_s
from gateway.core.admission.tenants import DEFAULT, TenantQuotas, TokenBucket
from gateway.core.fleet.pricing import Tier
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.interleave.draws import TENANTS
from tidegate.outcome import Overloaded

_URGENT_ROOM: Final = 1.5
_SWAMPED: Final = 60

Account = tuple[str, Tier]


class Door:
    """Mutable: `enters` and `leaves` for each life, `begins` and `ends` for each attempt."""

    def __init__(self, cap: int) -> None:
        self.admission = Admission(AdaptiveLimit(cap), TenantQuotas(TENANTS), draw=lambda: 0.5)
        self._inside: Counter[str] = Counter()
        self._due_s: Counter[Account] = Counter()  # of what is over
        self._charged_s: dict[AttemptTelemetry, float] = {}  # of what is under way

    def enters(self, tenant: str, priority: int, asked: int, now: float) -> bool:
        """Let a request in if admission does."""
        admission, name = self.admission, self._name(tenant)
        refusal = admission.enter(AdmissionRequest(tenant, priority, lambda: asked), now)
        if refusal is not None:
            check_refusal(refusal)
            return False
        self._inside[name] += 1
        limit = admission.limit
        assert limit.in_flight <= min(limit.cap, int(_URGENT_ROOM * limit.limit)), f"{limit} let one in too many"
        assert self._inside[name] <= (TENANTS[name].max_in_flight or inf), f"{name} has too many inside"
        return True

    def leaves(self, tenant: str, stayed_s: float) -> None:
        assert stayed_s >= 0.0
        self.admission.leave(tenant, stayed_s)
        self._inside[self._name(tenant)] -= 1

    def begins(self, attempt: AttemptTelemetry) -> None:
        """Called after the launch was charged."""
        observer = attempt.candidate.observer
        if observer is None:  # sent in hope, though placement had refused it
            return
        assert isinstance(observer, TenantCharge)
        self._charged_s[attempt] = charged_s = observer.charged_s
        assert isclose(charged_s, charged_cost_s(attempt.candidate)) and 0.0 < observer.share <= 1.0
        bucket = self._bucket(observer)
        assert bucket.rate == inf or bucket.balance >= min(0.0, bucket.burst - charged_s) - 1e-9, (
            f"{observer} was launched without the means"
        )

    def ends(self, attempt: AttemptTelemetry, how: str, stages: Mapping[str, float]) -> None:
        """What is due for it in the end. Called before the evidence is told."""
        if (charged_s := self._charged_s.pop(attempt, None)) is None:
            return
        observer = attempt.candidate.observer
        assert isinstance(observer, TenantCharge)
        if how == "answered" and "compute" in stages:
            due_s = observer.share * stages["compute"]
        else:
            due_s = 0.0 if how in ("failed", "moved") else charged_s
        self._due_s[observer.quota.name, observer.tier] += due_s

    def is_swamped(self) -> None:
        """Queues elsewhere ate many attempts: if requests keep coming, that is overload."""
        for _ in range(_SWAMPED):
            self.admission.overload.attempt_ended(lost=True)

    def check(self) -> None:
        admission = self.admission
        assert admission.in_flight == self._inside.total(), f"{admission.limit} should have {self._inside} inside"
        assert admission.limit.floor <= admission.limit.limit <= admission.limit.cap
        spent_s = self._due_s.copy()
        for attempt, charged_s in self._charged_s.items():
            observer = attempt.candidate.observer
            assert isinstance(observer, TenantCharge)
            spent_s[observer.quota.name, observer.tier] += charged_s
        for name, quota in admission.tenants.quotas.items():
            assert quota.in_flight == self._inside[name], f"{quota} should have {self._inside[name]}"
            for tier, bucket in quota.buckets.items():
                there_s = spent_s[name, tier]
                assert isclose(quota.spent_s[tier], there_s, abs_tol=1e-6), f"{quota} should have spent {there_s}"
                assert bucket.balance <= bucket.burst, "a bucket has a brim"

    def check_at_rest(self) -> None:
        self.check()
        assert self.admission.in_flight == 0, "somebody is still inside"
        assert not self._charged_s, "a charge was never settled"

    def _name(self, tenant: str) -> str:
        return tenant if tenant in TENANTS else DEFAULT

    def _bucket(self, observer: TenantCharge) -> TokenBucket:
        return observer.quota.buckets[observer.tier]

    def __repr__(self) -> str:
        return f"<Door {self.admission!r}>"


def check_refusal(refusal: Overloaded) -> None:
    """A refusal says why, and when to come back: within bounds, whatever was predicted."""
    assert refusal.message.partition(":")[0] in ("over-budget", "shed", "full", "hopeless")
    assert refusal.retry_after_s is not None
    assert SHORTEST_S <= refusal.retry_after_s <= LONGEST_S
