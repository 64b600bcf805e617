"""An OTLP collector in this process: takes spans over HTTP as the specification has it, decoded by its own protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Otlp:
    """What came so far. `status` is what exports are answered with."""

    endpoint: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    exports: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    async def take(self, request: web.Request) -> web.Response:
        self.exports += 1
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.status != 200:
            return web.Response(status=self.status)
        found = ExportTraceServiceRequest.FromString(await request.read())
        for resource in found.resource_spans:
            words = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(words["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@asynccontextmanager
async def collector() -> AsyncIterator[Otlp]:
    otlp = Otlp()
    app = web.Application()
    app.router.add_post("/v1/traces", otlp.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    otlp.endpoint = f"http://127.0.0.1:{port}/v1/traces"
    try:
        yield otlp
    finally:
        await runner.cleanup()
