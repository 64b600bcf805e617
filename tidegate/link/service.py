"""`LinkService` holds all link streams that one process serves: a `LinkServer` for each, and their common drain.

A stream that was dialled here lives as long as its gRPC handler; a stream that this side dialled is run by the code
that dialled it. `drain` sends a goodbye on every stream and waits.

Where several gateways have a stream here, each hears within SPREAD_S of the work that the others brought or got back.
Its own answers tell it the load as well, but only when it asks: between two of them a gateway that asks a sixteenth
would take the target for idle, and so would all sixteen (simulated: docs/design/routing.md, "Several gateways").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

import grpc
import structlog

from tidegate import __version__
from tidegate.fleet.offers import ModelOffer
from tidegate.link.attestation_challenge import Attest, ChallengeResponder, no_evidence
from tidegate.link.client import MAX_MESSAGE_BYTES
from tidegate.link.frames import Greeting
from tidegate.link.server import LinkServer
from tidegate.link.session import KeepaliveTiming, MessageStream
from tidegate.link.streams import METHOD, SERVICE, ServedStream
from tidegate.oip.content_limits import DEFAULT, ContentLimits
from tidegate.oip.host import ModelHost
from tidegate.types import LoadReport

SPREAD_S: Final = 0.01

log = structlog.get_logger(__name__)


class LinkService:
    """All link streams that one process serves.

    Args:
        name: "edge/NAME", "pool/NAME" or "site/NAME".
        epoch: the epoch under which `load` reports; read again for each stream.
        max_concurrent: requests under way per stream; more are refused as overloaded.
        attest: answers challenges; raises ValueError, with the reason, if there is no evidence.
        boot: identifies this start of the process, which has run for `uptime_s`.
        is_site: the host is a gateway, whose load is no single queue: its peers hear of it once a second.
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
        boot: str = "",
        uptime_s: Callable[[], float] = lambda: 0.0,
        is_site: bool = False,
    ) -> None:
        self._host = host
        self._is_site = is_site
        self._boot = boot
        self._uptime_s = uptime_s
        self._attest = attest
        self._name = name
        self._epoch = epoch
        self._offers = offers
        self._load = load
        self._heartbeat = heartbeat
        self._max_concurrent = max_concurrent
        self._limits = limits
        self._max_message_bytes = max_message_bytes
        self._servers: set[LinkServer] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._draining = ""
        self._workers: set[LinkServer] = set()  # the streams whose work has changed since the others were told
        self._spreads: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LinkService {self._name}, {len(self._servers)} streams{', draining' if self._draining else ''}>"

    @property
    def name(self) -> str:
        """ "edge/NAME" or "pool/NAME"."""
        return self._name

    @property
    def epoch(self) -> int:
        return self._epoch()

    @property
    def streams(self) -> int:
        return len(self._servers)

    @property
    def greeted(self) -> int:
        """The number of streams whose other side has sent its hello. A dial that hangs is a stream as well."""
        return sum(bool(one.peer) for one in self._servers)

    @property
    def paths(self) -> dict[str, str]:
        """Each peer that has sent its hello: "direct" if the peer dialled, "dialled out" if this side did."""
        return {one.peer: "dialled out" if one.dialled else "direct" for one in self._servers if one.peer}

    @property
    def callers(self) -> frozenset[str]:
        """The peers that have dialled this side and sent their hello: "gateway/NAME"."""
        return frozenset(one.peer for one in self._servers if one.peer and not one.dialled)

    @property
    def draining(self) -> bool:
        return bool(self._draining)

    @property
    def under_way(self) -> int:
        """The number of requests in progress, over all streams."""
        return sum(server.under_way for server in self._servers)

    def announce(self) -> None:
        """Send the load to every stream now, and the offers if they changed."""
        for server in tuple(self._servers):
            server.announce()

    async def drain(self, reason: str) -> None:
        """Send a goodbye on every stream; return when requests in progress are answered and all streams have ended."""
        self.say_goodbye(reason)
        await self._all_gone.wait()

    def say_goodbye(self, reason: str) -> None:
        """Take nothing new: each stream ends when the requests in progress on it are answered."""
        self._draining = reason
        for server in tuple(self._servers):
            server.leave(reason)

    def finish(self, reason: str) -> None:
        """End every stream now; what is under way on them gets no answer."""
        self._draining = reason
        for server in tuple(self._servers):
            server.session.finish(reason)

    async def serve(self, stream: MessageStream, peer_certificate: bytes | None = None) -> str:
        """Serve one stream, whichever side dialled it, until it ends; returns the reason in words.

        Args:
            peer_certificate: the certificate, PEM, that TLS has verified at the other end.
        """
        return await self.run(self.server_for(stream, peer_certificate))

    def server_for(
        self,
        stream: MessageStream,
        peer_certificate: bytes | None = None,
        *,
        dialled: bool = False,
        host: ModelHost | None = None,
        host_for: Callable[[str], ModelHost] | None = None,
    ) -> LinkServer:
        """The server side of one stream, for `run`.

        Args:
            peer_certificate: as in `serve`.
            dialled: whether this side dialled the stream.
            host: what answers on this one stream; None: what answers on all.
            host_for: as in `LinkServer`.
        """
        return LinkServer(
            stream,
            self._host if host is None else host,
            greeting=self._greeting,
            load=self._load,
            heartbeat=self._heartbeat,
            max_concurrent=self._max_concurrent,
            max_message_bytes=self._max_message_bytes,
            challenged=ChallengeResponder(self._attest, peer_certificate),
            limits=self._limits,
            dialled=dialled,
            on_work=(lambda _server: None) if self._is_site else self._worked,
            is_site=self._is_site,
            host_for=host_for,
        )

    def _worked(self, server: LinkServer) -> None:
        """The load has changed by a request of this stream, which hears of it by its answer."""
        if len(self._servers) > 1:
            self._workers.add(server)
            if self._spreads is None:
                self._spreads = asyncio.get_running_loop().call_later(SPREAD_S, self._spread)

    def _spread(self) -> None:
        workers, self._workers, self._spreads = self._workers, set(), None
        for server in tuple(self._servers):
            if workers != {server}:
                server.tell_load()

    async def run(self, server: LinkServer) -> str:
        """Serve the stream of `server` until it ends; returns the reason in words."""
        if self._draining:
            # before any hello, so that no peer takes this process for a target that is up
            return f"leaving: {self._draining}"
        self._servers.add(server)
        self._all_gone.clear()
        try:
            return await server.run()
        finally:
            self._servers.discard(server)
            self._workers.discard(server)
            if len(self._servers) <= 1 and self._spreads is not None:
                self._spreads.cancel()
                self._spreads = None
            if not self._servers:
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
        return Greeting(self._name, self._epoch(), __version__, self._offers(), self._boot, self._uptime_s())
