"""The configuration section `tracing`, the same for all three processes: where spans go, and of which requests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidegate.config import Section

Reason = Literal["late", "hedged", "failed"]


class TracingConfig(Section):
    """Traces over OTLP; needs `pip install 'tidegate[tracing]'`."""

    endpoint: str = Field(
        pattern=r"^https?://\S+$",
        description="URL of a collector's OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.",
    )
    headers: dict[str, str] = Field({}, description="Headers of each export, such as a collector's credential.")
    ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the requests without a caller's trace that is sampled. More shows more of the ordinary, "
        "and costs about 0.3 ms of CPU each. A caller's own flag is respected whatever this is.",
    )
    keep: tuple[Reason, ...] = Field(
        ("late", "hedged", "failed"),
        description="Requests that are kept though they were not sampled, by how they turned out (gateway only).",
    )
    max_queued_spans: int = Field(
        8192, ge=64, le=1_000_000, description="Spans that wait for the collector; beyond, the oldest are dropped."
    )
    max_kept_per_s: float = Field(
        50.0,
        gt=0,
        le=100_000,
        description="Requests a second that `keep` may add: in an outage all fail, and their traces are alike.",
    )
    timeout_s: float = Field(
        5.0, gt=0, le=60, description="Seconds for one export with its retries; then its spans are dropped."
    )
