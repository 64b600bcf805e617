"""The gateway's guard authenticates each caller before anything of its request is read.

    Authorization: Bearer KEY|TOKEN   an API key (tg_…) or a signed token; gRPC: metadata `authorization`
    x-api-key: KEY                    an API key
    client certificate                if neither header is present
    nothing                           the anonymous tenant, if one is configured

A presented credential must be valid: a wrong one is refused, even if anonymous callers are let in, and so are two that
differ, since the request would belong to neither. The tenant's request rate is charged here, so that a request over
the limit costs no decoding.

`admit` costs a few microseconds with a key: a parse, a hash, a look-up (`tests/bench/identity_cost.py`).
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, AsyncExitStack

from gateway.config.auth import AuthConfig
from gateway.core.access.api_key import PREFIX
from gateway.core.admission.admission import Admission
from gateway.identity.audit import Audit
from gateway.identity.certificates import Certificates
from gateway.identity.credential import UnprovedCredential
from gateway.identity.jwt_tokens import TokenVerifier
from gateway.identity.keyring import Changes, KeyRing
from gateway.identity.scoped_host import ScopedHost
from tidegate import clock
from tidegate.caller import Grant, Identity, Right
from tidegate.oip.guard import PresentedCredentials
from tidegate.oip.host import ModelHost
from tidegate.outcome import Forbidden, ServeError, Unauthenticated
from tidegate.security.standing import StandingWatch

_BEARER = "bearer "


class GatewayGuard:
    """A `Guard` over the gateway's host. `async with` reads the keys and follows them."""

    def __init__(self, config: AuthConfig, host: ModelHost, admission: Admission, audit: Audit) -> None:
        self._host = host
        self._admission = admission
        self._audit = audit
        self.standing = StandingWatch()
        self.keys = KeyRing(config.keys_file, self._keys_changed) if config.keys_file else None
        self.tokens = TokenVerifier(config.jwt) if config.jwt else None
        self._certificates = Certificates(config.mtls) if config.mtls else None
        self._anonymous = Identity("anonymous", Grant(config.anonymous)) if config.anonymous else None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> GatewayGuard:
        async with self._stack:
            if self.keys is not None:
                await self._stack.enter_async_context(self.keys)
            if self.tokens is not None:
                await self._stack.enter_async_context(self.tokens.keys)
            await self._stack.enter_async_context(self.standing)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def let_in(self, presented: PresentedCredentials) -> ModelHost:
        return ScopedHost(self._host, await self.identify(presented), presented, self._audit.refused)

    async def admit(self, presented: PresentedCredentials) -> ModelHost:
        identity = await self.identify(presented)
        quota = self._admission.tenants.of_identity(identity)
        wait_s = quota.ask(now := clock.now())
        if wait_s > 0.0:
            raise self._admission.refuse_over_rate(quota.lacks_requests(now), wait_s)
        return ScopedHost(self._host, identity, presented, self._audit.refused)

    def follow(
        self, presented: PresentedCredentials, right: Right | None = None
    ) -> AbstractContextManager[asyncio.Future[ServeError]]:
        """A future, for a stream, that gets the refusal once the credential, or its right, is good no more."""
        if right is None:
            return self.standing.follow(lambda: self.identify(presented))
        return self.standing.follow(lambda: self.with_right(presented, right))

    async def identify(self, presented: PresentedCredentials) -> Identity:
        """Return the caller's identity. Raises Unauthenticated; refusals are audited."""
        try:
            return await self._identified(presented)
        except UnprovedCredential as error:
            self._audit.refused(error.reason, error.who, presented)
            raise
        except Unauthenticated:
            self._audit.refused("missing", "", presented)
            raise

    async def with_right(self, presented: PresentedCredentials, right: Right) -> Identity:
        """Return the caller's identity if it has the right. Raises Unauthenticated and Forbidden."""
        identity = await self.identify(presented)
        if not identity.may(right):
            self._audit.refused(f"no right {right}", identity.id, presented)
            raise Forbidden(f"{identity.id} has no right {right!r}")
        return identity

    def _keys_changed(self, changes: Changes) -> None:
        self._audit.keys_changed(changes)
        self.standing.look_soon()

    async def _identified(self, presented: PresentedCredentials) -> Identity:
        text, utc_s = _credential(presented), clock.utc_s()
        if text:
            if self.tokens is not None and not text.startswith(PREFIX):
                return await self.tokens.identify(text, utc_s)
            if self.keys is None:
                raise UnprovedCredential("API keys are not accepted here", "kind")
            return self.keys.identify(text, utc_s)
        certificate = presented.certificate() if self._certificates is not None else None
        if self._certificates is not None and certificate is not None:
            return self._certificates.identify(certificate, utc_s)
        if self._anonymous is None:
            raise Unauthenticated("this gateway wants a credential, as in `Authorization: Bearer KEY`")
        return self._anonymous

    def __repr__(self) -> str:
        means = [one for one in (self.keys, self.tokens, self._certificates, self._anonymous) if one is not None]
        return f"<GatewayGuard {means}>"


def _credential(presented: PresentedCredentials) -> str:
    """Return the presented key or token, "" for none. Raises UnprovedCredential."""
    authorization, key = presented.authorization, presented.key
    if authorization and authorization[: len(_BEARER)].lower() != _BEARER:
        raise UnprovedCredential("of the schemes of `Authorization` only `Bearer` is known here", "scheme")
    text = authorization[len(_BEARER) :].strip() if authorization else key.strip()
    if "," in text or "," in key:  # one of them came twice, and not the same
        raise UnprovedCredential("two different credentials are shown", "ambiguous")
    if key and key.strip() != text:
        raise UnprovedCredential("`Authorization` and `x-api-key` show two different credentials", "ambiguous")
    return text
