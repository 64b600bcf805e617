"""A request in halves on virtual time: what is sent where, and what happens when one is lost or its caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import pytest

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.placement.placer import Placer
from gateway.serving.dispatcher import Dispatcher
from gateway.serving.layer_splitting import LayerSplitting
from tests.support.gateway.conductor import FakeTarget
from tests.support.gateway.fleets import spec, variant
from tests.support.loop import elapsed, on_virtual_time, settle
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.models.manifest import Axis, Cost, Manifest, TensorSpec
from tidegate.models.manifest import Variant as ModelVariant
from tidegate.models.split.layer_split import LayerSplit, SplitCut, SplitHalf
from tidegate.outcome import ModelNotFound, NothingAlive, Overloaded, ServeError, Unreachable
from tidegate.types import HELP, Accepted, Call, Datatype, InferRequest, InferResponse, Reply, Tensor

IMAGE: Final = TensorSpec("image", Datatype.UINT8, ("batch", 64))
SCORES: Final = TensorSpec("scores", Datatype.FP32, ("batch", 2))
FEATURES: Final = TensorSpec("activation", Datatype.INT8, ("batch", 8))
CUT: Final = SplitCut("mid", "cnn.head-1", "cnn.tail-1", "int8", 8.0, 0.0, 0.3, 1.0, 1)
EDGE_S, HEAD_S, POOL_S, TAIL_S = 0.4, 0.05, 0.02, 0.01


def manifest(name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], **more: object) -> Manifest:
    made = ModelVariant("fp32", "x.onnx", "onnx", "fp32", ("edge", "pool"), "0" * 64, size_bytes=1)
    axes = {"batch": Axis(1, 8)}
    cost = Cost("items", inputs[0].name)
    return Manifest(name, "1", inputs=inputs, outputs=outputs, variants=(made,), cost=cost, axes=axes, **more)  # type: ignore[arg-type]


MODELS: Final = {
    "cnn": manifest("cnn", (IMAGE,), (SCORES,), split=LayerSplit((CUT,))),
    CUT.head: manifest(CUT.head, (IMAGE,), (FEATURES,), half=SplitHalf("cnn", "head")),
    CUT.tail: manifest(CUT.tail, (FEATURES,), (SCORES,), half=SplitHalf("cnn", "tail")),
}


def manifest_of(name: str, _version: str) -> Manifest:
    if name not in MODELS:
        raise ModelNotFound(name)
    return MODELS[name]


class HalvesTarget(FakeTarget):
    """Answers a head with features and all else with scores, each model in its own time or with its own error."""

    def __init__(self, id: str, takes: dict[str, float], errors: dict[str, ServeError] | None = None) -> None:
        super().__init__(id)
        self._takes = takes
        self._errors = errors or {}

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        self.takes_s, self.error = self._takes[request.model_name], self._errors.get(request.model_name)
        reply = await super().take(request, variant, budget_s, on_accepted)
        spec = FEATURES if request.model_name == CUT.head else SCORES
        output = Tensor(spec.name, spec.datatype, (1, 8 if spec is FEATURES else 2), bytes(8))
        return Reply(
            InferResponse(request.model_name, "1", (output,), id=request.id), stages=reply.stages, variant=variant
        )


class Cut:
    """A dispatcher with halves in front of it: an edge with the whole and the head, and pools with the tail."""

    def __init__(self, *pools: HalvesTarget, edge: HalvesTarget | None = None, edge_says_s: float = EDGE_S) -> None:
        self.edge = edge or HalvesTarget("edge/a", {"cnn": EDGE_S, CUT.head: HEAD_S})
        self.pools = pools
        self.fleet = Fleet(lambda _model, _version: "items")
        self._add(self.edge, {"cnn": edge_says_s, CUT.head: HEAD_S})
        for pool in pools:
            self._add(pool, {CUT.tail: TAIL_S})
        targets = {one.id: one for one in (self.edge, *pools)}
        self.dispatcher = Dispatcher(Placer(self.fleet), targets, manifest_of, draw=lambda: 0.5)
        self.splitting = LayerSplitting(
            manifest_of, self.dispatcher.placer, self.dispatcher.ask_builder, self.dispatcher.left_out
        )

    def _add(self, target: HalvesTarget, takes: dict[str, float]) -> None:
        offers = tuple(ModelOffer(name, "1", (variant("fp32", compute_s=s),)) for name, s in takes.items())
        self.fleet.add(spec(target.id), clock.now())
        self.fleet.fold(LinkUp(target.id, target.id, 1, offers), clock.now())

    def infer(self, budget_s: float = 0.3) -> asyncio.Future[Reply]:
        image = Tensor("image", Datatype.UINT8, (1, 64), bytes(64))
        now = clock.now()
        call = Call(InferRequest("cnn", (image,), id="7"), "oip-http", now, now + budget_s)
        return asyncio.ensure_future(self.splitting.served(call, self.dispatcher.infer))

    @property
    def ended(self) -> dict[str, float]:
        return {sample.labels["result"]: sample.value for one in self.splitting.families() for sample in one.samples}

    def assert_at_rest(self) -> None:
        for target in (self.edge, *self.pools):
            assert target.under_way == 0, target.id


def pool(id: str = "pool/p", takes_s: float = TAIL_S, error: ServeError | None = None) -> HalvesTarget:
    return HalvesTarget(id, {CUT.tail: takes_s}, {} if error is None else {CUT.tail: error})


@on_virtual_time
async def test_the_head_is_asked_of_the_edge_and_its_features_of_the_pool_within_one_budget() -> None:
    cut = Cut(pool())
    reply, took_s = await elapsed(cut.infer())
    assert took_s == pytest.approx(HEAD_S + TAIL_S)
    assert reply.route is not None
    assert (reply.route.served_by, reply.route.reason, reply.route.attempts) == ("pool/p", "split", 2)
    assert reply.route.head is not None
    assert (reply.route.head.served_by, reply.route.head.layer) == ("edge/a", "mid")
    assert (reply.response.model_name, reply.response.id) == ("cnn", "7")
    (head, _, head_budget_s), (tail, _, tail_budget_s) = cut.edge.seen[0], cut.pools[0].seen[0]
    assert [one.name for one in head.inputs] == ["image"]
    assert [one.name for one in tail.inputs] == ["activation"]
    assert head_budget_s < 0.3, "the tail's time is left out of the head's"
    assert tail_budget_s == pytest.approx(0.3 - HEAD_S)
    assert reply.stages["compute"] == pytest.approx(0.012), "both halves'"
    assert cut.ended == {"answered": 1.0}
    cut.assert_at_rest()


@on_virtual_time
async def test_another_pool_takes_the_same_activations_where_one_is_lost() -> None:
    cut = Cut(pool("pool/p", error=Unreachable("gone")), pool("pool/q", error=None))
    reply = await cut.infer()
    assert reply.route is not None
    assert reply.route.reason == "split"
    assert reply.route.served_by == "pool/q"
    lost, taken = (one.seen[0][0] for one in cut.pools)
    assert lost.inputs == taken.inputs
    assert len(cut.edge.seen) == 1, "the head is not computed again"
    cut.assert_at_rest()


@on_virtual_time
async def test_a_device_that_asks_for_help_is_no_place_for_a_head() -> None:
    """It alone offers one: so the request is not cut, and nothing of it is asked of a device that gave it away."""
    cut = Cut(pool(), edge_says_s=0.01)
    image = Tensor("image", Datatype.UINT8, (1, 64), bytes(64))
    call = Call(InferRequest("cnn", (image,), id="7"), HELP, clock.now(), clock.now() + 0.3, path=("edge/a",))
    with pytest.raises(NothingAlive, match="edge/a is not for this request"):
        await cut.splitting.served(call, cut.dispatcher.infer)
    assert cut.edge.seen == [] and cut.ended == {}


def hopeful_edge(kind: type[HalvesTarget] = HalvesTarget) -> HalvesTarget:
    """An edge that is quicker than it says: not to be relied upon for the whole, and in time with it all the same."""
    return kind("edge/a", {"cnn": 0.1, CUT.head: 0.01})


@on_virtual_time
async def test_the_edge_finishes_with_its_full_model_where_the_pools_are_lost_and_it_is_declared() -> None:
    cut = Cut(pool(error=Unreachable("gone")), edge=hopeful_edge(), edge_says_s=0.28)
    reply = await cut.infer(budget_s=0.3)
    assert reply.route is not None
    assert (reply.route.served_by, reply.route.fallback, reply.route.head) == ("edge/a", True, None)
    assert [request.model_name for request, _, _ in cut.edge.seen] == [CUT.head, "cnn"]
    assert cut.ended == {"tail-failed": 1.0}
    cut.assert_at_rest()


@on_virtual_time
async def test_a_tail_that_is_silent_is_insured_at_the_edge_while_that_can_still_make_it() -> None:
    # Said to take 0.28 of 0.36 s, which it makes in most cases: not sure enough to be left uncut.
    edge = HalvesTarget("edge/a", {"cnn": 0.1, CUT.head: 0.01})
    cut = Cut(pool(takes_s=60.0), edge=edge, edge_says_s=0.28)
    reply = await cut.infer(budget_s=0.36)
    assert reply.route is not None
    assert reply.route.served_by == "edge/a"
    await settle()
    assert cut.pools[0].cancelled == len(cut.pools[0].seen) == 1
    assert cut.ended == {"insured": 1.0}
    cut.assert_at_rest()


@on_virtual_time
async def test_a_lost_head_leaves_the_whole_and_an_error_of_the_whole_is_what_the_caller_gets() -> None:
    edge = HalvesTarget("edge/a", {"cnn": EDGE_S, CUT.head: 0.01}, {CUT.head: Overloaded("busy")})
    cut = Cut(pool(), edge=edge)
    with pytest.raises(ServeError) as told:
        await cut.infer()
    assert "activation" not in str(told.value)
    assert cut.ended == {"head-failed": 1.0}
    assert not cut.pools[0].seen
    cut.assert_at_rest()


@on_virtual_time
async def test_a_head_without_the_features_that_the_tail_takes_is_a_bad_answer_and_the_whole_is_asked() -> None:
    class Dumb(HalvesTarget):
        async def take(
            self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
        ) -> Reply:
            reply = await super().take(request, variant, budget_s, on_accepted)
            return Reply(InferResponse(request.model_name, "1", ()), stages=reply.stages, variant=variant)

    cut = Cut(pool(), edge=hopeful_edge(Dumb), edge_says_s=0.28)
    reply = await cut.infer(budget_s=0.3)
    assert reply.route is not None
    assert reply.route.served_by == "edge/a"
    assert not cut.pools[0].seen
    assert cut.ended == {"head-failed": 1.0}
    cut.assert_at_rest()


@on_virtual_time
async def test_a_caller_that_leaves_ends_the_half_that_is_under_way() -> None:
    cut = Cut(pool(takes_s=5.0))
    for after_s, target in ((HEAD_S / 2, cut.edge), (HEAD_S + 0.005, cut.pools[0])):
        asked = cut.infer()
        await clock.sleep(after_s)
        assert target.under_way == 1
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await settle()
        cut.assert_at_rest()


@on_virtual_time
async def test_a_model_whose_halves_are_not_known_is_computed_whole() -> None:
    cut = Cut(pool())
    known = dict(MODELS)
    del MODELS[CUT.tail]
    try:
        with pytest.raises(ServeError):
            await cut.infer(budget_s=0.1)  # the edge alone is too slow
        assert not cut.pools[0].seen
    finally:
        MODELS.update(known)
    assert (await cut.infer()).route is not None, "and is looked up again"
