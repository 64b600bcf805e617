"""Exports spans to a collector over OTLP; this is the only module that imports OpenTelemetry.

The SDK's batch processor sends from a thread of its own and keeps a bounded queue, so a collector that is dead or slow
costs its spans and nothing else: `add` never waits, and the end of this process waits `PATIENCE_S` at most for what
is still queued. That the collector cannot be reached, and that it can again, is one log line each.

Spans are made here from ours as finished ones: the SDK's own are objects with locks that are opened and closed around
code, which is neither how nor when these come to be.

Source: OpenTelemetry specification, "Trace SDK" and "OTLP/HTTP".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from tidegate import __version__, clock
from tidegate.tracing.config import TracingConfig
from tidegate.tracing.span import Span

PATIENCE_S: Final = 2.0
EVERY_S: Final = 1.0
_BATCH: Final = 512
_KINDS: Final = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "consumer": SpanKind.CONSUMER,
}
_SCOPE: Final = InstrumentationScope("tidegate", __version__)
log = structlog.get_logger(__name__)


class SpanExport:
    """Sends the spans that are added to it, inside `async with`.

    Args:
        service: "gateway", "edge" or "pool"; with `name` the process in each trace's resource.
    """

    def __init__(self, config: TracingConfig, service: str, name: str) -> None:
        self.counts: Counter[str] = Counter({"made": 0, "exported": 0, "failed": 0})
        self._config = config
        self._resource = Resource(
            {
                "service.name": f"tidegate-{service}",
                "service.instance.id": name,
                "service.version": __version__,
            }
        )
        self._processor: BatchSpanProcessor | None = None
        self._exporter: _ReportingExporter | None = None

    async def __aenter__(self) -> Self:
        config = self._config
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `_ReportingExporter` logs it once
        sending = OTLPSpanExporter(config.endpoint, headers=config.headers, timeout=config.timeout_s)
        self._exporter = _ReportingExporter(sending, self.counts, config.endpoint)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=config.max_queued_spans,
            schedule_delay_millis=EVERY_S * 1e3,
            max_export_batch_size=min(_BATCH, config.max_queued_spans),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        processor, self._processor = self._processor, None
        if processor is None or self._exporter is None:
            return
        # A thread of our own: the loop's would be joined at its end, however long the collector takes.
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            processor.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=flush, name="last spans", daemon=True).start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await done.wait()
        except TimeoutError:
            log.warning("spans are lost: the collector did not take them in time", endpoint=self._config.endpoint)
            self._exporter.give_up()

    def add(self, spans: Iterable[Span]) -> None:
        """Queue them for the collector."""
        if self._processor is None:
            return
        to_utc_s = clock.utc_s() - clock.now()
        for span in spans:
            self.counts["made"] += 1
            self._processor.on_end(self._readable(span, to_utc_s))

    def _readable(self, span: Span, to_utc_s: float) -> ReadableSpan:
        def ns(at: float) -> int:
            return int((at + to_utc_s) * 1e9)

        parent = _context(span.trace_id, span.parent_id) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, span.state),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[SdkEvent(event.name, timestamp=ns(event.at)) for event in span.events],
            links=[SdkLink(_context(link.trace_id, link.span_id)) for link in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=ns(span.began_at),
            end_time=max(ns(span.began_at), ns(span.ended_at)),
            instrumentation_scope=_SCOPE,
        )

    def __repr__(self) -> str:
        return f"<SpanExport to {self._config.endpoint} {dict(self.counts)}>"


class _ReportingExporter(SpanExporter):
    """Counts the results of another exporter, and logs when it begins to fail and when it recovers. In a thread."""

    def __init__(self, inner: SpanExporter, counts: Counter[str], endpoint: str) -> None:
        self._inner = inner
        self._counts = counts
        self._endpoint = endpoint
        self._failing = False
        self._given_up = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._given_up:
            return SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        except Exception as error:  # a defect of the library must not end its thread
            log.warning("spans could not be sent", error=repr(error))
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        self._counts["failed" if failed else "exported"] += len(spans)
        if failed != self._failing and not self._given_up:
            self._failing = failed
            words = "the collector takes no spans" if failed else "the collector takes spans again"
            (log.warning if failed else log.info)(words, endpoint=self._endpoint)
        return result

    def give_up(self) -> None:
        self._given_up = True
        self._inner.shutdown()  # ends its waiting between tries

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _context(trace_id: int, span_id: int, state: str = "") -> SpanContext:
    kept: Any = TraceState.from_header([state]) if state else None
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED), trace_state=kept)
