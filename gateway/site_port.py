"""The port that upstream gateways dial (`site_port`): through it this gateway is one target of theirs, a site.

The other end of `gateway/targets/site.py`. A request comes in as a frame of the link stream, with what its gateway
knows of the caller, meets the same layers as any other but the caller's authentication, and is placed on this
gateway's own targets. Beside the answers the port tells a summary of the whole site, once a second
(`gateway/core/fleet/site_summary.py`), instead of a message for each device.

tls     a certificate of a gateway, gateway/NAME, and no other certificate
none    any peer that reaches the port: it is believed what it says of its callers, as edges and pools believe a gateway

Who counts: requests, bytes and tokens of a tenant's quota are counted where its caller asked, and nowhere else; the
seconds of compute and the places in flight are this site's, and count here under the tenant's name. Admission, overload
and quarantine are this site's own, so that an upstream gateway cannot take from it what its own callers could not.

A request that has this gateway's name in its path is refused (`gateway/layers/from_gateway.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import grpc
import structlog

from gateway.config.gateway import GatewayConfig
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.site_summary import SiteSummary
from tidegate import clock
from tidegate.link.client import ROOM_BYTES
from tidegate.link.service import LinkService
from tidegate.link.streams import MAX_ENVELOPE_BYTES
from tidegate.oip.host import ModelHost
from tidegate.security.tls import Tls
from tidegate.servers.address import is_loopback
from tidegate.servers.grpc_server import open_grpc_server
from tidegate.servers.limits import ServerLimits
from tidegate.servers.role_guard import ServerSecurity

GRACE_S: Final = 1.0
log = structlog.get_logger(__name__)


def site_service_of(config: GatewayConfig, host: ModelHost, fleet: Fleet, in_flight: Callable[[], int]) -> LinkService:
    """The link streams of upstream gateways.

    Args:
        host: answers their calls; its layers begin with `from_gateway`.
        in_flight: how many requests are under way here, of whatever caller.
    """
    summary = SiteSummary(fleet, int(clock.utc_s() * 1e6), in_flight)
    return LinkService(
        host,
        name=f"site/{config.name}",
        epoch=lambda: summary.epoch,
        offers=lambda: summary.offers(clock.now()),
        load=lambda: summary.load(clock.now()),
        max_concurrent=config.max_in_flight,
        max_message_bytes=config.max_body_bytes + ROOM_BYTES,
        limits=config.limits.content,
        is_site=True,
    )


def _add(service: LinkService, server: grpc.aio.Server) -> None:
    service.add_to(server)


@asynccontextmanager
async def site_port(
    service: LinkService, config: GatewayConfig, tls: Tls | None, limits: ServerLimits
) -> AsyncIterator[str]:
    """Open the port and yield its "HOST:PORT".

    Raises:
        StartError: the address cannot be listened on.
    """
    assert config.site_port is not None
    port = open_grpc_server(
        partial(_add, service),
        config.host,
        config.site_port,
        max_message_bytes=MAX_ENVELOPE_BYTES,
        grace_s=GRACE_S,
        key="site_port",
        secured=ServerSecurity(tls, frozenset({"gateway"})) if tls else None,
        limits=limits,
    )
    async with port as (address, server):
        await server.start()
        if tls is None and not is_loopback(config.host):
            log.warning("any peer that reaches the port may pass for an upstream gateway: set `tls`", site=address)
        yield address
