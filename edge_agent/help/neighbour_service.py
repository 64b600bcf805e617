"""The neighbour service takes what other devices of the site ask of this one, on streams that they open for it.

It is a service of its own on the device's gRPC port (`NEIGHBOUR_SERVICE`), so that over TLS it is open to devices'
certificates and to nothing else, and gateways' streams are not. Each stream is a link stream like any other: budgets,
cancellation, chunks of large bodies and heartbeats are the link's (`tidegate/link/server.py`). A neighbour that leaves
a request, or whose stream ends, takes it out of the queue here.

    stream → proof → name, which the configuration must allow → requests, each by `neighbour_host.py`

A second method tells the manifests of the models that neighbours may have.

Bounded: one stream a neighbour, the newest; MOST_STREAMS in all; requests under way on each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
import msgspec
import structlog

from edge_agent.core.help.neighbour_admission import why_not_neighbour
from edge_agent.help.neighbour_host import NeighbourAnswers, NeighbourHost
from edge_agent.serving.host import EdgeHost
from tidegate.link.client import MAX_MESSAGE_BYTES
from tidegate.link.server import LinkServer
from tidegate.link.service import LinkService
from tidegate.link.streams import ASKER_KEY, HELP_METHOD, MODELS_METHOD, NEIGHBOUR_SERVICE, ServedStream
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.security.certificate_identity import identity_of
from tidegate.types import TargetId

MOST_STREAMS: Final = 32
MOST_MANIFESTS_BYTES: Final = 4 * 2**20
Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger(__name__)


class NeighbourService:
    """The streams of neighbours that ask this device.

    Args:
        may_ask: whether the device of this name is answered.
        encrypted: whether TLS stands before this, so that a certificate names the neighbour.
        epoch: as in `LinkService`.
    """

    def __init__(
        self,
        host: EdgeHost,
        answers: NeighbourAnswers,
        *,
        may_ask: Callable[[str], bool],
        encrypted: bool,
        epoch: Callable[[], int],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        limits: ContentLimits = DEFAULT,
    ) -> None:
        self.answers = answers
        self._host = host
        self._may_ask = may_ask
        self._encrypted = encrypted
        self._askers: dict[str, LinkServer] = {}
        self.links = LinkService(
            host,
            name=host.server_name,
            epoch=epoch,
            offers=lambda: answers.offers(host),
            load=host.load_report,
            max_concurrent=2 * answers.max_in_flight,
            max_message_bytes=max_message_bytes,
            limits=limits,
            is_site=True,
        )

    @property
    def askers(self) -> dict[str, int]:
        """The neighbours that have a stream here, with how many of their requests are under way."""
        return {name: server.under_way for name, server in self._askers.items()}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve both methods on a gRPC server that has not started yet."""
        methods = {
            HELP_METHOD: grpc.stream_stream_rpc_method_handler(self.exchange),
            MODELS_METHOD: grpc.unary_unary_rpc_method_handler(self.models),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NEIGHBOUR_SERVICE, methods),))

    async def exchange(self, _requests: object, context: Context) -> None:
        """The gRPC method of a neighbour's stream."""
        asker = await self._enter(context)
        stream = await ServedStream.open(context)  # nothing is awaited from here until it has its place
        if asker not in self._askers and len(self._askers) >= MOST_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(self._askers)} neighbours have streams")
        server = self.links.server_for(stream, host=NeighbourHost(self._host, self.answers, asker))
        before, self._askers[asker] = self._askers.get(asker), server
        if before is not None:
            before.session.finish("a newer stream of this neighbour took its place")
        try:
            reason = await self.links.run(server)
        finally:
            if self._askers.get(asker) is server:
                del self._askers[asker]
        log.info("a neighbour's stream ended", neighbour=asker, reason=reason)

    async def models(self, _message: bytes, context: Context) -> bytes:
        """The gRPC method that tells a neighbour for which models it is answered: a JSON list of manifests."""
        asker = await self._enter(context)
        manifests = NeighbourHost(self._host, self.answers, asker).manifests()
        told = msgspec.json.encode(manifests)
        if len(told) > MOST_MANIFESTS_BYTES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(manifests)} manifests of {len(told)} bytes")
        return told

    async def _enter(self, context: Context) -> str:
        """The neighbour that asks, "edge/NAME"; aborts where it may not."""
        if self.links.draining or self._host.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the device is shutting down")
        claimed = str(dict(context.invocation_metadata() or ()).get(ASKER_KEY, ""))
        why_not = why_not_neighbour(claimed, self._host.server_name, proven=self._proven(context))
        if not why_not and not self._may_ask(TargetId.parse(claimed).name):
            why_not = f"`answer_neighbours.devices` of this device has no entry for {claimed}"
        if why_not:
            log.info("refused a neighbour", peer=context.peer(), reason=why_not)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why_not)
        return claimed

    def _proven(self, context: Context) -> str | None:
        """Whose certificate the peer showed; "" where it showed none, None without TLS."""
        if not self._encrypted:
            return None
        names = context.auth_context().get("x509_subject_alternative_name", ())
        identity = identity_of(name.decode(errors="replace") for name in names)
        return "" if identity is None else str(identity)

    def __repr__(self) -> str:
        return f"<NeighbourService {len(self._askers)} neighbours, {self.answers!r}>"
