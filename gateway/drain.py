"""A gateway's drain: what is under way is answered, new callers are sent elsewhere, and then everything closes.

    readiness says no → new requests are refused, gRPC connections are told to go away → what is under way ends → close

- **HTTP.** The port stays open, so that health answers and a new request gets 503 with `retry-after-ms`. Each
  connection ends with its next answer.
- **gRPC.** The port closes to new connections, and each connection gets a GOAWAY: its client opens another one, for
  which a balancer finds another gateway. A stream of inference ends once what it has read is answered, a health watch
  at once.
- **Upstream gateways, and devices that ask for help.** Each stream gets a goodbye at once, and ends when its requests
  are answered.
- **Operators.** The admin port goes on meanwhile. Uploads and questions to it are waited for, its streams are not.

What is under way after `drain_s` is cut. Links to targets, the fleet's messages and the port that devices dial close
after all of this: answers come over them. Without requests under way the drain takes no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import structlog

from gateway.host import GatewayHost
from tidegate import clock
from tidegate.link.service import LinkService
from tidegate.oip.grpc.server import OipService
from tidegate.oip.guard import DrainingGuard
from tidegate.servers.http_drain import POLL_S, HttpDrain

CLOSE_GRACE_S: Final = 1.0  # what is left when a server closes, after the drain; with the links' goodbyes under 3 s
log = structlog.get_logger(__name__)


class GatewayDrain:
    """The drain of one gateway, which runs once."""

    def __init__(
        self,
        host: GatewayHost,
        entry: DrainingGuard,
        service: OipService,
        server: grpc.aio.Server | None,
        http: Sequence[HttpDrain],
        streams: Sequence[LinkService] = (),
    ) -> None:
        """Args:
        entry: the guard of every inference route.
        service: the methods on `server`; None: this process has no port for callers.
        http: the inference port's, then the operators'.
        streams: those of upstream gateways, and of devices that ask for help.
        """
        self._host = host
        self._entry = entry
        self._service = service
        self._server = server
        self._http = http
        self._streams = streams

    @property
    def under_way(self) -> int:
        """The number of requests and streams that are waited for."""
        answered = sum(one.under_way for one in self._streams)
        return self._service.under_way + sum(one.under_way for one in self._http) + answered

    async def run(self, drain_s: float, *, refuses: Callable[[], bool] = lambda: True) -> None:
        """Refuse what is new; return when what is under way has ended, or after `drain_s`.

        Args:
            refuses: False where another process takes what is new, so that what comes here all the same is answered.
        """
        self._host.drain()
        if refuses():
            self._entry.drain()
        self._service.drain()
        for one in self._http:
            one.begin()
        if waited := self.under_way:
            log.info("draining", under_way=waited, at_most_s=drain_s)
        # Closes the port and sends each connection a GOAWAY at once; then it waits as long as any call is under way.
        stopping = asyncio.create_task(self._stop_grpc(drain_s), name="grpc-goaway")
        try:
            async with asyncio.timeout(drain_s):
                await self._done()
        except TimeoutError:
            log.warning("requests under way are cut: `drain_s` is over", under_way=self.under_way, after_s=drain_s)
        finally:
            await self._stop_grpc(CLOSE_GRACE_S)  # the shorter grace holds: for calls that are no inference
            await stopping

    async def _stop_grpc(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _done(self) -> None:
        await asyncio.gather(*[one.drain("the gateway is shutting down") for one in self._streams])
        for one in self._http:
            await one.done()
        while self._service.under_way:
            await clock.sleep(POLL_S)

    def __repr__(self) -> str:
        return f"<GatewayDrain {self.under_way} under way>"
