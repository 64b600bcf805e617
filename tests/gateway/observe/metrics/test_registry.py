"""A gateway's metrics: deadlines and their causes, stages, attempts, bounds; and the documentation has them all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from gateway.catalog import Catalog
from gateway.config.gateway import GatewayConfig
from gateway.core.agreement.agreement_watch import AgreementWatch, AnswerSource, ShadowedAnswer
from gateway.core.agreement.expectation import AgreementTerms
from gateway.core.agreement.shadow_budget import ShadowBudget
from gateway.core.estimate.token_calibration import TokenCalibration
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.fleet.link_health import RttTimeline, link_state
from gateway.core.fleet.scaling import ReplicaScaler, ScalingSpec
from gateway.core.history.recorder import AnswerRecord, RequestEvent, RequestRecord
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.core.versions.configuration_drift import DriftWatch
from gateway.core.versions.traffic_split import TrafficSplit, TrafficSplits
from gateway.default_versions import DefaultVersions
from gateway.delivery.trials import TrialFigures, Trials
from gateway.observe.conditions import condition_family
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.scaling import scaling_families
from gateway.operate.agreement_report import agreement_families
from gateway.operate.cache_report import cache_families
from gateway.operate.configuration_report import configuration_families
from gateway.operate.help_report import help_families
from gateway.operate.trial_report import trial_families
from gateway.serving.known_answers import KnownAnswers
from gateway.serving.layer_splitting import split_families
from gateway.serving.shadowing import Shadowing
from tests.gateway.observe.metrics.test_generation import CALL as GENERATION
from tests.gateway.observe.metrics.test_generation import REPLY as GENERATED
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, fleet_of, offer, spec, variant
from tests.support.gateway.flowns import answered, given, request_record, went
from tests.support.observe.metric_tables import check
from tidegate import clock
from tidegate.config import load
from tidegate.metrics.exposition import Exposition
from tidegate.outcome import InvalidRequest, Outcome, Overloaded, ServeError, error_from_code
from tidegate.types import Call, Datatype, InferRequest, InferResponse, Reply, Resumed, Route, Tensor

REQUEST = InferRequest("minilm", (Tensor("input_ids", Datatype.INT64, (1, 4), bytes(32)),))


def three_targets() -> Fleet:
    return fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())


def metrics(fleet: Fleet | None = None, **keys: int) -> GatewayMetrics:
    return GatewayMetrics(fleet or three_targets(), admission_of(4), version_of=lambda request: "1", **keys)


def call() -> Call:
    return Call(REQUEST, "oip-http", NOW)


def reply(left_s: float = 1.0, attempts: int = 1, *, fallback: bool = False, **stages: float) -> Reply:
    took = {"admit": 0.001, "classify": 0.001, "queue": 0.010, "link": 0.020, "compute": 0.030} | stages
    return Reply(
        InferResponse("minilm", "1", ()),
        stages=took,
        route=Route("edge/a", "cheapest", "int8", attempts=attempts, fallback=fallback),
        budget_left_s=left_s,
        batch_wait_s=0.004,
        link_out_s=0.012,
    )


def value(counted: GatewayMetrics, name: str, **labels: str) -> float:
    """Of the one series with these labels; 0 where there is none."""
    text = Exposition(counted.collect).render()[0].decode()
    found = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
    return sum(one.value for one in found if labels.items() <= one.labels.items())


# There is nothing to count of these without a model that judges itself, a shed request, a report, or a sick target.
NEEDS_MORE = {
    "tidegate_escalated_total",
    "tidegate_provisional_total",
    "tidegate_shed_total",
    "tidegate_edge_state_age_seconds",
    "tidegate_condition",
    "tidegate_token_budgets_total",
    "tidegate_token_chance_calibration_error_ratio",
}
RETRIED = (
    *went(0, "edge/a", 0.0, ends=0.02, what="failed", words="unreachable: the link broke"),
    *answered(1, "pool/main", 0.02),
)


def busy_pool() -> ReplicaScaler:
    """One that has seen enough to know what it needs."""
    scaling = ReplicaScaler(ScalingSpec())
    for second in range(200):
        scaling.arrived(0.030, 0.010, 0.5, NOW + second)
    scaling.decide(NOW + 200.0, replicas=1, backlog_s=0.0)
    return scaling


def on_trial() -> Trials:
    trials = Trials(
        None, DefaultVersions(Catalog(()), Fleet(lambda model, version: "tokens")), lambda: 0.5, lambda: False
    )
    trials.defaults.splits = TrafficSplits({"minilm": TrafficSplit("1", "2", share=0.1)})
    trials.watched["minilm"] = TrialFigures()
    trials.watched["minilm"].agreement.record([0.99, 0.5], [True, False], classes=False)
    return trials


def resumed_record() -> RequestRecord:
    one = Resumed("edge/a", "pool/main", at=17, gap_s=0.21, grade="exact", why="stalled")
    end = AnswerRecord(1, Route("pool/main", "resumed", "paced", attempts=2, resumed=(one,)))
    return request_record(reasons=("cheapest", "resumed"), notes=[*RETRIED], end=end, wasted_tokens=20)


def test_an_answer_that_was_gone_on_with_is_counted_with_its_gap_and_what_was_computed_again() -> None:
    counted = metrics()
    counted.landed(resumed_record())
    counted.landed(request_record())
    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in counted.collect()
        for sample in family.samples
    }
    assert read["tidegate_resumes_total", "exact", "stalled"] == 1.0
    assert (read["tidegate_resume_gap_seconds_count",], read["tidegate_resume_gap_seconds_sum",]) == (1.0, 0.21)
    assert read["tidegate_wasted_tokens_total",] == 20.0


def watched_agreement() -> Shadowing:
    """A device whose answers drift."""
    watch, source = AgreementWatch(), AnswerSource("edge/a", "minilm", "1", "int8")
    for _ in range(30):
        watch.record(ShadowedAnswer(source, "pool/main", 0.9, AgreementTerms("cosine", "y", 0.02), 2, "tokens"), NOW)
    outcomes = {("minilm", "compared"): 30}
    return cast(Any, SimpleNamespace(watch=watch, budget=ShadowBudget(0.02), outcomes=outcomes))


def known_answers() -> KnownAnswers:
    counts = SimpleNamespace(
        outcomes={("minilm", "hit"): 1},
        kept={("minilm", "kept"): 1},
        lent={("minilm", "nothing_alive"): 1},
        cache=SimpleNamespace(evicted=0),
        rows=lambda: [("minilm", 1, 2, 1, 4096)],
    )
    return cast(Any, counts)


def test_every_metric_of_a_gateway_stands_in_the_documentation_with_its_labels() -> None:
    fleet = fleet_of(edge_a=variant(), pool_main=variant())
    counted = GatewayMetrics(
        fleet,
        admission_of(4),
        version_of=lambda request: "1",
        calibration_error=lambda: 0.1,
        token_calibration=TokenCalibration(),
    )
    counted.add(lambda: [condition_family(fleet), *scaling_families(busy_pool()), *trial_families(on_trial())])
    counted.add(lambda: [*agreement_families(watched_agreement()), *cache_families(known_answers())])
    counted.add(lambda: split_families({("minilm", "answered"): 1}))
    counted.add(lambda: [*help_families({"edge/attic": 1}), *configuration_families(DriftWatch())])
    counted.began(call())
    counted.answered(call(), reply(), NOW + 0.07)
    counted.answered(call(), reply(left_s=-0.1, fallback=True), NOW + 0.07)
    counted.ended(call(), Overloaded("full"), NOW + 0.07)
    counted.landed(request_record())
    counted.generative.embedded("minilm", 12, 0.01)
    counted.generation.answered(GENERATION, GENERATED, NOW + 0.25)
    counted.landed(request_record(reasons=("cheapest", "fallback"), notes=[*RETRIED]))
    counted.landed(resumed_record())
    silent = check(
        counted.collect(), "Gateway", "OpenAI's routes, in OpenTelemetry's words", "Triton's names, at all three"
    )
    assert silent <= NEEDS_MORE, "labels of all others are held against the table as well"


def test_stages_are_counted_without_overlap() -> None:
    counted = metrics()
    counted.answered(call(), reply(), NOW + 0.062)
    stages = {"queue": 0.006, "batch_wait": 0.004, "link_out": 0.012, "link_back": 0.008, "compute": 0.030}
    for stage, seconds in stages.items():
        assert value(counted, "tidegate_stage_seconds_sum", stage=stage) == pytest.approx(seconds), stage
    assert value(counted, "tidegate_gateway_overhead_seconds_sum", protocol="oip-http") == pytest.approx(0.002)


def test_what_a_retry_took_is_no_overhead_of_the_gateway() -> None:
    counted = metrics()
    counted.answered(call(), reply(attempts=2), NOW + 0.5)
    assert value(counted, "tidegate_gateway_overhead_seconds_count") == 0


@pytest.mark.parametrize(
    ("stages", "took_s", "cause"),
    [
        ({"queue": 1.0}, 1.052, "queue"),
        ({"link": 1.0}, 1.042, "link"),
        ({"compute": 1.0}, 1.032, "compute"),
        ({"admit": 1.0}, 1.061, "gateway"),
        ({}, 1.062, "retries"),
    ],
)
def test_a_late_answer_is_put_down_to_where_most_of_its_time_went(
    stages: dict[str, float], took_s: float, cause: str
) -> None:
    counted = metrics()
    counted.answered(call(), reply(left_s=-0.01, **stages), NOW + took_s)
    assert value(counted, "tidegate_deadline_missed_total", cause=cause) == 1
    assert value(counted, "tidegate_deadline_missed_total") == 1
    assert value(counted, "tidegate_deadline_met_total") == 0


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("overloaded", "shed"),
        ("deadline_exceeded", "expired"),
        ("nothing_alive", "nothing_alive"),
        ("unreachable", "failed"),
        ("internal", "failed"),
        ("invalid_request", None),
        ("forbidden", None),
    ],
)
def test_a_request_without_an_answer_missed_its_deadline_unless_it_was_its_callers_fault(
    code: str, cause: str | None
) -> None:
    counted = metrics()
    counted.ended(call(), error_from_code(code, "x"), NOW + 0.1)
    assert value(counted, "tidegate_deadline_missed_total") == (cause is not None)
    if cause is not None:
        assert value(counted, "tidegate_deadline_missed_total", cause=cause) == 1


def test_a_caller_that_leaves_missed_nothing() -> None:
    counted = metrics()
    counted.ended(call(), GeneratorExit(), NOW + 0.1)
    assert value(counted, "tidegate_requests_total", outcome=Outcome.CANCELLED.value) == 1
    assert value(counted, "tidegate_deadline_missed_total") == 0


def test_requests_inside_are_pending_until_their_end() -> None:
    counted = metrics()
    for _ in range(3):
        counted.began(call())
    counted.answered(call(), reply(), NOW + 0.07)
    counted.ended(call(), Overloaded("full"), NOW + 0.07)
    assert value(counted, "nv_inference_pending_request_count", model="minilm", version="1") == 1


def hedged(won: bool, what: str = "cancelled") -> list[RequestEvent]:
    second = (
        answered(1, "edge/b", 0.050) if won else went(1, "edge/b", 0.050, ends=0.090, what=what, words="internal: x")
    )
    first = went(0, "edge/a", 0.0, ends=0.110, what="cancelled") if won else answered(0, "edge/a", 0.0, took_s=0.080)
    return sorted([*first, *second], key=lambda note: note.at)


@pytest.mark.parametrize(
    ("notes", "by", "result"),
    [(hedged(True), 1, "won"), (hedged(False), 0, "cancelled"), (hedged(False, "failed"), 0, "lost")],
)
def test_a_hedge_is_counted_by_what_became_of_it(notes: list[RequestEvent], by: int, result: str) -> None:
    counted = metrics()
    counted.landed(request_record(notes=notes, end=given(attempt=by)))
    assert value(counted, "tidegate_hedge_total", result=result) == 1
    assert value(counted, "tidegate_hedge_total") == 1


def test_a_hedge_that_there_was_no_budget_for_is_counted_as_suppressed() -> None:
    gateway = Gateway(load(GatewayConfig))
    hedges = gateway.dispatcher.hedges
    assert isinstance(hedges, ChanceHedging)
    while hedges.may_hedge():
        pass
    assert value(gateway.metrics, "tidegate_hedge_total", result="suppressed") == 1


def test_a_fallback_is_counted_by_the_error_before_it() -> None:
    counted = metrics()
    counted.landed(
        request_record(notes=[*RETRIED], reasons=("cheapest", "fallback"), end=given("pool/main", attempt=1))
    )
    assert value(counted, "tidegate_fallback_attempts_total", cause="unreachable", result="answered") == 1
    assert value(counted, "tidegate_target_attempts_total", target="edge/a", result="failed") == 1
    assert value(counted, "tidegate_target_attempts_total", target="pool/main", result="answered") == 1


def test_an_answer_is_held_against_what_was_predicted_of_it() -> None:
    counted = metrics()
    counted.landed(request_record(notes=answered(0, "edge/a", 0.0, took_s=0.060)))  # 0.05 were predicted
    counted.landed(request_record(notes=answered(0, "edge/a", 0.0, took_s=30.0)))
    assert value(counted, "tidegate_predicted_latency_error_seconds_bucket", tier="edge", le="0.01") == 1
    assert value(counted, "tidegate_predicted_latency_error_seconds_bucket", tier="edge", le="+Inf") == 2
    assert value(counted, "tidegate_prediction_promises_total", tier="edge", result="broken") >= 1


def big_fleet(agents: int) -> tuple[GatewayMetrics, Fleet]:
    fleet = fleet_of()
    for number in range(agents):
        name = f"edge/{number:05}"
        fleet.add(spec(name), NOW)
        fleet.fold(LinkUp(name, name, 1, (offer(variant()),)), NOW)
        fleet.targets[name].asked_at = NOW + number
    counted = GatewayMetrics(fleet, admission_of(4), version_of=lambda request: "1", most_targets=100)
    for number in range(agents):
        counted.landed(flown_at(f"edge/{number:05}"))
    return counted, fleet


FLOWN = request_record()


def flown_at(target: str) -> RequestRecord:
    return replace(FLOWN, notes=tuple(answered(0, target, 0.0)))


@pytest.mark.slow
def test_ten_thousand_agents_cost_as_many_series_as_a_hundred() -> None:
    counted, _ = big_fleet(10_000)
    for other in (InvalidRequest("no"), ServeError("x")):
        counted.refused("oip-http", "made-up", other)

    text = Exposition(counted.collect).render()[0]

    lines = [line for line in text.splitlines() if not line.startswith(b"#")]
    assert len(lines) < 2_500, "a dozen families by target, 101 series each, and what does not grow with the fleet"
    assert len(text) < 250_000
    assert value(counted, "tidegate_targets", tier="edge") == 10_000, "all of them are counted"
    assert value(counted, "tidegate_target_attempts_total") == 10_000, "what has no series of its own is in the rest"


@pytest.mark.slow
def test_the_troubled_have_series_of_their_own_and_the_rest_shows_the_worst() -> None:
    counted, fleet = big_fleet(300)
    fleet.targets["edge/00000"].ejected = True  # asked longest ago of all
    for number in range(1, 6):
        fleet.targets[f"edge/{number:05}"].link.rtt_s = 3.0
    assert value(counted, "tidegate_target_up", target="edge/00000") == 1
    assert value(counted, "tidegate_link_rtt_seconds", target="rest") == 3.0
    assert value(counted, "tidegate_target_up", target="edge/00001") == 0, "it is one of the rest"


def test_a_link_is_as_sick_on_the_scrape_as_it_is_on_the_page() -> None:
    fleet = three_targets()
    timelines = {name: RttTimeline() for name in fleet.targets}
    counted = GatewayMetrics(fleet, admission_of(4), version_of=lambda request: "1", timeline_of=timelines.get)
    for target in fleet.targets.values():
        target.link.record(0.002, NOW)
        for _ in range(20):
            timelines[target.id].sample(target)
    fleet.targets["edge/a"].link.rtt_s = 0.150  # several times the usual
    fleet.fold(LinkDown("edge/b", "connection refused"), NOW)

    found = {name: value(counted, "tidegate_link_state", target=name) for name in fleet.targets}

    assert found == {"edge/a": 1, "edge/b": 4, "pool/main": 0}
    shown = {one.id: link_state(one, timelines[one.id], clock.now()).health for one in fleet.targets.values()}
    assert shown == {"edge/a": "slow", "edge/b": "down", "pool/main": "well"}


def test_series_of_a_target_end_when_it_leaves_and_others_get_its_place() -> None:
    fleet = three_targets()
    counted = metrics(fleet, most_targets=1)
    counted.landed(request_record(notes=answered(0, "edge/a", 0.0)))
    counted.landed(request_record(notes=answered(0, "edge/b", 0.0)))
    assert value(counted, "tidegate_target_attempts_total", target="rest") == 1
    fleet.remove("edge/a")
    assert value(counted, "tidegate_target_attempts_total", target="edge/a") == 0
    counted.landed(request_record(notes=answered(0, "edge/b", 0.0)))
    assert value(counted, "tidegate_target_attempts_total", target="edge/b") == 1
    assert value(counted, "tidegate_target_attempts_total", target="rest") == 1, "a counter never falls"


def test_round_trips_as_late_as_a_resent_packet_show_as_loss() -> None:
    fleet = three_targets()
    counted, link = metrics(fleet), fleet.targets["edge/a"].link
    for number in range(64):
        link.record(0.010 if number % 4 else 0.230, NOW + number / 10)
    ratio = value(counted, "tidegate_link_loss_ratio", target="edge/a")
    assert 0.1 < ratio < 0.4
    assert value(counted, "tidegate_link_loss_ratio", target="edge/b") == 0


def test_tokens_and_times_of_openais_routes_have_opentelemetrys_names() -> None:
    counted = metrics()
    counted.generative.embedded("minilm", 40, 0.05)
    counted.generative.failed("", "model_not_found", 0.001)
    labels = {"gen_ai_operation_name": "embeddings", "gen_ai_request_model": "minilm"}
    assert value(counted, "gen_ai_client_token_usage_sum", gen_ai_token_type="input", **labels) == 40
    assert value(counted, "gen_ai_client_operation_duration_seconds_count", **labels) == 1
    assert value(counted, "gen_ai_server_request_duration_seconds_count", error_type="model_not_found") == 1
