"""The gateway's configuration: what it listens on, which models it knows, whom it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from gateway.core.fleet import TargetSpec, Tier, Transport
from tidegate.config import ProcessConfig, Section
from tidegate.telemetry import Level


class TargetConfig(Section):
    """A target that is there whether or not MQTT tells of it: the pool, or a foreign OIP server."""

    name: str = Field(min_length=1, description="What it is called in answers: `TIER/NAME`.")
    tier: Tier = Field("pool", description="Its price class: an edge's compute is nearly free.")
    address: str = Field(description="host:port of its gRPC server.")
    transport: Transport = Field(
        "link", description="`link` to a Tidegate process: cheaper a hop, tells its load; `unary` to any OIP server."
    )
    foreign: bool = Field(False, description="Not a Tidegate process: its models are read from OIP metadata.")
    models: tuple[str, ...] = Field((), description="Only these of its models; empty: all. A foreign one needs names.")

    @property
    def spec(self) -> TargetSpec:
        transport: Transport = "unary" if self.foreign else self.transport
        return TargetSpec(f"{self.tier}/{self.name}", self.tier, self.address, transport, self.foreign, self.models)


class GatewayConfig(ProcessConfig):
    """One gateway."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="TIDEGATE_GATEWAY_", env_nested_delimiter="__"
    )

    name: str = Field("main", min_length=1, description="This gateway's name towards targets and the broker.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 lets other machines in.")
    http_port: int = Field(8000, ge=0, le=65535, description="OIP and OpenAI over HTTP; 0 takes a free port.")
    grpc_port: int = Field(8001, ge=0, le=65535, description="OIP over gRPC; 0 takes a free port.")
    metrics_port: int = Field(8002, ge=0, le=65535, description="Prometheus metrics under /metrics.")
    admin_port: int = Field(8003, ge=0, le=65535, description="State and explanations for operators.")
    model_repository: Path | None = Field(
        None,
        description="Folder of models; the gateway needs their manifests and tokenizers only. None: foreign models.",
    )
    mqtt: str | None = Field(
        None, description="Broker that edges report to, mqtt://host:1883; none: static targets only."
    )
    fleet: str = Field(
        "demo", min_length=1, description="Fleet whose edges are used; others on the broker are ignored."
    )
    targets: tuple[TargetConfig, ...] = Field((), description="Targets that are known without MQTT.")
    edge_transport: Transport = Field("link", description="How edges found over MQTT are called.")
    max_body_bytes: int = Field(
        64 * 2**20, gt=0, description="Largest body or message, in bytes; more takes memory times max_in_flight."
    )
    max_in_flight: int = Field(
        1024, gt=0, description="Requests inside at once; beyond it callers are told when to come back (429)."
    )
    access_log: Literal["none", "text", "json"] = Field(
        "none", description="A line per request: `text` on stderr, `json` as events on stdout; costs some 50 µs each."
    )
    log_level: Level = Field("info", description="Least severity of logs on stderr.")
    policy: Literal["cheapest", "value"] = Field(
        "cheapest",
        description="`cheapest` of those sure enough; `value` weighs quality, calibrated chance, cost and harm.",
    )
    remember_decisions: int = Field(256, ge=0, description="Finished requests kept for /debug/decisions.")

    @field_validator("targets")
    @classmethod
    def _names_are_unique(cls, targets: tuple[TargetConfig, ...]) -> tuple[TargetConfig, ...]:
        ids = [target.spec.id for target in targets]
        twice = sorted({one for one in ids if ids.count(one) > 1})
        if twice:
            raise ValueError(f"two targets are called {', '.join(twice)}")
        return targets
