"""Turns rows of numbers into Prometheus families: the only module that uses the types of the client library.

Each function makes one family from rows of (label values, number); a row has as many values as there are labels.
Needs prometheus-client, which an edge or a pool needs only if `metrics_port` is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar as Sampled

from tidegate.metrics.histogram import Exemplar, Histogram

Row = tuple[tuple[str, ...], float]


class BareCounter(Metric):
    """A counter whose name does not end in `_total`: Triton's names are older than that convention."""


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """`name` without `_total`, which the exposition adds."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def single(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return gauge(name, text, (), [((), value)])


def histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[tuple[str, ...], Histogram]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, counted in rows:
        buckets = [
            (bound, count) if exemplar is None else (bound, count, _sampled(exemplar))
            for (bound, count), exemplar in zip(counted.buckets(), counted.exemplars(), strict=True)
        ]
        family.add_metric(values, buckets, counted.total)
    return family


def bare(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """A counter of exactly this name, for names that are not ours."""
    metric = BareCounter(name, text, "unknown")
    for values, value in rows:
        metric.add_sample(name, dict(zip(labels, values, strict=True)), value)
    return metric


def _sampled(exemplar: Exemplar) -> Sampled:
    return Sampled({"trace_id": exemplar.trace_id}, exemplar.value, exemplar.utc_s)
