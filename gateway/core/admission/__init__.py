"""This room decides whether a request is let in: limits, tenants' quotas, overload, shedding and quarantine.

The admission layer imports `Admission` and `Quarantine`, and the placement stack imports `AdmissionGuard`, which
charges tenants for what is placed. Where a request goes is decided in `gateway/core/placement`.
"""
