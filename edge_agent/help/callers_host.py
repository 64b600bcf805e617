"""The callers' guard notes the credential that a local caller shows, for a gateway that is asked for help.

The device itself proves no credential and lets every caller in, as without help. The gateway proves the credential as
if the caller had come to it, so that the caller's tenant, rights and quotas count, within those of the device. The
credential stays with its one request: it is in no log and in no repr.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

from edge_agent.serving.host_around import HostAround
from tidegate.oip.guard import PresentedCredentials
from tidegate.oip.host import ModelHost
from tidegate.types import Call, Reply

InferFor = Callable[[Call, str], Awaitable[Reply]]  # the call, and the credential that its caller showed


class CallersGuard:
    """A `Guard` that lets all in. Args: infer_for: answers a call whose caller showed a credential."""

    def __init__(self, host: ModelHost, infer_for: InferFor) -> None:
        self._host = host
        self._infer_for = infer_for

    async def let_in(self, presented: PresentedCredentials) -> ModelHost:
        return self._host_of(presented)

    async def admit(self, presented: PresentedCredentials) -> ModelHost:
        return self._host_of(presented)

    def follow(self, presented: PresentedCredentials) -> AbstractContextManager[None]:
        return nullcontext()

    def _host_of(self, presented: PresentedCredentials) -> ModelHost:
        credential = presented.authorization or (f"Bearer {presented.key}" if presented.key else "")
        return CallersHost(self._host, self._infer_for, credential) if credential else self._host

    def __repr__(self) -> str:
        return f"<CallersGuard of {self._host.server_name}>"


class CallersHost(HostAround[ModelHost]):
    """A `ModelHost` for one request, whose caller showed a credential."""

    __slots__ = ("_credential", "_infer_for")

    def __init__(self, host: ModelHost, infer_for: InferFor, credential: str) -> None:
        super().__init__(host)
        self._infer_for = infer_for
        self._credential = credential

    def infer(self, call: Call) -> Awaitable[Reply]:
        return self._infer_for(call, self._credential)

    def __repr__(self) -> str:
        return f"<CallersHost for a bearer {self._host!r}>"
