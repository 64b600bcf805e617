"""The guard between a server's routes and its host: it authenticates a caller and returns the host that it may use.

No handler of a protected route holds a host of its own. It gets one from the guard, together with the request, so that
a route which forgets to ask cannot answer anything. That happens before a body is read: a refused caller costs no
memory and no decoding.

The host that is given is the caller's own view: other tenants' models are not in it, and its calls carry the identity.
Health needs no credential, since load balancers have no credentials and learn from it only whether to send anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

from tidegate.oip.host import ModelHost
from tidegate.outcome import ServeError, ShuttingDown

KEY_HEADER: Final = "x-api-key"


class PresentedCredentials(NamedTuple):
    """What a caller shows. Its repr, which logs may print, holds no secret."""

    authorization: str  # as header or metadata `authorization`; "" is none
    key: str  # header or metadata `x-api-key`
    certificate: Callable[[], bytes | None]  # X.509 in DER, which TLS has verified; None without one
    protocol: str
    peer: str

    def __repr__(self) -> str:
        return f"<PresentedCredentials over {self.protocol} by {self.peer}>"


def shown_as_one(values: Sequence[str]) -> str:
    """All that a caller shows under one name. Two that differ are joined by a comma, which no credential has."""
    return values[0] if len(values) == 1 else ", ".join(dict.fromkeys(values))


class Guard(Protocol):
    """Raises Unauthenticated, or its subclass BadCredential."""

    def let_in(self, presented: PresentedCredentials) -> Coroutine[Any, Any, ModelHost]:
        """The host as this caller may see it."""
        ...

    def admit(self, presented: PresentedCredentials) -> Coroutine[Any, Any, ModelHost]:
        """The same for one request, which is on the caller's budget. Raises Overloaded too."""
        ...

    def follow(self, presented: PresentedCredentials) -> AbstractContextManager[Awaitable[ServeError] | None]:
        """For a stream: what waits until the credential is good no more and gives the refusal. None: it never ends."""
        ...


class OpenGuard:
    """The guard of a host that needs none."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def let_in(self, presented: PresentedCredentials) -> ModelHost:
        return self._host

    async def admit(self, presented: PresentedCredentials) -> ModelHost:
        return self._host

    def follow(self, presented: PresentedCredentials) -> AbstractContextManager[None]:
        return nullcontext()

    def __repr__(self) -> str:
        return f"<OpenGuard may use {self._host.server_name}>"


class DrainingGuard:
    """Refuses every new request once the process drains, and passes all others to the guard behind it.

    It refuses where credentials are checked, so before a body is read: requests that were admitted before are not
    concerned, however long their bodies take to come.
    """

    def __init__(self, guard: Guard, server_name: str) -> None:
        self._guard = guard
        self._server_name = server_name
        self._draining = False

    def drain(self) -> None:
        """Refuse every request from now on."""
        self._draining = True

    def let_in(self, presented: PresentedCredentials) -> Coroutine[Any, Any, ModelHost]:
        self._check()
        return self._guard.let_in(presented)

    def admit(self, presented: PresentedCredentials) -> Coroutine[Any, Any, ModelHost]:
        self._check()
        return self._guard.admit(presented)

    def follow(self, presented: PresentedCredentials) -> AbstractContextManager[Awaitable[ServeError] | None]:
        return self._guard.follow(presented)

    def _check(self) -> None:
        if self._draining:
            raise ShuttingDown.of(self._server_name)

    def __repr__(self) -> str:
        return f"<DrainingGuard{' refuses all' if self._draining else ''} before {self._guard!r}>"
