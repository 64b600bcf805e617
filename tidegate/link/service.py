"""All link streams of one server: an `Answerer` for each, whoever dialled it, and their common end.

A stream that was dialled here lives as long as its gRPC handler; one that this side dialled is run by whoever dialled.
`drain` says goodbye on every one and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import grpc
import structlog

from tidegate import __version__
from tidegate.fleet.offers import ModelOffer
from tidegate.link.attestation_challenge import Attest, ChallengeResponder, no_evidence
from tidegate.link.client import MAX_MESSAGE_BYTES
from tidegate.link.frames import Greeting
from tidegate.link.server import Answerer
from tidegate.link.session import Duplex, KeepaliveTiming
from tidegate.link.streams import METHOD, SERVICE, ServedStream
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.host import ModelHost
from tidegate.types import LoadReport

log = structlog.get_logger(__name__)


class LinkService:
    """All streams of one server. A stream lives as long as its gRPC handler; `drain` says goodbye on each and waits.

    Args:
        name: "edge/NAME" or "pool/NAME".
        epoch: the epoch under which `load` reports; asked again for each stream.
        max_concurrent: requests under way per stream; more are refused as overloaded.
        attest: answers challenges; raises ValueError with words where there is no evidence.
    """

    def __init__(
        self,
        host: ModelHost,
        *,
        name: str,
        epoch: Callable[[], int],
        offers: Callable[[], tuple[ModelOffer, ...]],
        load: Callable[[], LoadReport],
        heartbeat: KeepaliveTiming = KeepaliveTiming(),  # noqa: B008 - frozen
        max_concurrent: int = 1024,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        attest: Attest = no_evidence,
        limits: ContentLimits = DEFAULT,
    ) -> None:
        self._host = host
        self._attest = attest
        self._name = name
        self._epoch = epoch
        self._offers = offers
        self._load = load
        self._heartbeat = heartbeat
        self._max_concurrent = max_concurrent
        self._limits = limits
        self._max_message_bytes = max_message_bytes
        self._answerers: set[Answerer] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._draining = ""

    def __repr__(self) -> str:
        return f"<LinkService {self._name}, {len(self._answerers)} streams{', draining' if self._draining else ''}>"

    @property
    def streams(self) -> int:
        return len(self._answerers)

    @property
    def greeted(self) -> int:
        """Streams whose other side has said hello: a dial that hangs is a stream, and reaches nobody."""
        return sum(bool(one.peer) for one in self._answerers)

    @property
    def roads(self) -> dict[str, str]:
        """Who has said hello, and who dialled: "direct" for them, "dialled out" for this side."""
        return {one.peer: "dialled out" if one.dialled else "direct" for one in self._answerers if one.peer}

    @property
    def callers(self) -> frozenset[str]:
        """Who has dialled this side and said hello: "gateway/NAME"."""
        return frozenset(one.peer for one in self._answerers if one.peer and not one.dialled)

    @property
    def draining(self) -> bool:
        return bool(self._draining)

    @property
    def under_way(self) -> int:
        """Requests that are being worked on, over all streams."""
        return sum(answerer.under_way for answerer in self._answerers)

    def announce(self) -> None:
        """Send the load, and the offers where they changed, to every stream now."""
        for answerer in tuple(self._answerers):
            answerer.announce()

    async def drain(self, reason: str) -> None:
        """Say goodbye on every stream and return when what was under way is answered and the streams have ended."""
        self._draining = reason
        for answerer in tuple(self._answerers):
            answerer.leave(reason)
        await self._all_gone.wait()

    async def serve(self, duplex: Duplex, asker: bytes | None = None) -> str:
        """Answer on one stream, whoever dialled it, until it ends; the reason in words.

        Args:
            asker: the certificate, PEM, that TLS has verified at the other end.
        """
        return await self.run(self.answerer(duplex, asker))

    def answerer(self, duplex: Duplex, asker: bytes | None = None, *, dialled: bool = False) -> Answerer:
        """The party for one stream, for `run`. Args: asker: as in `serve`; dialled: whether this side did."""
        return Answerer(
            duplex,
            self._host,
            greeting=self._greeting,
            load=self._load,
            heartbeat=self._heartbeat,
            max_concurrent=self._max_concurrent,
            max_message_bytes=self._max_message_bytes,
            challenged=ChallengeResponder(self._attest, asker),
            limits=self._limits,
            dialled=dialled,
        )

    async def run(self, answerer: Answerer) -> str:
        """Answer on its stream until it ends; the reason in words."""
        if self._draining:
            return f"leaving: {self._draining}"  # without a hello, so that nobody takes it for a target that is up
        self._answerers.add(answerer)
        self._all_gone.clear()
        try:
            return await answerer.run()
        finally:
            self._answerers.discard(answerer)
            if not self._answerers:
                self._all_gone.set()

    def add_to(self, server: grpc.aio.Server) -> Self:
        """Serve the streams on a gRPC server that has not started yet."""
        handler = grpc.stream_stream_rpc_method_handler(self.exchange)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        return self

    async def exchange(self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """The gRPC method."""
        if self._draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"leaving: {self._draining}")
        shown = context.auth_context().get("x509_pem_cert", ())
        reason = await self.serve(await ServedStream.open(context), next(iter(shown), None))
        log.info("link stream ended", peer=context.peer(), reason=reason)

    def _greeting(self) -> Greeting:
        return Greeting(self._name, self._epoch(), __version__, self._offers())
