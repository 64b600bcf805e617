"""The section `auth`: which credentials are believed, and what they may."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tidegate.caller import Grant, Right, UsageLimits
from tidegate.config import Section
from tidegate.oip.tenant import RULE, is_tenant
from tidegate.placement_pin import Pin

Algorithm = Literal["RS256", "ES256", "EdDSA"]


class GrantConfig(Section):
    """What somebody is given."""

    tenant: str = Field(description="Whose budgets its requests are on.")
    models: tuple[str, ...] = Field(("*",), description="Globs of the models it may see and use.")
    highest_priority: int = Field(1, ge=1, le=4, description="What it asks for above this is lowered to it.")
    pin: Pin = Field("any", description="How far its requests may go at most: `edge`, `site` or `any`.")
    rights: tuple[Right, ...] = Field(
        ("infer",), description="Of `infer`, `metrics`, `admin`, `act-for-others`, `dial-in`."
    )
    requests_per_s: float | None = Field(None, gt=0, description="Requests a second; none: its tenant's limit only.")
    bytes_per_s: float | None = Field(None, gt=0, description="Bytes of tensors a second, both ways together.")
    pool_s_per_s: float | None = Field(None, ge=0, description="Seconds of pool compute a second.")
    edge_s_per_s: float | None = Field(None, ge=0, description="Seconds of edge compute a second.")
    max_in_flight: int | None = Field(None, gt=0, description="Its requests inside at once.")

    @field_validator("tenant")
    @classmethod
    def _can_be_said(cls, tenant: str) -> str:
        return tenant_name(tenant)

    @property
    def grant(self) -> Grant:
        limits = UsageLimits(
            self.requests_per_s, self.bytes_per_s, self.pool_s_per_s, self.edge_s_per_s, self.max_in_flight
        )
        return Grant(self.tenant, self.models, self.highest_priority, self.pin, self.rights, limits)


class CertificateConfig(GrantConfig):
    """Whom a client certificate names, and what that one may."""

    name: str = Field(
        pattern=r"^(dns|uri|email|cn):.+",
        description="A name in the certificate, globs allowed: `dns:`, `uri:` or `email:` of its alternative names, or "
        "`cn:` of its subject. The first entry that fits counts.",
    )


class MtlsConfig(Section):
    """Client certificates. TLS itself, and whose certificates are trusted, belongs to the listeners."""

    certificates: tuple[CertificateConfig, ...] = Field(min_length=1, description="Who is who, in order.")


class JwtConfig(Section):
    """Signed tokens of one issuer."""

    issuer: str = Field(min_length=1, description="Claim `iss`, exactly.")
    audience: str = Field(min_length=1, description="Claim `aud` must be or hold this.")
    jwks_file: Path | None = Field(None, description="File with the issuer's public keys (JWKS).")
    jwks_url: str | None = Field(None, description="https address of them; fetched, cached, fetched again when a key "
                                                   "is unknown. Nothing in a token can name another one.")  # fmt: skip
    algorithms: tuple[Algorithm, ...] = Field(("RS256", "ES256", "EdDSA"), min_length=1, description="Accepted ones.")
    leeway_s: float = Field(30.0, ge=0, le=300, description="By how much clocks may differ, in seconds.")
    max_lifetime_s: float = Field(
        86_400.0, gt=0, description="Longest time from `iat` to `exp`; a token cannot be revoked before it expires."
    )
    tenant_claim: str = Field("tenant", description="Claim that names the tenant.")
    models_claim: str = Field("models", description="Claim with a list of globs of models; absent: `models`.")
    models: tuple[str, ...] = Field(("*",), description="What a token without such a claim may use.")
    highest_priority: int = Field(1, ge=1, le=4, description="Of all tokens.")
    pin: Pin = Field("any", description="How far requests of tokens may go at most.")
    rights: tuple[Right, ...] = Field(("infer",), description="Of all tokens. `admin` lets every one of them in.")

    @model_validator(mode="after")
    def _keys_come_from_one_place(self) -> Self:
        if (self.jwks_file is None) == (self.jwks_url is None):
            raise ValueError("say where the issuer's keys are: either jwks_file or jwks_url")
        return self

    @field_validator("jwks_url")
    @classmethod
    def _is_safe(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ValueError("jwks_url must hold no user or password: it stands in logs")
        loopback = parts.hostname in ("127.0.0.1", "::1", "localhost")
        if parts.scheme != "https" and not (parts.scheme == "http" and loopback):
            raise ValueError("jwks_url must begin with https://: who can change these keys is everybody")
        return url


class AuthConfig(Section):
    """Who is let in. Without this section everybody is, and the start says so."""

    keys_file: Path | None = Field(None, description="File of API keys, as `tidegate keys` writes it.")
    jwt: JwtConfig | None = Field(None, description="Tokens of an issuer.")
    mtls: MtlsConfig | None = Field(None, description="Client certificates; needs TLS on the listeners.")
    anonymous: str | None = Field(
        None, description="Tenant of those who show no credential; none: they are refused. A wrong one always is."
    )

    @field_validator("anonymous")
    @classmethod
    def _can_be_said(cls, tenant: str | None) -> str | None:
        return None if tenant is None else tenant_name(tenant)

    @model_validator(mode="after")
    def _somebody_can_get_in(self) -> Self:
        if self.keys_file is None and self.jwt is None and self.mtls is None:
            raise ValueError(
                "the section believes no credential: set keys_file, jwt or mtls, or leave `auth` out to let all in"
            )
        return self


def tenant_name(name: str) -> str:
    if not is_tenant(name):
        raise ValueError(f"{name!r} is no tenant's name: {RULE}")
    return name
