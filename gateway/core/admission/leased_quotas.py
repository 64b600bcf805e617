"""Leased quotas are what a store lends of each quota, a moment ahead, so that several gateways spend from one bucket.

Shares (`shared_quotas.py`) follow what is asked with the delay of a report. With a store there is one token bucket for
all gateways, and each gateway draws from it, beside requests, what its callers will ask for in the next moment:

    held        a bucket here has this much: as many seconds of demand as AHEAD leases last, or the largest cost that
                was refused lately, or an equal part of half the burst, for the first requests after silence
    asked for   what is short of that; debts are short of it too
    given back  what is more than twice that
    early       a bucket that the store could fill, and that has spent a quarter, is filled again before the next turn

Callers come unevenly: with what is asked on average, a gateway would refuse a part of it although the tenant is under
its quota, as often as several come between two turns. Holding more for that would keep it from the others; asking
early does not. Where the store has no more, nothing is asked early: there is nothing to be had by it.

What is held was taken out of the store's bucket before, so nothing is spent twice, wherever callers come in:

    granted by all in t seconds ≤ rate · t + burst      half of the burst is in the store, half of it held when silent

Where the store is away, each bucket has its share again, as without a store. On the way back to leases, what a share
had saved up is paid for, and the store's bucket is lowered to what this gateway can know of it (`ceiling`), so that a
store which went on filling its bucket in the meantime, or has forgotten it, lends no second burst. What gateways spend
that do not lease (no store, or cut off from it) comes off the rate.

Bounded: some MOST_ASKED limits a turn, in turns; a limit that is full here asks for nothing. Pure.
Source: docs/gateways.md, "A store"; Google's Doorman and Envoy's RLQS (capacity leased to clients, not asked for).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from gateway.core.admission.shared_quotas import SharedQuotas, limited_buckets
from gateway.core.admission.tenants import TenantQuota, TenantQuotas, TokenBucket
from gateway.core.peers.fair_share import QuotaUse
from gateway.core.peers.peers import PeerReport

MOST_ASKED: Final = 256
AHEAD: Final = 1.5  # leases: the next one may come late by half its length
_LARGER: Final = 1.25  # than what was refused: it fades, and must be there when the caller comes again
_ROUNDED: Final = 1e-4  # on the way to the store and back
_SHORT: Final = 0.75  # of what should be held; above it nothing is asked for


class LeaseClaim(NamedTuple):
    """What one limit asks of the store.

    rate, burst: of the store's bucket. want: may be lent at most. back: is given back. start: what the bucket has if
    the store does not know it. ceiling: it has no more than that; below 0: whatever it has.
    """

    quota: str
    kind: str
    rate: float
    burst: float
    want: float
    back: float
    start: float
    ceiling: float


class QuotaLoan(NamedTuple):
    """The store's answer: what it lends, and what is left there."""

    granted: float
    left: float


class _Known(NamedTuple):
    left: float
    at: float


class _FilledBucket(NamedTuple):
    """A bucket to which the store lent all that was asked for, and the balance below which it asks again at once."""

    bucket: TokenBucket
    low: float

    @property
    def runs_short(self) -> bool:
        return self.bucket.leased and self.bucket.balance < self.low

    @classmethod
    def filled(cls, bucket: TokenBucket) -> _FilledBucket:
        return cls(bucket, _SHORT * bucket.balance)


class _Claimed(NamedTuple):
    """The bucket of a claim, and how much of what it holds the store does not know of."""

    bucket: TokenBucket
    unpaid: float


class LeasedQuotas:
    """Mutable: `ask` once a lease, and `ask_early` while it `runs_short`; then `lent` with the answers, or `lost`.

    Args:
        shared: knows what is asked of each limit, and the share that it has without a store.
        lease_s: the time between two turns.
    """

    def __init__(self, tenants: TenantQuotas, shared: SharedQuotas, lease_s: float) -> None:
        self._tenants = tenants
        self._shared = shared
        self._lease_s = lease_s
        self._known: dict[tuple[str, str], _Known] = {}  # the store's buckets, when they were last seen
        self._watched: dict[tuple[str, str], _FilledBucket] = {}
        self._claimed: dict[tuple[str, str], _Claimed] = {}  # in this turn
        self._first_asked = self._first_other = 0  # of the next turn

    def ask(self, now: float, gateways: int, elsewhere: Sequence[PeerReport | None] = ()) -> list[LeaseClaim]:
        """What this turn asks of the store.

        Args:
            gateways: how many there are, this one included.
            elsewhere: of each gateway that lives and does not lease: its last report; None: it has said nothing.
        """
        self._claimed = {}
        asked: list[tuple[str, TenantQuota]] = []
        others: list[tuple[str, TenantQuota]] = []
        for name, quota in self._shared.limited():
            (asked if self._shared.is_asked(name) else others).append((name, quota))
        claims: list[LeaseClaim] = []
        # What is asked now comes first, and of the rest a part in each turn: there may be ten thousand.
        self._first_asked, self._first_other = (
            self._first_asked % (len(asked) or 1),
            self._first_other % (len(others) or 1),
        )
        for name, quota in _from(asked, self._first_asked):
            if len(claims) >= MOST_ASKED:
                break
            self._first_asked += 1
            claims.extend(self._claims(name, quota, now, gateways, elsewhere))
        for name, quota in islice(_from(others, self._first_other), MOST_ASKED - min(MOST_ASKED, len(claims))):
            self._first_other += 1
            claims.extend(self._claims(name, quota, now, gateways, elsewhere))
        return claims

    @property
    def runs_short(self) -> bool:
        """Whether a bucket may be empty before the next turn, although the store may have more for it."""
        return any(one.runs_short for one in self._watched.values())

    def ask_early(self, now: float, gateways: int, elsewhere: Sequence[PeerReport | None] = ()) -> list[LeaseClaim]:
        """What is asked of the store between two turns, for the buckets that run short."""
        self._claimed = {}
        claims: list[LeaseClaim] = []
        short = [(key, one.bucket) for key, one in self._watched.items() if one.runs_short]
        for (name, kind), bucket in short[:MOST_ASKED]:
            if self._bucket(name, kind) is not bucket:  # the limits have changed: nobody spends from it any more
                del self._watched[name, kind]
                continue
            asked = list(self._claim(name, kind, bucket, now, gateways, elsewhere))
            if not asked:  # less is to be held than when it was filled
                self._watched[name, kind] = _FilledBucket.filled(bucket)
            claims += asked
        return claims

    def _claims(
        self, name: str, quota: TenantQuota, now: float, gateways: int, elsewhere: Sequence[PeerReport | None]
    ) -> Iterable[LeaseClaim]:
        for kind, bucket in limited_buckets(quota):
            if bucket.whole_rate > 0.0:
                yield from self._claim(name, kind, bucket, now, gateways, elsewhere)

    def _claim(
        self,
        name: str,
        kind: str,
        bucket: TokenBucket,
        now: float,
        gateways: int,
        elsewhere: Sequence[PeerReport | None],
    ) -> Iterable[LeaseClaim]:
        asked = self._shared.asked_of(name, kind).asked
        burst = bucket.whole_burst
        least = max(burst / (2 * gateways), min(1.0, burst) if kind == "requests" else 0.0)
        held = min(burst, max(least, asked * AHEAD * self._lease_s, _LARGER * bucket.largest_missed))
        bucket.available(now)  # refilled, where it is a share
        balance, want, back, ceiling = bucket.balance, 0.0, 0.0, -1.0
        unpaid = 0.0
        if not bucket.leased:
            unpaid = max(0.0, balance)
            want = held - min(0.0, balance)
            saved = balance * (bucket.whole_rate / bucket.rate) if bucket.rate > 0.0 else 0.0  # of all gateways
            ceiling = max(0.0, saved) / 2.0
        elif balance < max(_SHORT * held, least * (1.0 - _ROUNDED)):
            want = held - balance
        elif balance > 2.0 * held:
            back = balance - held
        else:
            return
        self._claimed[name, kind] = _Claimed(bucket, unpaid)
        want *= 1.0 + _ROUNDED  # what is held must be enough for what it was asked for
        rate = max(0.0, bucket.whole_rate - _spent_elsewhere(name, kind, bucket.whole_rate, gateways, elsewhere))
        known = self._known.get((name, kind))
        most = burst / 2.0  # in the store; the rest is held
        start = most if known is None else min(most, known.left + bucket.whole_rate * (now - known.at))
        if ceiling >= 0.0:
            start = min(start, ceiling)
        yield LeaseClaim(name, kind, rate=rate, burst=most, want=want, back=back, start=start, ceiling=ceiling)

    def lent(self, claims: Sequence[LeaseClaim], loans: Sequence[QuotaLoan], now: float) -> None:
        """Take the store's answers to these claims, in their order."""
        for claim, loan in zip(claims, loans, strict=True):
            key = claim.quota, claim.kind
            bucket, unpaid = self._claimed.pop(key)
            if self._bucket(*key) is not bucket:
                # The limits of a credential have changed meanwhile. A new bucket holds a whole burst of which the store
                # does not know: it pays for that with a claim of its own, and what was lent to the old one is lost.
                self._watched.pop(key, None)
                continue
            if not bucket.leased:
                bucket.lease(now)
            bucket.deposit(loan.granted - claim.back - unpaid)
            self._known[key] = _Known(loan.left, now)
            if loan.granted >= claim.want * (1.0 - _ROUNDED):
                self._watched[key] = _FilledBucket.filled(bucket)
            else:  # the store has no more: asking it more often would change who gets it, and not how much
                self._watched.pop(key, None)
        if len(self._known) > 4 * MOST_ASKED:
            self._forget_those_that_are_gone()

    def _bucket(self, name: str, kind: str) -> TokenBucket | None:
        """The bucket of a limit as it is now; None: there is no such limit any more."""
        quota = self._tenants.quotas.get(name)
        return None if quota is None else dict(limited_buckets(quota)).get(kind)

    def _forget_those_that_are_gone(self) -> None:
        self._known = {key: one for key, one in self._known.items() if key[0] in self._tenants.quotas}
        self._watched = {key: one for key, one in self._watched.items() if key[0] in self._tenants.quotas}

    def lost(self, now: float) -> None:
        """The store does not answer: every limit has its share from now on."""
        for _, quota in self._shared.limited():
            for _, bucket in limited_buckets(quota):
                if bucket.leased:
                    bucket.share(bucket.rate, now)

    def __repr__(self) -> str:
        return f"<LeasedQuotas of {len(self._known)} limits, {self._lease_s:g} s ahead>"


def _from(quotas: Sequence[tuple[str, TenantQuota]], first: int) -> Iterable[tuple[str, TenantQuota]]:
    """All of them, beginning with one of them."""
    return chain(islice(quotas, first, None), islice(quotas, first))


def _spent_elsewhere(
    name: str, kind: str, whole: float, gateways: int, elsewhere: Sequence[PeerReport | None]
) -> float:
    """What is spent of a limit by gateways that do not lease; one that says nothing takes its equal part."""
    return sum(whole / gateways if one is None else _used(one.asked, name, kind) for one in islice(elsewhere, gateways))


def _used(asked: Mapping[str, Mapping[str, QuotaUse]], name: str, kind: str) -> float:
    use = asked.get(name, {}).get(kind)
    return 0.0 if use is None else use.used
