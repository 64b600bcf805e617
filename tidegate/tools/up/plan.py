"""The plan of `tidegate up` fixes all ports, configurations, command lines and their order before anything starts.

One number decides every port, so that two systems side by side need one flag: gateway HTTP, gRPC, metrics, admin,
broker and pool from N up, then gRPC and HTTP of each edge. With N = 8000 the first three are Triton's.

Simulated links (`links.py`) come after all of these; the parts behind them are reached through them. Then comes the
port where edges fetch model files, with `--ship`, then four for each gateway beside the first, and six for each site.

With `--sites` the edges are shared out among sites, each with a broker and a gateway of its own. The first gateway then
has no broker: it is a region's, and its targets are the pool and the sites (docs/sites.md).

Only the gateway listens where `--host` says; broker, pool and edges stay on loopback, since nothing outside this
machine talks to them directly.

The order of `processes` is the order of starting. Pool and edges measure at warm-up what their work costs, and the
placement trusts those figures: two that measure at once on one machine would both report twice the truth. So each
starts when the one before is ready, but for edges after the first: they get its figures (`many_edges.py`) and may start
side by side. The gateway comes last, so that a caller that reaches it reaches everything, and links just before it, so
that their timelines do not run while others warm up; the broker's comes with the broker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tidegate.fleet.topics import DEFAULT_FLEET
from tidegate.tools.up import links
from tidegate.tools.up.links import LinkPlan

Role = Literal["broker", "pool", "edge", "gateway", "link"]

LOOPBACK: Final = "127.0.0.1"
PORT_MAX: Final = 65535
PORTS_BEFORE_EDGES: Final = 6
PORTS_PER_EDGE: Final = 2
PORTS_PER_GATEWAY: Final = 4
PORTS_PER_SITE: Final = 6  # broker, then the gateway's: HTTP, gRPC, metrics, admin, site
MOST_GATEWAYS: Final = 16
MOST_SITES: Final = 16
MOST_WORKERS: Final = 64
FLEET: Final = DEFAULT_FLEET
SITE: Final = "site-"  # begins a site gateway's name
PORTS_FLAG: Final = "--ports-from"
GATEWAY_DRAIN_S: Final = 30.0
# Less than a pool of its own takes: a user waits for it, and real calls correct what is measured roughly.
POOL_WARMUP_S: Final = 10.0


class PlanError(Exception):
    """Options that cannot work together; the message names the flag."""


@dataclass(frozen=True, slots=True)
class Secure:
    """Where `--secure` keeps certificates, keys and the broker's files (`secure.py` makes them)."""

    pki: Path
    mosquitto: str  # the program
    broker_dir: Path
    keys_file: Path
    api_key_file: Path

    @property
    def ca(self) -> Path:
        return self.pki / "ca.crt"

    def section(self, role: str, name: str) -> dict[str, str]:
        """A part's `tls`."""
        pair = self.pki / role / name
        return {"cert": f"{pair}.crt", "key": f"{pair}.key", "ca": str(self.ca)}


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options. `broker` is the address of a broker that runs already, or None for the embedded one."""

    data_dir: Path
    models: Path
    edges: int = 2
    gateways: int = 1
    sites: int = 0
    gateway_workers: int = 1  # of each gateway
    ports_from: int = 8000
    host: str = LOOPBACK
    broker: str | None = None
    requests: bool = True  # whether the gateway reports each request
    cores: int = 2  # of this machine, all parts together
    links: tuple[str, ...] = ()  # PART=SCENARIO, each
    seed: int = 1  # of the links' chance
    secure: Secure | None = None  # with encryption, identities and API keys
    ship: Path | None = None  # the public key of rollouts to the edges
    demos: tuple[str, ...] = ()  # the demo models that are wanted
    own_models: bool = False  # the user named the repository: what it holds is served, and no demo is added

    @property
    def gateway_names(self) -> tuple[str, ...]:
        return ("gateway", *(f"gateway-{number}" for number in range(2, self.gateways + 1)))


@dataclass(frozen=True, slots=True)
class PlannedPort:
    host: str
    number: int
    purpose: str


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One child: `module` is run with `arguments`, after `config` has been written to `config_path`."""

    role: Role
    name: str
    module: str
    address: str
    ports: tuple[PlannedPort, ...]
    log_path: Path
    arguments: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    config_path: Path | None = None
    env_prefix: str = ""
    site_address: str = ""  # where upstream gateways call this site
    leads_to: str = ""  # the address that this link stands in front of
    control: str = ""  # where this link is controlled

    @property
    def called_at(self) -> str:
        """Where gateways call it."""
        return self.site_address or self.address

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The inherited environment without what would override the plan; the rest of a section is the user's."""
        left = {name: self._undecided(name, value) for name, value in inherited.items()}
        return {name: value for name, value in left.items() if value is not None}

    def _undecided(self, name: str, value: str) -> str | None:
        """What a variable says beside the plan, or None: `ROLLOUT__GROUPS` stands beside `rollout: {keys: …}`."""
        if not self.env_prefix or not name.upper().startswith(self.env_prefix):
            return value
        decided: Any = self.config or {}
        for part in name[len(self.env_prefix) :].lower().split("__"):
            if not isinstance(decided, Mapping):
                return None
            if part not in decided:
                return value
            decided = decided[part]
        return _rest_of_section(value, decided) if isinstance(decided, Mapping) else None


def _rest_of_section(value: str, decided: Mapping[str, Any]) -> str | None:
    """A section, as the environment has it, without the keys that are decided; None where nothing is left of it."""
    try:
        section = json.loads(value)
    except ValueError:
        return value  # for the process to refuse: it names the variable
    rest = _without(section, decided) if isinstance(section, dict) else {}  # `null` would leave out what is decided
    return json.dumps(rest) if rest else None


def _without(section: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    rest = {}
    for key, value in section.items():
        mine = decided.get(key)
        if key not in decided:
            rest[key] = value
        elif isinstance(mine, Mapping) and isinstance(value, dict):
            rest[key] = _without(value, mine)
    return rest


@dataclass(frozen=True, slots=True)
class Plan:
    processes: tuple[ProcessPlan, ...]
    http: str
    grpc: str
    metrics: str
    admin: str
    secure: Secure | None = None
    at_once: int = 1  # how many of those that may start side by side do so

    @property
    def starts(self) -> tuple[tuple[ProcessPlan, ...], ...]:
        """The processes in the order of starting; those that stand together may start side by side."""
        edges = tuple(process for process in self.processes if process.role == "edge")
        return tuple(
            edges[1:] if process in edges[1:] else (process,) for process in self.processes if process not in edges[2:]
        )

    @property
    def ports(self) -> tuple[PlannedPort, ...]:
        return tuple(port for process in self.processes for port in process.ports)

    @property
    def targets(self) -> int:
        """How many targets the first gateway should see: with sites those, and not the edges behind them."""
        sites = [process for process in self.processes if process.name.startswith(SITE)]
        if sites:
            return 1 + len(sites)
        return sum(process.role in ("pool", "edge") for process in self.processes)

    def reached_at(self, process: ProcessPlan) -> str:
        """Where others reach this process: its link's address, or its own."""
        ahead = (link.address for link in self.processes if link.leads_to == process.called_at)
        return next(ahead, process.called_at)


def plan(options: Options) -> Plan:
    """Everything `tidegate up` will start.

    Raises:
        PlanError: the ports do not fit below 65536, or there is nothing to start.
    """
    _check(options)
    ahead = _links(options)
    scheme, mqtt = ("https", "mqtts") if options.secure else ("http", "mqtt")
    broker = options.broker or f"{mqtt}://{LOOPBACK}:{_port(ahead, 'broker', options.ports_from + 4)}"
    edges = tuple(
        _edge(options, number, _broker_of_edge(options, number) or broker, ahead)
        for number in range(1, options.edges + 1)
    )
    sites = tuple(range(1, options.sites + 1))
    brokers = tuple(_broker(options, _site_port(options, site), f"broker-{site}") for site in sites)
    embedded = () if options.broker or sites else (_broker(options, options.ports_from + 4, "broker"),)
    pool = _pool(options)
    gateways = tuple(_gateway(options, number, broker, ahead) for number in range(options.gateways, 0, -1))
    broker_link = tuple(_link(options, ahead["broker"], one) for one in embedded if "broker" in ahead)
    site_gateways = tuple(_site(options, site) for site in sites)
    others = tuple(_link(options, ahead[one.name], one) for one in (pool, *edges, *site_gateways) if one.name in ahead)
    here = LOOPBACK if options.host in ("0.0.0.0", "::", "") else options.host
    first = options.ports_from
    return Plan(
        processes=(*embedded, *brokers, *broker_link, pool, *edges, *site_gateways, *others, *gateways),
        http=f"{scheme}://{here}:{first}",
        grpc=f"{here}:{first + 1}",
        metrics=f"{scheme}://{here}:{first + 2}",
        admin=f"{scheme}://{LOOPBACK}:{first + 3}",
        secure=options.secure,
        at_once=max(1, options.cores),
    )


def _links(options: Options) -> dict[str, LinkPlan]:
    embedded = () if options.broker or options.sites else ("broker",)
    sites = (f"{SITE}{number}" for number in range(1, options.sites + 1))
    parts = ("pool", *(f"edge-{number}" for number in range(1, options.edges + 1)), *sites, *embedded)
    first = options.ports_from + PORTS_BEFORE_EDGES + PORTS_PER_EDGE * options.edges
    try:
        return links.parse(options.links, parts, first)
    except links.LinkOptionError as error:
        raise PlanError(str(error)) from error


def _artifacts_port(options: Options) -> int:
    edges = PORTS_BEFORE_EDGES + PORTS_PER_EDGE * options.edges
    return options.ports_from + edges + links.PORTS_PER_LINK * len(options.links)


def _first_port(options: Options, gateway: int) -> int:
    """The HTTP port of the gateway of this number, from 1; gRPC, metrics and admin follow."""
    return options.ports_from if gateway == 1 else _artifacts_port(options) + 1 + PORTS_PER_GATEWAY * (gateway - 2)


def _site_port(options: Options, site: int) -> int:
    """The first port of the site of this number, from 1: its broker's."""
    return _artifacts_port(options) + 1 + PORTS_PER_GATEWAY * (options.gateways - 1) + PORTS_PER_SITE * (site - 1)


def _broker_of_edge(options: Options, number: int) -> str:
    """The address of the site's broker that this edge reports to; "" without sites. Edges are dealt out in turn."""
    return f"mqtt://{LOOPBACK}:{_site_port(options, 1 + (number - 1) % options.sites)}" if options.sites else ""


def _port(ahead: Mapping[str, LinkPlan], part: str, own: int) -> int:
    """Where this part is reached."""
    return ahead[part].port if part in ahead else own


def _link(options: Options, link: LinkPlan, part: ProcessPlan) -> ProcessPlan:
    name = f"link-{link.part}"
    return ProcessPlan(
        role="link",
        name=name,
        module="tidegate.netsim.proxy",
        address=f"{LOOPBACK}:{link.port}",
        ports=(PlannedPort(LOOPBACK, link.port, name), PlannedPort(LOOPBACK, link.control_port, f"{name}'s control")),
        log_path=_log_path(options, name),
        arguments=link.arguments(LOOPBACK, int(part.called_at.rpartition(":")[2]), options.seed),
        leads_to=part.called_at,
        control=f"http://{LOOPBACK}:{link.control_port}",
    )


def _check(options: Options) -> None:
    if options.edges < 0:
        raise PlanError(f"--edges {options.edges}: there cannot be fewer than none")
    if not 1 <= options.gateways <= MOST_GATEWAYS:
        raise PlanError(f"--gateways {options.gateways}: from 1 to {MOST_GATEWAYS}")
    _check_sites(options)
    if not 1 <= options.gateway_workers <= MOST_WORKERS:
        raise PlanError(f"--gateway-workers {options.gateway_workers}: from 1 to {MOST_WORKERS}")
    last = _artifacts_port(options) - (options.ship is None)
    if options.gateways > 1:
        last = _first_port(options, options.gateways) + PORTS_PER_GATEWAY - 1
    if options.sites:
        last = _site_port(options, options.sites) + PORTS_PER_SITE - 1
    if options.ports_from < 1 or last > PORT_MAX:
        raise PlanError(f"{PORTS_FLAG} {options.ports_from}: the ports {options.ports_from} to {last} do not all exist")


def _check_sites(options: Options) -> None:
    if not 0 <= options.sites <= MOST_SITES:
        raise PlanError(f"--sites {options.sites}: from 0 to {MOST_SITES}")
    if not options.sites:
        return
    if options.edges < options.sites:
        raise PlanError(f"--sites {options.sites} with --edges {options.edges}: each site needs an edge of its own")
    others = {"--broker": options.broker, "--secure": options.secure, "--ship": options.ship}
    if named := [flag for flag, value in others.items() if value is not None]:
        raise PlanError(
            f"--sites and {named[0]} exclude each other here: docs/sites.md has the configurations to write"
        )


def _broker(options: Options, port: int, name: str) -> ProcessPlan:
    secure = options.secure
    module, scheme, what = "tidegate.tools.broker.embedded", "mqtt", "embedded MQTT broker"
    arguments: tuple[str, ...] = ("--host", LOOPBACK, "--port", str(port))
    if secure is not None:
        module, scheme, what = "tidegate.tools.up.mosquitto", "mqtts", "MQTT broker"
        arguments = ("--program", secure.mosquitto, "--conf", str(secure.broker_dir / "mosquitto.conf"), *arguments)
    return ProcessPlan(
        role="broker",
        name=name,
        module=module,
        address=f"{scheme}://{LOOPBACK}:{port}",
        ports=(PlannedPort(LOOPBACK, port, what),),
        log_path=_log_path(options, name),
        arguments=arguments,
    )


def _pool(options: Options) -> ProcessPlan:
    port = options.ports_from + 5
    return ProcessPlan(
        role="pool",
        name="pool",
        module="cloud_pool",
        address=f"{LOOPBACK}:{port}",
        ports=(PlannedPort(LOOPBACK, port, "pool gRPC"),),
        log_path=_log_path(options, "pool"),
        config={
            "name": "pool",
            "host": LOOPBACK,
            "grpc_port": port,
            "model_repository": str(options.models),
            # Threads of one computation wait for each other by spinning. A pool that takes every core of a machine that
            # it shares with the rest spins against them, and everyone is slower. On its own machine it takes all.
            "threads": max(1, options.cores - 1),
            "warmup_budget_s": POOL_WARMUP_S,
            **_tls(options, "pool", "pool"),
        },
        config_path=_config_path(options, "pool"),
        env_prefix="TIDEGATE_POOL_",
    )


def _edge(options: Options, number: int, broker: str, ahead: Mapping[str, LinkPlan]) -> ProcessPlan:
    name = f"edge-{number}"
    grpc_port = options.ports_from + PORTS_BEFORE_EDGES + PORTS_PER_EDGE * (number - 1)
    http_port = grpc_port + 1
    return ProcessPlan(
        role="edge",
        name=name,
        module="edge_agent",
        address=f"{LOOPBACK}:{grpc_port}",
        ports=(PlannedPort(LOOPBACK, grpc_port, f"{name} gRPC"), PlannedPort(LOOPBACK, http_port, f"{name} HTTP")),
        log_path=_log_path(options, name),
        config={
            "name": name,
            "host": LOOPBACK,
            "grpc_port": grpc_port,
            "http_port": http_port,
            "model_repository": str(options.models),
            "mqtt": broker,
            "fleet": FLEET,
            "state_dir": str(options.data_dir / name),
            **({"advertise": f"{LOOPBACK}:{ahead[name].port}"} if name in ahead else {}),
            **({"rollout": {"keys": [str(options.ship)]}} if options.ship else {}),
            **_tls(options, "edge", name),
        },
        config_path=_config_path(options, name),
        env_prefix="TIDEGATE_EDGE_",
    )


def _gateway(options: Options, number: int, broker: str, ahead: Mapping[str, LinkPlan]) -> ProcessPlan:
    """The gateway of this number, from 1. The first keeps what there is once: stored messages, and model files."""
    first, host, name = _first_port(options, number), options.host, options.gateway_names[number - 1]
    pool = f"{LOOPBACK}:{_port(ahead, 'pool', options.ports_from + 5)}"
    ships = options.ship is not None and number == 1
    return ProcessPlan(
        role="gateway",
        name=name,
        module="gateway",
        address=f"{'https' if options.secure else 'http'}://{host}:{first}",
        ports=(
            PlannedPort(host, first, f"{name} HTTP (OIP and OpenAI)"),
            PlannedPort(host, first + 1, f"{name} gRPC (OIP)"),
            PlannedPort(host, first + 2, f"{name} metrics"),
            PlannedPort(LOOPBACK, first + 3, f"{name} admin"),
            *((PlannedPort(LOOPBACK, _artifacts_port(options), f"{name} model files"),) if ships else ()),
        ),
        log_path=_log_path(options, name),
        config={
            "name": name,
            "host": host,
            "http_port": first,
            "grpc_port": first + 1,
            "metrics_port": first + 2,
            "admin_port": first + 3,
            "model_repository": str(options.models),
            **({} if options.sites else {"mqtt": broker, "fleet": FLEET}),
            "targets": [
                {"name": "pool", "tier": "pool", "address": pool, "transport": "link"},
                *(_site_target(options, site, ahead) for site in range(1, options.sites + 1)),
            ],
            **({"workers": options.gateway_workers} if options.gateway_workers > 1 else {}),
            "drain_s": GATEWAY_DRAIN_S,  # fixed here: `system.py` waits for it
            "access_log": "json" if options.requests else "none",
            **({"ingest": _ingest(options)} if number == 1 and not options.sites else {}),
            **({"artifacts": _artifacts(options)} if ships else {}),
            **_tls(options, "gateway", name),
            **({"auth": {"keys_file": str(options.secure.keys_file)}} if options.secure else {}),
        },
        config_path=_config_path(options, name),
        env_prefix="TIDEGATE_GATEWAY_",
    )


def _site(options: Options, site: int) -> ProcessPlan:
    """The gateway of this site, over its own edges."""
    broker, name = _site_port(options, site), f"{SITE}{site}"
    http, site_port = broker + 1, broker + 5
    purposes = ("HTTP (OIP and OpenAI)", "gRPC (OIP)", "metrics", "admin", "site")
    return ProcessPlan(
        role="gateway",
        name=name,
        module="gateway",
        address=f"http://{LOOPBACK}:{http}",
        ports=tuple(PlannedPort(LOOPBACK, http + at, f"{name} {purpose}") for at, purpose in enumerate(purposes)),
        log_path=_log_path(options, name),
        config={
            "name": name,
            "host": LOOPBACK,
            "http_port": http,
            "grpc_port": http + 1,
            "metrics_port": http + 2,
            "admin_port": http + 3,
            "site_port": site_port,
            "model_repository": str(options.models),
            "mqtt": f"mqtt://{LOOPBACK}:{broker}",
            "fleet": FLEET,
            "drain_s": GATEWAY_DRAIN_S,
        },
        config_path=_config_path(options, name),
        env_prefix="TIDEGATE_GATEWAY_",
        site_address=f"{LOOPBACK}:{site_port}",
    )


def _site_target(options: Options, site: int, ahead: Mapping[str, LinkPlan]) -> dict[str, str]:
    port = _port(ahead, f"{SITE}{site}", _site_port(options, site) + 5)
    return {"name": f"{SITE}{site}", "tier": "site", "address": f"{LOOPBACK}:{port}"}


def _ingest(options: Options) -> dict[str, Any]:
    return {"path": str(options.data_dir / "run" / "ingest.db")}


def _artifacts(options: Options) -> dict[str, Any]:
    return {"folder": str(options.data_dir / "artifacts"), "host": LOOPBACK, "port": _artifacts_port(options)}


def _tls(options: Options, role: str, name: str) -> dict[str, Any]:
    return {"tls": options.secure.section(role, name)} if options.secure else {}


def _config_path(options: Options, name: str) -> Path:
    return options.data_dir / "run" / f"{name}.yaml"


def _log_path(options: Options, name: str) -> Path:
    return options.data_dir / "logs" / f"{name}.log"
