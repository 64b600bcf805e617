"""Shared quotas give each of several gateways its part of every quota, by what is asked of each of them.

A quota is a tenant's, whichever gateway its callers come to. Nothing on a request's way asks anybody: each gateway has
a share of each limit (`gateway/core/peers/fair_share.py`). It sets its shares anew several times a second, from what
was asked of itself and from what the others last said was asked of them.

What is asked is what was spent and what was refused, smoothed over SMOOTH_S, so that a gateway which has to refuse
gets more the next time. Of bytes and of work that is settled later only what was spent is known; a gateway that spends
its whole share gets a part of what the others leave, each time, until they are in balance.

Bounded: of MOST_TOLD quotas it is told what is asked, those of which the largest part is; of the others the rest of
the gateways take nothing to be asked here. A limit that is not shared costs nothing here, and a gateway without others
leaves the quotas as they are. The processes of one gateway divide its share among themselves by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf
from typing import Final, NamedTuple

from gateway.core.admission.tenants import TenantQuota, TenantQuotas, TokenBucket
from gateway.core.peers.fair_share import QuotaUse, fair_share
from gateway.core.peers.peers import PeerReport

SMOOTH_S: Final = 0.5
COMES_AGAIN_S: Final = 30.0  # a caller that was refused, with the same cost
MOST_TOLD: Final = 1024
PLACES: Final = "places"  # at once: those that are taken no other gateway gets, whatever its share is
_LEAST: Final = 1e-6  # smoothed demand that is no demand any more

_Kinds = Mapping[str, QuotaUse]
Asked = Mapping[str, _Kinds]
_NONE: Final = QuotaUse(0.0, 0.0)


class SharedQuotas:
    """Mutable: `take` at fixed intervals, then `divide` with what the others have said."""

    def __init__(self, tenants: TenantQuotas) -> None:
        self._tenants = tenants
        self._asked: dict[str, dict[str, QuotaUse]] = {}  # by quota and kind, a second
        self._taken_at: float | None = None
        self._divided = False

    def take(self, now: float) -> Asked:
        """What was asked lately, to be told to the others: by quota, and by kind of limit; of nothing, nothing."""
        passed_s = 0.0 if self._taken_at is None else now - self._taken_at
        self._taken_at = now
        keep, fades = exp(-passed_s / SMOOTH_S), exp(-passed_s / COMES_AGAIN_S)
        share = (1.0 - keep) / passed_s if passed_s > 0.0 else 0.0
        for name, quota in self.limited():
            known = self._asked.get(name, {})
            found = {}
            for kind, bucket in limited_buckets(quota):
                before = known.get(kind, _NONE)
                used = max(0.0, keep * before.used + share * bucket.spent)
                asked = max(used, keep * before.asked + share * (bucket.spent + bucket.missed))
                bucket.spent = bucket.missed = 0.0
                bucket.largest_missed *= fades
                if asked > _LEAST:
                    found[kind] = QuotaUse(asked, used)
            if quota.spec.max_in_flight is not None:
                places = max(float(quota.places_asked), keep * known.get(PLACES, _NONE).asked)
                quota.places_asked = quota.in_flight
                if places > _LEAST:
                    found[PLACES] = QuotaUse(places, float(quota.in_flight))
            if found:
                self._asked[name] = found
            else:
                self._asked.pop(name, None)
        if len(self._asked) <= MOST_TOLD:
            return self._asked
        most = sorted(self._asked, key=lambda name: -self._part_asked(name))[:MOST_TOLD]
        return {name: self._asked[name] for name in most}

    def _part_asked(self, name: str) -> float:
        """The largest part of any of its limits that is asked here."""
        quota = self._tenants.quotas[name]
        wholes = {kind: bucket.whole_rate for kind, bucket in limited_buckets(quota)}
        wholes[PLACES] = float(quota.spec.max_in_flight or inf)
        parts = (one.asked / wholes[kind] for kind, one in self._asked[name].items() if wholes[kind])
        return max(parts, default=0.0)

    def divide(
        self,
        reports: Sequence[PeerReport],
        unknown: int,
        now: float,
        siblings: Sequence[PeerReport] = (),
        silent: int = 0,
    ) -> None:
        """Set this gateway's share of everything; of a gateway in several processes, this process's.

        Args:
            unknown: gateways that live and have said nothing lately.
            siblings: what the other processes of this gateway say.
            silent: those of them that live and have said nothing lately.
        """
        alone = not reports and not unknown and not siblings and not silent
        if alone and not self._divided:
            return
        self._divided = not alone
        for name, quota in self.limited():
            own = self._asked.get(name, {})
            theirs = [report.asked.get(name, {}) for report in reports]
            here = [report.asked.get(name, {}) for report in siblings]
            for kind, bucket in limited_buckets(quota):
                if bucket.whole_rate > 0.0:
                    uses = _Uses.of(kind, own, theirs, here)
                    share = uses.share(bucket.whole_rate, unknown, silent)
                    if bucket.leased:
                        bucket.rate = share  # what it has as soon as nothing is lent
                    else:
                        bucket.share(share, now)
            if quota.spec.max_in_flight is not None:
                uses = _Uses.of(PLACES, own, theirs, here)
                part = uses.share(float(quota.spec.max_in_flight), unknown, silent)
                left = quota.spec.max_in_flight - sum(int(one.used) for one in (*uses.others, *uses.siblings))
                quota.places = max(1, min(int(part + 1e-9), left))

    def asked_of(self, name: str, kind: str) -> QuotaUse:
        """What was asked lately of one limit."""
        return self._asked.get(name, {}).get(kind, _NONE)

    def is_asked(self, name: str) -> bool:
        """Whether anything was asked lately of a quota."""
        return name in self._asked

    def limited(self) -> Iterator[tuple[str, TenantQuota]]:
        """The quotas that limit anything."""
        return ((name, quota) for name, quota in self._tenants.quotas.items() if not quota.unlimited)

    def __repr__(self) -> str:
        return f"<SharedQuotas, asked of {len(self._asked)}>"


class _Uses(NamedTuple):
    """What is asked of one limit: of this process, of other gateways, and of the other processes of this one."""

    own: QuotaUse
    others: list[QuotaUse]
    siblings: list[QuotaUse]

    @classmethod
    def of(cls, kind: str, own: _Kinds, theirs: Sequence[_Kinds], here: Sequence[_Kinds]) -> _Uses:
        return cls(
            own.get(kind, _NONE), [one.get(kind, _NONE) for one in theirs], [one.get(kind, _NONE) for one in here]
        )

    def share(self, whole: float, unknown: int, silent: int) -> float:
        """This process's share: of its gateway's, where it has siblings (`gateway/core/peers/siblings.py`)."""
        if not self.siblings and not silent:
            return fair_share(whole, self.own, self.others, unknown)
        if self.others or unknown:
            together = (self.own, *self.siblings)
            gateway = QuotaUse(sum(one.asked for one in together), sum(one.used for one in together))
            whole = fair_share(whole, gateway, self.others, unknown)
        return fair_share(whole, self.own, self.siblings, silent)


def limited_buckets(quota: TenantQuota) -> Iterator[tuple[str, TokenBucket]]:
    """The limited ones, by the words of the configuration."""
    named = (
        ("requests", quota.requests),
        ("bytes", quota.bytes),
        ("tokens", quota.tokens),
        ("pool", quota.buckets["pool"]),
        ("edge", quota.buckets["edge"]),
    )
    return ((kind, bucket) for kind, bucket in named if bucket.whole_rate < inf)
