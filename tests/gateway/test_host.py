"""The gateway as the OIP servers see it."""

from __future__ import annotations

import pytest

from gateway.catalog import Catalog
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown
from gateway.core.health.breaker import AttemptVerdict
from gateway.default_versions import DefaultVersions
from gateway.host import GatewayHost
from gateway.observe.metrics import GatewayMetrics
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, fleet_of, spec, variant
from tests.support.serving.host import digits, minilm
from tidegate import clock
from tidegate.outcome import ModelNotFound
from tidegate.types import Call, InferRequest, InferResponse, Reply


async def answers(call: Call) -> Reply:
    return Reply(InferResponse("minilm", "1", ()))


def host(fleet: Fleet) -> GatewayHost:
    metrics = GatewayMetrics(fleet, admission_of(1), version_of=lambda request: "1")
    return GatewayHost("main", DefaultVersions(Catalog([minilm(), digits()]), fleet), fleet, metrics, answers)


def test_a_model_is_ready_while_a_usable_target_offers_it() -> None:
    fleet = fleet_of(edge_a=variant())
    one = host(fleet)
    assert one.model_ready("minilm")
    assert one.model_ready("minilm", "1")
    assert not one.model_ready("digits"), "nobody offers it"
    assert not one.model_ready("nobody")

    for _ in range(5):
        fleet.targets["edge/a"].breaker.record(AttemptVerdict.FAILURE, clock.now(), 0.5)
    assert one.model_ready("minilm"), "the last one stays in use, however it fails"

    fleet.fold(LinkDown("edge/a", "reset"), clock.now())
    assert not one.model_ready("minilm")


def test_the_gateway_is_ready_when_static_targets_were_tried_and_one_can_be_used() -> None:
    fleet = fleet_of(edge_a=variant())
    one = host(fleet)
    assert one.ready()
    fleet.add(spec("pool/main"), NOW)
    assert not one.ready()
    fleet.fold(LinkDown("pool/main", "refused"), NOW)
    assert one.ready()
    fleet.fold(LinkDown("edge/a", "refused"), NOW)
    assert not one.ready()


def test_statistics_are_of_all_models_or_of_one() -> None:
    fleet = fleet_of(edge_a=variant())
    one = host(fleet)
    assert [statistics.name for statistics in one.statistics()] == ["digits", "minilm"]
    assert [statistics.name for statistics in one.statistics("minilm")] == ["minilm"]
    assert [statistics.version for statistics in one.statistics("minilm", "1")] == ["1"]
    with pytest.raises(ModelNotFound):
        one.statistics("nobody")


async def test_models_come_from_the_catalog_and_answers_from_the_stack() -> None:
    fleet = fleet_of(edge_a=variant())
    one = host(fleet)
    assert one.server_name == "tidegate-gateway-main"
    assert [manifest.name for manifest in one.manifests()] == ["digits", "minilm"]
    assert one.manifest("minilm").name == "minilm"
    reply = await one.infer(Call(InferRequest("minilm", ()), "oip-http", NOW))
    assert reply.response.model_name == "minilm"
    assert repr(one) == "<GatewayHost main <Catalog 2 own, 0 foreign, 0 shipped>>"
