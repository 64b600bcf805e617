"""The loop lag of a process as Prometheus families: how late its loop ran, how long collections took, what stalls cost.

tidegate_loop_lag_seconds    histogram, one observation every `loop_lag.EVERY_S`
tidegate_loop_stalls_total   wake-ups that were late by `loop_lag.STALL_S` or more
tidegate_loop_stalled        1 while stalls cost deadlines
tidegate_gc_pause_seconds    histogram, by generation
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from tidegate.metrics.families import counter, histogram, single
from tidegate.metrics.loop_lag import STALL_S, LoopLag


def loop_families(seen: LoopLag) -> Iterator[Metric]:
    words = "How late the event loop ran a timer that was due."
    yield histogram("tidegate_loop_lag_seconds", words, (), [((), seen.lag)])
    words = f"Timers that the event loop ran {STALL_S:g} s late or more."
    yield counter("tidegate_loop_stalls", words, (), [((), float(seen.stalls))])
    yield single(
        "tidegate_loop_stalled", "1 while a loop that is held up costs deadlines.", float(bool(seen.cost.evidence))
    )
    rows = [((str(generation),), pauses) for generation, pauses in seen.pauses.items()]
    yield histogram("tidegate_gc_pause_seconds", "How long a garbage collection took.", ("generation",), rows)
