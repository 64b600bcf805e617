"""Enforce the rights of each call's identity, and its tenant's quota of requests, bytes and tokens.

The credential itself was proved at the server (`gateway/identity/guard.py`), before a body was read; there the request
was paid for too. Where no credentials are configured a call has no identity: its tenant is the caller's own word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.core.access.entitlement import authorized_call
from gateway.core.admission.admission import Admission
from gateway.core.admission.tenants import TenantQuota
from gateway.layers.stack import Layer, Service
from gateway.layers.token_reservation import counted, most_tokens, tokens_made
from tidegate.models.generative import Generative
from tidegate.types import Call, InferRequest, Reply


def authenticate(
    admission: Admission,
    now: Callable[[], float],
    generative_of: Callable[[InferRequest], Generative | None] = lambda _request: None,
) -> Layer:
    """Args:
    generative_of: what is said of the request's model, if it generates; asked only where a quota limits anything.
    """
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
            generative = generative_of(call.request)
            reply = await (inner(call) if generative is None else generated(call, generative, quota))
            quota.carry(reply.response.size_bytes, now())
            return reply

        async def generated(call: Call, generative: Generative, quota: TenantQuota) -> Reply:
            """Pay for a generation's tokens first, and give back at its end what was not made.

            A caller who leaves an answer that is not streamed pays for all: how much of it was made is not known here.
            """
            reserved, made = most_tokens(call.request, generative), 0
            wait_s = quota.reserve(reserved, now())
            if wait_s > 0.0:
                raise admission.refuse_over_tokens(quota, reserved, wait_s)
            call, tokens = counted(call)
            try:
                reply = await inner(call)
                told = tokens_made(reply)
                made = reserved if told is None else told
                return reply
            except asyncio.CancelledError:
                made = reserved if tokens is None else tokens.made
                raise
            except BaseException:
                made = 0 if tokens is None else tokens.made
                raise
            finally:
                quota.settle(reserved - made, now())

        return service

    return layer
