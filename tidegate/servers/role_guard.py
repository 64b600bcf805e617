"""Who may knock: callers whose certificate has the right role, over a TLS version that is new enough.

A certificate that the CA has signed opens a connection; it doesn't say that an edge may ask another edge to work for
it. Edges are in strangers' hands, and their keys with them: so a part of ours that is called asks for a role. Checked
at each call, from what the transport has verified; nothing is taken from headers.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from structlog import get_logger

from tidegate.security.certificate_identity import NotAllowed, Role, check_role
from tidegate.security.tls import Tls

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """How a door is locked: the certificate it shows, and whom it lets in.

    Attributes:
        roles: whose certificates are let in; none: anybody's, and whoever shows none unless `require_client_cert`.
        narrowed: over gRPC, by service: who may call that one, where it is not all of those.
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
    """Refuses, with PERMISSION_DENIED and words, who has not one of the roles."""

    def __init__(
        self, roles: Collection[Role], min_version: str, narrowed: Mapping[str, frozenset[Role]] | None = None
    ) -> None:
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
        guarded = self._guarded(getattr(handler, kind), self._narrowed.get(service, self._roles))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _guarded(
        self, behaviour: Callable[[Any, Context], Any], roles: frozenset[Role]
    ) -> Callable[[Any, Context], Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                await self._admit(context, roles)
                async for answer in behaviour(request, context):
                    yield answer

            return stream

        async def answer(request: Any, context: Context) -> Any:
            await self._admit(context, roles)
            return await behaviour(request, context)

        return answer

    async def _admit(self, context: Context, roles: frozenset[Role] | None = None) -> None:
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

    async def _refuse(self, context: Context, why: str) -> None:
        log.warning("refused a caller", peer=context.peer(), reason=why)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    def __repr__(self) -> str:
        return f"<RoleGuard {', '.join(sorted(self._roles))} over {self._min_version.decode()}>"


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
