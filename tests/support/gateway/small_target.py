"""A target process in miniature: OIP and the link service on one port, over a host that the test steers."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from tests.support.serving.hosts import EchoHost
from tidegate.fleet.offers import ModelOffer
from tidegate.link.attestation_challenge import Attest, no_evidence
from tidegate.link.service import LinkService
from tidegate.link.session import KeepaliveTiming
from tidegate.oip.grpc.server import OipService, server_options
from tidegate.types import LoadReport


class SmallTarget:
    """Args: load: what it says of itself at every heartbeat."""

    def __init__(
        self,
        name: str,
        host: EchoHost,
        offers: tuple[ModelOffer, ...],
        *,
        epoch: int,
        load: Callable[[], LoadReport],
        max_message_bytes: int,
    ) -> None:
        self.name = name
        self.host = host
        self.offers = offers
        self.port = 0
        self.link: LinkService | None = None
        self._epoch = epoch
        self.load = load
        self._max_message_bytes = max_message_bytes
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def make_link(self, attest: Attest = no_evidence) -> LinkService:
        self.link = LinkService(
            self.host,
            name=self.name,
            epoch=lambda: self._epoch,
            offers=lambda: self.offers,
            load=self.load,
            heartbeat=KeepaliveTiming(0.1, 300),
            attest=attest,
        )
        return self.link

    def add_to(self, server: grpc.aio.Server, attest: Attest = no_evidence) -> None:
        OipService(self.host, max_message_bytes=self._max_message_bytes).add_to(server)
        self.make_link(attest).add_to(server)

    async def start(self) -> None:
        """On a port of its own, and on the same one after a `kill`."""
        self._server = grpc.aio.server(options=server_options(self._max_message_bytes))
        self.add_to(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        """Connections are cut at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
