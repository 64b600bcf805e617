"""Requests that admission lets in and refuses, and what tenants spend, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from gateway.core.admission.admission import Admission
from gateway.core.admission.quarantine import Quarantine
from gateway.observe.metrics.bounded_labels import REST, worth_showing
from tidegate.metrics.families import counter, gauge, single

MOST_TENANTS: Final = 100


def admission_families(admission: Admission, held: Quarantine) -> Iterator[Metric]:
    yield single("tidegate_in_flight", "Requests inside the gateway.", admission.in_flight)
    refused = (((reason,), n) for reason, n in admission.refused.items())
    yield counter("tidegate_shed", "Requests refused by admission, by reason.", ("reason",), refused)
    yield counter("tidegate_quarantines", "Senders of poison who were put in quarantine.", (), [((), held.begun)])
    yield counter("tidegate_quarantine_refused", "Requests refused in quarantine.", (), [((), held.refused)])
    yield counter("tidegate_overload_changes", "Changes of the overload state.", (), [((), admission.overload.changes)])
    yield single("tidegate_overloaded", "1 while shedding, without hedges; 0 in ordinary times.", admission.overload.on)
    yield single("tidegate_rejection_ratio", "Share of arrivals that is to be shed.", admission.rejection.rate)
    yield single("tidegate_cut_level", "Levels from here on are shed; 500 sheds nobody.", admission.cut.cut)
    yield single("tidegate_in_flight_limit", "Most requests inside that are let in now.", admission.limit.limit)
    yield from _tenant_families(admission)


def _tenant_families(admission: Admission) -> Iterator[Metric]:
    shown, others = worth_showing(
        admission.tenants.quotas.values(), MOST_TENANTS, lambda quota: (quota.in_flight, sum(quota.spent_s.values()))
    )
    inside = [((quota.name,), float(quota.in_flight)) for quota in shown]
    spent = [((quota.name, str(tier)), seconds) for quota in shown for tier, seconds in quota.spent_s.items()]
    if others:
        inside.append(((REST,), float(sum(quota.in_flight for quota in others))))
        tiers = sorted({str(tier) for quota in others for tier in quota.spent_s})
        spent += [
            ((REST, tier), sum(s for quota in others for name, s in quota.spent_s.items() if name == tier))
            for tier in tiers
        ]
    yield gauge("tidegate_tenant_in_flight", "Requests inside, by tenant.", ("tenant",), inside)
    words = "Compute charged and not refunded. It falls where a charge was too high: a gauge."
    yield gauge("tidegate_tenant_compute_seconds", words, ("tenant", "tier"), spent)
