"""Sections of the gateway's configuration: a target, a tenant, whose evidence is believed, how the pool is scaled."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from gateway.core.admission.tenants import TenantSpec
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.scaling import ScalingSpec
from gateway.core.fleet.target import TargetSpec, Transport
from tidegate.config import Section
from tidegate.placement_pin import Zone


class TargetConfig(Section):
    """A target that is there whether or not MQTT tells of it: the pool, or a foreign OIP server."""

    name: str = Field(min_length=1, description="What it is called in answers: `TIER/NAME`.")
    tier: Tier = Field("pool", description="Its price class: an edge's compute is nearly free.")
    zone: Zone | None = Field(
        None,
        description="Where it stands, for pinned requests. Default: an edge is `edge`, a pool is `cloud`.",
    )
    address: str = Field(description="host:port of its gRPC server.")
    transport: Transport = Field(
        "link", description="`link` to a Tidegate process: cheaper a hop, tells its load; `unary` to any OIP server."
    )
    foreign: bool = Field(False, description="Not a Tidegate process: its models are read from OIP metadata.")
    models: tuple[str, ...] = Field((), description="Only these of its models; empty: all. A foreign one needs names.")
    standby: bool = Field(
        False,
        description="In reserve: it gets requests only where no other target is sure enough to make it in time.",
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
            id,
            self.tier,
            self.address,
            transport,
            self.foreign,
            self.models,
            zone=self.zone,
            standby=self.standby,
            encrypted=encrypted,
        )


class TenantConfig(Section):
    """What one tenant may use; unknown ones share the entry `default`, or with `auth` have one like it each."""

    weight: float = Field(
        1.0,
        gt=0,
        le=100,
        description="What its answers are worth beside others'; of 2, it is shed half as often.",
    )
    pool_s_per_s: float | None = Field(
        None, ge=0, description="Seconds of pool compute a second, on average; none: no limit, 0: no pool."
    )
    edge_s_per_s: float | None = Field(
        None, ge=0, description="Seconds of edge compute a second, on average; none: no limit, 0: no edges."
    )
    burst_s: float = Field(
        1.0, gt=0, description="Seconds of compute it may have saved up; more lets it come in larger bursts."
    )
    max_in_flight: int | None = Field(None, gt=0, description="Its requests inside at once; none: no limit of its own.")
    requests_per_s: float | None = Field(
        None, gt=0, description="Requests a second, of any kind; a second's worth may come at once; none: no limit."
    )
    bytes_per_s: float | None = Field(
        None, gt=0, description="Bytes of tensors a second, both ways together; beyond, it waits; none: no limit."
    )

    @property
    def spec(self) -> TenantSpec:
        rates = (self.pool_s_per_s, self.edge_s_per_s, self.requests_per_s, self.bytes_per_s)
        pool, edge, requests, octets = (inf if rate is None else rate for rate in rates)
        return TenantSpec(self.weight, pool, edge, self.burst_s, self.max_in_flight, requests, octets)


class AttestationPolicyConfig(Section):
    """Whose evidence is believed (`docs/security.md`)."""

    allowed: Path = Field(
        description="File of attestation keys, a line each as `tidegate attest init` prints it; it is followed, and a "
        "key that is taken out is believed no more within seconds."
    )
    measurements: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(
        (),
        description="Digests of what targets may be; empty: whatever an allowed key signs. A target that is another is "
        "refused, with its own in `tidegate status`.",
    )
    max_age_s: float = Field(
        600.0,
        ge=5,
        le=86400,
        description="Seconds for which evidence counts; it is asked anew at about half of that. Less notices a changed "
        "target sooner, and costs each target two signatures a time. Evidence must reach a "
        "request's deadline: budgets beyond 0.4 of this may be refused.",
    )


class ScalingConfig(Section):
    """How many replicas of the pool are asked for, by `GET /scaling` and a metric (`docs/degradation.md`)."""

    target_attainment: float = Field(
        0.99,
        ge=0.5,
        le=0.9999,
        description="Share of the pool's requests that are to be answered in time; more asks for more spare replicas.",
    )
    start_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="Seconds from the wish for a replica until it serves, image and warm-up included; more looks "
        "further ahead, and asks for more while load rises.",
    )
    scale_down_s: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds for which a smaller need must have lasted; more keeps replicas through longer lulls.",
    )
    min_replicas: int = Field(1, ge=1, le=1000, description="The need is never less.")
    max_replicas: int = Field(64, ge=1, le=1000, description="The need is never more.")
    workers_per_replica: int = Field(
        1, ge=1, le=256, description="Batches that a replica computes at the same time: its devices."
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self

    @property
    def spec(self) -> ScalingSpec:
        return ScalingSpec(
            self.target_attainment,
            self.start_s,
            self.scale_down_s,
            self.min_replicas,
            self.max_replicas,
            self.workers_per_replica,
        )


def default_scaling() -> ScalingConfig:
    return ScalingConfig.model_validate({})  # mypy does not see that every field has a default
