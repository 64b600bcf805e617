"""The admin port put together: its routes, and the middlewares that check and audit each request.

On loopback looking requires no credential, and changing something requires the operator's token, or the right `admin`
if `auth` is configured. On other addresses the right `admin` is required, on every route but the console's static page
and `/healthz`. Changes are audited in each case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.catalog import Catalog
from gateway.config.gateway import GatewayConfig
from gateway.core.access.broker_rights import BrokerRights
from gateway.core.admission.admission import Admission
from gateway.core.fleet.fleet import Fleet
from gateway.core.peers.peers import Peers
from gateway.core.versions.canary import CanaryRollout
from gateway.delivery.trials import Trials
from gateway.identity.audit import Audit
from gateway.identity.guard import GatewayGuard
from gateway.identity.operator_access import OPEN, addresses_only, right_for_changes, right_required, token_for_changes
from gateway.observe.conditions import OtherCondition
from gateway.observe.traffic_recorder import TrafficRecorder
from gateway.operate.admin import AllProcesses, admin_routes
from gateway.operate.agreement_report import agreement_rows
from gateway.operate.configuration_report import configuration_json
from gateway.operate.console.history import ConsoleHistory
from gateway.operate.console.page import Console, page_files
from gateway.operate.console.snapshot import ConsoleView
from gateway.operate.devices import device_routes
from gateway.operate.log_levels import log_level_routes
from gateway.operate.trial_report import trial_rows
from gateway.serving.dispatcher import Dispatcher
from gateway.serving.shadowing import Shadowing
from gateway.targets.directory import Directory
from tidegate.caller import Right
from tidegate.oip.http.server import error_middleware
from tidegate.servers.address import is_loopback
from tidegate.servers.operator_token import OperatorToken


def operator_routes(
    *,
    name: str,
    fleet: Fleet,
    catalog: Catalog,
    dispatcher: Dispatcher,
    directory: Directory,
    broker_rights: BrokerRights,
    admission: Admission,
    watch: ConsoleHistory | None,
    policy: str,
    rollouts: Callable[[], Iterable[CanaryRollout]],
    trials: Trials,
    shadowing: Shadowing | None,
    others: Callable[[float], list[OtherCondition]],
    peers: Peers,
    processes: AllProcesses | None = None,
    admitted: Callable[[], dict[str, Any]] | None = None,
    cached: Callable[[], list[dict[str, Any]]] = list,
    configured: Callable[[float], dict[str, Any]] = lambda _now: configuration_json(None, 0.0),
    helped: Callable[[], list[dict[str, Any]]] = list,
) -> tuple[list[web.RouteDef], Console | None]:
    """Return the admin port's routes, and the console if `watch` is given: it is entered by the caller.

    Args:
        others: the conditions at an instant that are of no target.
        processes: of a gateway with `workers`; None: this is all.
        admitted: the console's figures of what all of them let in.
        cached: by model, what is answered from the response cache.
        configured: how devices' settings are to those that are desired.
        helped: by device, the requests that it asks for now.
    """
    recordings = TrafficRecorder(dispatcher.recorder, fleet, gateway=name, policy=policy, serves=processes is None)
    admin = [
        *admin_routes(
            fleet,
            catalog,
            dispatcher,
            directory.refused,
            broker_rights,
            others=others,
            found=directory.found,
            peers=peers,
            processes=processes,
            cached=cached,
            configured=configured,
            helped=helped,
        ),
        *device_routes(directory.devices),
        *log_level_routes(),
        web.get("/debug/recording", recordings.stream),
    ]
    if watch is None:
        return admin, None
    console_view = ConsoleView(
        name=name,
        watch=watch,
        fleet=fleet,
        admission=admission,
        catalog=catalog,
        found=directory.found,
        refused=directory.refused,
        rollouts=rollouts,
        trials=lambda: trial_rows(trials),
        agreement=lambda now: agreement_rows(shadowing, now),
        others=others,
        admitted=admitted,
    )
    console = Console(console_view)
    return [*admin, *console.routes()], console


def admin_middlewares(
    config: GatewayConfig, guard: GatewayGuard | None, audit: Audit, token: OperatorToken
) -> list[Middleware]:
    """Return the admin port's middlewares: they depend on whether its address is a loopback one."""
    opened = OPEN | page_files().keys()
    if not is_loopback(config.admin_host):
        return require_right(guard, audit, "admin", opened)
    changes = token_for_changes(token, audit) if guard is None else right_for_changes(guard, audit, opened)
    return [addresses_only, changes]


def require_right(
    guard: GatewayGuard | None, audit: Audit, right: Right, opened: Collection[str] = OPEN
) -> list[Middleware]:
    """Return the middlewares that require a right, and that turn refusals into answers."""
    assert guard is not None  # the configuration requires `auth` here
    return [error_middleware, right_required(right, guard, audit, opened)]
