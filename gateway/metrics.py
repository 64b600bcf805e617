"""What the gateway counts, and how Prometheus sees it.

Every request pays for what is counted, so counting is plain integers in slotted objects (a microsecond or two for all
of it), and `collect` turns them into metric families only when somebody scrapes. The client library's own counters
take a lock per increment, some twenty times a request. This is sound because counting and scraping happen on the one
event loop.

Labels are bounded: models by the repository, tiers, protocols and outcomes by their enums; targets appear only on
gauges that are read from the fleet view at scrape time.

The `nv_inference_*` counters are a compatibility view of the same numbers, so that dashboards, autoscalers and
perf_analyzer made for Triton work unchanged. Source: metrics.md E.1 and E.5.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.conditions import condition_family
from gateway.core.admission import Admission
from gateway.core.fleet import Fleet
from gateway.core.quarantine import Quarantine
from tidegate import clock
from tidegate.oip.host import ModelStatistics, Tally
from tidegate.outcome import Outcome, ServeError
from tidegate.types import Call, InferRequest, Reply

_DURATIONS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STAGES_S: Final = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SLACKS_S: Final = (
    -5.0,
    -2.0,
    -1.0,
    -0.5,
    -0.2,
    -0.1,
    -0.05,
    0.0,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)  # late is negative
_STAGES: Final = ("admit", "classify", "queue", "link", "compute")
_NV_REASON: Final = {
    Outcome.CANCELLED: "CANCELED",
    Outcome.OVERLOADED: "REJECTED",
    Outcome.DEADLINE_EXCEEDED: "REJECTED",
    Outcome.NOTHING_ALIVE: "REJECTED",
    Outcome.UNREACHABLE: "BACKEND",
    Outcome.BAD_ANSWER: "BACKEND",
}


class Histogram:
    """Counts by upper bound. Mutable: `observe`."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with their upper bounds, as Prometheus prints them."""
        running, rows = 0, []
        for bound, hits in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            running += hits
            rows.append((bound, float(running)))
        return rows

    def __repr__(self) -> str:
        return f"<Histogram {sum(self._counts)} values>"


class _Served:
    """What is counted of one (model, tier)."""

    __slots__ = ("duration", "slack", "stages")

    def __init__(self) -> None:
        self.duration = Histogram(_DURATIONS_S)
        self.slack = Histogram(_SLACKS_S)
        self.stages = {stage: Histogram(_STAGES_S) for stage in _STAGES}


class Metrics:
    """An `Observer` of the stack, a collector for Prometheus, and the source of OIP's model statistics."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        *,
        version_of: Callable[[InferRequest], str],
        quarantine: Quarantine | None = None,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._quarantine = quarantine or Quarantine()
        self._version_of = version_of
        self._requests: Counter[tuple[str, str, str, Outcome]] = Counter()
        self._routes: Counter[tuple[str, str]] = Counter()  # (tier, reason)
        self._fallbacks: Counter[str] = Counter()  # by the tier that answered
        self._escalated: Counter[str] = Counter()  # by model: answers of a better variant than the unsure one
        self._provisional: Counter[str] = Counter()  # by model: unsure answers that were given
        self._served: dict[tuple[str, str], _Served] = {}
        self._statistics: dict[tuple[str, str], ModelStatistics] = {}
        self._failures: Counter[tuple[str, str, str]] = Counter()  # (model, version, Triton's reason)

    # counting

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        route, model = reply.route, call.request.model_name
        tier = route.served_by.partition("/")[0] if route else "none"
        took_s = now - call.arrived_at
        self._requests[model, tier, call.protocol, _outcome(reply)] += 1
        if route is not None:
            self._routes[tier, route.reason] += 1
            if route.fallback:
                self._fallbacks[tier] += 1
            if route.reason == "escalated":
                self._escalated[model] += 1
            if route.provisional:
                self._provisional[model] += 1
        served = self._served.get((model, tier))
        if served is None:
            served = self._served[model, tier] = _Served()
        served.duration.observe(took_s)
        if reply.budget_left_s is not None:
            served.slack.observe(reply.budget_left_s)
        for stage, seconds in reply.stages.items():
            served.stages[stage].observe(seconds)
        self._count_success(call, reply, took_s)

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        outcome = Outcome.CANCELLED if isinstance(error, asyncio.CancelledError) else Outcome.of(error)
        model, version = call.request.model_name, self._version_of(call.request)
        self._requests[model, "none", call.protocol, outcome] += 1
        self._failures[model, version, _NV_REASON.get(outcome, "OTHER")] += 1
        self._statistics_of(model, version).fail.add(now - call.arrived_at)

    def refused(self, protocol: str, model: str, error: ServeError) -> None:
        """A request that a protocol refused before it became a call. Its model may be anything: it is no label."""
        known = model if any(name == model for name, _ in self._statistics) else ""
        self._requests[known, "none", protocol, Outcome.of(error)] += 1

    def statistics(self, name: str, version: str) -> ModelStatistics:
        """The statistics of one model version, from zero if it never served."""
        return self._statistics_of(name, version)

    def _count_success(self, call: Call, reply: Reply, took_s: float) -> None:
        response, stages = reply.response, reply.stages
        one = self._statistics_of(response.model_name, response.model_version)
        rows = _rows(call.request)
        one.inference_count += rows
        one.execution_count += 1
        one.last_inference_ms = int(clock.utc_s() * 1e3)
        one.success.add(took_s)
        queue_s, compute_s = stages.get("queue", 0.0), stages.get("compute", 0.0)
        one.queue.add(queue_s)
        one.compute_infer.add(compute_s)
        tally = one.batches.get(rows)
        if tally is None:
            tally = one.batches[rows] = Tally()
        tally.add(compute_s)

    def _statistics_of(self, name: str, version: str) -> ModelStatistics:
        found = self._statistics.get((name, version))
        if found is None:
            found = self._statistics[name, version] = ModelStatistics(name, version)
        return found

    # scraping

    def registry(self) -> CollectorRegistry:
        """A registry of its own: several gateways may live in one process (in tests they do)."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        yield from self._request_families()
        yield from self._time_families()
        yield from self._target_families()
        yield from self._admission_families()
        yield from self._triton_families()

    def _request_families(self) -> Iterator[Metric]:
        yield _counter(
            "tidegate_requests",
            "Requests by how they ended.",
            ("model", "tier", "protocol", "outcome"),
            (((model, tier, how, end.value), n) for (model, tier, how, end), n in self._requests.items()),
        )
        yield _counter(
            "tidegate_route", "Answers by where and why they were made.", ("to", "reason"), self._routes.items()
        )
        yield _counter(
            "tidegate_fallback",
            "Answers that another target gave than the one asked first.",
            ("to",),
            (((tier,), n) for tier, n in self._fallbacks.items()),
        )
        yield _counter(
            "tidegate_escalated",
            "Answers of a better variant after one that was not sure.",
            ("model",),
            (((model,), n) for model, n in self._escalated.items()),
        )
        yield _counter(
            "tidegate_provisional",
            "Answers that their model was not sure of, with nobody better in time.",
            ("model",),
            (((model,), n) for model, n in self._provisional.items()),
        )
        in_flight = GaugeMetricFamily("tidegate_in_flight", "Requests inside the gateway.")
        in_flight.add_metric((), self._admission.in_flight)
        yield in_flight

    def _time_families(self) -> Iterator[Metric]:
        duration = HistogramMetricFamily(
            "tidegate_request_duration_seconds", "From arrival to answer.", labels=("model", "tier")
        )
        slack = HistogramMetricFamily(
            "tidegate_deadline_slack_seconds", "Budget left at the answer; negative is late.", labels=("model", "tier")
        )
        stages = HistogramMetricFamily(
            "tidegate_stage_seconds", "Where an answer's time went.", labels=("model", "tier", "stage")
        )
        for (model, tier), served in self._served.items():
            duration.add_metric((model, tier), served.duration.buckets(), served.duration.total)
            slack.add_metric((model, tier), served.slack.buckets(), served.slack.total)
            for stage, histogram in served.stages.items():
                stages.add_metric((model, tier, stage), histogram.buckets(), histogram.total)
        yield from (duration, slack, stages)

    def _target_families(self) -> Iterator[Metric]:
        now = clock.now()
        breaker = GaugeMetricFamily("tidegate_breaker_state", "0 closed, 1 open, 2 half open.", labels=("target",))
        path = GaugeMetricFamily("tidegate_path_breaker_state", "The same of the way to it.", labels=("target",))
        up = GaugeMetricFamily("tidegate_target_up", "Whether requests can be sent there.", labels=("target",))
        rtt = GaugeMetricFamily("tidegate_link_rtt_seconds", "Smoothed round trip.", labels=("target",))
        jitter = GaugeMetricFamily("tidegate_link_jitter_seconds", "Mean deviation of it.", labels=("target",))
        wait = GaugeMetricFamily("tidegate_queue_wait_seconds", "Predicted wait there now.", labels=("target",))
        age = GaugeMetricFamily("tidegate_edge_state_age_seconds", "Since its last load report.", labels=("agent",))
        for target in self._fleet.targets.values():
            label = (target.id,)
            breaker.add_metric(label, target.breaker.state)
            path.add_metric(label, target.path.state)
            up.add_metric(label, target.up)
            rtt.add_metric(label, target.link.rtt_s)
            jitter.add_metric(label, target.link.jitter_s)
            wait.add_metric(label, target.wait_s(now))
            if target.spec.tier == "edge" and target.ledger.load is not None:
                age.add_metric(label, now - target.ledger.reported_at)
        yield from (breaker, path, up, rtt, jitter, wait, age, condition_family(self._fleet))

    def _admission_families(self) -> Iterator[Metric]:
        door = self._admission
        yield _counter(
            "tidegate_shed",
            "Requests refused by admission, by reason.",
            ("reason",),
            (((reason,), n) for reason, n in door.refused.items()),
        )
        held = self._quarantine
        yield _counter("tidegate_quarantines", "Senders of poison who were put in quarantine.", (), [((), held.begun)])
        yield _counter("tidegate_quarantine_refused", "Requests refused in quarantine.", (), [((), held.refused)])
        yield _counter("tidegate_overload_changes", "Changes of the overload state.", (), [((), door.overload.changes)])
        gauges = (
            ("tidegate_overloaded", "1 while shedding, without hedges; 0 in ordinary times.", door.overload.on),
            ("tidegate_rejection_ratio", "Share of arrivals that is to be shed.", door.rejection.rate),
            ("tidegate_cut_level", "Levels from here on are shed; 500 sheds nobody.", door.cut.cut),
            ("tidegate_in_flight_limit", "Most requests inside that are let in now.", door.limit.limit),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric((), value)
            yield gauge
        purses = door.tenants.purses.values()
        inside = GaugeMetricFamily("tidegate_tenant_in_flight", "Requests inside, by tenant.", labels=("tenant",))
        spent = GaugeMetricFamily(
            "tidegate_tenant_compute_seconds",
            "Compute charged and not refunded. It falls where a charge was too high: a gauge.",
            labels=("tenant", "tier"),
        )
        for purse in purses:
            inside.add_metric((purse.name,), purse.in_flight)
            for tier, seconds in purse.spent_s.items():
                spent.add_metric((purse.name, tier), seconds)
        yield from (inside, spent)

    def _triton_families(self) -> Iterator[Metric]:
        tables: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
            ("nv_inference_request_success", "Answered requests.", lambda one: one.success.count),
            ("nv_inference_count", "Answered rows.", lambda one: one.inference_count),
            ("nv_inference_exec_count", "Executions.", lambda one: one.execution_count),
            ("nv_inference_request_duration_us", "Total time.", lambda one: one.success.ns / 1e3),
            ("nv_inference_queue_duration_us", "Time in queues.", lambda one: one.queue.ns / 1e3),
            ("nv_inference_compute_infer_duration_us", "Compute time.", lambda one: one.compute_infer.ns / 1e3),
        )
        for name, text, read in tables:
            rows = [((one.name, one.version), read(one)) for one in self._statistics.values()]
            yield _bare(name, text, ("model", "version"), rows)
        failures = list(self._failures.items())
        yield _bare("nv_inference_request_failure", "Failed requests.", ("model", "version", "reason"), failures)

    def __repr__(self) -> str:
        return f"<Metrics {sum(self._requests.values())} requests>"


class _BareCounter(Metric):
    """A counter whose name does not end in `_total`: Triton's names are older than that convention."""


def _bare(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    metric = _BareCounter(name, text, "unknown")
    for values, value in rows:
        metric.add_sample(name, dict(zip(labels, values, strict=True)), value)
    return metric


def _counter(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _outcome(reply: Reply) -> Outcome:
    if reply.budget_left_s is not None and reply.budget_left_s < 0:
        return Outcome.LATE
    return Outcome.DEGRADED if reply.route is not None and reply.route.degraded else Outcome.OK


def _rows(request: InferRequest) -> int:
    shape = request.inputs[0].shape if request.inputs else ()
    return max(1, shape[0]) if len(shape) > 1 else 1
