"""Shadowing: what is computed again and what never is, what it may cost, and that no caller waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from gateway.core.agreement.agreement_watch import AgreementWatch
from gateway.core.agreement.shadow_budget import ShadowBudget
from gateway.core.fleet.fleet import AnswerDrift
from gateway.core.fleet.link_events import LinkUp
from gateway.core.placement.cloud_budget import CloudBudget
from gateway.core.placement.placer import Placer
from gateway.layers.shadow import shadow
from gateway.operate.agreement_report import agreement_families, agreement_json, drift_conditions
from gateway.serving.disagreements import Disagreements, input_digest
from gateway.serving.dispatcher import Dispatcher
from gateway.serving.shadowing import MAX_BYTES, PATIENCE_S, PENDING, Shadowing, ShadowTerms
from tests.support.gateway.conductor import CountingTarget
from tests.support.gateway.fleets import ask, fleet_of, spec, variant
from tests.support.loop import on_virtual_time, settle
from tests.support.models.tiny_models import double_manifest
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.fleet.offers import ModelOffer
from tidegate.models.manifest import Manifest, Quality
from tidegate.outcome import NothingAlive, Overloaded
from tidegate.priority import LAST_LEVEL
from tidegate.types import DEFERRED, Accepted, Call, Datatype, InferRequest, InferResponse, Reply

INT8 = replace(double_manifest().variants[0], name="int8", quality=Quality("cosine", 0.99, 100))
MANIFEST = replace(double_manifest(), variants=(INT8,))


class Doubling(CountingTarget):
    """Answers with twice the input, turned by `turned`."""

    def __init__(self, id: str, *, takes_s: float = 0.010) -> None:
        super().__init__(id)
        self.turned = 0.0
        self.computes_s = 0.006
        self.signs = ""
        self.takes_s = takes_s
        self.error: Exception | None = None
        self.seen: list[InferRequest] = []
        self.priorities: list[int] = []
        self.cancelled = 0

    async def infer(self, request: InferRequest, *, priority: int, **words: Any) -> Reply:
        self.priorities.append(priority)
        return await super().infer(request, priority=priority, **words)

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        self.seen.append(request)
        try:
            await clock.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        rows: NDArray[Any] = 2.0 * tensor_to_array(request.inputs[0])
        turn = np.array([[np.cos(self.turned), -np.sin(self.turned)], [np.sin(self.turned), np.cos(self.turned)]])
        output = array_to_tensor("y", (rows @ turn).astype(np.float32), Datatype.FP32)
        stages = {"queue": 0.0, "compute": self.computes_s}
        return Reply(InferResponse("double", "1", (output,)), stages=stages, variant=self.signs or variant)


class Scene:
    """A gateway's line of dispatcher and shadowing, over one edge and one pool."""

    def __init__(
        self,
        *,
        share: float = 1.0,
        every_s: float = 0.01,
        strained: Callable[[], bool] = lambda: False,
        budget: CloudBudget | None = None,
        pool_share: float = 1.0,
        folder: Path | None = None,
        manifest: Manifest = MANIFEST,
        forbids: Callable[[str], bool] = lambda _tenant: False,
    ) -> None:
        self.edge, self.pool = Doubling("edge/a"), Doubling("pool/p")
        self.fleet = fleet_of()
        for target_id, one in (
            ("edge/a", variant("int8", compute_s=0.010, quality=0.99)),
            ("pool/p", variant("fp32", compute_s=0.050, quality=1.0)),
        ):
            self.fleet.add(spec(target_id), clock.now())
            offers = (ModelOffer("double", "1", (one,)),)
            self.fleet.fold(LinkUp(target_id, target_id, 1, offers), clock.now())
        targets = {"edge/a": self.edge, "pool/p": self.pool}
        placer = Placer(self.fleet, cloud_budget=budget)
        self.dispatcher = Dispatcher(placer, targets, lambda _name, _version: manifest, draw=lambda: 0.5)
        self.shadowing = Shadowing(
            ShadowTerms(share, 2.0, forbids),
            AgreementWatch(every_s),
            ShadowBudget(pool_share),
            Disagreements(100, folder, 1 << 20),
            placer=placer,
            targets=targets,
            manifest_of=lambda _name, _version: manifest,
            ask_builder=self.dispatcher.ask_builder,
            draw=lambda: 0.5,
            strained=strained,
        )
        self.service = shadow(self.shadowing)(self.dispatcher.infer)

    async def ask(self, **changes: Any) -> Reply:
        """An answer, and the shadow that follows it."""
        reply = await self.service(call(**changes))
        await clock.sleep(0.2)
        return reply

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: count for (_, outcome), count in self.shadowing.outcomes.items()}


def call(**changes: Any) -> Call:
    now = clock.now()
    rows = array_to_tensor("x", np.array([[1.0, 2.0]], dtype=np.float32), Datatype.FP32)
    return replace(Call(InferRequest("double", (rows,), id="mine"), "oip-http", now, now + 1.0), **changes)


@on_virtual_time
async def test_an_answer_of_a_device_is_computed_again_after_its_caller_has_it() -> None:
    scene = Scene()
    async with scene.shadowing:
        began_at = clock.now()
        reply = await scene.service(call())
        assert clock.now() - began_at == pytest.approx(scene.edge.takes_s), "no caller waits"
        assert reply.route is not None and reply.route.served_by == "edge/a"
        assert scene.pool.seen == []
        await clock.sleep(0.2)
        (again,) = scene.pool.seen
        assert (again.id, again.model_version) == ("", "1")
        assert scene.pool.priorities == [LAST_LEVEL]
        assert scene.outcomes == {"compared": 1}
        (state,) = scene.shadowing.watch.sources.values()
        assert state.mean == pytest.approx(0.0, abs=1e-6)


@on_virtual_time
async def test_a_shadow_is_no_request_no_attempt_and_no_flight_record() -> None:
    scene = Scene()
    async with scene.shadowing:
        await scene.ask()
        scene.dispatcher.recorder.pack()
        assert len(scene.dispatcher.recorder) == 1
        pool = scene.fleet.targets["pool/p"]
        assert (pool.queue_estimate.in_flight, pool.asked_at) == (0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"pin": "edge"},
        {"pin": "site"},
        {"attested": True},
        {"tenant": "private"},
        {"protocol": DEFERRED},
        {"path": ("region",)},
    ],
    ids=lambda one: str(next(iter(one.values()))),
)
@on_virtual_time
async def test_what_may_not_be_copied_is_not(changes: dict[str, Any]) -> None:
    scene = Scene(forbids=lambda tenant: tenant == "private")
    async with scene.shadowing:
        if changes.get("attested"):
            scene.shadowing.answered(call(**changes), await scene.dispatcher.infer(call()))
            await clock.sleep(0.2)
        else:
            await scene.ask(**changes)
        assert scene.pool.seen == [] and scene.outcomes == {}


@pytest.mark.parametrize("changes", [{"pin": "site"}, {"require": "attested"}], ids=["pinned", "attested"])
@on_virtual_time
async def test_a_model_whose_manifest_keeps_its_requests_is_not_shadowed(changes: dict[str, Any]) -> None:
    scene = Scene(manifest=replace(MANIFEST, **changes))
    async with scene.shadowing:
        reply = Reply(InferResponse("double", "1", ()), route=(await Scene().service(call())).route)
        scene.shadowing.answered(call(), reply)
        await clock.sleep(0.2)
        assert scene.pool.seen == []


@on_virtual_time
async def test_only_the_drawn_share_is_shadowed_and_a_device_once_in_its_gap() -> None:
    scene = Scene(share=0.5)  # the draw is 0.5
    async with scene.shadowing:
        await scene.ask()
        assert scene.pool.seen == []
    scene = Scene(every_s=10.0)
    async with scene.shadowing:
        for _ in range(5):
            await scene.ask()
        assert len(scene.pool.seen) == 1
        await clock.sleep(10.0)
        await scene.ask()
        assert len(scene.pool.seen) == 2


@on_virtual_time
async def test_a_busy_pool_is_waited_for_and_then_left_alone() -> None:
    scene = Scene()
    view = scene.fleet.targets["pool/p"]
    view.queue_estimate.launch(1, 1.0, clock.now())
    async with scene.shadowing:
        await scene.ask()
        assert scene.pool.seen == []
        view.queue_estimate.finish(1, clock.now())
        await clock.sleep(0.2)
        assert len(scene.pool.seen) == 1
        view.queue_estimate.launch(2, 1.0, clock.now())
        await scene.ask()
        await clock.sleep(PATIENCE_S)
        assert scene.outcomes == {"compared": 1, "busy": 1}


@on_virtual_time
async def test_nothing_is_asked_while_the_gateway_is_strained_or_the_cloud_is_dear() -> None:
    is_strained = True
    scene = Scene(strained=lambda: is_strained)
    async with scene.shadowing:
        await scene.ask()
        is_strained = False
        await clock.sleep(PATIENCE_S + 1.0)
        assert scene.pool.seen == []
    cloud = CloudBudget(0.01)
    scene = Scene(budget=cloud)
    async with scene.shadowing:
        cloud.factor(clock.now())
        for _ in range(20):
            cloud.spent(1.0)
            await clock.sleep(0.2)
            cloud.factor(clock.now())
        assert cloud.factor(clock.now()) > 1.0
        await scene.service(call())
        await clock.sleep(0.5)
        assert scene.pool.seen == []


@on_virtual_time
async def test_what_shadows_cost_is_counted_and_bounded() -> None:
    cloud = CloudBudget(100.0)
    scene = Scene(budget=cloud, pool_share=0.02)
    async with scene.shadowing:
        for _ in range(200):
            await scene.service(call())
            await clock.sleep(0.02)
        spent_s = scene.shadowing.budget.spent_s
        assert 0.006 <= spent_s <= 0.1 + 0.006 + 0.001 * 200 * 0.05
        assert len(scene.pool.seen) < 40
        cloud.factor(clock.now() + 0.2)
        assert cloud.spend > 0.0


@on_virtual_time
async def test_a_shadow_costs_no_more_than_its_pool_took_for_it() -> None:
    scene = Scene()
    scene.pool.computes_s = 1e12
    async with scene.shadowing:
        await scene.ask()

    assert scene.shadowing.budget.spent_s == pytest.approx(scene.pool.takes_s)


@on_virtual_time
async def test_a_device_that_signs_a_variant_of_its_own_making_is_compared_all_the_same() -> None:
    scene = Scene()
    scene.edge.signs = "int8x"
    async with scene.shadowing:
        await scene.ask()

    assert scene.outcomes == {"compared": 1}


@on_virtual_time
async def test_a_budget_grows_by_what_pools_compute_for_callers() -> None:
    budget = ShadowBudget(0.02)
    assert budget.affords(1, 0.0)
    budget.spent(1.0)
    assert not budget.affords(1, 1.0)
    budget.worked(100.0)
    assert budget.affords(1, 2.0), "two seconds, less one of debt"
    assert repr(budget).endswith("s left, 1 s spent>")


@on_virtual_time
async def test_a_device_that_drifts_is_left_out_declared_and_comes_back_by_copies() -> None:
    scene = Scene()
    scene.edge.turned = 1.0
    async with scene.shadowing:
        for _ in range(40):
            await scene.ask()
        target = scene.fleet.targets["edge/a"]
        condition = target.degradation.active["answer_drift"]
        assert "double 1 int8" in condition.evidence and condition.model == "double"
        assert [one.variant.standing for one in scene.fleet.offered("double", "1")] == ["demoted", ""]

        reply = await scene.ask()
        assert reply.route is not None and reply.route.served_by == "pool/p"
        pinned = await scene.ask(pin="edge")
        assert pinned.route is not None
        assert (pinned.route.served_by, pinned.route.degraded) == ("edge/a", True)

        scene.edge.turned = 0.0
        before = len(scene.pool.seen)
        asked = 0
        while "answer_drift" in target.degradation.active and asked < 100:
            await scene.ask()
            asked += 1
        assert asked < 60
        assert len(scene.pool.seen) == before + asked, "the pool answered callers, and nothing else"
        assert [one.variant.standing for one in scene.fleet.offered("double", "1")] == ["", ""]
        assert "<Shadowing <AgreementWatch 1 followed, 0 drifting>" in repr(scene.shadowing)


@on_virtual_time
async def test_a_demotion_outlives_the_targets_entry_and_its_process() -> None:
    fleet = fleet_of(edge_a=variant("int8"), pool_p=variant("fp32"))
    now = clock.now()
    key = ("minilm", "1", "int8")
    fleet.drifts("edge/a", key, AnswerDrift("they differ", demoted=True), now)
    offers = fleet.targets["edge/a"].offers
    fleet.fold(LinkUp("edge/a", "edge/a", 2, offers), now)  # another process
    assert "answer_drift" in fleet.targets["edge/a"].degradation.active
    fleet.remove("edge/a")
    fleet.add(spec("edge/a"), now)
    fleet.fold(LinkUp("edge/a", "edge/a", 3, offers), now)
    assert "answer_drift" in fleet.targets["edge/a"].degradation.active
    chosen = Placer(fleet).decide(ask(at=now), now).chosen
    assert chosen is not None and chosen.target.id == "pool/p"
    demanded = Placer(fleet).decide(ask(at=now, variant="int8"), now).chosen
    assert demanded is not None and demanded.target.id == "edge/a", "nothing else has it"
    fleet.drifts("edge/a", key, None, now)
    assert "answer_drift" not in fleet.targets["edge/a"].degradation.active
    fleet.drifts("edge/gone", key, None, now)


@on_virtual_time
async def test_a_reference_that_fails_accuses_nobody() -> None:
    scene = Scene()
    async with scene.shadowing:
        for error in (NothingAlive("down"), Overloaded("full"), ValueError("a defect")):
            scene.pool.error = error
            await scene.ask()
        assert scene.outcomes == {"unanswered": 2}
        assert not scene.shadowing.watch.sources
        scene.pool.error = None
        await scene.ask()
        assert scene.outcomes["compared"] == 1


@on_virtual_time
async def test_the_end_cancels_the_shadow_that_is_under_way_and_forgets_the_others() -> None:
    scene = Scene(every_s=0.001)
    scene.pool.takes_s = 5.0
    async with scene.shadowing:
        for _ in range(PENDING + 5):
            await scene.service(call())
        await settle()
        assert f"{PENDING} pending" in repr(scene.shadowing)
    assert (scene.pool.cancelled, scene.pool.under_way) == (1, 0)
    assert "0 pending" in repr(scene.shadowing)


@on_virtual_time
async def test_a_large_request_is_not_kept_for_a_shadow() -> None:
    scene = Scene()
    large = array_to_tensor("x", np.zeros((1, MAX_BYTES // 4 + 1), dtype=np.float32), Datatype.FP32)
    async with scene.shadowing:
        reply = await scene.dispatcher.infer(call())
        scene.shadowing.answered(replace(call(), request=InferRequest("double", (large,))), reply)
        assert "0 pending" in repr(scene.shadowing)


@on_virtual_time
async def test_disagreements_are_kept_as_digests_and_inputs_only_where_a_folder_is_named(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "inputs"):
        scene = Scene(folder=folder)
        scene.edge.turned = 1.0
        async with scene.shadowing:
            await scene.ask()
            for _ in range(100):  # written in a thread, which virtual time does not wait for
                if len(scene.shadowing.worklist):
                    break
                await asyncio.to_thread(lambda: None)
        (kept,) = scene.shadowing.worklist
        assert (kept.target, kept.reference, kept.metric) == ("edge/a", "pool/p's fp32", "cosine")
        assert kept.score == pytest.approx(1.0 - np.cos(1.0), abs=1e-4)
        assert kept.input_sha256 == input_digest(call().request.inputs)
        if folder is None:
            assert kept.file == ""
        else:
            with np.load(kept.file) as arrays:
                assert arrays["x"].tolist() == [[1.0, 2.0]]


@on_virtual_time
async def test_a_screen_and_a_scrape_show_what_is_compared() -> None:
    scene = Scene()
    async with scene.shadowing:
        await scene.ask()
        shown = agreement_json(scene.shadowing, clock.now())
        (source,) = shown["sources"]
        assert (source["target"], source["compared"], source["demoted"]) == ("edge/a", 1, False)
        scene.edge.turned = 1.0
        for _ in range(40):
            await scene.ask()
        (source,) = agreement_json(scene.shadowing, clock.now())["sources"]
        assert source["demoted"] and source["drifting_for_s"] >= 0.0
        samples = {one.name: one.value for family in agreement_families(scene.shadowing) for one in family.samples}
        assert samples["tidegate_answer_drift"] == 1.0
        assert samples["tidegate_shadow_pool_seconds_total"] > 0.0
        assert drift_conditions(scene.shadowing.watch) == []
