"""A tenant's tokens: reserved before a generation, settled by what was made, however it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from gateway.core.admission.admission import Admission
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.layers.authenticate import authenticate
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW
from tests.support.loop import on_virtual_time, settle
from tests.support.models.generative import GENERATIVE
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import Usage, usage_parameters
from tidegate.outcome import Overloaded, Unreachable
from tidegate.token_sink import TokenBatch
from tidegate.types import Call, InferResponse, Reply

CALL = Call(infer_request("talker", GenerateRequest((1,) * 20, 80)), "openai", NOW, tenant="acme")
REPLY = Reply(InferResponse("talker", "1", (), parameters=usage_parameters(Usage("stop", 20, 10))))
Inner = Callable[[Call], Awaitable[Reply]]


def limited(inner: Inner) -> tuple[Inner, Callable[[], float]]:
    """The layer before `inner`, of a tenant with 120 tokens; and what it has left."""
    admission: Admission = admission_of()
    admission.tenants = TenantQuotas({"acme": TenantSpec(tokens_per_s=2.0)})
    layer = authenticate(admission, lambda: NOW, lambda _request: GENERATIVE)
    return layer(inner), lambda: admission.tenants.of("acme").tokens.available(NOW)


async def answers(_call: Call) -> Reply:
    return REPLY


async def fails(_call: Call) -> Reply:
    raise Unreachable("gone")


def streams(then: Inner) -> Inner:
    async def inner(call: Call) -> Reply:
        assert call.tokens is not None
        call.tokens.started(20, 0)
        call.tokens.put(TokenBatch(0, (5, 6, 7)))
        return await then(call)

    return inner


async def never_ends(_call: Call) -> Reply:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


@on_virtual_time
async def test_what_an_answer_did_not_need_is_given_back() -> None:
    service, left = limited(answers)
    await service(CALL)
    assert left() == 120.0 - 30


@on_virtual_time
async def test_what_cannot_be_paid_is_refused_with_a_time_and_costs_nothing() -> None:
    service, left = limited(answers)
    await service(CALL)
    with pytest.raises(Overloaded, match="'acme' has used up its tokens: 100 are asked for") as refused:
        await service(CALL)
    assert refused.value.retry_after_s is not None and 5.0 <= refused.value.retry_after_s <= 6.5
    assert left() == 90.0


@on_virtual_time
async def test_a_request_that_does_not_say_reserves_the_models_own_number_and_none_more_than_the_context() -> None:
    seen: list[float] = []

    async def inner(call: Call) -> Reply:
        seen.append(left())
        return REPLY

    service, left = limited(inner)
    plain = replace(CALL.request, parameters={})
    await service(replace(CALL, request=plain))
    assert seen == [120.0 - 20 - GENERATIVE.default_max_tokens]

    service, left = limited(inner)
    greedy = replace(CALL.request, parameters={"max_tokens": 1_000_000})
    await service(replace(CALL, request=greedy))
    assert seen[1] == 0.0, "the whole context is more than a burst, and the bucket was full"


@on_virtual_time
async def test_a_failure_costs_nothing_and_one_in_the_middle_what_had_come() -> None:
    service, left = limited(fails)
    with pytest.raises(Unreachable):
        await service(CALL)
    assert left() == 120.0
    service, left = limited(streams(fails))
    with pytest.raises(Unreachable):
        await service(replace(CALL, tokens=TokenStream()))
    assert left() == 120.0 - 23


@on_virtual_time
@pytest.mark.parametrize(("streamed", "left_over"), [(True, 120.0 - 23), (False, 20.0)])
async def test_a_caller_who_leaves_pays_for_what_it_was_sent_or_for_all(streamed: bool, left_over: float) -> None:
    service, left = limited(streams(never_ends) if streamed else never_ends)
    task = asyncio.ensure_future(service(replace(CALL, tokens=TokenStream()) if streamed else CALL))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left() == left_over
