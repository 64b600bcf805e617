"""A process's own certificate as Prometheus families: when it begins and ends; without TLS there are none.

tidegate_certificate_not_before_timestamp_seconds
tidegate_certificate_not_after_timestamp_seconds
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from tidegate.metrics.families import single


def certificate_families(validity_utc_s: tuple[float, float] | None) -> Iterator[Metric]:
    if validity_utc_s is not None:
        begins, ends = validity_utc_s
        yield single("tidegate_certificate_not_before_timestamp_seconds", "When this certificate begins.", begins)
        yield single("tidegate_certificate_not_after_timestamp_seconds", "When this certificate ends.", ends)
