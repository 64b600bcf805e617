"""The identity of a caller and its grant, into which every kind of credential is turned.

An API key, a signed token and a client certificate differ in how they are proved. What follows is the same for all, so
it is one `Grant`: from the file of keys, from a token's issuer, or from the configuration for a certificate.

    tenant             whose budgets its requests are on, and the name in metrics
    models             globs of the models it may see and use; any other name is forbidden, whether it exists or not
    highest_priority   a higher priority in a request is lowered to it, not refused
    pin                how far its requests may go at most; a request may ask for less
    rights             `infer` · `metrics` and `admin`, for operators · `act-for-others`, to name other tenants
                       `dial-in`, for a device that dials: it is edge/TENANT
    limits             of this one credential, beside and within its tenant's

A refusal by name alone reveals nothing about which models exist. `act-for-others` is for a proxy that has authenticated
its callers itself: only then is the header `tidegate-tenant` believed.

Nothing here knows a secret, so an identity may stand in any log.
"""

from __future__ import annotations

import re
from fnmatch import translate
from functools import lru_cache
from math import inf
from typing import Final, Literal

import msgspec

from tidegate.placement_pin import Pin

Right = Literal["infer", "metrics", "admin", "act-for-others", "dial-in"]
RIGHTS: Final[tuple[Right, ...]] = ("infer", "metrics", "admin", "act-for-others", "dial-in")


class UsageLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What may be used; None: no limit of its own."""

    requests_per_s: float | None = None
    bytes_per_s: float | None = None
    pool_s_per_s: float | None = None
    edge_s_per_s: float | None = None
    max_in_flight: int | None = None
    tokens_per_s: float | None = None  # of generations


NO_LIMITS: Final = UsageLimits()


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rights and limits of one credential."""

    tenant: str
    models: tuple[str, ...] = ("*",)
    highest_priority: int = 1
    pin: Pin = "any"
    rights: tuple[Right, ...] = ("infer",)
    limits: UsageLimits = NO_LIMITS


def tenant_of(payer: str) -> str:
    """The tenant of a name whose quota is charged (`Identity.payer`): a credential with limits acts for its tenant."""
    return payer.partition("#")[0]


class Identity(msgspec.Struct, frozen=True):
    """An authenticated caller. `id` names the credential: "key:3f9a", "token:SUBJECT", "cert:dns:NAME"."""

    id: str
    grant: Grant
    expires_at: float = inf  # UTC seconds

    @property
    def tenant(self) -> str:
        return self.grant.tenant

    @property
    def payer(self) -> str:
        """The name whose quota is charged; `tenant_of` reads it. A tenant's name never contains `#`."""
        return self.grant.tenant if self.grant.limits == NO_LIMITS else f"{self.grant.tenant}#{self.id}"

    def may(self, right: Right) -> bool:
        return right in self.grant.rights

    def may_use(self, model: str) -> bool:
        return _any_of(self.grant.models)(model) is not None

    def __repr__(self) -> str:
        return f"<Identity {self.id} of {self.grant.tenant}>"


@lru_cache(1024)
def _any_of(globs: tuple[str, ...]):  # type: ignore[no-untyped-def]  # a bound `fullmatch`, which typing cannot name
    return re.compile("|".join(map(translate, globs)) or r"(?!)").fullmatch
