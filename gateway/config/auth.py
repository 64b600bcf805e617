"""The section `auth`: which credentials the gateway accepts, and what each of them grants."""

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
    """What a credential grants."""

    tenant: str = Field(description="The tenant whose limits its requests count against.")
    models: tuple[str, ...] = Field(("*",), description="Globs of the models that it may see and use.")
    highest_priority: int = Field(
        1, ge=1, le=4, description="The highest priority it may request; higher ones are lowered to it."
    )
    pin: Pin = Field("any", description="The outermost zone for its requests: `edge`, `site` or `any`.")
    rights: tuple[Right, ...] = Field(
        ("infer",), description="Of `infer`, `metrics`, `admin`, `act-for-others`, `dial-in`."
    )
    requests_per_s: float | None = Field(None, gt=0, description="Requests a second; none: its tenant's limit only.")
    bytes_per_s: float | None = Field(None, gt=0, description="Bytes of tensors a second, both ways together.")
    tokens_per_s: float | None = Field(None, gt=0, description="Tokens of generations a second, in and out together.")
    pool_s_per_s: float | None = Field(None, ge=0, description="Seconds of pool compute a second.")
    edge_s_per_s: float | None = Field(None, ge=0, description="Seconds of edge compute a second.")
    max_in_flight: int | None = Field(None, gt=0, description="Its requests in flight at once.")

    @field_validator("tenant")
    @classmethod
    def _tenant_is_valid(cls, tenant: str) -> str:
        return tenant_name(tenant)

    @property
    def grant(self) -> Grant:
        limits = UsageLimits(
            requests_per_s=self.requests_per_s,
            bytes_per_s=self.bytes_per_s,
            tokens_per_s=self.tokens_per_s,
            pool_s_per_s=self.pool_s_per_s,
            edge_s_per_s=self.edge_s_per_s,
            max_in_flight=self.max_in_flight,
        )
        return Grant(self.tenant, self.models, self.highest_priority, self.pin, self.rights, limits)


class CertificateConfig(GrantConfig):
    """A client certificate, matched by name, and what it grants."""

    name: str = Field(
        pattern=r"^(dns|uri|email|cn):.+",
        description="A name in the certificate, globs allowed: `dns:`, `uri:` or `email:` of its alternative names, or "
        "`cn:` of its subject. The first entry that matches counts.",
    )


class MtlsConfig(Section):
    """Client certificates. TLS itself, and the trusted certificate authorities, belong to the listeners."""

    certificates: tuple[CertificateConfig, ...] = Field(
        min_length=1, description="Certificate names and their grants; the first match counts."
    )


class JwtConfig(Section):
    """Signed tokens of one issuer."""

    issuer: str = Field(min_length=1, description="Claim `iss`, exactly.")
    audience: str = Field(min_length=1, description="Claim `aud` must be or hold this.")
    jwks_file: Path | None = Field(None, description="File with the issuer's public keys (JWKS).")
    jwks_url: str | None = Field(None, description="https address of these keys; fetched again when a key is "
                                                   "unknown. Nothing in a token can name another address.")  # fmt: skip
    algorithms: tuple[Algorithm, ...] = Field(
        ("RS256", "ES256", "EdDSA"), min_length=1, description="Accepted algorithms."
    )
    leeway_s: float = Field(30.0, ge=0, le=300, description="By how much clocks may differ, in seconds.")
    max_lifetime_s: float = Field(
        86_400.0, gt=0, description="Longest time from `iat` to `exp`; a token cannot be revoked before it expires."
    )
    tenant_claim: str = Field("tenant", description="Claim that names the tenant.")
    models_claim: str = Field("models", description="Claim with a list of globs of models; absent: `models`.")
    models: tuple[str, ...] = Field(("*",), description="Globs of models for a token without that claim.")
    highest_priority: int = Field(1, ge=1, le=4, description="The highest priority that tokens may request.")
    pin: Pin = Field("any", description="The outermost zone for requests with tokens.")
    rights: tuple[Right, ...] = Field(("infer",), description="Rights of all tokens; `admin` lets each of them in.")

    @model_validator(mode="after")
    def _one_source_of_keys(self) -> Self:
        if (self.jwks_file is None) == (self.jwks_url is None):
            raise ValueError("say where the issuer's keys are: either jwks_file or jwks_url")
        return self

    @field_validator("jwks_url")
    @classmethod
    def _jwks_url_is_safe(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ValueError("jwks_url must hold no user or password: logs contain it")
        loopback = parts.hostname in ("127.0.0.1", "::1", "localhost")
        if parts.scheme != "https" and not (parts.scheme == "http" and loopback):
            raise ValueError("jwks_url must begin with https://: with changed keys an attacker can sign as any tenant")
        return url


class AuthConfig(Section):
    """Which callers are let in. Without this section every caller is, and a log line at the start says so."""

    keys_file: Path | None = Field(None, description="File of API keys, as `tidegate keys` writes it.")
    jwt: JwtConfig | None = Field(None, description="Tokens of an issuer.")
    mtls: MtlsConfig | None = Field(None, description="Client certificates; needs TLS on the listeners.")
    anonymous: str | None = Field(
        None,
        description="Tenant of callers without a credential; none: they are refused. A wrong one always is.",
    )

    @field_validator("anonymous")
    @classmethod
    def _tenant_is_valid(cls, tenant: str | None) -> str | None:
        return None if tenant is None else tenant_name(tenant)

    @model_validator(mode="after")
    def _accepts_a_credential(self) -> Self:
        if self.keys_file is None and self.jwt is None and self.mtls is None:
            raise ValueError(
                "the section believes no credential: set keys_file, jwt or mtls, or leave `auth` out to let all in"
            )
        return self


def tenant_name(name: str) -> str:
    """Return the name. Raises ValueError: it is no tenant's name."""
    if not is_tenant(name):
        raise ValueError(f"{name!r} is no tenant's name: {RULE}")
    return name
