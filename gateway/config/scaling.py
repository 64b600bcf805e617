"""The section `scaling`: how the gateway computes the number of pool replicas that it asks for."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from gateway.core.fleet.scaling import ScalingSpec
from tidegate.config import Section


class ScalingConfig(Section):
    """How many replicas of the pool the gateway asks for, by `GET /scaling` and a metric (`docs/degradation.md`)."""

    target_attainment: float = Field(
        0.99,
        ge=0.5,
        le=0.9999,
        description="Share of the pool's requests to be answered in time; more asks for more spare replicas.",
    )
    start_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="Seconds from the request for a replica until it serves, image and warm-up included; more looks "
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
