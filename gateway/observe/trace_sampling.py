"""Which requests' spans are made: those that are sampled, and every late, hedged or failed one.

The flight recorder passes each request's record on, still inside the request: what is kept is known before the metrics
are counted, so that exemplars name kept traces only. What `keep` adds is limited a second, since in an outage every
request fails: their traces are alike, and making them is work at the worst time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from gateway.core.history.recorder import RequestRecord
from gateway.observe.spans import spans_of
from tidegate import clock
from tidegate.metrics.families import counter
from tidegate.trace_context import current
from tidegate.tracing.collector import Collector
from tidegate.tracing.config import TracingConfig

_BURST_S: Final = 1.0


class TraceSampler:
    """`landed` is a watcher of the flight recorder."""

    def __init__(self, config: TracingConfig, collector: Collector) -> None:
        self._config = config
        self._keep = frozenset(config.keep)
        self._collector = collector
        self._tokens = config.max_kept_per_s * _BURST_S
        self._filled_at = clock.now()

    def landed(self, record: RequestRecord) -> None:
        trace = current.get()
        if trace is None:
            return
        if not trace.kept:
            if not self._turned_out(record) or not self._may():
                return
            trace.kept = True
        self._collector.add(spans_of(trace, record))

    def families(self) -> Iterator[Metric]:
        words = "Spans by what became of them; made and neither exported nor failed: still queued, or dropped."
        rows = [((result,), float(n)) for result, n in self._collector.counts.items()]
        yield counter("tidegate_trace_spans", words, ("result",), rows)

    def _turned_out(self, record: RequestRecord) -> bool:
        """Whether the request ended in a way that is always kept."""
        keep = self._keep
        if isinstance(record.end, str):
            return "failed" in keep and record.outcome != "cancelled"
        return (record.late and "late" in keep) or (record.end.route.hedged and "hedged" in keep)

    def _may(self) -> bool:
        now = clock.now()
        rate = self._config.max_kept_per_s
        self._tokens = min(rate * _BURST_S, self._tokens + (now - self._filled_at) * rate)
        self._filled_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def __repr__(self) -> str:
        return f"<TraceSampler {self._config.ratio:.1%} and {', '.join(sorted(self._keep))} to {self._collector!r}>"
