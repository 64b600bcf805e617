"""Accepts the link streams that devices dial, on a port of its own, and keeps one a device for the directory.

The port (`link_port`) is not the callers' gRPC port. Callers may be anybody, devices may not: over TLS this port
requires a device's certificate in the handshake, which a port for callers cannot. A device's stream lives for ever and
its address is a NAT's, shared by hundreds, so limits that are made for callers would hit the wrong peers. And a
firewall can let devices in without letting them call.

    connection → proof (certificate, or key, or none) → stream → hello within GREET_WITHIN_S → welcome → used → left

A stream lives no longer than its proof: it is cut when its key is revoked or its certificate expires, and the device
dials again with what it has by then.

Bounded: the streams without a hello, the time that they have for it, and, in `gateway/core/access/dial_in.py`,
everything else. A refusal is a gRPC status with words, so that the device's own log names the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Any, Final

import grpc
import structlog

from gateway.core.access.dial_in import DialInAdmission
from gateway.core.fleet.name_claims import NameClaim, NameClaims
from gateway.targets.accepted_link import AcceptedLink
from tidegate import __version__, clock
from tidegate.link.client import MAX_MESSAGE_BYTES
from tidegate.link.frames import Greeting
from tidegate.link.session import KeepaliveTiming
from tidegate.link.streams import METHOD, SERVICE, ServedStream
from tidegate.outcome import ServeError
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.security.certificate_identity import identity_of
from tidegate.types import TargetId

GREET_WITHIN_S: Final = 5.0
MAX_UNGREETED: Final = 256
COMPLAIN_EVERY_S: Final = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
Identify = Callable[[Context], Awaitable[str]]  # → "edge/NAME"; ServeError where it may not
Follow = Callable[[Context], AbstractContextManager[asyncio.Future[ServeError]]]
log = structlog.get_logger(__name__)


class DialInServer:
    """The streams that devices have dialled. `links` has the one of each that may be used, by target id.

    Args:
        known: whether the fleet knows this device, by target id; asked where the device proves nothing.
        encrypted: whether TLS requires a certificate, which then names the device.
        claims: of devices' names, shared with what is heard over MQTT.

    `on_in` is called with a stream that was let in, `on_left` when it has ended and none has taken its place.
    """

    def __init__(
        self,
        *,
        gateway_name: str,
        max_streams: int,
        known: Callable[[str], bool] = lambda _id: True,
        encrypted: bool = False,
        heartbeat: KeepaliveTiming = KeepaliveTiming(),  # noqa: B008 - frozen
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        claims: NameClaims | None = None,
    ) -> None:
        self.claims = NameClaims() if claims is None else claims
        self.links: dict[str, AcceptedLink] = {}
        self.on_in: Callable[[AcceptedLink], None] = lambda _link: None
        self.on_left: Callable[[AcceptedLink], None] = lambda _link: None
        self._greeting = Greeting(f"gateway/{gateway_name}", 0, __version__)
        self._reception = DialInAdmission(max_streams)
        self._known = known
        self._identify: Identify | None = None
        self.follow: Follow = _never
        self._encrypted = encrypted
        self._heartbeat = heartbeat
        self._max_message_bytes = max_message_bytes
        self._ungreeted = 0
        self._quiet_until, self._unsaid = -inf, 0
        self.closed = ""

    @property
    def ungreeted(self) -> int:
        """How many streams stand whose hello has not come yet."""
        return self._ungreeted

    @property
    def unsaid(self) -> int:
        """How many refusals have not been logged since the last that was; the next log line reports them."""
        return self._unsaid

    def add_to(self, server: grpc.aio.Server, identify: Identify | None = None, follow: Follow | None = None) -> None:
        """Serve the link stream on a gRPC server that has not started yet.

        Args:
            identify: the peer's identity, from what it shows beside a certificate.
            follow: a future that gets the refusal once the peer's proof is good no more; None: it proves nothing.
        """
        self._identify = identify
        self.follow = follow or _never
        handler = grpc.stream_stream_rpc_method_handler(self.exchange)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    def close(self, reason: str) -> None:
        """End every stream, and let none in any more."""
        self.closed = reason
        for link in tuple(self.links.values()):
            link.finish(reason)

    async def exchange(self, _requests: object, context: Context) -> None:
        """The gRPC method."""
        if self.closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.closed)
        if self._ungreeted >= MAX_UNGREETED:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams have not said hello yet")
        self._ungreeted += 1
        counted = True
        lapsed = ""
        try:
            link = AcceptedLink(
                await ServedStream.open(context),
                self._greeting,
                peer=context.peer() or "",
                welcome=self._welcome,
                proven=await self.proof(context),
                heartbeat=self._heartbeat,
                max_message_bytes=self._max_message_bytes,
            )
            running = asyncio.create_task(link.run(), name=f"link from {link.peer}")
            try:
                greeted = await _has_greeted(link, running)
                self._ungreeted -= 1
                counted = False
                if greeted:
                    with self.follow(context) as lapse:
                        await asyncio.wait((running, lapse), return_when=asyncio.FIRST_COMPLETED)
                        lapsed = "" if running.done() else lapse.result().message
                reason = lapsed or (running.result() if greeted else f"no hello within {GREET_WITHIN_S:g} s")
            finally:
                await cancel_and_wait(running)
                self._forget(link)
        finally:
            self._ungreeted -= counted
        if lapsed:
            log.warning("a device's stream was cut: its proof is good no more", target=link.id, reason=lapsed)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, lapsed)
        await self._part(link, reason, context)

    async def _part(self, link: AcceptedLink, reason: str, context: Context) -> None:
        if link.greeting is None:
            self.complain(link.peer, reason)
        elif link.refused:
            self.complain(link.peer, link.refused)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, link.refused)
        else:
            log.info("a device's stream ended", target=link.id, peer=link.peer, reason=reason)

    async def proof(self, context: Context) -> str:
        """The peer's identity; "" where no proof is required. Aborts where proof is required and missing."""
        if self._encrypted:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            identity = identity_of(name.decode(errors="replace") for name in names)
            if identity is None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this needs a device's certificate")
            return str(identity)
        if self._identify is None:
            return ""
        try:
            return await self._identify(context)
        except ServeError as error:
            self.complain(context.peer() or "", error.message)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
            raise

    def _welcome(self, link: AcceptedLink, greeting: Greeting) -> str:
        name = greeting.name
        if self.closed:
            return self.closed
        now, before = clock.now(), self.links.get(name)
        why_not = self._reception.why_not_named(name, proven=link.proven, known=self._known(name), now=now)
        if why_not:
            return why_not
        device = TargetId.parse(name).name
        if before is not None and before.open and before.greeting is not None:
            self.claims.still_here(device, before.greeting.boot, now)
        claim = NameClaim(greeting.boot, greeting.epoch, link.peer, now - greeting.uptime_s)
        conflict = self.claims.claim(device, claim, now)
        if conflict is not None:
            return conflict.refusal(now)
        keeps_name = self.claims.keeps(device, greeting.boot)
        why_not = self._reception.why_not_now(name, greeting.epoch, keeps_name=keeps_name)
        if why_not:
            return why_not
        self._reception.enter(name, greeting.epoch)
        self.links[name] = link
        log.info("a device dialled in", target=name, peer=link.peer)
        self.on_in(link)
        if before is not None:
            self._replace(before, device, greeting.boot, now)
        return ""

    def _replace(self, before: AcceptedLink, device: str, boot: str, now: float) -> None:
        """End the stream whose place another has taken; another agent's is told whose name it is."""
        said = before.greeting.boot if before.greeting is not None else ""
        words = self.claims.refusal_of(device, said, now) if said != boot else ""
        if words:
            before.refuse(words)
        else:
            before.finish("a newer stream of this device took its place")

    def _forget(self, link: AcceptedLink) -> None:
        if self.links.get(link.id) is link:
            del self.links[link.id]
            self._reception.leave(link.id)
            self.on_left(link)

    def complain(self, peer: str, reason: str) -> None:
        """Log a line a second at most: a peer may be refused as often as it dials."""
        now = clock.now()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        log.warning("refused a device that dialled", peer=peer, reason=reason, unsaid=self._unsaid)
        self._quiet_until, self._unsaid = now + COMPLAIN_EVERY_S, 0

    def __repr__(self) -> str:
        return f"<DialInServer {self._reception!r}, {self._ungreeted} ungreeted>"


@contextmanager
def _never(_context: Context) -> Iterator[asyncio.Future[ServeError]]:
    lapse: asyncio.Future[ServeError] = asyncio.get_running_loop().create_future()
    yield lapse
    lapse.cancel()


async def _has_greeted(link: AcceptedLink, running: asyncio.Task[str]) -> bool:
    """Wait for the hello, the end or too long; False when there was neither."""
    greeted = asyncio.create_task(link.greeted_once.wait(), name="hello")
    try:
        done, _ = await asyncio.wait((greeted, running), timeout=GREET_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        await cancel_and_wait(greeted)
