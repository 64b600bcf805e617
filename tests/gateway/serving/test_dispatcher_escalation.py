"""The dispatcher with models that judge themselves: confidence is read from real tensors, and no task is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from gateway.core.placement.placer import Placer
from gateway.operate.explanation import explanation_json
from gateway.serving.dispatcher import Dispatcher
from tests.support.gateway.conductor import FakeTarget, Scene
from tests.support.gateway.fleets import variant
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.tidegate.models.test_confidence import manifest
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.models.manifest import Manifest
from tidegate.outcome import Overloaded, Unreachable
from tidegate.types import Accepted, Call, Datatype, InferRequest, Reply, RequestedOutput, Route

INT8 = variant("int8", compute_s=0.010, quality=0.97)
FP32 = variant("fp32", compute_s=0.050, quality=0.99)
SURE, UNSURE = [0.9, 0.1, 0.0, 0.0], [0.4, 0.35, 0.25, 0.0]


class Classifier(FakeTarget):
    """A target that answers `scores`."""

    scores = SURE

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        reply = await super().take(request, variant, budget_s, on_accepted)
        output = array_to_tensor("scores", np.array([self.scores]), Datatype.FP32)
        response = reply.response.__class__(request.model_name, request.model_version, (output,), id=request.id)
        return Reply(response, stages=reply.stages, variant=reply.variant)


def classifier(target_id: str, scores: list[float] = SURE, *, takes_s: float = 0.010) -> Classifier:
    one = Classifier(target_id, takes_s=takes_s)
    one.scores = scores
    return one


class Judging(Scene):
    """A scene whose model judges itself, by a margin of a half."""

    def __init__(self, edge: Classifier, pool: Classifier, *, overloaded: bool = False) -> None:
        super().__init__({"edge_a": (edge, INT8), "pool_main": (pool, FP32)})
        self.dispatcher = Dispatcher(
            Placer(self.fleet), self.targets, self._manifest, draw=lambda: 0.5, overloaded=lambda: overloaded
        )

    def _manifest(self, name: str, version: str) -> Manifest:
        return manifest(name="minilm")

    async def ask(self, *, outputs: tuple[str, ...] = (), budget_s: float = 1.0, demanded: str = "") -> Route:
        reply = await self.answer(outputs=outputs, budget_s=budget_s, demanded=demanded)
        assert reply.route is not None
        return reply.route

    async def answer(self, *, outputs: tuple[str, ...] = (), budget_s: float = 1.0, demanded: str = "") -> Reply:
        call = self.call(budget_s=budget_s)
        ids = array_to_tensor("ids", np.zeros((1, 4)), Datatype.INT64)
        request = InferRequest("minilm", (ids,), id="7", outputs=tuple(RequestedOutput(name) for name in outputs))
        asked = Call(request, call.protocol, call.arrived_at, call.deadline, variant=demanded)
        return await self.dispatcher.infer(asked)


@on_virtual_time
async def test_a_sure_answer_of_the_edge_is_final() -> None:
    scene = Judging(classifier("edge/a"), pool := classifier("pool/main"))
    route = await scene.ask()
    assert (route.served_by, route.reason, route.provisional) == ("edge/a", "cheapest", False)
    assert pool.seen == []


@on_virtual_time
async def test_an_unsure_answer_is_escalated_within_the_same_budget() -> None:
    scene = Judging(classifier("edge/a", UNSURE), pool := classifier("pool/main", takes_s=0.2))
    route, took_s = await elapsed(scene.ask())
    assert (route.served_by, route.reason, route.variant, route.attempts) == ("pool/main", "escalated", "fp32", 2)
    assert not (route.provisional or route.hedged or route.fallback or route.degraded)
    assert took_s == pytest.approx(0.210)
    assert pool.seen[0][2] == pytest.approx(0.99), "what is left"
    (flown,) = scene.dispatcher.recorder
    told = explanation_json(flown)
    assert [
        (one["what"], one["attempt"], one.get("confidence")) for one in told["events"] if one["what"] != "look"
    ] == [
        ("launched", 0, None),
        ("answered", 0, 0.05),
        ("launched", 1, None),
        ("answered", 1, None),
    ]
    assert told["end"]["reason"] == "escalated"
    scene.assert_at_rest()


@on_virtual_time
@pytest.mark.parametrize("error", [Unreachable("gone"), Overloaded("full"), KeyError("a defect")])
async def test_the_edges_own_answer_is_given_where_the_pool_fails(error: Exception) -> None:
    edge, pool = classifier("edge/a", UNSURE), classifier("pool/main", takes_s=0.05)
    pool.error = error
    scene = Judging(edge, pool)
    reply = await scene.answer()
    route = reply.route
    assert route is not None
    assert (route.served_by, route.reason, route.provisional, route.attempts) == ("edge/a", "cheapest", True, 2)
    assert [round(float(share), 2) for share in np.frombuffer(reply.response.outputs[0].raw, "<f4")] == UNSURE
    assert reply.budget_left_s == pytest.approx(0.94), "as of when it was given"
    scene.assert_at_rest()


@on_virtual_time
async def test_a_silent_pool_costs_time_but_no_answer() -> None:
    scene = Judging(classifier("edge/a", UNSURE), pool := classifier("pool/main", takes_s=60.0))
    route, took_s = await elapsed(scene.ask())
    assert (route.served_by, route.provisional) == ("edge/a", True)
    assert took_s == pytest.approx(0.98)
    await settle()
    assert pool.cancelled == 1
    scene.assert_at_rest()


@on_virtual_time
async def test_a_hedge_that_is_under_way_at_the_pool_is_awaited_and_no_other_is_launched() -> None:
    scene = Judging(classifier("edge/a", UNSURE, takes_s=0.95), pool := classifier("pool/main", takes_s=0.03))
    route = await scene.ask()
    assert (route.served_by, route.reason, route.hedged, route.attempts) == ("pool/main", "hedge", True, 2)
    assert len(pool.seen) == 1
    await settle()
    scene.assert_at_rest()


@on_virtual_time
async def test_an_overloaded_gateway_escalates_nothing() -> None:
    scene = Judging(classifier("edge/a", UNSURE), pool := classifier("pool/main"), overloaded=True)
    assert (await scene.ask()).provisional
    assert pool.seen == []


@on_virtual_time
async def test_an_answer_is_not_judged_by_an_output_that_was_not_requested() -> None:
    scene = Judging(classifier("edge/a", UNSURE), classifier("pool/main"))
    assert not (await scene.ask(outputs=("other",))).provisional
    assert (await scene.ask(outputs=("scores",))).reason == "escalated"


@on_virtual_time
async def test_a_demanded_variant_is_given_with_its_doubt() -> None:
    scene = Judging(classifier("edge/a", UNSURE), classifier("pool/main"))
    route = await scene.ask(demanded="int8")
    assert (route.served_by, route.reason, route.provisional) == ("edge/a", "demanded", True)


@on_virtual_time
async def test_the_pools_answers_are_not_judged() -> None:
    scene = Judging(classifier("edge/a"), classifier("pool/main", UNSURE))
    assert not (await scene.ask(demanded="fp32")).provisional


@on_virtual_time
async def test_an_escalation_is_cancelled_when_its_caller_leaves() -> None:
    scene = Judging(classifier("edge/a", UNSURE), pool := classifier("pool/main", takes_s=60.0))
    asking = asyncio.create_task(scene.ask())
    await clock.sleep(0.5)
    assert pool.under_way == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await settle()
    assert asking.cancelled()
    assert pool.cancelled == 1
    scene.assert_at_rest()


@on_virtual_time
async def test_the_confidence_policy_of_a_model_is_read_once() -> None:
    scene = Judging(classifier("edge/a", UNSURE), classifier("pool/main"))
    await scene.ask()
    assert scene.dispatcher.judges.of("minilm", "1") is scene.dispatcher.judges.of("minilm", "1")
    assert repr(scene.dispatcher.judges) == "<ConfidencePolicies of minilm:1>"
