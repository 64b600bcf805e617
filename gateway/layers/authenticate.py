"""Enforce the rights of each call's identity, and its tenant's quota of requests, bytes and tokens.

The credential itself was proved at the server (`gateway/identity/guard.py`), before a body was read; there the request
was paid for too. Where no credentials are configured a call has no identity: its tenant is the caller's own word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from gateway.core.access.entitlement import authorized_call
from gateway.core.admission.admission import Admission
from gateway.core.admission.tenants import JointQuota, TenantQuota
from gateway.core.admission.token_forecast import TokenForecast
from gateway.layers.stack import Layer, Service
from gateway.layers.token_reservation import MeteredTokens, tokens_made
from tidegate.generate.usage import SPENT
from tidegate.types import Call, Reply


def authenticate(
    admission: Admission,
    now: Callable[[], float],
    forecast_of: Callable[[Call], TokenForecast | None] = lambda _call: None,
) -> Layer:
    """Args:
    forecast_of: the tokens of a call, if its model generates; asked only where a quota limits anything.
    """
    tenants = admission.tenants

    def pays(quota: TenantQuota) -> None:
        wait_s = quota.ask(at := now())
        if wait_s > 0.0:
            raise admission.refuse_over_rate(quota.lacks_requests(at), wait_s)

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
                    quota = JointQuota(own, quota)
            if quota.limitless:
                return await inner(call)
            quota.carry(sum([len(tensor.raw) for tensor in call.request.inputs]), now())
            forecast = forecast_of(call)
            reply = await (inner(call) if forecast is None else generated(call, forecast, quota))
            quota.carry(reply.response.size_bytes, now())
            return reply

        async def generated(call: Call, forecast: TokenForecast, quota: TenantQuota) -> Reply:
            """Pay for a generation's tokens first, for more as they come, and give back at its end what was not made.

            A caller who leaves an answer that is not streamed pays for all: how much of it was made is not known here.
            """
            reserved, made = forecast.reserved(is_streamed=call.tokens is not None), 0
            wait_s = quota.reserve(reserved, at := now())
            if wait_s > 0.0:
                raise admission.refuse_over_tokens(quota.lacks_tokens(reserved, at), reserved, wait_s)
            tokens: MeteredTokens | None = None
            if call.tokens is not None:
                task = asyncio.current_task()
                assert task is not None  # a coroutine of ours runs in one
                cut = partial(task.cancel, SPENT)
                tokens = MeteredTokens(call.tokens, reserved, forecast.prompt, partial(_draws, quota, now), cut)
                call = replace(call, tokens=tokens)
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
                quota.settle((reserved if tokens is None else tokens.held) - made, now())

        return service

    return layer


def _draws(quota: TenantQuota, now: Callable[[], float], count: int) -> bool:
    """Whether the quota has paid for so many tokens more."""
    return quota.reserve(count, now()) <= 0.0
