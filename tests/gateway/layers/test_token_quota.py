"""A tenant's tokens: reserved before a generation, settled by what was made, however it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from msgspec.structs import replace

from gateway.core.admission.admission import Admission
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.core.admission.token_forecast import TokenForecast
from gateway.layers.admit import admit
from gateway.layers.authenticate import authenticate
from gateway.layers.token_reservation import DRAW
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW
from tests.support.loop import on_virtual_time, settle
from tests.support.models.generative import GENERATIVE
from tidegate.caller import Grant, Identity, UsageLimits
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import SPENT, FinishReason, Usage, usage_parameters
from tidegate.outcome import Overloaded, Unreachable
from tidegate.token_sink import TokenBatch
from tidegate.types import Call, InferResponse, Reply

CALL = Call(infer_request("talker", GenerateRequest((1,) * 20, 80)), "openai", NOW, tenant="acme")
Inner = Callable[[Call], Awaitable[Reply]]


def answer_of(tokens: int, reason: FinishReason = "stop") -> Reply:
    return Reply(InferResponse("talker", "1", (), parameters=usage_parameters(Usage(reason, 20, tokens))))


REPLY = answer_of(10)


def forecast(call: Call) -> TokenForecast:
    """Of answers that have 5 tokens more often than not."""
    most = call.request.parameters.get("max_tokens", GENERATIVE.default_max_tokens)
    assert isinstance(most, int)
    return TokenForecast(20, min(5.0, most), min(most, GENERATIVE.context - 20))


def limited(inner: Inner) -> tuple[Inner, Callable[[], float]]:
    """The layer before `inner`, of a tenant with 120 tokens; and what it has left."""
    admission: Admission = admission_of()
    admission.tenants = TenantQuotas({"acme": TenantSpec(tokens_per_s=2.0)})
    layer = authenticate(admission, lambda: NOW, forecast)
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
async def test_a_prompt_costs_no_more_than_it_has_whatever_its_target_says_at_its_start() -> None:
    async def inner(call: Call) -> Reply:
        assert call.tokens is not None
        call.tokens.started(2**32 - 1, 0)
        call.tokens.put(TokenBatch(0, (5, 6, 7)))
        raise Unreachable("gone")

    service, left = limited(inner)
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


@on_virtual_time
async def test_a_stream_reserves_what_is_expected_and_draws_more_as_it_goes_on() -> None:
    seen: list[float] = []

    async def inner(call: Call) -> Reply:
        assert call.tokens is not None
        call.tokens.started(20, 0)
        seen.append(left())
        for token in range(10):
            call.tokens.put(TokenBatch(token, (token,)))
        seen.append(left())
        return answer_of(10)

    service, left = limited(inner)
    await service(replace(CALL, tokens=TokenStream()))
    assert seen == [120.0 - 25, 120.0 - 25 - DRAW]
    assert left() == 120.0 - 30


@on_virtual_time
async def test_a_stream_is_cut_where_nothing_is_left_and_pays_for_what_came_and_no_more() -> None:
    cut: list[str] = []

    async def inner(call: Call) -> Reply:
        assert call.tokens is not None
        call.tokens.started(20, 0)
        try:
            for token in range(1000):
                call.tokens.put(TokenBatch(token, (token,)))
                await settle()
        except asyncio.CancelledError as error:
            cut.append(error.args[0])
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return answer_of(stream.received, "length")
        raise AssertionError("it was not cut")

    stream = TokenStream(window=10_000)
    service, left = limited(inner)
    await service(replace(CALL, tokens=stream, request=replace(CALL.request, parameters={"max_tokens": 1000})))
    assert cut == [SPENT]
    assert 100 - DRAW < stream.received <= 101, "all that was left of 120 but for less than a draw, and one token more"
    assert left() == pytest.approx(max(0.0, 120.0 - 20 - stream.received))


async def test_a_credential_that_acts_for_another_tenant_pays_by_its_own_limits_too() -> None:
    admission: Admission = admission_of()
    admission.tenants = TenantQuotas({"acme": TenantSpec(tokens_per_s=1000.0)})
    limits = UsageLimits(tokens_per_s=2.0, bytes_per_s=1.0)
    identity = Identity("key:p", Grant("proxy", rights=("infer", "act-for-others"), limits=limits))
    service = authenticate(admission, lambda: NOW, forecast)(answers)
    call = replace(CALL, identity=identity, tenant="acme")
    own, other = admission.tenants.of_identity(identity), admission.tenants.of("acme")
    before = own.tokens.available(NOW), other.tokens.available(NOW)

    assert await service(call) is REPLY
    assert own.tokens.available(NOW) - before[0] == other.tokens.available(NOW) - before[1] == -30.0
    assert own.bytes.available(NOW) < 1.0
    for _ in range(5):
        with suppress(Overloaded):
            await service(call)
    with pytest.raises(Overloaded, match="'proxy#key:p' has used up its tokens"):
        await service(call)
    assert other.tokens.available(NOW) > 1000.0


@pytest.mark.parametrize("most", [None, 1])
async def test_a_credential_that_acts_for_others_has_places_of_its_own(most: int | None) -> None:
    admission: Admission = admission_of()
    identity = Identity(
        "key:p", Grant("proxy", rights=("infer", "act-for-others"), limits=UsageLimits(max_in_flight=most))
    )
    inside, answered = 0, asyncio.Event()

    async def slow(_call: Call) -> Reply:
        nonlocal inside
        inside += 1
        await answered.wait()
        return REPLY

    service = authenticate(admission, lambda: NOW)(admit(admission, lambda: NOW)(slow))
    calls = [asyncio.create_task(service(replace(CALL, identity=identity, tenant=name))) for name in ("acme", "zeta")]
    await settle()
    assert inside == (2 if most is None else 1)
    answered.set()
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert first is REPLY
    if most is not None:
        assert isinstance(second, Overloaded) and "tenant 'proxy#key:p' has 1 requests in flight" in second.message
        assert await service(replace(CALL, identity=identity, tenant="zeta")) is REPLY, "its place is free again"
    assert {one.in_flight for one in admission.tenants.quotas.values()} == {0}
