"""Tenant quotas bound each tenant's use of the fleet: a token bucket per tier, in seconds of compute.

Requests per second mean little where one request costs a thousand times another, so budgets are in what is scarce: a
tenant that may use 0.5 pool-seconds a second keeps half a device busy, however it asks. An attempt is charged its
predicted compute as it is launched and settled when its answer says what it took; a refused or failed one is refunded.
Several requests that a pool computes together share one batch: each is charged the share of it by which it lengthens
the queue (`placer.added_work_s`).

A request may be paid when the bucket holds its cost, or is full: what costs more than a whole burst would otherwise
never run. What the prediction was short of becomes a debt, which is repaid before anything else is spent.

Requests and bytes are budgeted in the same way, for what compute does not show: a flood of small questions about
metadata, or bodies that fill the link. Their bursts are one second's worth.

Tokens of generations are reserved before they are made, the prompt's and as many as the answer may have, and settled
at the end, however it came: what was not made is given back at once. Their burst is a minute's worth, since a single
answer is many seconds'.

A tenant is a name in the configuration; any other name shares the quota of `default`, so names that callers invent cost
no memory. An authenticated tenant (`known`) has a quota of its own, as large as that of `default` where nothing else is
configured: a storm of another tenant must not empty it. A credential with limits has a quota within its tenant's:
whatever it spends is spent from both. Where one of those that pay together lacks, a refusal names that one (`lacks_…`),
and is counted as missed there alone: the other could have paid, and needs no larger share.

Several gateways side by side have a share of each quota, by what is asked of each of them: `SharedQuotas` sets it
(`shared_quotas.py`) from what the buckets have counted. With a store, the buckets hold what it lends
(`leased_quotas.py`). A gateway alone has the whole.

Invariants: 0 <= available <= burst; what a tenant is granted in t seconds is at most rate · t + burst + the largest
single cost; in_flight never exceeds the tenant's own limit. O(1), and as many quotas as there are names configured and
authenticated, MAX_QUOTAS at most.
Source: docs/design/routing.md, "Tenant budgets"; Stripe, "Scaling your API with rate limiters", 2017 (token buckets,
and a cap in flight).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from gateway.core.fleet.pricing import Tier
from tidegate.caller import NO_LIMITS, Identity, UsageLimits, tenant_of

DEFAULT: Final = "default"
TOKEN_BURST_S: Final = 60.0
MAX_QUOTAS: Final = 10_000  # beyond, a new tenant shares the default


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """What one tenant may use. Infinite rates are no limit."""

    weight: float = 1.0
    pool_s_per_s: float = inf
    edge_s_per_s: float = inf
    burst_s: float = 1.0
    max_in_flight: int | None = None
    requests_per_s: float = inf
    bytes_per_s: float = inf
    tokens_per_s: float = inf


class TokenBucket:
    """Mutable: seconds of compute, requests or bytes that may be spent now; refilled at `rate` up to `burst`.

    `spent` adds up what was spent, and `missed` what was asked for and refused, until somebody takes them
    (`shared_quotas.py`); `largest_missed` is the largest single cost that was refused lately. A `leased` bucket holds
    what a store has lent (`leased_quotas.py`): it is filled by `deposit` and by nothing else.
    """

    __slots__ = (
        "_at", "_balance", "burst", "largest_missed", "leased", "missed", "rate", "spent", "whole_burst", "whole_rate",
    )  # fmt: skip

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = self.whole_rate = rate
        self.burst = self.whole_burst = burst
        self.spent = self.missed = self.largest_missed = 0.0
        self.leased = False
        self._balance = burst if rate > 0.0 else 0.0  # below 0: a debt
        self._at = 0.0

    @property
    def balance(self) -> float:
        """What was there at the last refill, less what was spent since; below 0 it is a debt."""
        return self._balance

    def available(self, now: float) -> float:
        """What may be spent, never below 0."""
        self._refill(now)
        return max(0.0, self._balance)

    def affords(self, cost: float, now: float) -> bool:
        if self.rate in (0.0, inf):
            return self.rate > 0.0
        self._refill(now)
        return self._balance >= min(cost, self.burst)

    def wait_s(self, cost: float, now: float) -> float:
        """Until `cost` can be paid; infinite where nothing ever comes in."""
        self._refill(now)
        short = min(cost, self.burst) - self._balance
        if short <= 0.0 or self.rate == inf:
            return 0.0
        return short / self.rate if self.rate > 0.0 else inf

    def spend(self, cost: float, now: float) -> None:
        """Charge; a negative cost is a refund."""
        if self.rate < inf:
            self._refill(now)
            self._balance = min(self.burst, self._balance - cost)
            self.spent += cost

    def miss(self, cost: float) -> None:
        """Count a cost that was refused."""
        self.missed += cost
        self.largest_missed = max(self.largest_missed, cost)

    def miss_if_short(self, cost: float, now: float) -> None:
        """Count a cost that was refused, unless it was refused for the sake of another bucket."""
        if not self.affords(cost, now):
            self.miss(cost)

    def lease(self, now: float) -> None:
        """From now on it holds what is deposited."""
        self._refill(now)
        self.leased = True
        self.burst = self.whole_burst

    def deposit(self, amount: float) -> None:
        """Add what was lent; a negative amount is given back."""
        self._balance = min(self.burst, self._balance + amount)

    def share(self, rate: float, now: float) -> None:
        """From now on this part of the whole, a rate, with as much of the burst."""
        self._refill(now)
        self.leased = False
        self.rate = rate
        self.burst = self.whole_burst * (rate / self.whole_rate)
        self._balance = min(self.burst, self._balance)

    def _refill(self, now: float) -> None:
        if self.rate < inf and now > self._at:
            if not self.leased:
                self._balance = min(self.burst, self._balance + self.rate * (now - self._at))
            self._at = now

    def __repr__(self) -> str:
        return f"<TokenBucket {self._balance:.3f} of {self.burst:g}, {self.rate:g} a second>"


class TenantQuota:
    """Mutable: one tenant's buckets, and how many of its requests are inside. `within`: the quota that pays with it."""

    __slots__ = (
        "_all", "buckets", "bytes", "in_flight", "name", "places", "places_asked", "requests", "spec", "spent_s",
        "tokens", "unlimited", "within",
    )  # fmt: skip

    def __init__(self, name: str, spec: TenantSpec, within: TenantQuota | None = None) -> None:
        self.name = name
        self.in_flight = 0
        self.spent_s: dict[Tier, float] = {"edge": 0.0, "pool": 0.0, "site": 0.0}
        self.within = within
        self._all: tuple[TenantQuota, ...] = (self,) if within is None else (self, within)
        self.change(spec)

    def change(self, spec: TenantSpec) -> None:
        """Other limits from now on, with full buckets. Requests inside stay inside."""
        self.spec = spec
        # Where nothing is limited, as for most gateways' only tenant, no bucket need be asked.
        self.unlimited = spec == TenantSpec(weight=spec.weight, burst_s=spec.burst_s)
        self.buckets: dict[Tier, TokenBucket] = {
            "edge": TokenBucket(spec.edge_s_per_s, spec.burst_s),
            "pool": TokenBucket(spec.pool_s_per_s, spec.burst_s),
            "site": TokenBucket(inf, spec.burst_s),  # the site's own quotas limit what its places spend
        }
        self.requests = TokenBucket(spec.requests_per_s, max(1.0, spec.requests_per_s))
        self.bytes = TokenBucket(spec.bytes_per_s, spec.bytes_per_s)
        self.tokens = TokenBucket(spec.tokens_per_s, TOKEN_BURST_S * spec.tokens_per_s)
        self.places = spec.max_in_flight  # this gateway's share
        self.places_asked = 0  # the most that were taken or asked for, until somebody takes it

    @property
    def limitless(self) -> bool:
        """Whether neither it nor the quota around it limits anything."""
        return self.unlimited and (self.within is None or self.within.unlimited)

    def has_place(self) -> bool:
        for one in self._all:
            if one.places is not None:
                one.places_asked = max(one.places_asked, one.in_flight + 1)
                if one.in_flight >= one.places:
                    return False
        return True

    def lacks_places(self) -> TenantQuota:
        """The one of those that pay whose places are taken; itself where none is full."""
        return next((one for one in self._all if one.places is not None and one.in_flight >= one.places), self)

    def enter(self) -> None:
        for one in self._all:
            one.in_flight += 1

    def leave(self) -> None:
        for one in self._all:
            one.in_flight -= 1

    def affords(self, tier: Tier, cost_s: float, now: float) -> bool:
        if self.limitless:
            return True
        return all(one.buckets[tier].affords(cost_s, now) for one in self._all)

    def wait_s(self, tier: Tier, cost_s: float, now: float) -> float:
        return max(one.buckets[tier].wait_s(cost_s, now) for one in self._all)

    def lacks_compute(self, tier: Tier, cost_s: float, now: float) -> TenantQuota:
        """The one of those that pay that has to wait longest."""
        return max(self._all, key=lambda one: one.buckets[tier].wait_s(cost_s, now))

    def refuse(self, tier: Tier, cost_s: float, now: float) -> float:
        """An attempt that cannot be paid: how long it would have to wait."""
        for one in self._all:
            one.buckets[tier].miss_if_short(cost_s, now)
        return self.wait_s(tier, cost_s, now)

    def spend(self, tier: Tier, cost_s: float, now: float) -> None:
        for one in self._all:
            if not one.unlimited:
                one.buckets[tier].spend(cost_s, now)
            one.spent_s[tier] += cost_s

    def ask(self, now: float) -> float:
        """Pay for one request; how long it has to wait instead where it cannot be paid, or where bytes are owed."""
        if self.limitless:
            return 0.0
        wait_s = max([_asks_in_s(one, now) for one in self._all])
        for one in self._all:
            if wait_s <= 0.0:
                one.requests.spend(1.0, now)
            else:
                one.requests.miss_if_short(1.0, now)
        return wait_s

    def lacks_requests(self, now: float) -> TenantQuota:
        """The one of those that pay that has to wait longest for its next request."""
        return max(self._all, key=lambda one: _asks_in_s(one, now))

    def carry(self, size_bytes: int, now: float) -> None:
        """Pay for bytes that came or went; more than there are is owed, and asked for first."""
        if self.limitless:
            return
        for one in self._all:
            one.bytes.spend(size_bytes, now)

    def reserve(self, tokens: int, now: float) -> float:
        """Pay for so many tokens of a generation; how long it has to wait instead where they cannot be paid."""
        if self.limitless:
            return 0.0
        wait_s = max([one.tokens.wait_s(tokens, now) for one in self._all])
        if wait_s <= 0.0:
            self.settle(-tokens, now)
        else:
            for one in self._all:
                one.tokens.miss_if_short(tokens, now)
        return wait_s

    def lacks_tokens(self, tokens: int, now: float) -> TenantQuota:
        """The one of those that pay that has to wait longest."""
        return max(self._all, key=lambda one: one.tokens.wait_s(tokens, now))

    def settle(self, tokens: int, now: float) -> None:
        """Give back tokens that were reserved and not made."""
        for one in self._all:
            one.tokens.spend(-tokens, now)

    def __repr__(self) -> str:
        return f"<TenantQuota {self.name} {self.in_flight} in flight, {self.buckets}>"


class JointQuota(TenantQuota):
    """What a credential that acts for another tenant uses, which both pay. Made for one request."""

    def __init__(self, own: TenantQuota, other: TenantQuota) -> None:
        self.name, self.spec, self.in_flight = other.name, other.spec, other.in_flight
        self.unlimited = own.limitless and other.limitless
        self.within = None
        paying = [one for pays in (own, other) for one in (pays, pays.within) if one is not None]
        self._all = tuple(dict.fromkeys(paying))

    def __repr__(self) -> str:
        return f"<JointQuota of {', '.join(one.name for one in self._all)}>"


class TenantQuotas:
    """The quotas, by tenant."""

    def __init__(self, specs: Mapping[str, TenantSpec] = {}) -> None:  # never changed
        self.quotas = {name: TenantQuota(name, spec) for name, spec in {DEFAULT: TenantSpec(), **specs}.items()}
        self._default = self.quotas[DEFAULT]

    def of(self, name: str) -> TenantQuota:
        """The tenant's quota; that of `default` for a name that is not configured."""
        return self.quotas.get(name, self._default)

    def paying(self, name: str, also_pays: str) -> TenantQuota:
        """The tenant's quota, or that of both where a credential with limits of its own acts for it.

        Args:
            also_pays: the name of that credential's quota; "" for none.
        """
        quota = self.of(name)
        if not also_pays:
            return quota
        # Where there was no room for a quota of the credential's own, its tenant's pays, as in `of_identity`.
        own = self.quotas.get(also_pays) or self.of(tenant_of(also_pays))
        return quota if own is quota else JointQuota(own, quota)

    def weight_of(self, name: str) -> float:
        return self.of(name).spec.weight

    def known(self, tenant: str) -> TenantQuota:
        """The quota of an authenticated tenant, made where it is new."""
        found = self.quotas.get(tenant)
        if found is not None:
            return found
        if len(self.quotas) >= MAX_QUOTAS:
            return self._default
        return self.quotas.setdefault(tenant, TenantQuota(tenant, self._default.spec))

    def of_identity(self, identity: Identity) -> TenantQuota:
        """The quota that pays for an identity: the tenant's, or one within it where the credential has limits."""
        limits, tenant = identity.grant.limits, identity.grant.tenant
        if limits == NO_LIMITS:
            return self.known(tenant)
        within = self.known(tenant)
        spec = _spec_of(limits, within.spec.weight)
        found = self.quotas.get(identity.payer)
        if found is None:
            full = len(self.quotas) >= MAX_QUOTAS
            return within if full else self.quotas.setdefault(identity.payer, TenantQuota(identity.payer, spec, within))
        if found.spec != spec:
            found.change(spec)
        return found

    def __repr__(self) -> str:
        return f"<TenantQuotas {', '.join(self.quotas)}>"


def _asks_in_s(quota: TenantQuota, now: float) -> float:
    return max(quota.requests.wait_s(1.0, now), quota.bytes.wait_s(0.0, now))


def _spec_of(limits: UsageLimits, weight: float) -> TenantSpec:
    rates = (limits.pool_s_per_s, limits.edge_s_per_s, limits.requests_per_s, limits.bytes_per_s, limits.tokens_per_s)
    pool, edge, requests, octets, tokens = (inf if rate is None else rate for rate in rates)
    return TenantSpec(
        weight=weight,
        pool_s_per_s=pool,
        edge_s_per_s=edge,
        burst_s=1.0,
        max_in_flight=limits.max_in_flight,
        requests_per_s=requests,
        bytes_per_s=octets,
        tokens_per_s=tokens,
    )
