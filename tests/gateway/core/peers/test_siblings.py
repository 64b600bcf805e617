"""The processes of one gateway count as one for others, and divide among themselves what it may use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission.shared_quotas import SharedQuotas
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.core.peers.demand_terms import DemandTerms
from gateway.core.peers.fair_share import QuotaUse
from gateway.core.peers.peers import FRESH_S, CloudSpend, PeerReport
from gateway.core.peers.siblings import Siblings, combined


def asked(rate: float, used: float | None = None) -> PeerReport:
    return PeerReport({"acme": {"requests": QuotaUse(rate, rate if used is None else used)}})


def test_siblings_are_those_that_the_parent_says_live_and_a_report_holds_for_a_while() -> None:
    siblings = Siblings()
    siblings.report("worker-1", asked(1.0), 0.0)
    assert (siblings.count, siblings.reports(0.0)) == (0, [])  # nobody that is known
    siblings.alive(["worker-1", "worker-2"])
    siblings.report("worker-1", asked(1.0), 10.0)
    assert (siblings.count, siblings.reports(10.0), siblings.unknown(10.0)) == (2, [asked(1.0)], 1)
    assert siblings.unknown(10.1 + FRESH_S) == 2
    siblings.alive(["worker-2"])
    assert siblings.reports(10.0) == []


def test_what_processes_say_adds_up_to_what_their_gateway_says() -> None:
    one = PeerReport({"acme": {"requests": QuotaUse(3.0, 2.0)}}, DemandTerms(1.0, 4.0, 0.5), CloudSpend(2.0, 4.0))
    other = PeerReport(
        {"acme": {"requests": QuotaUse(1.0, 1.0), "bytes": QuotaUse(5.0, 5.0)}}, None, CloudSpend(1.0, 1.0)
    )
    third = PeerReport({}, DemandTerms(2.0, 5.0, 0.7))
    told = combined([one, other, third])
    assert told.asked == {"acme": {"requests": QuotaUse(4.0, 3.0), "bytes": QuotaUse(5.0, 5.0)}}
    assert told.need == DemandTerms(3.0, 9.0, 0.7)
    assert told.cloud is not None
    assert told.cloud.spend == 3.0 and told.cloud.factor == pytest.approx(2.0)
    assert combined([PeerReport()]) == PeerReport()


def share_of(own: float, siblings: list[PeerReport], others: list[PeerReport], **more: Any) -> float:
    """The share of 100 requests a second of a process that is asked `own` a second."""
    tenants = TenantQuotas({"acme": TenantSpec(requests_per_s=100.0)})
    shared = SharedQuotas(tenants)
    bucket = tenants.of("acme").requests
    shared.take(0.0)
    for turn in range(1, 60):
        bucket.spent = own * 0.1
        shared.take(turn * 0.1)
    shared.divide(others, 0, 20.0, siblings, more.get("silent", 0))
    return bucket.rate


def test_siblings_that_are_asked_too_much_share_their_gateways_share_and_not_the_whole() -> None:
    # Two gateways are asked more than there is: each gets half, and the processes of this one divide their half.
    assert share_of(200.0, [asked(200.0, 20.0)], [asked(400.0, 50.0)]) == pytest.approx(25.0, rel=0.01)
    assert share_of(200.0, [asked(200.0, 50.0)], []) == pytest.approx(50.0, rel=0.01)


def test_a_sibling_that_lives_and_is_silent_counts_as_one_that_takes_an_equal_part() -> None:
    assert share_of(200.0, [], [], silent=1) == pytest.approx(50.0, rel=0.01)
    assert share_of(200.0, [], []) == pytest.approx(100.0)


@pytest.mark.slow
@given(st.lists(st.floats(1.0, 500.0), min_size=2, max_size=4))
def test_the_shares_of_processes_add_up_to_their_gateways(rates: list[float]) -> None:
    shares = [
        share_of(rate, [asked(one, min(one, 100.0)) for other, one in enumerate(rates) if other != place], [])
        for place, rate in enumerate(rates)
    ]
    used = [min(rate, share) for rate, share in zip(rates, shares, strict=True)]
    assert sum(used) <= 100.0 * 1.01
    if sum(rates) >= 100.0:
        assert sum(used) >= 75.0
