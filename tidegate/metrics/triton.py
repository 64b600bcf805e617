"""Triton's metric names for the counts of all three processes: a compatibility view of `ModelStatistics`.

Dashboards, autoscalers and perf_analyzer made for Triton work unchanged. The durations are our own
measurements: nothing splits input and output from compute, so those two counters are not there.

Source: triton-inference-server/core, src/metrics.cc; docs/design/metrics.md, "Triton's names".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from tidegate.metrics.families import Row, bare, gauge
from tidegate.oip.host import ModelStatistics
from tidegate.outcome import Outcome

_LABELS: Final = ("model", "version")
_REASON: Final = {
    Outcome.CANCELLED: "CANCELED",
    Outcome.OVERLOADED: "REJECTED",
    Outcome.DEADLINE_EXCEEDED: "REJECTED",
    Outcome.NOTHING_ALIVE: "REJECTED",
    Outcome.UNREACHABLE: "BACKEND",
    Outcome.BAD_ANSWER: "BACKEND",
}
_TABLE: Final[tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...]] = (
    ("nv_inference_request_success", "Answered requests.", lambda one: one.success.count),
    ("nv_inference_count", "Answered rows.", lambda one: one.inference_count),
    ("nv_inference_exec_count", "Executions.", lambda one: one.execution_count),
    ("nv_inference_request_duration_us", "Total time.", lambda one: one.success.ns / 1e3),
    ("nv_inference_queue_duration_us", "Time in queues.", lambda one: one.queue.ns / 1e3),
    ("nv_inference_compute_infer_duration_us", "Compute time.", lambda one: one.compute_infer.ns / 1e3),
)


def failure_reason(outcome: Outcome) -> str:
    """Triton's name for the reason of a failure."""
    return _REASON.get(outcome, "OTHER")


def triton_families(
    statistics: Iterable[ModelStatistics],
    *,
    failures: Iterable[tuple[tuple[str, str, str], float]],
    pending: Iterable[Row],
) -> Iterator[Metric]:
    """Args:
    failures: by model, version and Triton's reason.
    pending: by model and version.
    """
    known = list(statistics)
    for name, text, read in _TABLE:
        yield bare(name, text, _LABELS, [((one.name, one.version), read(one)) for one in known])
    yield bare("nv_inference_request_failure", "Failed requests.", (*_LABELS, "reason"), failures)
    yield gauge("nv_inference_pending_request_count", "Requests that are not answered yet.", _LABELS, pending)
