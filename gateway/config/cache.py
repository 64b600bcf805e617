"""The section `cache`: of which models answers are kept, for how long, and in how many bytes."""

from __future__ import annotations

from pydantic import Field

from gateway.core.response_cache.response_cache import CacheLimits
from tidegate.config import Section


class CachedModelConfig(Section):
    """One model's part of the cache; an empty one (`MODEL: {}`) is kept as the section says."""

    ttl_s: float | None = Field(
        None, gt=0, le=2_592_000, description="Seconds that its answers are kept; none: as `cache.ttl_s`."
    )
    stale_for_s: float | None = Field(
        None,
        ge=0,
        le=2_592_000,
        description="Seconds after that for which they are last-known answers; none: as `cache.stale_for_s`.",
    )
    max_bytes: int | None = Field(
        None, ge=4096, description="Bytes that its answers may take of the whole; none: as `cache.max_bytes`."
    )


class CacheConfig(Section):
    """The response cache: docs/known-answers.md. Only the models that are named have one."""

    models: dict[str, CachedModelConfig] = Field(
        min_length=1,
        description="The models whose answers are kept, by name; `{}` keeps them as the section says. Only for models "
        "that give the same answer to the same input.",
    )
    ttl_s: float = Field(
        300.0,
        gt=0,
        le=2_592_000,
        description="Seconds that an answer is kept, whether it is asked for or not; more saves more computing.",
    )
    stale_for_s: float = Field(
        0.0,
        ge=0,
        le=2_592_000,
        description="Seconds after `ttl_s` for which an answer is given where nothing else answers, declared with its "
        "age (a last-known answer); 0: never. More bears longer outages, with older answers.",
    )
    max_bytes: int = Field(
        64 * 2**20,
        ge=4096,
        description="Bytes of all answers together, in each process (`workers`); beyond, those asked for longest ago "
        "go.",
    )
    max_input_bytes: int = Field(
        2**20,
        ge=0,
        description="A request with larger inputs is computed: to read them for its key would hold up other requests.",
    )
    share_tenants: bool = Field(
        False,
        description="Whether a tenant may be given what another one's request was answered with. It then learns, by "
        "how fast an answer comes, that the same was asked before.",
    )

    @property
    def limits(self) -> dict[str, CacheLimits]:
        """By model."""
        return {
            name: CacheLimits(
                one.ttl_s or self.ttl_s,
                one.max_bytes or self.max_bytes,
                self.stale_for_s if one.stale_for_s is None else one.stale_for_s,
            )
            for name, one in self.models.items()
        }
