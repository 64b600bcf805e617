"""Requests by how they ended, what their time went on, and whether they made their deadlines.

Every request pays for what is counted, so counting is plain integers in slotted objects (a few microseconds for all of
it), and families are made only at a scrape. The client library's own counters take a lock per increment,
some twenty times a request. This is sound because counting and scraping happen on the one event loop.

Answers are counted `MOST_NOTED` at a time, or at a scrape: between two requests an interpreter does so much
else that counting one of them finds nothing of its code and its counters in the processor's caches, and takes three
times as long. What is noted of an answer until then is a few numbers: requests and replies with their tensors are not
held on to, since what lives longer than its request makes all that come after it find memory that is not in the caches.

Labels are bounded: models by the repository, tiers, protocols, outcomes and causes by their enums.

A missed deadline has one cause. Without an answer it is how the request ended; for a late answer it is where most of
its time went: `queue`, `link`, `compute`, `gateway` (ours before placement), or `retries` (what no stage of the
answering attempt explains: those before it). Callers' errors and callers that left had no deadline to miss.

Source: docs/design/metrics.md, "Own names" and "What counting costs".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

import msgspec
from prometheus_client.metrics_core import Metric

from tidegate import clock
from tidegate.metrics.families import counter, histogram
from tidegate.metrics.histogram import DURATIONS_S, SIGNED_S, STAGES_S, Exemplar, Histogram
from tidegate.metrics.triton import failure_reason, triton_families
from tidegate.oip.host import ModelStatistics, TimedCount
from tidegate.outcome import ModelNotFound, Outcome, ServeError
from tidegate.trace_context import Trace
from tidegate.types import Call, InferRequest, Reply, Route, TargetId

MOST_NOTED: Final = 64  # answers that are still to be counted
STAGES: Final = ("classify", "admit", "queue", "batch_wait", "link_out", "compute", "link_back")
_NOT_MISSED: Final = frozenset(
    {
        Outcome.CANCELLED, Outcome.INVALID_REQUEST, Outcome.TOO_LARGE, Outcome.MODEL_NOT_FOUND, Outcome.NOT_SUPPORTED,
        Outcome.UNAUTHENTICATED, Outcome.FORBIDDEN,
    }
)  # fmt: skip
_MISSED_BY: Final = {
    Outcome.OVERLOADED: "shed",
    Outcome.DEADLINE_EXCEEDED: "expired",
    Outcome.NOTHING_ALIVE: "nothing_alive",
}  # any other: "failed"


class _AnswerCounts(msgspec.Struct, frozen=True, gc=False):
    """What is counted of an answer."""

    model: str
    protocol: str
    rows: int
    served: tuple[str, str]  # the model and version that answered
    at_utc_s: float
    took_s: float
    left_s: float | None
    route: Route | None
    stages: Mapping[str, float]
    batch_wait_s: float
    link_out_s: float
    trace: Trace | None


class _ServedCounts:
    """What is counted of one (model, tier)."""

    __slots__ = ("duration", "slack", "stages")

    def __init__(self) -> None:
        self.duration = Histogram(DURATIONS_S)
        self.slack = Histogram(SIGNED_S)
        self.stages = {stage: Histogram(STAGES_S) for stage in STAGES}

    def exemplify(self, trace_id: str, took_s: float, left_s: float | None, utc_s: float) -> None:
        self.duration.exemplify(Exemplar(took_s, trace_id, utc_s))
        if left_s is not None:
            self.slack.exemplify(Exemplar(left_s, trace_id, utc_s))

    def observe_stages(self, answer: _AnswerCounts) -> None:
        stages, own, took = self.stages, answer.stages, answer.stages.get
        for stage in ("classify", "admit", "compute"):
            if stage in own:
                stages[stage].observe(own[stage])
        if (queue_s := took("queue")) is not None:
            stages["queue"].observe(queue_s - answer.batch_wait_s)
            stages["batch_wait"].observe(answer.batch_wait_s)
        if (link_s := took("link")) is not None:
            stages["link_out"].observe(answer.link_out_s)
            stages["link_back"].observe(link_s - answer.link_out_s)


class RequestCounts:
    """An `Observer` of the stack, and the source of OIP's model statistics.

    Args:
        version_of: the version that serves a request that names none.
    """

    def __init__(self, version_of: Callable[[InferRequest], str]) -> None:
        self._version_of = version_of
        self._noted: list[_AnswerCounts] = []  # to be counted
        self._requests: Counter[tuple[str, str, str, Outcome]] = Counter()
        self._routes: Counter[tuple[str, str]] = Counter()  # (tier, reason)
        self._fallbacks: Counter[str] = Counter()  # by the tier that answered
        self._escalated: Counter[str] = Counter()  # by model: answers of a better variant than the unsure one
        self._provisional: Counter[str] = Counter()  # by model: unsure answers that were given
        self._met: Counter[str] = Counter()  # by model
        self._missed: Counter[tuple[str, str]] = Counter()  # by model and cause
        self._pending: Counter[tuple[str, str]] = Counter()  # by model, and version as it was asked for
        # What was asked for → what that was when it was asked for first: a model may leave while it is served.
        self._versions: dict[tuple[str, str], str] = {}
        self._served: dict[tuple[str, str], _ServedCounts] = {}
        self._overhead: dict[str, Histogram] = {}  # by protocol
        self._statistics: dict[tuple[str, str], ModelStatistics] = {}
        self._failures: Counter[tuple[str, str, str]] = Counter()  # (model, version, Triton's reason)

    @property
    def total(self) -> int:
        self._count()
        return sum(self._requests.values())

    def began(self, call: Call) -> None:
        request = call.request
        key = request.model_name, request.model_version
        if key not in self._versions:
            self._versions[key] = self._version_of(request)
        self._pending[key] += 1

    def answered(self, call: Call, reply: Reply, now: float) -> None:
        self._left(call)
        request, response = call.request, reply.response
        self._noted.append(
            _AnswerCounts(  # positional: hot path
                request.model_name,
                call.protocol,
                _rows(request),
                (response.model_name, response.model_version),
                clock.utc_s(),
                now - call.arrived_at,
                reply.budget_left_s,
                reply.route,
                reply.stages,
                reply.batch_wait_s,
                reply.link_out_s,
                call.trace,
            )
        )
        if len(self._noted) >= MOST_NOTED:
            self._count()

    def ended(self, call: Call, error: BaseException, now: float) -> None:
        self._left(call)
        outcome = Outcome.of(error)
        model = call.request.model_name
        version = self._version_meant(call.request)
        self._requests[model, "none", call.protocol, outcome] += 1
        if outcome not in _NOT_MISSED:
            self._missed[model, _MISSED_BY.get(outcome, "failed")] += 1
        self._failures[model, version, failure_reason(outcome)] += 1
        self._statistics_of(model, version).fail.add(now - call.arrived_at)

    def _version_meant(self, request: InferRequest) -> str:
        """The version of a request that failed: what is meant where none is named changes."""
        key = request.model_name, request.model_version
        if not request.model_version:
            with suppress(ModelNotFound):  # it left meanwhile: the one before is meant
                self._versions[key] = self._version_of(request)
        return self._versions.get(key, request.model_version)

    def refused(self, protocol: str, model: str, error: ServeError) -> None:
        """A request that a protocol refused before it became a call. Its model may be anything: it is no label."""
        self._count()  # which names are models' is known from those that were served
        known = model if any(name == model for name, _ in self._statistics) else ""
        self._requests[known, "none", protocol, Outcome.of(error)] += 1

    def statistics(self, name: str, version: str) -> ModelStatistics:
        """The statistics of one model version, from zero if it never served."""
        self._count()
        return self._statistics_of(name, version)

    def _statistics_of(self, name: str, version: str) -> ModelStatistics:
        found = self._statistics.get((name, version))
        if found is None:
            found = self._statistics[name, version] = ModelStatistics(name, version)
        return found

    def families(self) -> Iterator[Metric]:
        self._count()
        yield counter(
            "tidegate_requests",
            "Requests by how they ended.",
            ("model", "tier", "protocol", "outcome"),
            (((model, tier, how, end.value), n) for (model, tier, how, end), n in self._requests.items()),
        )
        words = "Answers by where and why they were made."
        yield counter("tidegate_route", words, ("to", "reason"), self._routes.items())
        words = "Answers that another target gave than the one asked first."
        yield counter("tidegate_fallback", words, ("to",), (((tier,), n) for tier, n in self._fallbacks.items()))
        words = "Answers of a better variant after one that was not sure."
        yield counter("tidegate_escalated", words, ("model",), (((one,), n) for one, n in self._escalated.items()))
        words = "Answers that their model was not sure of, with nobody better in time."
        yield counter("tidegate_provisional", words, ("model",), (((one,), n) for one, n in self._provisional.items()))
        words = "Answers that were there by their deadline."
        yield counter("tidegate_deadline_met", words, ("model",), (((model,), n) for model, n in self._met.items()))
        words = "Late answers, and requests without an answer that were no fault of their caller's, by cause."
        yield counter("tidegate_deadline_missed", words, ("model", "cause"), self._missed.items())
        yield from self._time_families()
        pending: Counter[tuple[str, str]] = Counter()
        for (model, said), inside in self._pending.items():
            pending[model, self._versions.get((model, said), said)] += inside
        yield from triton_families(self._statistics.values(), failures=self._failures.items(), pending=pending.items())

    def _time_families(self) -> Iterator[Metric]:
        served = self._served.items()
        yield histogram(
            "tidegate_request_duration_seconds",
            "From arrival to answer.",
            ("model", "tier"),
            ((key, one.duration) for key, one in served),
        )
        yield histogram(
            "tidegate_deadline_slack_seconds",
            "Budget left at the answer; negative is late.",
            ("model", "tier"),
            ((key, one.slack) for key, one in served),
        )
        yield histogram(
            "tidegate_stage_seconds",
            "Where an answer's time went.",
            ("model", "tier", "stage"),
            (((*key, stage), counted) for key, one in served for stage, counted in one.stages.items()),
        )
        yield histogram(
            "tidegate_gateway_overhead_seconds",
            "What an answer of the first attempt took that neither link nor target explains.",
            ("protocol",),
            (((protocol,), counted) for protocol, counted in self._overhead.items()),
        )

    def _left(self, call: Call) -> None:
        key = call.request.model_name, call.request.model_version
        if self._pending[key] > 0:
            self._pending[key] -= 1

    def _count(self) -> None:
        """Take in what was noted."""
        noted, self._noted = self._noted, []
        for answer in noted:
            self._count_one(answer)
            self._observe_overhead(answer)
            self._count_success(answer)

    def _count_one(self, answer: _AnswerCounts) -> None:
        model, route, took_s = answer.model, answer.route, answer.took_s
        tier = TargetId.parse(route.served_by).tier if route else "none"
        self._requests[model, tier, answer.protocol, _outcome(answer)] += 1
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
            served = self._served[model, tier] = _ServedCounts()
        served.duration.observe(took_s)
        if (left_s := answer.left_s) is not None:
            served.slack.observe(left_s)
            if left_s < 0.0:
                self._missed[model, _cause(answer)] += 1
            else:
                self._met[model] += 1
        served.observe_stages(answer)
        if (trace := answer.trace) is not None and trace.kept:
            served.exemplify(trace.hex_id, took_s, left_s, answer.at_utc_s)

    def _observe_overhead(self, answer: _AnswerCounts) -> None:
        route, took = answer.route, answer.stages.get
        if route is None or route.attempts != 1 or route.provisional:
            return
        counted = self._overhead.get(answer.protocol)
        if counted is None:
            counted = self._overhead[answer.protocol] = Histogram(STAGES_S)
        counted.observe(max(0.0, answer.took_s - took("queue", 0.0) - took("compute", 0.0) - took("link", 0.0)))

    def _count_success(self, answer: _AnswerCounts) -> None:
        one, rows, took = self._statistics_of(*answer.served), answer.rows, answer.stages.get
        one.inference_count += rows
        one.execution_count += 1
        one.last_inference_ms = int(answer.at_utc_s * 1e3)
        one.success.add(answer.took_s)
        compute_s = took("compute", 0.0)
        one.queue.add(took("queue", 0.0))
        one.compute_infer.add(compute_s)
        tally = one.batches.get(rows)
        if tally is None:
            tally = one.batches[rows] = TimedCount()
        tally.add(compute_s)

    def __repr__(self) -> str:
        return f"<RequestCounts {self.total} requests>"


def _outcome(answer: _AnswerCounts) -> Outcome:
    if answer.left_s is not None and answer.left_s < 0:
        return Outcome.LATE
    return Outcome.DEGRADED if answer.route is not None and answer.route.degraded else Outcome.OK


def _cause(answer: _AnswerCounts) -> str:
    """Where most of a late answer's time went."""
    took = answer.stages.get
    spent = {
        "queue": took("queue", 0.0),
        "link": took("link", 0.0),
        "compute": took("compute", 0.0),
        "gateway": took("admit", 0.0) + took("classify", 0.0),
    }
    spent["retries"] = answer.took_s - sum(spent.values())
    return max(spent, key=lambda cause: spent[cause])


def _rows(request: InferRequest) -> int:
    shape = request.inputs[0].shape if request.inputs else ()
    return max(1, shape[0]) if len(shape) > 1 else 1
