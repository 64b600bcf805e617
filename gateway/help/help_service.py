"""The help service takes the requests that devices cannot answer well, on streams that the devices open for it.

The streams come in by the port that devices dial (`link_port`), with the same proof of who they are, and live no
longer than it. Each is a link stream like any other, in which the gateway is the side that answers
(`tidegate/link/server.py`): so budgets, cancellation, tokens, chunks of large bodies and heartbeats are the link's. A
device that leaves a request, or whose stream ends, frees the request's place here and at the target.

    stream → proof → name and grant → requests, each on its device's rights and quotas, and through the same layers as a
    caller's

A second method tells a device the manifests of the models with which it may be helped, so that it can check requests
for models that it does not have itself.

Bounded: one stream a device, the newest; `max_streams` in all; requests and bytes under way on each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import grpc
import msgspec
import structlog

from gateway.core.access.asker import why_not_asker
from gateway.core.admission.admission import Admission
from gateway.help.asker_host import AskerHost, Identified
from gateway.targets.dial_in import DialInServer
from tidegate.caller import Grant, Identity
from tidegate.link.client import ROOM_BYTES
from tidegate.link.server import LinkServer
from tidegate.link.service import LinkService
from tidegate.link.streams import ASKER_KEY, HELP_METHOD, MODELS_METHOD, SERVICE, ServedStream
from tidegate.oip.content_limits import ContentLimits
from tidegate.oip.host import ModelHost
from tidegate.outcome import ServeError
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.types import LoadReport, TargetId

MOST_MANIFESTS_BYTES: Final = 4 * 2**20
Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger(__name__)


class HelpService:
    """The streams of devices that ask for help.

    Args:
        host: answers; its layers begin with those that count and authorize calls.
        dialled_in: proves who a device is, on the port that both share.
        grant_of: what the device of a name may have; None: it is not helped.
        known: whether the fleet knows this device, by target id; asked where the device proves nothing.
        identify: proves the credentials of devices' callers; None: there are none here.
        max_in_flight: requests of one device under way at once.
    """

    def __init__(
        self,
        host: ModelHost,
        admission: Admission,
        dialled_in: DialInServer,
        *,
        gateway_name: str,
        grant_of: Callable[[str], Grant | None],
        known: Callable[[str], bool],
        identify: Identified | None,
        max_in_flight: int,
        max_streams: int,
        max_body_bytes: int,
        limits: ContentLimits,
    ) -> None:
        self._host = host
        self._admission = admission
        self._dialled_in = dialled_in
        self._grant_of = grant_of
        self._known = known
        self._identify = identify
        self._max_streams = max_streams
        self._askers: dict[str, LinkServer] = {}
        self._reports = count(1)
        self.links = LinkService(
            host,
            name=f"gateway/{gateway_name}",
            epoch=lambda: 0,
            offers=lambda: (),
            load=self._load,
            max_concurrent=max_in_flight,
            max_message_bytes=max_body_bytes + ROOM_BYTES,
            limits=limits,
            is_site=True,
        )

    @property
    def askers(self) -> dict[str, int]:
        """The devices that have a stream here, with how many of their requests are under way."""
        return {name: server.under_way for name, server in self._askers.items()}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve both methods on a gRPC server that has not started yet."""
        methods = {
            HELP_METHOD: grpc.stream_stream_rpc_method_handler(self.exchange),
            MODELS_METHOD: grpc.unary_unary_rpc_method_handler(self.models),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    async def exchange(self, _requests: object, context: Context) -> None:
        """The gRPC method of a device's stream."""
        asker, device = await self._enter(context)
        stream = await ServedStream.open(context)  # nothing is awaited from here until it has its place
        if asker not in self._askers and len(self._askers) >= self._max_streams:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(self._askers)} devices have streams for help"
            )
        host = AskerHost(self._host, self._admission, device, asker, identify=self._identify)
        server = self.links.server_for(stream, host=host, host_for=host.bearing)
        before, self._askers[asker] = self._askers.get(asker), server
        if before is not None:
            before.session.finish("a newer stream of this device took its place")
        running = asyncio.create_task(self.links.run(server), name=f"help for {asker}")
        try:
            with self._dialled_in.follow(context) as lapse:
                await asyncio.wait((running, lapse), return_when=asyncio.FIRST_COMPLETED)
                lapsed: ServeError | None = None if running.done() else lapse.result()
        finally:
            await cancel_and_wait(running)
            if self._askers.get(asker) is server:
                del self._askers[asker]
        if lapsed is not None:
            log.warning("a device's stream for help was cut: its proof is good no more", asker=asker)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, lapsed.message)
        log.info("a device's stream for help ended", asker=asker, reason=running.result())

    async def models(self, _message: bytes, context: Context) -> bytes:
        """The gRPC method that tells a device with which models it may be helped: a JSON list of manifests."""
        asker, device = await self._enter(context)
        manifests = AskerHost(self._host, self._admission, device, asker).manifests()
        told = msgspec.json.encode(manifests)
        if len(told) > MOST_MANIFESTS_BYTES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(manifests)} manifests of {len(told)} bytes")
        return told

    async def _enter(self, context: Context) -> tuple[str, Identity]:
        """The device that asks, and what it may have; aborts where it may nothing."""
        if self.links.draining or self._dialled_in.closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is shutting down")
        claimed = str(dict(context.invocation_metadata() or ()).get(ASKER_KEY, ""))
        proven = await self._dialled_in.proof(context)
        known = self._known(claimed)
        why_not = why_not_asker(claimed, proven=proven, known=known)
        grant = None if why_not else self._grant_of(TargetId.parse(claimed).name)
        if grant is None:
            words = why_not or f"no entry of `help.devices` at this gateway is for {claimed}"
            self._dialled_in.complain(context.peer() or "", words)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, words)
            raise AssertionError("abort raises")
        return claimed, Identity(f"device:{claimed}", grant)

    def _load(self) -> LoadReport:
        return LoadReport(0, next(self._reports), 0, self._admission.in_flight, 0.0)

    def __repr__(self) -> str:
        return f"<HelpService {len(self._askers)} devices, {self.links.under_way} under way>"
