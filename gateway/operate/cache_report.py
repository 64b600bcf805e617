"""The cache report: how much was answered from the response cache, as JSON for commands and as metric families."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import Metric

from gateway.serving.known_answers import KnownAnswers
from tidegate.metrics.families import counter, gauge


def cache_json(known: KnownAnswers | None) -> list[dict[str, Any]]:
    """By model whose answers are kept; empty without a cache."""
    if known is None:
        return []
    return [
        {"model": model, "hits": hits, "lookups": asked, "kept": kept, "bytes": held}
        for model, hits, asked, kept, held in known.rows()
    ]


def cache_families(known: KnownAnswers) -> Iterable[Metric]:
    outcomes = [((model, outcome), float(count)) for (model, outcome), count in known.outcomes.items()]
    kept = [((model, outcome), float(count)) for (model, outcome), count in known.kept.items()]
    rows = list(known.rows())
    words = "Requests for models whose answers are kept, by what became of them at the cache."
    return [
        counter("tidegate_cache_requests", words, ("model", "outcome"), outcomes),
        counter("tidegate_cache_kept", "New answers for the cache: kept, or too large.", ("model", "outcome"), kept),
        counter(
            "tidegate_cache_last_known",
            "Old answers that were given since nothing else was to be had, by the refusal instead of which.",
            ("model", "code"),
            [(key, float(count)) for key, count in known.lent.items()],
        ),
        counter("tidegate_cache_evicted", "Known answers that made room for others.", (), [((), known.cache.evicted)]),
        gauge(
            "tidegate_cache_answers", "Known answers that are kept.", ("model",), [((one[0],), one[3]) for one in rows]
        ),
        gauge("tidegate_cache_bytes", "Bytes that they take.", ("model",), [((one[0],), one[4]) for one in rows]),
    ]
