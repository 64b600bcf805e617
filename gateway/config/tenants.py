"""The section `tenants`: what each tenant may use, and how much its answers count in overload."""

from __future__ import annotations

from math import inf

from pydantic import Field

from gateway.core.admission.tenants import TenantSpec
from tidegate.config import Section


class TenantConfig(Section):
    """What one tenant may use. Unknown tenants share the entry `default`; with `auth` each has a copy of it."""

    weight: float = Field(
        1.0,
        gt=0,
        le=100,
        description="What its answers are worth relative to others'; a tenant of weight 2 is shed half as often.",
    )
    pool_s_per_s: float | None = Field(
        None, ge=0, description="Seconds of pool compute a second, on average; none: no limit, 0: no pool."
    )
    edge_s_per_s: float | None = Field(
        None, ge=0, description="Seconds of edge compute a second, on average; none: no limit, 0: no edges."
    )
    burst_s: float = Field(
        1.0, gt=0, description="Seconds of compute that it may have saved up; more admits larger bursts."
    )
    max_in_flight: int | None = Field(
        None, gt=0, description="Its requests in flight at once; none: no limit of its own."
    )
    requests_per_s: float | None = Field(
        None, gt=0, description="Requests a second, of any kind; a second's worth may come at once; none: no limit."
    )
    bytes_per_s: float | None = Field(
        None, gt=0, description="Bytes of tensors a second, both ways together; beyond, it waits; none: no limit."
    )
    tokens_per_s: float | None = Field(
        None,
        gt=0,
        description="Tokens of generations a second, prompts and answers together; a minute's worth may come at once; "
        "none: no limit.",
    )

    shadow: bool = Field(
        True,
        description="Whether devices' answers to it may be computed again in the pool, to compare both "
        "(docs/agreement.md).",
    )

    @property
    def spec(self) -> TenantSpec:
        rates = (self.pool_s_per_s, self.edge_s_per_s, self.requests_per_s, self.bytes_per_s, self.tokens_per_s)
        pool, edge, requests, octets, tokens = (inf if rate is None else rate for rate in rates)
        return TenantSpec(
            weight=self.weight,
            pool_s_per_s=pool,
            edge_s_per_s=edge,
            burst_s=self.burst_s,
            max_in_flight=self.max_in_flight,
            requests_per_s=requests,
            bytes_per_s=octets,
            tokens_per_s=tokens,
        )
