"""The layers around the dispatcher, each alone and stacked."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.core.admission.tenants import TenantSpec
from gateway.layers.admit import admit, fingerprint
from gateway.layers.expire import expire
from gateway.layers.observe import observe
from gateway.layers.stack import Layer, Service, stack
from gateway.observe.access_log import AccessLog
from gateway.serving.work_estimate import WorkDescription
from tests.support.gateway.doors import admission_of
from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.generate.usage import Usage, usage_parameters
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.types import Call, Datatype, InferRequest, InferResponse, Reply, Route, Tensor

REPLY = Reply(
    InferResponse("minilm", "1", ()),
    route=Route("edge/a", "cheapest", "int8"),
    budget_left_s=1.5,
    variant="int8",
)


def call(deadline: float | None = None) -> Call:
    return Call(InferRequest("minilm", (), id="7"), "oip-http", clock.now(), deadline)


async def answers(call: Call) -> Reply:
    return REPLY


@on_virtual_time
async def test_the_outermost_layer_sees_a_call_first_and_its_answer_last() -> None:
    seen: list[str] = []

    def named(name: str) -> Layer:
        def layer(inner: Service) -> Service:
            async def service(call: Call) -> Reply:
                seen.append(f"{name} in")
                reply = await inner(call)
                seen.append(f"{name} out")
                return reply

            return service

        return layer

    assert await stack(named("a"), named("b"), inner=answers)(call()) is REPLY
    assert seen == ["a in", "b in", "b out", "a out"]


@on_virtual_time
async def test_who_gave_no_budget_gets_the_models_own() -> None:
    seen: list[Call] = []

    async def remember(call: Call) -> Reply:
        seen.append(call)
        return REPLY

    service = expire(clock.now, lambda request: 2.0)(remember)
    await service(call())
    await service(call(deadline=clock.now() + 0.3))
    assert [one.deadline for one in seen] == [clock.now() + 2.0, clock.now() + 0.3]


@on_virtual_time
async def test_what_is_late_goes_no_further() -> None:
    async def never(call: Call) -> Reply:
        raise AssertionError("a late call came through")

    with pytest.raises(DeadlineExceeded):
        await expire(clock.now, lambda request: 2.0)(never)(call(deadline=clock.now()))


@on_virtual_time
async def test_a_full_gateway_says_when_to_come_back_and_places_come_back_however_a_call_ends() -> None:
    async def slow(call: Call) -> Reply:
        await clock.sleep(2.0)
        return REPLY

    door = admission_of(1)
    service = admit(door, clock.now)(slow)
    first = asyncio.ensure_future(service(call()))
    await settle()

    with pytest.raises(Overloaded, match="full: 1 requests are in flight, which is max_in_flight") as refused:
        await service(call())

    assert refused.value.retry_after_s == 0.05
    first.cancel()
    await settle()
    assert door.in_flight == 0
    assert await service(call()) is REPLY


@on_virtual_time
async def test_a_tenant_at_its_own_limit_is_refused_while_others_come_in() -> None:
    async def slow(call: Call) -> Reply:
        await clock.sleep(2.0)
        return REPLY

    service = admit(admission_of(acme=TenantSpec(max_in_flight=1)), clock.now)(slow)
    acme = msgspec.structs.replace(call(), tenant="acme")
    first = asyncio.ensure_future(service(acme))
    await settle()

    with pytest.raises(Overloaded, match="over-budget: tenant 'acme' has 1 requests in flight"):
        await service(acme)

    assert await service(call()) is REPLY
    assert await first is REPLY
    assert await service(acme) is REPLY


@on_virtual_time
async def test_a_tenant_that_gets_a_quota_of_its_own_meanwhile_leaves_where_it_entered() -> None:
    """Another gateway's call of a tenant that is new here, before the tenant's first own one."""

    async def slow(call: Call) -> Reply:
        await clock.sleep(2.0)
        return REPLY

    door = admission_of(default=TenantSpec(max_in_flight=1))
    service = admit(door, clock.now)(slow)
    first = asyncio.ensure_future(service(msgspec.structs.replace(call(), tenant="clinic")))
    await settle()
    own = door.tenants.known("clinic")
    await first

    assert (own.in_flight, door.tenants.of("someone").in_flight) == (0, 0)
    assert await service(call()) is REPLY


def test_a_retry_has_the_fingerprint_of_its_first_try_and_other_contents_have_another() -> None:
    def asked(raw: bytes, id: str) -> int:
        return fingerprint(InferRequest("minilm", (Tensor("x", Datatype.UINT8, (len(raw),), raw),), id=id))

    assert asked(b"abc", "1") == asked(b"abc", "2")
    assert asked(b"abc", "1") != asked(b"abd", "1")


class Recorder:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def began(self, call: Call) -> None:
        self.seen.append("began")

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        self.seen.append("answered")

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        self.seen.append(type(error).__name__)


@on_virtual_time
async def test_observers_hear_of_every_beginning_and_end_once() -> None:
    recorder = Recorder()

    async def fail(call: Call) -> Reply:
        raise Overloaded("full")

    async def hang(call: Call) -> Reply:
        await clock.sleep(9.0)
        return REPLY

    async def break_down(call: Call) -> Reply:
        raise KeyError("defect")

    for inner, error in ((fail, Overloaded), (break_down, KeyError)):
        with pytest.raises(error):
            await observe(clock.now, recorder)(inner)(call())
    await observe(clock.now, recorder)(answers)(call())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await observe(clock.now, recorder)(hang)(call())

    assert recorder.seen[::2] == ["began"] * 4
    assert recorder.seen[1::2] == ["Overloaded", "KeyError", "answered", "CancelledError"]


# the access log is an observer


def logged(*, ended: BaseException | None = None, reply: Reply = REPLY, **budgets: float) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    log = AccessLog(
        lambda call: WorkDescription("tokens", 23.3364, "cheap", 2.0),
        lambda event, **fields: lines.append({"event": event, **fields}),
    )
    one = Call(InferRequest("minilm", (), id="7"), "oip-http", 10.0, **budgets)  # type: ignore[arg-type]
    if ended is None:
        log.answered(one, reply, 10.0125)
    else:
        log.ended(one.due(11.0), ended, 10.0125)
    return lines[0]


def test_a_generations_line_has_its_tokens_and_how_fast_they_came() -> None:
    took = usage_parameters(Usage("stop", 31, 11, 24))
    streamed = msgspec.structs.replace(
        REPLY, response=InferResponse("talker", "1", (), parameters=took), first_token_s=0.0025
    )
    expected = {"prompt_tokens": 31, "cached_tokens": 24, "completion_tokens": 11, "finish_reason": "stop"}
    assert logged(reply=streamed).items() >= {**expected, "first_token_ms": 2.5, "tokens_per_s": 1000.0}.items()
    budgets = logged(reply=streamed, ttft_s=0.002, tpot_s=0.05)
    assert (budgets["ttft_budget_ms"], budgets["ttft_kept"]) == (2.0, False)
    assert (budgets["tpot_budget_ms"], budgets["tpot_kept"]) == (50.0, True)
    whole = logged(reply=msgspec.structs.replace(streamed, first_token_s=None))
    assert whole.items() >= expected.items()
    assert not whole.keys() & {"first_token_ms", "tokens_per_s"}


def test_a_line_tells_of_expected_work_no_more_digits_than_anybody_reads() -> None:
    assert logged()["units"] == 23.3


def test_a_generations_line_leaves_out_counts_that_cannot_be_read() -> None:
    nonsense = InferResponse("talker", "1", (), parameters={"finish_reason": "bored"})
    assert "prompt_tokens" not in logged(reply=msgspec.structs.replace(REPLY, response=nonsense))


def test_an_answer_is_one_line_with_all_that_was_decided() -> None:
    assert logged() == {
        "event": "served",
        "id": "7",
        "model": "minilm",
        "protocol": "oip-http",
        "outcome": "ok",
        "feature": "tokens",
        "units": 23.3,
        "cost_class": "cheap",
        "budget_ms": 2000.0,
        "served_by": "edge/a",
        "reason": "cheapest",
        "variant": "int8",
        "attempts": 1,
        "fallback": False,
        "provisional": False,
        "latency_ms": 12.5,
        "budget_left_ms": 1500.0,
    }


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(REPLY.response, budget_left_s=-0.1), "late"),
        (Reply(REPLY.response, route=Route("edge/a", "fallback", "int8", degraded=True)), "degraded"),
    ],
)
def test_late_and_degraded_answers_are_called_so(reply: Reply, outcome: str) -> None:
    assert logged(reply=reply)["outcome"] == outcome


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (Overloaded("full"), "overloaded", "full"),
        (asyncio.CancelledError(), "cancelled", "cancelled"),
        (KeyError(), "internal", "internal"),
    ],
)
def test_a_refusal_is_a_line_too(error: BaseException, outcome: str, reason: str) -> None:
    line = logged(ended=error)
    assert (line["outcome"], line["reason"], line["served_by"], line["budget_left_ms"]) == (outcome, reason, "", 987.5)
