"""The dial-in relay lends the keeper's streams of devices to workers, each a stream of its own for each device.

    device ──dials──▶ keeper's `link_port`        one stream a device, however many workers
    worker ──dials──▶ keeper's unix socket        one stream a device that it knows to have dialled in

A device sees one gateway with one stream, as without workers. On the unix socket the keeper answers like the device
would: its name, epoch and offers, its loads as they come, and its answers, tokens and refusals. What costs CPU is one
more pass of a request's bytes through a process; only devices that cannot be dialled are reached that way.

The socket lies in a folder that only this account can enter, so nothing is proven on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from gateway.targets.accepted_link import AcceptedLink
from tidegate import clock
from tidegate.link.service import LinkService
from tidegate.link.streams import METHOD, SERVICE, ServedStream
from tidegate.models.manifest import Manifest
from tidegate.oip.grpc.server import server_options
from tidegate.oip.host import ModelStatistics
from tidegate.trace_context import PARENT_KEY, STATE_KEY
from tidegate.types import Accepted, Call, LoadReport, Reply

DEVICE_KEY: Final = "relayed-device"
NO_DEADLINE_S: Final = 3600.0  # every request of a gateway has one; this bounds what a defect could hold
CLOSE_GRACE_S: Final = 0.5
Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger(__name__)


class LentLink:
    """One device's stream, as a `ModelHost` for the workers' streams to it."""

    def __init__(self, link: AcceptedLink, manifest_of: Callable[[str, str], Manifest]) -> None:
        greeting = link.greeting
        assert greeting is not None, "only a stream that was let in is lent"
        self._link = link
        self._manifest_of = manifest_of
        self.service = LinkService(
            self,
            name=greeting.name,
            epoch=lambda: greeting.epoch,
            offers=lambda: () if link.greeting is None else link.greeting.offers,
            load=lambda: link.load or LoadReport(greeting.epoch, 0, 0, 0, 0.0),
            boot=greeting.boot,
        )
        link.lend(self.service.announce, self.service.say_goodbye)

    # ModelHost

    @property
    def server_name(self) -> str:
        return self._link.id

    def ready(self) -> bool:
        return self._link.open

    def manifests(self) -> Sequence[Manifest]:
        return ()

    def manifest(self, name: str, version: str = "") -> Manifest:
        return self._manifest_of(name, version)

    def model_ready(self, name: str, version: str = "") -> bool:
        return self._link.open

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        return ()

    async def infer(self, call: Call) -> Reply:
        budget_s = NO_DEADLINE_S if call.deadline is None else call.deadline - clock.now()
        return await self._link.infer(
            call.request,
            variant=call.variant,
            budget_s=budget_s if isfinite(budget_s) else NO_DEADLINE_S,
            priority=call.priority,
            traceparent=call.headers.get(PARENT_KEY, ""),
            tracestate=call.headers.get(STATE_KEY, ""),
            on_accepted=call.on_accepted or _unheard,
            tokens=call.tokens,
        )

    def is_of(self, link: AcceptedLink) -> bool:
        return self._link is link

    def end(self, reason: str) -> None:
        """End the workers' streams, whatever is under way on them: its answers will not come."""
        self.service.finish(reason)

    def __repr__(self) -> str:
        return f"<LentLink {self._link!r}>"


class DialInRelay:
    """The unix socket at which workers ask for devices. `opened` serves it.

    Args:
        links: the streams that devices have dialled, by target id.
        manifest_of: of a model by name and version.
    """

    def __init__(self, links: Mapping[str, AcceptedLink], manifest_of: Callable[[str, str], Manifest]) -> None:
        self._links = links
        self._manifest_of = manifest_of
        self._lent: dict[str, LentLink] = {}

    @asynccontextmanager
    async def opened(self, path: Path, max_message_bytes: int) -> AsyncIterator[None]:
        await asyncio.to_thread(path.unlink, missing_ok=True)  # a former keeper's
        server = grpc.aio.server(options=server_options(max_message_bytes))
        handler = grpc.stream_stream_rpc_method_handler(self.exchange)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(CLOSE_GRACE_S)

    async def exchange(self, _requests: object, context: Context) -> None:
        """The gRPC method: a worker's stream to one device, which ends with the device's own."""
        wanted = str(dict(context.invocation_metadata() or ()).get(DEVICE_KEY, ""))
        link = self._links.get(wanted)
        if link is None or not link.open:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{wanted} has not dialled in")
            return
        lent = self._lent.get(wanted)
        if lent is None or not lent.is_of(link):
            lent = self._lent[wanted] = LentLink(link, self._manifest_of)
        await lent.service.serve(await ServedStream.open(context))

    def left(self, link: AcceptedLink) -> None:
        """The device's stream has ended: so do the workers' to it."""
        lent = self._lent.get(link.id)
        if lent is not None and lent.is_of(link):
            del self._lent[link.id]
            lent.end(link.why_not)

    def __repr__(self) -> str:
        return f"<DialInRelay {len(self._lent)} lent>"


def _unheard(_accepted: Accepted) -> None:
    """For a caller that does not ask when its request was accepted."""
