"""Targets that lie, on virtual time, through a whole dispatcher: nobody pays for it, and nobody else is harmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.admission.admission import Admission
from gateway.core.admission.placement_guard import AdmissionGuard
from gateway.core.admission.tenants import TenantQuotas, TenantSpec
from gateway.core.fleet.link_events import LinkUp
from gateway.core.placement.placer import Candidate, Placer, added_work_s
from gateway.core.request import attempt
from gateway.layers.authenticate import authenticate
from gateway.observe.metrics.generation import GenerationCounts
from gateway.serving.dispatcher import Dispatcher
from gateway.serving.execution import _most_prompt_tokens
from tests.support.gateway.conductor import FP32, INT8, FakeTarget, Scene, target
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, fleet_of, offer, variant
from tests.support.gateway.talkers import Mishap, Talker, TalkScene
from tests.support.loop import on_virtual_time
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.generate.request import GenerateRequest, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import CACHED_KEY, COMPLETION_KEY, PROMPT_KEY, STOPPED, usage_of
from tidegate.oip.reply import reply_parameters
from tidegate.outcome import InternalError, InvalidRequest
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.text_prompt import TextPrompt
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.types import Accepted, InferRequest, Parameter, Reply, Route

FOREVER_S = (2**64 - 1) / 1e6  # as many microseconds as a frame can say


class Liar(FakeTarget):
    """A target whose replies are changed."""

    def __init__(self, id: str, **changes: Any) -> None:
        super().__init__(id)
        self.changes = changes

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        return replace(await super().take(request, variant, budget_s, on_accepted), **self.changes)


# requests that are called invalid


def denier(id: str) -> FakeTarget:
    """A target that calls every request invalid, at once: as one with another model's files does."""
    return FakeTarget(id, takes_s=0.001, error=InvalidRequest("no such input"))


@on_virtual_time
async def test_a_target_that_calls_all_invalid_costs_no_answer_and_is_soon_asked_no_more() -> None:
    wrong = denier("edge/a")
    scene = Scene({"edge_a": (wrong, INT8), "pool_main": (target("pool_main"), FP32)})

    for _ in range(30):
        reply = await scene.dispatcher.infer(scene.call())
        assert reply.route is not None and reply.route.served_by == "pool/main"

    assert len(wrong.seen) == 10 and not scene.fleet.targets["edge/a"].breaker.allows(clock.now())
    scene.assert_at_rest()


@on_virtual_time
async def test_a_few_requests_on_which_targets_differ_take_none_of_them_away() -> None:
    """Of one tenant's making, say: most of what the target is asked it answers."""
    picky = FakeTarget("edge/a", takes_s=0.001)
    scene = Scene({"edge_a": (picky, INT8), "pool_main": (target("pool_main"), FP32)})

    for number in range(60):
        picky.error = InvalidRequest("a word that is not known here") if number % 12 >= 7 else None
        await scene.dispatcher.infer(scene.call())

    assert len(picky.seen) == 60 and scene.fleet.targets["edge/a"].breaker.allows(clock.now())


@on_virtual_time
async def test_what_two_targets_call_invalid_is_refused_and_neither_is_blamed() -> None:
    deniers = denier("edge/a"), denier("edge/b"), denier("edge/c")
    scene = Scene({f"edge_{one.id[-1]}": (one, INT8) for one in deniers})

    for _ in range(10):
        with pytest.raises(InvalidRequest, match="no such input"):
            await scene.dispatcher.infer(scene.call())

    assert sum(len(one.seen) for one in deniers) == 20
    assert all(scene.fleet.targets[one.id].breaker.allows(clock.now()) for one in deniers)
    scene.assert_at_rest()


# seconds


@on_virtual_time
@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ({"queue": 0.001, "compute": FOREVER_S}, {"queue": 0.0, "compute": 0.010}),
        ({"queue": FOREVER_S, "compute": 0.004}, {"queue": 0.006, "compute": 0.004}),
        ({"compute": FOREVER_S}, {"compute": 0.010}),
        ({"queue": 0.004, "compute": 0.006}, {"queue": 0.004, "compute": 0.006}),
    ],
)
async def test_no_answer_takes_longer_at_its_target_than_it_was_under_way(
    said: Mapping[str, float], counted: Mapping[str, float]
) -> None:
    scene = Scene({"edge_a": (Liar("edge/a", stages=said, batch_wait_s=FOREVER_S), INT8)})

    reply = await scene.dispatcher.infer(scene.call())

    assert {stage: reply.stages[stage] for stage in said} == pytest.approx(counted)
    assert reply.batch_wait_s == pytest.approx(counted.get("queue", 0.0))
    assert scene.fleet.offered("minilm", "1")[0].cost.predict_s(4.0) < 0.1, "it has not learned centuries"
    scene.assert_at_rest()


@on_virtual_time
async def test_a_tenant_pays_no_more_seconds_than_its_answer_took() -> None:
    fleet = fleet_of(edge_a=variant("int8", compute_s=0.010))
    admission: Admission = admission_of(acme=TenantSpec(edge_s_per_s=0.1))
    placer = Placer(fleet)
    dispatcher = Dispatcher(
        placer,
        {"edge/a": Liar("edge/a", stages={"queue": 0.0, "compute": FOREVER_S})},
        lambda _name, _version: minilm(),
        draw=lambda: 0.5,
        placement=AdmissionGuard(placer, fleet, admission),
    )
    now = clock.now()
    scene = Scene({})

    await dispatcher.infer(replace(scene.call(), tenant="acme"))

    bucket = admission.tenants.of("acme").buckets["edge"]
    assert bucket.burst - bucket.available(clock.now()) == pytest.approx(0.010, abs=0.002)
    assert clock.now() - now == pytest.approx(0.010)


# a generation's counts


class Boaster(Talker):
    """A talker that says other counts than there are, before and after."""

    def __init__(self, id: str, mishaps: tuple[Mishap, ...] = (), said: Mapping[str, Parameter] | None = None) -> None:
        super().__init__(id, mishaps)
        self.said = said or {}

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        if self.tokens is not None:
            self.tokens = BoastedStart(self.tokens)
        reply = await super().take(request, variant, budget_s, on_accepted)
        return replace(reply, response=replace(reply.response, parameters={**reply.response.parameters, **self.said}))


class BoastedStart:
    """A `TokenSink` with as large a prompt as a frame can say."""

    def __init__(self, sink: TokenSink) -> None:
        self._sink = sink
        self.window = sink.window
        self.put: Callable[[TokenBatch], None] = sink.put
        self.on_credit = sink.on_credit

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._sink.started(2**32 - 1, 2**32 - 1)


MANY: dict[str, Parameter] = {
    PROMPT_KEY: 2**53,
    COMPLETION_KEY: 2**53,
    CACHED_KEY: 2**53,
    "prefill_us": 2**53,
    "decode_us": 2**53,
}


@on_virtual_time
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_generation_costs_no_more_than_its_prompt_and_what_was_asked_for(is_streamed: bool) -> None:
    scene = TalkScene(Boaster("edge/a", said=MANY))
    admission: Admission = admission_of()
    admission.tenants = TenantQuotas({"acme": TenantSpec(tokens_per_s=1.0)})
    layer = authenticate(admission, clock.now, scene.dispatcher.ask_builder.token_forecast)
    service, metrics = layer(scene.dispatcher.infer), GenerationCounts()
    call = scene.call(TokenStream() if is_streamed else None, max_tokens=12, tenant="acme")

    reply = await service(call)

    usage = usage_of(reply.response)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 12, 3)
    assert usage.prefill_s + usage.decode_s == pytest.approx(clock.now() - call.arrived_at, abs=1e-5)
    tokens = admission.tenants.of("acme").tokens
    assert tokens.burst - tokens.available(call.arrived_at) <= 15
    metrics.answered(call, reply, clock.now())
    [counted] = [one for one in metrics.families() if one.name == "tidegate_tokens"]
    assert {one.labels["type"]: one.value for one in counted.samples} == {"input": 3, "output": 12, "cached": 3}
    scene.assert_at_rest()


@on_virtual_time
async def test_an_answer_of_several_targets_says_what_it_can_be_as_well() -> None:
    scene = TalkScene(Boaster("edge/a", (Mishap("fails", 5),)), Boaster("edge/b", (Mishap("fails", 5),), MANY))

    reply = await scene.dispatcher.infer(scene.call(TokenStream(), max_tokens=12))

    assert reply.route is not None and reply.route.resumed
    usage = usage_of(reply.response)
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 12)


@on_virtual_time
async def test_an_answer_that_its_reader_ends_says_no_larger_prompt() -> None:
    scene, stream = TalkScene(Boaster("edge/a")), TokenStream()
    asked = scene.dispatcher.infer(scene.call(stream, max_tokens=40))
    answering: asyncio.Task[Reply] = asyncio.create_task(asked)  # type: ignore[arg-type]
    await stream.take()

    await cancel_and_wait(answering, why=STOPPED)

    usage = usage_of(answering.result().response)
    assert usage.prompt_tokens == 3 and usage.completion_tokens < 40


def test_a_prompt_in_words_has_no_more_tokens_than_bytes_and_a_template() -> None:
    ids = infer_request("talker", GenerateRequest((1, 2, 3), 8))
    assert _most_prompt_tokens(ids, 3) == 3
    words = TextPrompt({"messages": b'[{"role":"user"}]', "tools": b"[1]"}, begun="ä")  # type: ignore[dict-item]
    assert _most_prompt_tokens(replace(ids, inputs=(), text=words), 5) == 17 + 3 + 2 + 4096


# words


@on_virtual_time
@pytest.mark.parametrize("said", ["fp32; degraded=0", "x\r\nset-cookie: a=b", "fp32x", "paced"])
async def test_a_variant_that_the_target_does_not_offer_counts_as_the_one_that_was_placed(said: str) -> None:
    scene = Scene({"edge_a": (Liar("edge/a", variant=said), INT8)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.variant == "int8"
    assert reply_parameters(reply)["tidegate-route"].startswith("only; variant=int8; attempts=1;")
    scene.assert_at_rest()


@on_virtual_time
async def test_a_variant_that_the_target_offers_beside_the_one_that_was_placed_is_told() -> None:
    scene = Scene({"edge_a": (Liar("edge/a", variant="int4"), INT8)})
    scene.fleet.fold(LinkUp("edge/a", "edge/a", 2, (offer(INT8, variant("int4", compute_s=0.2)),)), NOW)

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert (reply.variant, reply.route.variant) == ("int4", "int4")


@on_virtual_time
async def test_only_a_site_answers_with_a_route_of_its_own() -> None:
    inner = Route("pool/best", "pinned", "fp32", degraded=False)
    scene = Scene({"edge_a": (Liar("edge/a", route=inner), INT8)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None and reply.route.inner is None


# offers that break what is computed with them


@pytest.fixture
def unlaunchable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Targets by whose offers nothing can be computed when an attempt is launched."""
    names: set[str] = set()

    def broken(candidate: Candidate) -> float:
        if candidate.target.id in names:
            raise OverflowError("int too large to convert to float")
        return added_work_s(candidate)

    monkeypatch.setattr(attempt, "added_work_s", broken)
    return names


@on_virtual_time
async def test_an_attempt_that_cannot_be_launched_fails_and_another_target_answers(unlaunchable: set[str]) -> None:
    unlaunchable.add("edge/a")
    scene = Scene({"edge_a": (target("edge_a"), INT8), "pool_main": (target("pool_main"), FP32)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert (reply.route.served_by, reply.route.fallback, reply.route.attempts) == ("pool/main", True, 2)
    [record] = scene.dispatcher.recorder
    assert [note.what for note in record.notes if note.what != "look"] == ["launched", "failed", "launched", "answered"]
    scene.assert_at_rest()


@on_virtual_time
async def test_where_no_attempt_can_be_launched_the_request_ends_with_the_defect(unlaunchable: set[str]) -> None:
    unlaunchable.update(("edge/a", "pool/main"))
    scene = Scene({"edge_a": (target("edge_a"), INT8), "pool_main": (target("pool_main"), FP32)})

    with pytest.raises(InternalError, match="defect: OverflowError"):
        await scene.dispatcher.infer(scene.call())

    scene.assert_at_rest()


@on_virtual_time
async def test_a_hedge_that_cannot_be_launched_leaves_the_first_attempt_alone(unlaunchable: set[str]) -> None:
    unlaunchable.add("pool/main")
    slow = target("edge_a", takes_s=0.95)
    scene = Scene({"edge_a": (slow, INT8), "pool_main": (target("pool_main"), FP32)})

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None and reply.route.served_by == "edge/a"
    scene.assert_at_rest()


@on_virtual_time
async def test_a_target_at_which_nothing_can_be_launched_is_soon_asked_no_more(unlaunchable: set[str]) -> None:
    unlaunchable.add("edge/a")
    scene = Scene({"edge_a": (target("edge_a"), INT8), "pool_main": (target("pool_main"), FP32)})
    for _ in range(5):
        await scene.dispatcher.infer(scene.call())

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None
    assert (reply.route.served_by, reply.route.attempts) == ("pool/main", 1)


@on_virtual_time
async def test_a_defect_at_an_answer_is_told_as_it_is_and_not_as_another_one_of_the_cleanup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(*_: object, **__: object) -> None:
        raise OverflowError("a defect")

    monkeypatch.setattr(attempt.AttemptTelemetry, "answered", raises)
    scene = Scene({"edge_a": (target("edge_a"), INT8)})

    with pytest.raises(OverflowError, match="a defect"):
        await scene.dispatcher.infer(scene.call())
