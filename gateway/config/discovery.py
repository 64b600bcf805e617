"""The section `discovery`: sources of targets that come and go while the gateway runs, beside the list `targets`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from gateway.config.targets import TargetConfig
from gateway.core.fleet.pricing import Tier
from tidegate.config import Section
from tidegate.placement_pin import Zone
from tidegate.servers.address import is_loopback

SourceKind = Literal["file", "dns", "kubernetes", "announce"]
MAX_SOURCES: Final = 16
_NEEDS: Final[dict[SourceKind, tuple[str, ...]]] = {
    "file": ("path",),
    "dns": ("name",),
    "kubernetes": ("service",),
    "announce": (),
}
_DNS_SERVER: Final = re.compile(r"(\d{1,3}(\.\d{1,3}){3}(:\d{1,5})?|\[[0-9a-fA-F:.]+\](:\d{1,5})?)")
_LABEL: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_TARGET_KEYS: Final = ("zone", "transport", "foreign", "models", "standby", "tls", "tier")
_TAKES: Final[dict[SourceKind, tuple[str, ...]]] = {
    "file": ("path",),
    "dns": ("name", "port", "server", "every_s", "timeout_s", *_TARGET_KEYS),
    "kubernetes": (
        "service",
        "namespace",
        "port_name",
        "zones",
        "server",
        "token_file",
        "ca_file",
        "timeout_s",
        *_TARGET_KEYS,
    ),
    "announce": ("standby", "models", "tls", "zone"),
}


class SourceConfig(Section):
    """One source of targets."""

    source: SourceKind = Field(
        description="`file`: a list that is read again when it changes; `dns`: the records of a name, such as a "
        "headless Service; `kubernetes`: a Service's EndpointSlices, watched; `announce`: pools say over MQTT that "
        "they are there (docs/discovery.md)."
    )
    path: Path | None = Field(
        None, description="Of `file`: YAML or JSON with a list `targets`, each as here, or with `draining: true`."
    )
    name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="Of `dns`: the name. One that begins with `_`, as _grpc._tcp.pools.prod.svc.cluster.local, has SRV "
        "records; any other has addresses, and needs `port`.",
    )
    port: int | None = Field(None, gt=0, le=65535, description="Of `dns` with addresses: the port of each target.")
    service: str | None = Field(None, pattern=_LABEL, description="Of `kubernetes`: the Service's name.")
    namespace: str | None = Field(
        None, pattern=_LABEL, description="Of `kubernetes`: the Service's namespace. None: the gateway's own."
    )
    port_name: str | None = Field(
        None, max_length=63, description="Of `kubernetes`: the name of the Service's port. None: its only port."
    )
    zones: dict[str, Zone] = Field(
        {},
        max_length=256,
        description="Of `kubernetes`: where the endpoints of a zone (topology.kubernetes.io/zone) are, such as "
        "{eu-west-1a: cloud, shop-12: site}. Others are in `zone`.",
    )
    server: str | None = Field(
        None,
        max_length=512,
        description="Of `dns`: ADDRESS[:PORT] of the DNS server, an IPv6 address in brackets; None: the system's. Of "
        "`kubernetes`: URL of the API server; None: that of the cluster in which this gateway is a pod.",
    )
    token_file: Path | None = Field(
        None,
        description="Of `kubernetes`: file with the token, read again for each request. None: the service account's; "
        "with `server`: no token.",
    )
    ca_file: Path | None = Field(
        None,
        description="Of `kubernetes`: PEM file with the API server's CA. None: the service account's; with `server`: "
        "the machine's trusted CAs.",
    )
    every_s: float = Field(
        1.0,
        ge=0.1,
        le=300,
        description="Of `dns`: seconds between two lookups at most; a shorter TTL of the records brings the next one "
        "sooner. Less finds a new target sooner, and costs a query each time.",
    )
    timeout_s: float = Field(
        2.0,
        gt=0,
        le=60,
        description="Of `dns` and `kubernetes`: seconds for an answer; after it the server counts as away.",
    )
    tier: Tier = Field(
        "pool",
        description="Of `dns` and `kubernetes`: the targets' price class; `site`: they are gateways (docs/sites.md).",
    )
    zone: Zone | None = Field(None, description="Of all but `file`: where the targets are. Default: by tier.")
    transport: Literal["link", "unary"] = Field(
        "link", description="Of `dns` and `kubernetes`: how the targets are called."
    )
    foreign: bool = Field(False, description="Of `dns` and `kubernetes`: not Tidegate processes, as in `targets`.")
    models: tuple[str, ...] = Field((), description="Of all but `file`: only these models; empty: all.")
    standby: bool = Field(False, description="Of all but `file`: the targets are in reserve.")
    tls: bool | None = Field(None, description="Of all but `file`: whether to call over TLS, as in `targets`.")

    @model_validator(mode="after")
    def _keys_fit_the_source(self) -> Self:
        for key in _NEEDS[self.source]:
            if getattr(self, key) is None:
                raise ValueError(f"source: {self.source} needs the key {key}")
        takes = ("source", *_TAKES[self.source])
        odd = sorted(self.model_fields_set - set(takes))
        if odd:
            raise ValueError(f"source: {self.source} has no key {odd[0]}; it takes {', '.join(takes[1:])}")
        if self.source == "dns" and not self.has_srv and self.port is None:
            raise ValueError(
                f"name {self.name!r} has addresses only, so the key port is needed; SRV records have ports of their "
                "own, and their names begin with _, such as _grpc._tcp.NAME"
            )
        if self.has_srv and self.port is not None:
            raise ValueError(f"name {self.name!r} has SRV records, which say each target's port: leave port out")
        if self.server is not None:
            self._check_server(self.server)
        return self

    def _check_server(self, server: str) -> None:
        if self.source == "dns" and not _DNS_SERVER.fullmatch(server):
            raise ValueError(f"server {server!r} is no ADDRESS[:PORT] of a DNS server")
        if self.source != "kubernetes":
            return
        url = urlsplit(server)
        if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query or url.fragment:
            raise ValueError(f"server {server!r} is no URL of an API server: https://HOST[:PORT] is wanted")
        if url.scheme == "http" and self.token_file is not None and not is_loopback(url.hostname):
            raise ValueError(f"server {server!r} would show the token to whoever listens on the way: use https")
        if self.namespace is None:
            raise ValueError("with server, the key namespace is needed")

    @property
    def has_srv(self) -> bool:
        """Whether SRV records are asked for, by the form of the name (RFC 2782)."""
        return self.name is not None and self.name.startswith("_")

    @property
    def label(self) -> str:
        """The source's name in states, conditions and logs: `dns:pools.prod`."""
        service = f"{self.namespace}/{self.service}" if self.namespace else self.service
        what = {"file": self.path, "dns": self.name, "kubernetes": service, "announce": None}[self.source]
        return self.source if what is None else f"{self.source}:{what}"

    def target(self, name: str, address: str, **more: object) -> TargetConfig:
        """A target of this source. Raises ValidationError where it has a value that does not fit."""
        keys = {key: getattr(self, key) for key in _TARGET_KEYS if key in self.model_fields_set}
        return TargetConfig.model_validate({**keys, "name": name, "address": address, **more})


class ListedTargetConfig(TargetConfig):
    """A target in a file that is followed."""

    draining: bool = Field(False, description="It finishes what it has, and takes nothing new.")


class TargetsFile(Section):
    """A file of `source: file`."""

    targets: tuple[ListedTargetConfig, ...] = Field(description="Targets, each as in the section `targets`.")
