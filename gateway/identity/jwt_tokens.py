"""The token verifier checks signed tokens (JWT) with the issuer's keys and turns their claims into an identity.

Only a signature by one of the configured issuer's keys is trusted. Of the header only `alg` and `kid` are read, and
both merely choose among what is configured: `none` and HMAC are in no configuration, an address in a header (`jku`,
`x5u`, `jwk`, `x5c`) is ignored, and a token with `crit` requires an unknown extension and is refused.

Verifying costs 50 to 150 µs, so a verified token is remembered by its hash until it expires, and forgotten when the
issuer's keys change. A token cannot be revoked; `max_lifetime_s` bounds how long a lost one can be used.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, Final

import jwt
from jwt.exceptions import ExpiredSignatureError, PyJWTError

from gateway.config.auth import JwtConfig
from gateway.identity.credential import UnprovedCredential
from gateway.identity.jwks import KeySet
from tidegate.caller import Grant, Identity
from tidegate.oip.tenant import is_tenant

MOST_CHARACTERS: Final = 8192
REMEMBERED: Final = 4096
_MOST_MODELS: Final = 256


class TokenVerifier:
    """Identifies callers by token. Mutable: the tokens that were verified."""

    def __init__(self, config: JwtConfig) -> None:
        self._config = config
        self.keys = KeySet(file=config.jwks_file, url=config.jwks_url, on_change=self.forget)
        self._known: OrderedDict[bytes, Identity] = OrderedDict()

    def forget(self) -> None:
        self._known.clear()

    async def identify(self, token: str, utc_s: float) -> Identity:
        """Return the identity of a token. Raises UnprovedCredential."""
        if len(token) > MOST_CHARACTERS:
            raise UnprovedCredential("the token is too long", "malformed")
        if not token.isascii():  # bytes that are no text come as surrogates, which cannot be encoded
            raise UnprovedCredential("this is no token", "malformed")
        digest = blake2b(token.encode(), digest_size=32).digest()
        known = self._known.get(digest)
        if known is None:
            known = await self._verified(token)
            self._remember(digest, known)
        if utc_s >= known.expires_at + self._config.leeway_s:
            raise UnprovedCredential("the token has expired", "expired", known.id)
        return known

    async def _verified(self, token: str) -> Identity:
        try:
            header = jwt.get_unverified_header(token)
        except (PyJWTError, ValueError, RecursionError) as error:
            raise UnprovedCredential("this is no token", "malformed") from error
        if "crit" in header or header.get("alg") not in self._config.algorithms:
            raise UnprovedCredential("the token is signed in a way that is not accepted here", "algorithm")
        kid = header.get("kid", "")
        key = await self.keys.key(kid) if isinstance(kid, str) else None
        if key is None or key.algorithm_name != header["alg"]:
            raise UnprovedCredential("the token is not signed by a known key", "wrong")
        return self._identity(self._claims(token, key))

    def _claims(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        config = self._config
        try:
            return jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway_s,
                options={"require": ["exp", "iat", "iss", "aud"]},
            )
        except ExpiredSignatureError as error:
            raise UnprovedCredential("the token has expired", "expired") from error
        except (PyJWTError, ValueError, OverflowError, TypeError) as error:
            raise UnprovedCredential("the token is not valid here", "wrong") from error

    def _identity(self, claims: dict[str, Any]) -> Identity:
        config = self._config
        who = f"token:{str(claims.get('sub', ''))[:128]}"
        if not all(isinstance(claims[name], int | float) for name in ("exp", "iat")):  # PyJWT accepts strings too
            raise UnprovedCredential("the token's times are no numbers", "lifetime", who)
        if claims["exp"] - claims["iat"] > config.max_lifetime_s:
            raise UnprovedCredential(f"the token is good for longer than {config.max_lifetime_s:g} s", "lifetime", who)
        tenant = claims.get(config.tenant_claim)
        if not isinstance(tenant, str) or not is_tenant(tenant):
            raise UnprovedCredential(f"the token names no tenant in its claim {config.tenant_claim!r}", "tenant", who)
        grant = Grant(tenant, self._models(claims, who), config.highest_priority, config.pin, config.rights)
        return Identity(who, grant, float(claims["exp"]))

    def _models(self, claims: dict[str, Any], who: str) -> tuple[str, ...]:
        models = claims.get(self._config.models_claim)
        if models is None:
            return self._config.models
        listed = isinstance(models, list) and len(models) <= _MOST_MODELS
        if not listed or not all(isinstance(one, str) and len(one) <= 256 for one in models):
            raise UnprovedCredential(
                f"the token's claim {self._config.models_claim!r} is no list of names", "models", who
            )
        return tuple(models)

    def _remember(self, digest: bytes, identity: Identity) -> None:
        self._known[digest] = identity
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def __repr__(self) -> str:
        return f"<TokenVerifier of {self._config.issuer} {len(self._known)} remembered, {self.keys!r}>"
