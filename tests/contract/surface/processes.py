"""What the processes expose: metrics, routes and gRPC methods, and the keys of what operators are answered.

Nothing is started: families are made of small fleets and of stand-ins for what is only counted, and route tables are
made without a port.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric

from cloud_pool.metrics import PoolMetrics
from edge_agent.configuration.families import configuration_families as settings_families
from edge_agent.core.help.help_counts import HelpCounts
from edge_agent.core.help.neighbour_counts import NeighbourCounts
from edge_agent.offline.routes import device_routes as edge_routes
from edge_agent.serving.metrics import EdgeMetrics
from gateway.app import Gateway
from gateway.catalog import Catalog
from gateway.core.agreement.agreement_watch import AgreementWatch, AnswerSource, ShadowedAnswer
from gateway.core.agreement.expectation import AgreementTerms
from gateway.core.agreement.shadow_budget import ShadowBudget
from gateway.core.estimate.token_calibration import TokenCalibration
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.scaling import ReplicaScaler, ScalingSpec
from gateway.core.health.degradation import Condition
from gateway.core.history.recorder import FlightRecorder
from gateway.core.response_cache.response_cache import CacheLimits, ResponseCache
from gateway.core.versions.canary import CanaryRollout, DocumentRevisions, RolloutSpec
from gateway.core.versions.configuration_drift import ConfiguredDevice, DesiredHere, DriftWatch
from gateway.core.versions.traffic_split import TrafficSplit, TrafficSplits
from gateway.default_versions import DefaultVersions
from gateway.delivery.artifacts.server import ArtifactServer
from gateway.delivery.artifacts.upload import intake_routes
from gateway.delivery.rollouts.routes import rollout_routes
from gateway.delivery.trials import TrialFigures, Trials
from gateway.fleet_sync.freshness import DeviceView, Freshness
from gateway.ingest.routes import ingest_routes
from gateway.observe.conditions import condition_family
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.scaling import ScalingWatch, scaling_families
from gateway.observe.trace_sampling import TraceSampler
from gateway.operate.admin import admin_routes
from gateway.operate.admin_routes import operator_routes
from gateway.operate.agreement_report import agreement_families, agreement_routes
from gateway.operate.cache_report import cache_families
from gateway.operate.configuration_report import configuration_families, configuration_json
from gateway.operate.devices import device_routes
from gateway.operate.help_report import help_families
from gateway.operate.log_levels import log_level_routes
from gateway.operate.trial_report import trial_families
from gateway.operate.trial_routes import trial_routes
from gateway.serving.disagreements import Disagreements
from gateway.serving.known_answers import CacheTerms, KnownAnswers
from gateway.serving.layer_splitting import split_families
from gateway.serving.shadowing import Shadowing
from gateway.workers.messages import Member
from gateway.workers.overview import process_families
from tests.cloud_pool.workers.test_health_controller import watched
from tests.support.gateway.app import configured
from tests.support.gateway.doors import admission_of
from tests.support.gateway.fleets import NOW, fleet_of, spec, variant
from tests.support.gateway.flowns import answered, request_record, went
from tests.support.loop import run
from tests.support.serving.hosts import EchoHost
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.fleet.reported import ConfigurationReport, ModelReport, Reported, RolloutState, SettingDifference
from tidegate.generate.usage import Usage, usage_parameters
from tidegate.link.service import LinkService
from tidegate.metrics.certificate_families import certificate_families
from tidegate.metrics.exposition import Exposition
from tidegate.metrics.loop_families import loop_families
from tidegate.metrics.loop_lag import LoopLag
from tidegate.metrics.served import ServedCounts
from tidegate.netsim.proxy.control import control_app
from tidegate.oip.grpc.server import OipService
from tidegate.oip.host import ModelStatistics
from tidegate.oip.http.server import OipRoutes
from tidegate.openai.routes import openai_routes
from tidegate.outcome import Outcome, Overloaded
from tidegate.rollout.desired import DesiredConfiguration
from tidegate.tracing.config import TracingConfig
from tidegate.types import Call, Datatype, InferRequest, InferResponse, Reply, Route, Tensor

MODEL: Final = "minilm"
ASKED: Final = (
    "/v1/state", "/v1/fleet?all=1", "/v1/log-level", "/v1/versions", "/v1/rollouts", "/v1/rollouts/ID", "/v1/devices",
    "/v1/ingested", "/v1/agreement", "/v1/disagreements",
    "/debug/decisions", "/debug/decisions?id=id-1", "/debug/conditions", "/scaling",
)  # fmt: skip


def metrics() -> dict[str, Any]:
    """Each process's metrics by name, with type and labels."""
    return {
        "gateway": _families(_of_a_gateway()),
        "pool": _families(run(_of_a_pool())),
        "edge": _families(_of_an_edge()),
    }


def _families(families: Iterable[Metric]) -> dict[str, str]:
    rows = {}
    for family in families:
        labels = set(getattr(family, "_labelnames", ())) | {key for one in family.samples for key in one.labels}
        name = family.name + ("_total" if family.type == "counter" else "")
        rows[name] = f"{family.type}({', '.join(sorted(labels - {'le'}))})"
    return rows


def _of_a_gateway() -> list[Metric]:
    fleet, call = fleet_of(edge_a=variant(), pool_main=variant()), _call()
    counted = GatewayMetrics(
        fleet,
        admission_of(4),
        version_of=lambda _: "1",
        calibration_error=lambda: 0.1,
        token_calibration=TokenCalibration(),
    )
    tracing = TraceSampler(
        TracingConfig(endpoint="http://127.0.0.1:4318"), cast(Any, SimpleNamespace(counts={"queued": 1}))
    )
    counted.add(lambda: [condition_family(fleet), *scaling_families(_busy()), *trial_families(_on_trial())])
    counted.add(lambda: agreement_families(run(_shadowing())))
    counted.add(lambda: cache_families(_known_answers()))
    counted.add(lambda: configuration_families(_drifted()))
    counted.add(lambda: help_families({"edge/attic": 1}))
    counted.add(lambda: split_families({(MODEL, "answered"): 1}))
    counted.add(lambda: process_families([Member("worker-1", "worker")], {}))
    counted.add(tracing.families)
    counted.add(lambda: loop_families(LoopLag()))
    counted.add(lambda: certificate_families((0.0, 1.0)))
    counted.began(call)
    counted.answered(call, _reply(), NOW + 0.07)
    counted.generation.answered(call, _generated(), NOW + 0.07)
    counted.ended(call, Overloaded("full"), NOW + 0.07)
    counted.landed(request_record())
    return list(Exposition(counted.collect).own())


def _known_answers() -> KnownAnswers:
    defaults = DefaultVersions(Catalog(()), fleet_of())
    cache = ResponseCache(2**20, {MODEL: CacheLimits(60.0, 2**20)})
    known = KnownAnswers(
        cache,
        CacheTerms(2**20, shares_tenants=False),
        defaults,
        FlightRecorder(1),
        demanded=lambda _call: "",
        on_trial=lambda _call: False,
        is_drifting=lambda *_source: False,
    )
    known.outcomes[MODEL, "hit"] += 1
    known.kept[MODEL, "kept"] += 1
    return known


async def _of_a_pool() -> list[Metric]:
    async with watched() as watch:
        await watch.looks(2)
        supervisor = watch.pool.supervisor
        counts = PoolMetrics(
            watch.pool.scheduler,
            supervisor,
            watch.steward,
            lambda: [lane.statistics for lane in supervisor.lanes.values()],
            served=_served(),
        )
        return _with_the_process(counts.collect)


def _of_an_edge() -> list[Metric]:
    host = SimpleNamespace(served=_served(), statistics=lambda: [ModelStatistics(MODEL, "1")], draining=False)
    queue = SimpleNamespace(queued=0, in_flight=0, queue_delay_s=lambda now: 0.0, oldest_age_s=0.0)
    sensors = SimpleNamespace(now=SimpleNamespace(battery=0.5, on_battery=False, temperature_c=40.0, throttled=False))
    sync = SimpleNamespace(connected=True, epoch=1)
    helped = HelpCounts()
    helped.requests["unfit", "ok"] += 1
    answered = NeighbourCounts()
    answered.requests["ok"] += 1
    counts = EdgeMetrics(
        *cast(Any, (host, list, queue, sensors, sync)), sandbox={"files": True}, helped=helped, answered=answered
    )
    settings = cast(Any, SimpleNamespace(report=ConfigurationReport(RolloutState.COMMITTED, "0")))
    return _with_the_process(lambda: [*counts.collect(), *settings_families(settings)])


def _with_the_process(collect: Callable[[], Iterable[Metric]]) -> list[Metric]:
    exposition = Exposition(collect)
    exposition.add(lambda: loop_families(LoopLag()))
    exposition.add(lambda: certificate_families((0.0, 1.0)))
    return list(exposition.own())


def _served() -> ServedCounts:
    served = ServedCounts()
    served.pending[MODEL, "1"] += 1
    served.outcomes[MODEL, "1", Outcome.INTERNAL] += 1
    return served


def routes() -> dict[str, Any]:
    """Every route of every HTTP port, and every method of every gRPC port."""
    return asyncio.run(_routes())


async def _routes() -> dict[str, Any]:
    stand_in = cast(Any, SimpleNamespace())
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(configured(Path(folder)))
        host = EchoHost()
        oip = OipRoutes(host, max_body_bytes=1)
        openai = openai_routes(host, stand_in, max_body_bytes=1)
        operators, _ = operator_routes(
            broker_rights=gateway.broker_rights,
            name="main",
            fleet=gateway.fleet,
            catalog=gateway.catalog,
            dispatcher=gateway.dispatcher,
            directory=gateway.directory,
            admission=gateway.admission,
            watch=gateway.watch,
            policy="value",
            rollouts=lambda: (),
            others=lambda _now: [],
            trials=gateway.trials,
            shadowing=gateway.shadowing,
            peers=gateway.peers,
        )
        admin = [
            *operators,
            *trial_routes(gateway.trials),
            *agreement_routes(None),
            *intake_routes(stand_in),
            *rollout_routes(stand_in, stand_in, ()),
            *ingest_routes(stand_in),
        ]
        return {
            "gateway": _table(gateway.inference_routes()),
            "gateway's metrics": _table(gateway.telemetry.routes()),
            "gateway's admin": _table(admin),
            "gateway's artifacts": _table(ArtifactServer(stand_in).routes()),
            "edge": _table([*edge_routes(None, stand_in), *oip.table(), *openai]),
            "link's control": _of_app(control_app(cast(Any, SimpleNamespace(link=None)))),
            "gateway over gRPC": _methods(gateway.add_services),
            "edge and pool over gRPC": _methods(lambda server: _target_services(host, server)),
        }


def _table(table: Iterable[web.AbstractRouteDef]) -> dict[str, Any]:
    app = web.Application()
    app.add_routes(table)
    return _of_app(app)


def _of_app(app: web.Application) -> dict[str, Any]:
    return {f"{one.method} {one.resource.canonical}": ... for one in app.router.routes() if one.resource is not None}


class _Methods:
    """In a server's place: notes what is put on it."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            self._note(handler._method_handlers)  # noqa: SLF001  # gRPC lists the methods of a generic handler nowhere else

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self._note({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def _note(self, handlers: dict[str, Any]) -> None:
        for path, one in handlers.items():
            asked, answer = (
                ("stream" if streams else "one") for streams in (one.request_streaming, one.response_streaming)
            )
            self.found[path] = f"{asked} to {answer}"


def _methods(add: Callable[[Any], Any]) -> dict[str, str]:
    methods = _Methods()
    add(methods)
    return methods.found


def _target_services(host: EchoHost, server: Any) -> None:
    OipService(host, max_message_bytes=1).add_to(server)
    word: Any = lambda: None  # noqa: E731
    LinkService(host, name="edge/a", epoch=word, offers=word, load=word, max_message_bytes=1).add_to(server)


def answers() -> dict[str, Any]:
    """Keys of what operators are answered, by route: of the answer itself, since its parts come from many places."""
    return run(_answers())


async def _answers() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(configured(Path(folder)))
        _furnish(gateway)
        rollouts = SimpleNamespace(
            all={
                "ID": CanaryRollout(
                    RolloutSpec("id", "echo", "4", ("kiosk",), {"kiosk": DocumentRevisions(1, 2)}), None
                )
            },
            document=lambda _: None,
            newest_revision=lambda _: 0,
            lease=SimpleNamespace(conductor="main"),
            configured=lambda _: _drifted().of("kiosk"),
        )
        rollouts.all["ID"].advance(1.0)
        rollouts.all["ID"].pause("operator")
        road = SimpleNamespace(devices=lambda _: (_device(),))
        watch = ScalingWatch(gateway.fleet, gateway.admission, ReplicaScaler(ScalingSpec()))
        tables = [
            *admin_routes(
                gateway.fleet,
                gateway.catalog,
                gateway.dispatcher,
                {"kiosk": "its name"},
                gateway.broker_rights,
                configured=lambda _now: configuration_json(_drifted(), NOW + 60.0),
            ),
            *device_routes(lambda: (_device(),)),
            *log_level_routes(),
            *trial_routes(gateway.trials),
            *rollout_routes(cast(Any, rollouts), cast(Any, road), ("http://main",)),
            *ingest_routes(cast(Any, _Ingest())),
            *agreement_routes(await _shadowing()),
            *watch.routes(),
        ]
        app = web.Application()
        app.add_routes(tables)
        return {path: await _keys_of(app, path) for path in ASKED}


def _furnish(gateway: Gateway) -> None:
    """Two targets, requests that ended in several ways, an ailment, and a version on trial."""
    fleet, now = gateway.fleet, clock.now()
    for target in ("edge/a", "pool/main"):
        fleet.add(spec(target), now)
        fleet.fold(LinkUp(target, target, 1, (ModelOffer("echo", "3", (variant(),)),)), now)
    ailing = fleet.targets["edge/a"].degradation.active
    ailing["slow_drift"] = Condition("slow_drift", now, "it is slow", None)
    failed = went(0, "edge/a", 0.0, ends=0.02, what="failed", words="unreachable: the link broke")
    twice = [*failed, *answered(1, "pool/main", 0.02)]
    small = fleet_of(edge_a=variant(), edge_b=variant(max_tokens=1), pool_main=variant())  # edge/b is passed over
    for one in (
        request_record(fleet=small),
        request_record(end="overloaded: full"),
        request_record(notes=twice, reasons=("cheapest", "fallback")),
    ):
        gateway.dispatcher.recorder.add(one)
    gateway.trials.defaults.splits = TrafficSplits({"echo": TrafficSplit("3", "4", share=0.1)})
    gateway.trials.watched["echo"] = TrialFigures()
    gateway.trials.watched["echo"].agreement.record([0.99, 0.5], [True, False], classes=False)


async def _shadowing() -> Shadowing:
    """A device whose answers drift, and one answer in the work list."""
    watch, worklist = AgreementWatch(), Disagreements(10)
    source, terms = AnswerSource("edge/a", "echo", "3", "int8"), AgreementTerms("cosine", "y", 0.02)
    answer = ShadowedAnswer(source, "pool/main's fp32", 0.9, terms, 2, "tokens")
    for _ in range(30):
        watch.record(answer, NOW)
    await worklist.keep(answer, (Tensor("x", Datatype.FP32, (1,), bytes(4)),))
    outcomes = {("echo", "compared"): 30}
    return cast(Any, SimpleNamespace(watch=watch, worklist=worklist, budget=ShadowBudget(0.02), outcomes=outcomes))


def _drifted() -> DriftWatch:
    """What is known of a device that has other settings than are desired of it."""
    drift, desired = DriftWatch(), {"kiosk": DesiredHere.of(7, DesiredConfiguration({"nice": 3}))}
    reported = _device().reported
    assert reported is not None
    accepted = replace(reported, accepted={"device/kiosk": 7})
    drift.look(desired, [ConfiguredDevice("kiosk", accepted, True)], NOW)
    return drift


def _device() -> DeviceView:
    offers = (ModelOffer("echo", "3", (variant(),)),)
    differs = (SettingDifference("nice", 9, "hand"),)
    configuration = ConfigurationReport(RolloutState.COMMITTED, "0", "why", "device/kiosk", 7, "0", differs, "refused")
    model = ModelReport("echo", RolloutState.ACTIVE)
    reported = Reported("kiosk", 1, 1, 0, models=(model,), configuration=configuration)
    return DeviceView(
        "kiosk", 1, ("http://kiosk",), offers, None, Freshness.FRESH, 0.1, "", reported=reported, agent="0.1.0"
    )


class _Ingest:
    """Two records in the place of those of a database."""

    async def records(self, after: int, limit: int) -> list[dict[str, Any]]:
        times = {"happened_s": 1.0, "taken_s": 2.0}
        model = {"model": "echo", "version": "3", "variant": "fp32"}
        row = {"seq": 1, "device": "kiosk", "id": "0", "kind": "event", "code": "overloaded", **times, **model}
        return [{**row, "body": b"{}"}, {**row, "kind": "result", "body": b"?"}]

    async def state(self) -> dict[str, Any]:
        return {}


async def _keys_of(app: web.Application, path: str) -> Any:
    request = make_mocked_request("GET", path, app=app)
    found = await app.router.resolve(request)
    request._match_info = found  # as the application does before it calls the handler  # noqa: SLF001  # aiohttp sets it before it calls a handler
    response = cast(web.Response, await found.handler(request))
    return _keys(json.loads(cast(bytes, response.body)))


def _keys(node: Any) -> Any:
    """The tree of keys; all entries of a list are laid over one another."""
    if isinstance(node, dict) and node:
        return {key: _keys(value) for key, value in node.items()}
    if isinstance(node, list):
        merged: dict[str, Any] = {}
        for one in node:
            _lay(merged, _keys(one))
        return {"[]": merged or ...}
    return ...


def _lay(over: dict[str, Any], tree: Any) -> None:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and isinstance(over.get(key), dict):
            _lay(over[key], value)
        elif over.get(key) in (None, ...):
            over[key] = value


def _call() -> Call:
    tensor = Tensor("input_ids", Datatype.INT64, (1, 4), bytes(32))
    return Call(InferRequest(MODEL, (tensor,)), "oip-http", NOW)


def _reply() -> Reply:
    stages = {"admit": 0.001, "classify": 0.001, "queue": 0.010, "link": 0.020, "compute": 0.030}
    route = Route("edge/a", "cheapest", "int8", attempts=1)
    return Reply(InferResponse(MODEL, "1", ()), stages=stages, route=route, budget_left_s=1.0)


def _generated() -> Reply:
    usage = usage_parameters(Usage("stop", 31, 11, 24))
    return replace(_reply(), response=InferResponse(MODEL, "1", (), parameters=usage), first_token_s=0.05)


def _busy() -> ReplicaScaler:
    scaling = ReplicaScaler(ScalingSpec())
    for second in range(200):
        scaling.arrived(0.030, 0.010, 0.5, NOW + second)
    scaling.decide(NOW + 200.0, replicas=1, backlog_s=0.0)
    return scaling


def _on_trial() -> Trials:
    trials = Trials(
        None, DefaultVersions(Catalog(()), Fleet(lambda model, version: "tokens")), lambda: 0.5, lambda: False
    )
    trials.defaults.splits = TrafficSplits({MODEL: TrafficSplit("1", "2", share=0.1)})
    trials.watched[MODEL] = TrialFigures()
    trials.watched[MODEL].agreement.record([0.99, 0.5], [True, False], classes=False)
    return trials
