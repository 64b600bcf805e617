"""What is counted, as Prometheus sees it."""

from __future__ import annotations

import asyncio
import weakref

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.observe.metrics import GatewayMetrics
from gateway.observe.metrics.requests import MOST_NOTED
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, fleet_of, variant
from tidegate import clock
from tidegate.metrics.exposition import Exposition
from tidegate.metrics.histogram import Histogram
from tidegate.outcome import InvalidRequest, NothingAlive, ServeError
from tidegate.types import Call, Datatype, InferRequest, InferResponse, LoadReport, Reply, Route, Tensor

REQUEST = InferRequest("minilm", (Tensor("input_ids", Datatype.INT64, (3, 4), bytes(96)),))


def metrics() -> GatewayMetrics:
    fleet = fleet_of(edge_a=variant(), pool_main=variant())
    fleet.targets["edge/a"].queue_estimate.report(LoadReport(1, 1, 0, 0, 0.0), "mqtt", clock.now() - 5.0)
    return GatewayMetrics(fleet, admission_of(4), version_of=lambda request: "1")


def reply(*, fallback: bool = False, degraded: bool = False, left_s: float | None = 1.0) -> Reply:
    return Reply(
        InferResponse("minilm", "1", ()),
        stages={"admit": 0.0001, "classify": 0.0001, "queue": 0.002, "link": 0.003, "compute": 0.020},
        route=Route("edge/a", "fallback" if fallback else "cheapest", "int8", fallback=fallback, degraded=degraded),
        budget_left_s=left_s,
    )


def samples(counted: GatewayMetrics) -> dict[tuple[str, str], float]:
    """(name, labels) → value, of what a scrape returns."""
    text = Exposition(counted.collect).render()[0].decode()
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_escalated_and_provisional_answers_are_counted_by_model() -> None:
    counted = metrics()
    for reason, provisional in (("escalated", False), ("escalated", False), ("cheapest", True), ("cheapest", False)):
        route = Route("edge/a", reason, "int8", provisional=provisional)
        counted.answered(call(), Reply(InferResponse("minilm", "1", ()), route=route), NOW + 0.030)

    seen = samples(counted)

    assert seen["tidegate_escalated_total", "model=minilm"] == 2
    assert seen["tidegate_provisional_total", "model=minilm"] == 1


def call() -> Call:
    return Call(REQUEST, "oip-http", NOW)


def test_answers_are_counted_by_where_and_how_they_ended() -> None:
    counted = metrics()
    counted.answered(call(), reply(), NOW + 0.030)
    counted.answered(call(), reply(fallback=True, degraded=True), NOW + 0.030)
    counted.answered(call(), reply(left_s=-0.5), NOW + 0.030)
    counted.answered(call(), Reply(InferResponse("minilm", "1", ())), NOW + 0.030)

    seen = samples(counted)

    labels = "model=minilm,outcome={},protocol=oip-http,tier={}"
    for outcome, tier in (("ok", "edge"), ("degraded", "edge"), ("late", "edge"), ("ok", "none")):
        assert seen["tidegate_requests_total", labels.format(outcome, tier)] == 1
    assert seen["tidegate_route_total", "reason=cheapest,to=edge"] == 2
    assert seen["tidegate_fallback_total", "to=edge"] == 1
    assert seen["tidegate_request_duration_seconds_bucket", "le=0.05,model=minilm,tier=edge"] == 3
    assert seen["tidegate_request_duration_seconds_bucket", "le=0.02,model=minilm,tier=edge"] == 0
    assert seen["tidegate_deadline_slack_seconds_bucket", "le=0.0,model=minilm,tier=edge"] == 1
    assert seen["tidegate_stage_seconds_sum", "model=minilm,stage=compute,tier=edge"] == pytest.approx(0.060)
    assert "Metrics 4 requests" in repr(counted)


@pytest.mark.slow
def test_however_many_answers_are_still_to_be_counted_every_reader_finds_them_all() -> None:
    for answers in (1, MOST_NOTED - 1, MOST_NOTED, 3 * MOST_NOTED + 1):
        scraped, asked, named = metrics(), metrics(), metrics()
        for counted in (scraped, asked, named):
            for _ in range(answers):
                counted.answered(call(), reply(), NOW + 0.030)
        assert samples(scraped)["tidegate_route_total", "reason=cheapest,to=edge"] == answers
        assert samples(scraped)["tidegate_route_total", "reason=cheapest,to=edge"] == answers, "and no one twice"
        assert asked.statistics("minilm", "1").success.count == answers
        named.refused("oip-http", "minilm", InvalidRequest("no"))
        assert named.requests.total == answers + 1
        refused = "model=minilm,outcome=invalid_request,protocol=oip-http,tier=none"
        assert samples(named)["tidegate_requests_total", refused] == 1, "it is a model's"


class Raw(bytearray):
    """Bytes of a tensor that can be watched."""


def test_what_is_still_to_be_counted_holds_on_to_no_tensor() -> None:
    counted = metrics()
    request, response = Raw(96), Raw(96)
    asked = InferRequest("minilm", (Tensor("input_ids", Datatype.INT64, (3, 4), request),))  # type: ignore[arg-type]
    told = InferResponse("minilm", "1", (Tensor("embedding", Datatype.FP32, (3, 8), response),))  # type: ignore[arg-type]
    counted.answered(Call(asked, "oip-http", NOW), Reply(told), NOW + 0.030)
    tensors = [weakref.ref(request), weakref.ref(response)]
    del request, response, asked, told
    assert [one() for one in tensors] == [None, None]
    assert counted.requests.total == 1


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (NothingAlive("no"), "nothing_alive", "REJECTED"),
        (asyncio.CancelledError(), "cancelled", "CANCELED"),
        (KeyError("defect"), "internal", "OTHER"),
    ],
)
def test_ends_without_an_answer_are_counted_by_their_cause(error: BaseException, outcome: str, reason: str) -> None:
    counted = metrics()
    counted.began(call())
    counted.ended(call(), error, NOW + 0.1)
    seen = samples(counted)
    assert seen["tidegate_requests_total", f"model=minilm,outcome={outcome},protocol=oip-http,tier=none"] == 1
    assert seen["nv_inference_request_failure", f"model=minilm,reason={reason},version=1"] == 1
    assert counted.statistics("minilm", "1").fail.count == 1


def test_names_that_callers_make_up_become_no_labels() -> None:
    counted = metrics()
    refusal: ServeError = InvalidRequest("no such model")
    counted.refused("oip-http", "made-up", refusal)
    counted.answered(call(), reply(), NOW + 0.03)
    counted.refused("oip-http", "minilm", refusal)
    seen = samples(counted)
    assert seen["tidegate_requests_total", "model=,outcome=invalid_request,protocol=oip-http,tier=none"] == 1
    assert seen["tidegate_requests_total", "model=minilm,outcome=invalid_request,protocol=oip-http,tier=none"] == 1


def test_tritons_names_show_the_same_numbers() -> None:
    counted = metrics()
    for _ in range(2):
        counted.answered(call(), reply(), NOW + 0.030)
    seen = samples(counted)
    one = "model=minilm,version=1"
    assert seen["nv_inference_request_success", one] == 2
    assert seen["nv_inference_count", one] == 6, "rows"
    assert seen["nv_inference_compute_infer_duration_us", one] == pytest.approx(40_000)
    assert seen["nv_inference_queue_duration_us", one] == pytest.approx(4_000)
    assert counted.statistics("minilm", "1").batches[3].count == 2


def test_targets_are_read_at_each_scrape() -> None:
    seen = samples(metrics())
    assert seen["tidegate_target_up", "target=pool/main"] == 1
    assert seen["tidegate_breaker_state", "target=edge/a"] == 0
    assert seen["tidegate_link_rtt_seconds", "target=edge/a"] == pytest.approx(0.002)
    assert seen["tidegate_edge_state_age_seconds", "agent=edge/a"] == pytest.approx(5.0, abs=0.5)
    assert seen["tidegate_in_flight", ""] == 0


def test_a_histogram_counts_cumulatively() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.buckets() == [("0.1", 1.0), ("1.0", 2.0), ("+Inf", 3.0)]
    assert repr(histogram) == "<Histogram 3 values>"
