"""A model's version that goes, or comes back otherwise, while requests of it are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.estimate.service_cost import MOST_LEFT
from gateway.core.fleet.link_events import LinkDown, LinkLoad, LinkUp
from gateway.layers.observe import observe
from gateway.observe.access_log import AccessLog
from gateway.serving.confidence_policy import ConfidencePolicies
from gateway.serving.work_estimate import WorkDescription
from gateway.targets.site import SiteTarget
from tests.support.gateway.conductor import FP32, FakeTarget, Scene, call
from tests.support.gateway.fleets import NOW, fleet_of, offer, variant
from tests.support.loop import on_virtual_time
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.generate.usage import Usage, usage_parameters
from tidegate.models.manifest import Confidence, Manifest
from tidegate.outcome import InternalError, ModelNotFound, Overloaded
from tidegate.types import Accepted, Call, InferRequest, InferResponse, LoadReport, Reply


class UnloadedScene(Scene):
    """The gateway's manifests are gone once `unloaded` is set."""

    unloaded = False

    def _manifest(self, name: str, version: str) -> Manifest:
        if self.unloaded:
            raise ModelNotFound("its version was unloaded")
        return minilm()


class LateGenerator(FakeTarget):
    """Answers a generation, before whose end `meanwhile` is done."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.meanwhile: Callable[[], None] = lambda: None

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        reply = await super().take(request, variant, budget_s, on_accepted)
        self.meanwhile()
        usage = usage_parameters(Usage("stop", 4, 3, 0, 0.001, 0.002))
        return replace(reply, response=InferResponse(request.model_name, request.model_version, (), request.id, usage))


@on_virtual_time
async def test_a_generation_that_ends_after_its_version_was_unloaded_is_given_and_leaves_nothing() -> None:
    target = LateGenerator("edge/a")
    scene = UnloadedScene({"edge_a": (target, FP32)})
    target.meanwhile = lambda: setattr(scene, "unloaded", True)

    reply = await scene.dispatcher.infer(scene.call())

    assert reply.route is not None and reply.route.served_by == "edge/a"
    scene.assert_at_rest()


@on_virtual_time
async def test_a_defect_at_an_answer_ends_its_attempt_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene({"edge_a": (FakeTarget("edge/a"), FP32)})

    def raises(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("gateway.serving.work_estimate.AskBuilder.computed", raises)
    with pytest.raises(InternalError, match="defect: ZeroDivisionError"):
        await scene.dispatcher.infer(scene.call())

    scene.assert_at_rest()
    assert not scene.fleet.targets["edge/a"].progress.under_way


async def _answers(call: Call) -> Reply:
    return Reply(InferResponse("minilm", "1", (), "7"))


async def _refuses(call: Call) -> Reply:
    raise Overloaded("full")


def test_an_access_log_that_cannot_read_the_work_writes_the_line_and_costs_nobody_the_answer() -> None:
    def gone(_call: Call) -> WorkDescription:
        raise ModelNotFound("its version was unloaded")

    lines: list[dict[str, Any]] = []
    log = AccessLog(gone, lambda _event, **fields: lines.append(fields))

    async def both() -> None:
        assert (await observe(lambda: 1.0, log)(_answers)(call())).response.id == "7"
        with pytest.raises(Overloaded):
            await observe(lambda: 1.0, log)(_refuses)(call())

    asyncio.run(both())
    assert [(one["outcome"], "units" in one) for one in lines] == [("ok", False), ("overloaded", False)]


def test_an_observer_with_a_defect_costs_nobody_the_answer_and_hides_no_refusal() -> None:
    class Broken:
        def answered(self, call: Call, reply: Reply, now: float) -> None:
            raise ZeroDivisionError

        def ended(self, call: Call, error: BaseException, now: float) -> None:
            raise ZeroDivisionError

    async def both() -> None:
        assert (await observe(lambda: 1.0, Broken())(_answers)(call())).response.id == "7"
        with pytest.raises(Overloaded):
            await observe(lambda: 1.0, Broken())(_refuses)(call())

    asyncio.run(both())


def test_a_model_that_is_loaded_anew_is_judged_by_its_new_threshold_or_no_more() -> None:
    plain = minilm()
    manifests = [replace(plain, confidence=Confidence(plain.outputs[0].name, "margin", 0.5))]
    policies = ConfidencePolicies(lambda _name, _version: manifests[-1], lambda: False)

    def threshold() -> float | None:
        found = policies.of("minilm", "1")
        return None if found is None else found.escalations.threshold

    assert threshold() == 0.5
    manifests.append(replace(plain, confidence=Confidence(plain.outputs[0].name, "margin", 0.9)))
    assert threshold() == 0.9
    manifests.append(plain)
    assert threshold() is None


def test_a_process_whose_clock_was_set_back_is_heard() -> None:
    fleet = fleet_of(pool_a=variant())
    target, epoch = fleet.targets["pool/a"], fleet.targets["pool/a"].epoch
    fleet.fold(LinkUp("pool/a", "pool/a", epoch + 1000, (offer(),)), NOW)
    fleet.fold(LinkLoad("pool/a", LoadReport(epoch + 1000, 5, 4, 2, 0.9)), NOW + 1.0)
    fleet.fold(LinkDown("pool/a", "gone"), NOW + 2.0)
    fleet.fold(LinkUp("pool/a", "pool/a", epoch + 10, (offer(),)), NOW + 10.0)
    fleet.fold(LinkLoad("pool/a", LoadReport(epoch + 10, 1, 30, 8, 3.0)), NOW + 11.0)
    assert target.queue_estimate.load is not None and target.queue_estimate.load.queued == 30
    assert target.queue_estimate.wait_s(NOW + 11.0) == pytest.approx(3.0)


def test_what_is_known_of_versions_that_came_and_went_is_bounded_and_what_may_come_back_is_kept() -> None:
    fleet = fleet_of(pool_a=variant())

    def offers_version(number: int) -> None:
        fleet.fold(LinkUp("pool/a", "pool/a", 1, (replace(offer(), version=str(number)),)), NOW + number)

    offers_version(0)
    first = fleet.offered("minilm", "0")[0].cost
    for number in range(1, MOST_LEFT):
        offers_version(number)
    offers_version(0)
    assert fleet.offered("minilm", "0")[0].cost is first, "what was learned is there again"
    for number in range(MOST_LEFT, 500):
        offers_version(number)
    before = fleet.offered("minilm", "499")[0].cost
    offers_version(499 - MOST_LEFT)
    offers_version(0)
    assert fleet.offered("minilm", "0")[0].cost is not first, "it was forgotten meanwhile"
    offers_version(499)
    assert fleet.offered("minilm", "499")[0].cost is before


class FakeSite(SiteTarget):
    def __init__(self) -> None:
        self.told: list[Call] = []
        self.under_way = 0

    async def relay(self, call: Call, request: InferRequest, **_: Any) -> Reply:  # type: ignore[override]
        self.told.append(call)
        return Reply(InferResponse(request.model_name, request.model_version, (), request.id))


@on_virtual_time
async def test_a_site_is_told_what_the_model_demands_and_not_only_its_caller() -> None:
    class Demanding(Scene):
        def _manifest(self, name: str, version: str) -> Manifest:
            return replace(minilm(), min_quality=0.9)

    site = FakeSite()
    scene = Demanding({"site_shop": (site, replace(FP32, quality=1.0))})  # type: ignore[dict-item]
    await scene.dispatcher.infer(replace(scene.call(), deadline=clock.now() + 1.0))
    assert [one.min_quality for one in site.told] == [0.9]
