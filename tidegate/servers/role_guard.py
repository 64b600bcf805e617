"""Admits callers whose certificate has the right role, over a TLS version that is new enough.

A certificate that the CA has signed opens a connection; it does not say that an edge may send work to another edge.
Edges are in strangers' hands, and their keys with them, so each server requires a role. The role is checked at each
call, in the certificate that the transport has verified; nothing is taken from headers. So is its end, which the
transport looks at in the handshake only, and a stream ends with its caller's certificate, and with this server's own.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from structlog import get_logger

from tidegate import clock
from tidegate.outcome import BadCredential
from tidegate.security.certificate_expiry import earliest_expiry_utc_s, until_expiry
from tidegate.security.certificate_identity import NotAllowed, Role, check_role
from tidegate.security.tls import Tls

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """The TLS of a port: the certificate that it presents, and the roles that it admits.

    Attributes:
        roles: the roles that are admitted; empty: every role, and callers without a certificate unless
            `require_client_cert`.
        narrowed: over gRPC, by service: the roles that may call it, if not all of `roles`.
    """

    tls: Tls
    roles: frozenset[Role] = frozenset()
    narrowed: Mapping[str, frozenset[Role]] = field(default_factory=dict)

    @property
    def require_client_cert(self) -> bool:
        required = self.tls.config.require_client_cert
        return bool(self.roles) if required is None else required

    @property
    def checks_roles(self) -> bool:
        return bool(self.roles) and self.require_client_cert


class RoleGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses a caller without one of the roles, with PERMISSION_DENIED and the reason."""

    def __init__(
        self,
        roles: Collection[Role],
        min_version: str,
        narrowed: Mapping[str, frozenset[Role]] | None = None,
        own: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        """Args:
        own: the certificate, PEM, that this server presents now.
        """
        self._own = own
        self._roles = frozenset(roles)
        self._narrowed = narrowed or {}
        self._min_version = f"TLSv{min_version}".encode()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        service = str(handler_call_details.method).strip("/").partition("/")[0]
        roles = self._narrowed.get(service, self._roles)
        guarded = self._guarded(getattr(handler, kind), roles, lasting=kind != "unary_unary")
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _guarded(
        self, behaviour: Callable[[Any, Context], Any], roles: frozenset[Role], *, lasting: bool
    ) -> Callable[[Any, Context], Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                expires_at_s = await self.admit(context, roles)
                try:
                    async with until_expiry(self._end(expires_at_s), "the caller's or this server's"):
                        async for answer in behaviour(request, context):
                            yield answer
                except BadCredential as error:
                    await self._refuse(context, str(error))

            return stream

        async def last(request: Any, context: Context) -> Any:
            expires_at_s = await self.admit(context, roles)
            try:
                async with until_expiry(self._end(expires_at_s), "the caller's or this server's"):
                    return await behaviour(request, context)
            except BadCredential as error:
                await self._refuse(context, str(error))

        if lasting:
            return last

        async def answer(request: Any, context: Context) -> Any:
            await self.admit(context, roles)
            return await behaviour(request, context)

        return answer

    def _end(self, expires_at_s: float) -> float:
        return min(expires_at_s, earliest_expiry_utc_s((self._own(),)))

    async def admit(self, context: Context, roles: frozenset[Role] | None = None) -> float:
        """Return when the peer's certificate ends.

        The call is aborted unless the certificate is good now and has one of `roles` (None: of the guard's own), over a
        TLS version allowed.
        """
        seen = context.auth_context()
        version = next(iter(seen.get("ssl_tls_version", ())), self._min_version)  # gRPC before 1.75 does not tell
        if version < self._min_version:
            await self._refuse(context, f"this needs {self._min_version.decode()}, not {version.decode()}")
        try:
            check_role(
                (name.decode(errors="replace") for name in seen.get("x509_subject_alternative_name", ())),
                roles or self._roles,
            )
        except NotAllowed as error:
            await self._refuse(context, str(error))
        expires_at_s = earliest_expiry_utc_s(seen.get("x509_pem_cert", ()))
        if clock.utc_s() >= expires_at_s:
            await self._refuse(context, "your certificate has expired since this connection began: connect again")
        return expires_at_s

    async def _refuse(self, context: Context, why: str) -> None:
        log.warning("refused a caller", peer=context.peer(), reason=why)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    def __repr__(self) -> str:
        return f"<RoleGuard {', '.join(sorted(self._roles))} over {self._min_version.decode()}>"


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
