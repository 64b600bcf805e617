"""A tenant without compute is refused at the door, unless a site may still answer for it."""

from __future__ import annotations

import pytest

from gateway.core.admission.admission import Admission, AdmissionRequest
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from tidegate.outcome import Overloaded

NOW = 100.0


@pytest.mark.parametrize(("has_sites", "is_in"), [(False, False), (True, True)])
def test_a_tenant_whose_compute_is_used_up_goes_to_sites_only(has_sites: bool, is_in: bool) -> None:
    tenants = TenantQuotas({"acme": TenantSpec(pool_s_per_s=0.5, edge_s_per_s=0.5, burst_s=1.0)})
    limit = AdaptiveLimit(10, targets=lambda: 1, slots=lambda: 0, fixed=True)
    door = Admission(limit, tenants, draw=lambda: 0.5, has_sites=has_sites)
    for tier in ("edge", "pool"):
        tenants.of("acme").spend(tier, 5.0, NOW)
    request = AdmissionRequest("acme", 0, lambda: 1, lambda: 1.0)
    refusal = door.enter(request, NOW)
    assert (refusal is None) is is_in
    assert is_in or isinstance(refusal, Overloaded)
