"""The port that devices dial (`link_port`): how it is secured, and how its address is advertised to devices.

tls     a device's certificate, edge/NAME, and no other certificate; a stream ends when its certificate does
auth    without TLS: an API key with the right `dial-in`, whose tenant is the device's name; a stream ends with the key
neither any peer that reaches the port, under the name of a device that the fleet knows
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final

import grpc
import structlog

from gateway.config.gateway import GatewayConfig
from gateway.core.fleet.name_claims import NameClaims
from gateway.help.help_service import HelpService
from gateway.identity.guard import GatewayGuard
from gateway.targets.dial_in import Context, DialInServer, Follow, Identify
from tidegate import clock
from tidegate.link.client import ROOM_BYTES
from tidegate.link.streams import MAX_ENVELOPE_BYTES
from tidegate.oip.grpc.guard import credentials_over_grpc
from tidegate.oip.guard import PresentedCredentials
from tidegate.outcome import BadCredential, ServeError
from tidegate.security.certificate_expiry import earliest_expiry_utc_s
from tidegate.security.standing import StandingWatch
from tidegate.security.tls import Tls
from tidegate.servers.address import is_loopback
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.limits import ServerLimits
from tidegate.servers.role_guard import ServerSecurity
from tidegate.types import TargetId

WILDCARDS: Final = ("", "0.0.0.0", "::")
GRACE_S: Final = 1.0
log = structlog.get_logger(__name__)


def dial_in_server_of(
    config: GatewayConfig, tls: Tls | None, known: Callable[[str], bool], claims: NameClaims
) -> DialInServer | None:
    """The server that accepts devices' streams; None without `link_port`."""
    if config.link_port is None:
        return None
    return DialInServer(
        gateway_name=config.name,
        max_streams=config.max_dialled_in,
        known=known,
        encrypted=tls is not None,
        max_message_bytes=config.max_body_bytes + ROOM_BYTES,
        claims=claims,
    )


@asynccontextmanager
async def link_port(
    dialled_in: DialInServer,
    config: GatewayConfig,
    tls: Tls | None,
    guard: GatewayGuard | None,
    limits: ServerLimits,
    help: HelpService | None = None,
) -> AsyncIterator[str]:
    """Open the port and yield its "HOST:PORT"; leaving it ends every stream.

    Args: help: answers devices that ask for help, on the same port; None: this gateway helps none.

    Raises:
        StartError: the address cannot be listened on.
    """
    assert config.link_port is not None
    standing = StandingWatch()
    follow = _certificate_follower(standing) if tls is not None else _key_follower(guard)
    identify = _by_key(guard) if guard is not None else None

    def add(server: grpc.aio.Server) -> None:
        dialled_in.add_to(server, identify=identify, follow=follow)
        if help is not None:
            help.add_to(server)

    port = open_grpc_server(
        add,
        config.host,
        config.link_port,
        max_message_bytes=MAX_ENVELOPE_BYTES,
        grace_s=GRACE_S,
        key="link_port",
        secured=ServerSecurity(tls, frozenset({"edge"})) if tls else None,
        limits=limits,
    )
    if limits.connections < config.max_dialled_in:
        most = {"connections": limits.connections, "max_dialled_in": config.max_dialled_in}
        log.info("open files limit the devices that can dial in: raise the limit (nofile) for more", **most)
    async with standing, port as (address, server):
        await server.start()
        if tls is None and config.auth is None and not is_loopback(config.host):
            log.warning("devices dial in without proof of who they are: set `tls`, or `auth`", link=address)
        try:
            yield address
        finally:
            dialled_in.close(f"gateway {config.name} is shutting down")
            if help is not None:
                help.links.finish(f"gateway {config.name} is shutting down")


def advertised_dial_address(config: GatewayConfig, address: str) -> tuple[str, ...]:
    """The address that devices are sent; none where only the configuration of each device can know it."""
    if config.link_advertise is not None:
        return (config.link_advertise,)
    if config.host in WILDCARDS:
        log.info("devices are not told where to dial: set `link_advertise`, or their `gateways`", link=address)
        return ()
    return (address,)


def _by_key(guard: GatewayGuard) -> Identify:
    async def identify(context: Context) -> str:
        return str(TargetId("edge", (await guard.with_right(_presented(context), "dial-in")).tenant))

    return identify


def _key_follower(guard: GatewayGuard | None) -> Follow | None:
    return None if guard is None else lambda context: guard.follow(_presented(context), "dial-in")


def _certificate_follower(standing: StandingWatch) -> Follow:
    def follow(context: Context) -> AbstractContextManager[asyncio.Future[ServeError]]:
        shown = context.auth_context().get("x509_pem_cert", ())
        expires_at = earliest_expiry_utc_s(shown)

        async def check() -> None:
            if clock.utc_s() >= expires_at:
                raise BadCredential("the device's certificate has expired")

        return standing.follow(check)

    return follow


def _presented(context: Context) -> PresentedCredentials:
    return credentials_over_grpc(context.invocation_metadata() or (), context, "link")
