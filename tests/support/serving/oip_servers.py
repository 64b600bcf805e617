"""Both OIP servers and the OpenAI routes over one host, in the test's own loop, on ports of the system's choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from aiohttp import web

from tests.support.serving.host import FakeHost
from tidegate.generate.text.text_models import TextModels
from tidegate.models.manifest import Manifest
from tidegate.oip import body_budget
from tidegate.oip import content_limits as limits_
from tidegate.oip.body_budget import BodyLimits, BodyMemory
from tidegate.oip.content_limits import ContentLimits
from tidegate.oip.grpc.server import OipService, server_options
from tidegate.oip.guard import Guard
from tidegate.oip.http.server import OipRoutes, error_middleware
from tidegate.openai.routes import RowLimit, openai_routes
from tidegate.openai.tokens import Tokenizers
from tidegate.outcome import ServeError

MAX_BYTES = 1024 * 1024


@dataclass
class Servers:
    host: FakeHost
    http: str  # host:port
    grpc: str
    refused: list[tuple[str, str, ServeError]] = field(default_factory=list)


@dataclass
class OneFolder:
    """A repository whose models all keep their tokenizer in one folder."""

    path: Path

    def folder(self, manifest: Manifest) -> Path:
        return self.path


@asynccontextmanager
async def serving(
    host: FakeHost,
    tokenizers: Path = Path("/nonexistent"),
    *,
    limits: ContentLimits = limits_.DEFAULT,
    body_limits: BodyLimits = body_budget.DEFAULT,
    guard: Guard | None = None,
    most_rows: RowLimit | None = None,
    max_body_bytes: int = MAX_BYTES,
) -> AsyncIterator[Servers]:
    servers = Servers(host, "", "")

    def refused(protocol: str, model: str, error: ServeError) -> None:
        servers.refused.append((protocol, model, error))

    texts = Tokenizers(OneFolder(tokenizers))
    generating = TextModels(OneFolder(tokenizers))
    app = web.Application(middlewares=[error_middleware])
    held = BodyMemory(body_limits.max_held_bytes)
    oip = OipRoutes(
        host,
        max_body_bytes=max_body_bytes,
        on_refused=refused,
        limits=limits,
        body_limits=body_limits,
        held=held,
        texts=generating,
        guard=guard,
    )
    app.add_routes(oip.table())
    app.add_routes(
        openai_routes(
            host,
            texts,
            max_body_bytes=4 * max_body_bytes,
            on_refused=refused,
            limits=limits,
            body_limits=body_limits,
            held=held,
            texts=generating,
            guard=guard,
            most_rows=most_rows,
        )
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False)
    await runner.setup()
    assert runner.server is not None
    runner.server.request_handler = oip.ahead_of(runner.server.request_handler)  # as in the gateway's door
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = grpc.aio.server(options=server_options(MAX_BYTES))
    service = OipService(
        host, max_message_bytes=MAX_BYTES, on_refused=refused, limits=limits, held=held, texts=generating
    )
    service.add_to(server)
    servers.grpc = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    servers.http = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield servers
    finally:
        await server.stop(0)
        await runner.cleanup()
        await generating.aclose()
