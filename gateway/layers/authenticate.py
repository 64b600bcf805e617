"""Enforce the rights of each call's identity, and its tenant's quota of requests and bytes.

The credential itself was proved at the server (`gateway/identity/guard.py`), before a body was read; there the request
was paid for too. Where no credentials are configured a call has no identity: its tenant is the caller's own word.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.access.entitlement import authorized_call
from gateway.core.admission.admission import Admission
from gateway.core.admission.tenants import TenantQuota
from gateway.layers.stack import Layer, Service
from tidegate.types import Call, Reply


def authenticate(admission: Admission, now: Callable[[], float]) -> Layer:
    tenants = admission.tenants

    def pays(quota: TenantQuota) -> None:
        wait_s = quota.ask(now())
        if wait_s > 0.0:
            raise admission.refuse_over_rate(quota, wait_s)

    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            identity = call.identity
            if identity is None:
                quota = tenants.of(call.tenant)
                pays(quota)
            else:
                own = tenants.of_identity(identity)
                call = authorized_call(call, identity, own.name)
                quota = own if call.tenant == own.name else tenants.known(call.tenant)
                if quota is not own:  # the tenant that it acts for pays as well
                    pays(quota)
            if quota.limitless:
                return await inner(call)
            quota.carry(sum([len(tensor.raw) for tensor in call.request.inputs]), now())
            reply = await inner(call)
            quota.carry(reply.response.size_bytes, now())
            return reply

        return service

    return layer
