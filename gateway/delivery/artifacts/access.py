"""Who may fetch model files: devices by their certificates, or else whom the gateway's `auth` knows.

Callers' certificates may be of another CA than the parts' (`tls.client_ca`); devices' are always of the parts' own.
"""

from __future__ import annotations

from aiohttp import web

from gateway.delivery.artifacts.server import Admit
from gateway.identity.guard import GatewayGuard
from tidegate.oip.http.guard import credentials_over_http
from tidegate.security.tls import Tls
from tidegate.servers.role_guard import ServerSecurity

PROTOCOL = "artifacts-http"


def secured_for_devices(tls: Tls | None) -> ServerSecurity | None:
    """TLS with a device's certificate demanded, unless `tls.require_client_cert` is false; None: no TLS."""
    if tls is None:
        return None
    return ServerSecurity(Tls(tls.config.model_copy(update={"client_ca": None})), frozenset({"edge"}))


def credential_check(guard: GatewayGuard | None, secured: ServerSecurity | None) -> Admit | None:
    """Asks for a credential where no certificate has been demanded; None: everybody may."""
    if guard is None or (secured is not None and secured.checks_roles):
        return None

    async def admit(request: web.Request) -> None:
        await guard.identify(credentials_over_http(request, PROTOCOL))

    return admit
