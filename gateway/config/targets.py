"""The section `targets`: targets that a gateway uses whether or not a device reports them over MQTT."""

from __future__ import annotations

from pydantic import Field

from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.target import TargetSpec, Transport
from tidegate.config import Section
from tidegate.placement_pin import Zone


class TargetConfig(Section):
    """A target that is known without MQTT: the pool, or a foreign OIP server."""

    name: str = Field(min_length=1, description="Its name in answers, as `TIER/NAME`.")
    tier: Tier = Field("pool", description="Its price class: an edge's compute is nearly free.")
    zone: Zone | None = Field(
        None,
        description="Where it is, for pinned requests. Default: an edge is `edge`, a pool is `cloud`.",
    )
    address: str = Field(description="host:port of its gRPC server.")
    transport: Transport = Field(
        "link", description="`link` to a Tidegate process: a cheaper hop, with load reports; `unary` to any OIP server."
    )
    foreign: bool = Field(False, description="Not a Tidegate process: its models are read from OIP metadata.")
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

    @property
    def spec(self) -> TargetSpec:
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
