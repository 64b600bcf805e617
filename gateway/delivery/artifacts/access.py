"""Access to model files: a device's certificate, or else a credential of the gateway's `auth`.

Callers' certificates may come from a CA of their own (`tls.client_ca`); devices' certificates always come from the CA
of Tidegate's own processes. A download that is under way as what its device has shown lapses is cut: the device comes
back with what it has by then, and goes on where it was.
"""

from __future__ import annotations

from contextlib import ExitStack

from aiohttp import web

from gateway.delivery.artifacts.server import Admit
from gateway.identity.guard import GatewayGuard
from gateway.identity.operator_access import hang_up_at
from tidegate import clock
from tidegate.oip.http.guard import credentials_over_http
from tidegate.outcome import BadCredential
from tidegate.security.certificate_expiry import peer_expiry_utc_s
from tidegate.security.standing import StandingWatch
from tidegate.security.tls import Tls
from tidegate.servers.role_guard import ServerSecurity

PROTOCOL = "artifacts-http"


def secured_for_devices(tls: Tls | None) -> ServerSecurity | None:
    """Return TLS that demands a device's certificate, unless `tls.require_client_cert` is false; None: no TLS."""
    if tls is None:
        return None
    return ServerSecurity(Tls(tls.config.model_copy(update={"client_ca": None})), frozenset({"edge"}))


def credential_check(guard: GatewayGuard | None, secured: ServerSecurity | None) -> Admit | None:
    """Return a check for a credential if no certificate is demanded; None: no credential is required."""
    if guard is None or (secured is not None and secured.checks_roles):
        return None

    async def admit(request: web.Request, held: ExitStack) -> None:
        presented = credentials_over_http(request, PROTOCOL)
        await guard.identify(presented)
        hang_up_at(held.enter_context(guard.follow(presented)), request)

    return admit


def certificate_check(standing: StandingWatch) -> Admit:
    """Return what follows a device's certificate, which the port has demanded: a download ends with it."""

    async def admit(request: web.Request, held: ExitStack) -> None:
        expires_at = peer_expiry_utc_s(request.get_extra_info("peercert"))

        async def check() -> None:
            if clock.utc_s() >= expires_at:
                raise BadCredential("the device's certificate has expired")

        hang_up_at(held.enter_context(standing.follow(check)), request)

    return admit
