"""The section `targets`: targets that a gateway uses whether or not a device reports them over MQTT."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from gateway.config.upstreams import UpstreamConfig
from gateway.core.fleet.pricing import Tier, TokenPrice
from gateway.core.fleet.target import TargetSpec, Transport
from tidegate.config import Section
from tidegate.placement_pin import Zone
from tidegate.servers.address import is_loopback


class TargetConfig(Section):
    """A target that is known without MQTT: the pool, or a foreign OIP server."""

    name: str = Field(min_length=1, description="Its name in answers, as `TIER/NAME`.")
    tier: Tier = Field(
        "pool",
        description="Its price class: an edge's compute is nearly free. `site`: it is another gateway, called at its "
        "`site_port`, and `name` is that gateway's name (docs/sites.md).",
    )
    zone: Zone | None = Field(
        None,
        description="Where it is, for pinned requests. Default: an edge is `edge`, a pool is `cloud`; a site keeps "
        "pins itself, and here is how far in it may be used at most.",
    )
    address: str = Field(
        description="host:port of its gRPC server; of a server with OpenAI's interface the URL that clients take as "
        "base_url, such as https://host/v1."
    )
    transport: Transport = Field(
        "link",
        description="`link` to a Tidegate process: a cheaper hop, with load reports; `unary` to any OIP server; "
        "`openai` to vLLM, SGLang, llama-server, Ollama or any service with OpenAI's interface (docs/upstreams.md).",
    )
    openai: UpstreamConfig | None = Field(
        None, description="Models, key, prices and limits of a server with `transport: openai`, which needs it."
    )
    foreign: bool = Field(False, description="Not a Tidegate process: its models are read from OIP metadata.")
    servers: int = Field(
        1,
        ge=1,
        le=64,
        description="Of a pool that runs several servers, as its own key `servers` says: NAME-0 at `address`, NAME-1 "
        "at the next port, and so on, each a target.",
    )
    models: tuple[str, ...] = Field((), description="Only these of its models; empty: all. A foreign one needs names.")
    standby: bool = Field(
        False,
        description="In reserve: it gets requests only if no other target is sure enough to answer in time.",
    )
    tls: bool | None = Field(
        None,
        description="Whether to call it over TLS, with the gateway's `tls`. Default: a Tidegate process yes, and it "
        "must show the certificate of TIER/NAME; a foreign one no, else it must show one for its host.",
    )

    @model_validator(mode="after")
    def _a_site_is_a_gateway(self) -> Self:
        if self.tier == "site" and (self.transport != "link" or self.foreign):
            raise ValueError("a target with tier: site is a Tidegate gateway: transport is link, and foreign is false")
        return self

    @model_validator(mode="after")
    def _servers_are_a_pools(self) -> Self:
        if self.servers == 1:
            return self
        if self.tier != "pool" or self.foreign or self.transport != "link":
            raise ValueError("servers: only a Tidegate pool with transport: link has several; list others one by one")
        port = self.address.rpartition(":")[2]
        if not (port.isascii() and port.isdecimal()) or int(port) + self.servers - 1 > 65535:
            raise ValueError(f"servers: address {self.address!r} must end in the port of the first of {self.servers}")
        return self

    def why_not(self, *, has_tls: bool) -> str:
        """Why a gateway with or without a section `tls` of its own cannot use it; "" where it can."""
        if self.tls and not has_tls:
            return "has tls: true, which needs the gateway's own section tls"
        if self.servers > 1 and has_tls and self.tls is not False:
            return "has servers, and a pool with several has no tls: set tls: false, or list pools with one server each"
        return ""

    def each(self) -> tuple[Self, ...]:
        """One for each server."""
        if self.servers == 1:
            return (self,)
        host, _, port = self.address.rpartition(":")
        return tuple(
            self.model_copy(
                update={"name": f"{self.name}-{number}", "address": f"{host}:{int(port) + number}", "servers": 1}
            )
            for number in range(self.servers)
        )

    @model_validator(mode="after")
    def _an_openai_server_is_described(self) -> Self:
        if (self.transport == "openai") != (self.openai is not None):
            raise ValueError("transport: openai and the section openai go together: give both, or neither")
        if self.openai is None:
            return self
        if self.foreign or self.models or self.tls is not None:
            raise ValueError(
                "foreign, models and tls are not of transport: openai: the models are in openai.models, and whether "
                "it is called over TLS is in its address"
            )
        url = urlsplit(self.address)
        if url.username or url.password:
            raise ValueError("address has a name or a password in it: the key is in openai.api_key_file or api_key_env")
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ValueError(
                f"address {self.address!r} is no URL of an OpenAI server: https://HOST[:PORT]/v1 is wanted, "
                "without a query"
            )
        listened = url.scheme == "http" and not is_loopback(url.hostname)
        if listened and self.openai.has_key and not self.openai.plain_text_key:
            raise ValueError(
                f"address {self.address!r} would show the key to whoever listens on the way: use https, or set "
                "openai.plain_text_key"
            )
        return self

    def _openai_spec(self, section: UpstreamConfig) -> TargetSpec:
        return TargetSpec(
            id=f"{self.tier}/{self.name}",
            tier=self.tier,
            address=self.address.rstrip("/"),
            transport="openai",
            foreign=True,
            models=tuple(section.models),
            zone=self.zone,
            standby=self.standby,
            encrypted=self.address.startswith("https:"),
            token_price=TokenPrice.of_money(section.input_price, section.output_price, section.pool_price),
        )

    @property
    def spec(self) -> TargetSpec:
        if self.openai is not None:
            return self._openai_spec(self.openai)
        transport: Transport = "unary" if self.foreign else self.transport
        id = f"{self.tier}/{self.name}"
        encrypted = not self.foreign if self.tls is None else self.tls
        return TargetSpec(
            id=id,
            tier=self.tier,
            address=self.address,
            transport=transport,
            foreign=self.foreign,
            models=self.models,
            zone=self.zone,
            standby=self.standby,
            encrypted=encrypted,
        )
