"""Admission for tests: nobody's compute is limited and nothing is drawn unless a test says so."""

from __future__ import annotations

from gateway.core.admission.admission import Admission
from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.tenants import TenantQuotas, TenantSpec


def admission_of(cap: int = 1024, **tenants: TenantSpec) -> Admission:
    return Admission(AdaptiveLimit(cap), TenantQuotas(tenants), draw=lambda: 0.5)
