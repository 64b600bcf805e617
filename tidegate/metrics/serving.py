"""A target's own requests as families, the same for edges and pools except for the prefix, with Triton's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from tidegate.metrics.families import counter, histogram
from tidegate.metrics.served import ServedCounts
from tidegate.metrics.triton import failure_reason, triton_families
from tidegate.oip.host import ModelStatistics
from tidegate.outcome import Outcome

_ANSWERED: Final = frozenset({Outcome.OK, Outcome.LATE, Outcome.DEGRADED})


def served_families(prefix: str, counts: ServedCounts, statistics: Iterable[ModelStatistics]) -> Iterator[Metric]:
    """Args: prefix: "tidegate_edge" or "tidegate_pool"."""
    outcomes = (((model, outcome.value), n) for (model, _, outcome), n in counts.outcomes.items())
    yield counter(f"{prefix}_requests", "Requests by how they ended.", ("model", "outcome"), outcomes)
    words = "Where a request's time went here."
    yield histogram(f"{prefix}_stage_seconds", words, ("model", "stage"), counts.stages.items())
    failures: Counter[tuple[str, str, str]] = Counter()
    for (model, version, outcome), n in counts.outcomes.items():
        if outcome not in _ANSWERED:
            failures[model, version, failure_reason(outcome)] += n
    yield from triton_families(statistics, failures=failures.items(), pending=counts.pending.items())
