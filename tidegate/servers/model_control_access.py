"""The access to a target's model control: callers that show the operator's token may load and unload models.

A target knows no tenants, and whoever reaches its port may have work computed. Loading and unloading concern every
caller, so they take more: the token that the process has written for its own account and root
(`operator_token.py`), as a header `authorization: Bearer TOKEN`. With TLS the port has checked the caller's
certificate before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import structlog

from tidegate.oip.guard import PresentedCredentials
from tidegate.oip.host import ModelHost
from tidegate.oip.repository.model_control import ModelControl, Statuses
from tidegate.outcome import Unauthenticated
from tidegate.runtime.process import StartError
from tidegate.servers.address import port_of
from tidegate.servers.operator_token import FILE_VARIABLE, OperatorToken

log = structlog.get_logger("model control")


class IndexedControl(ModelControl, Protocol):
    """A model control that knows the states of all versions."""

    async def statuses(self) -> Statuses: ...


class TokenAccess:
    """A `ControlAccess` to a target's control.

    Args:
        token: published by the process, or nowhere: then no caller is let in.
    """

    def __init__(self, control: IndexedControl, token: OperatorToken) -> None:
        self._control = control
        self._token = token

    async def statuses(self, host: ModelHost) -> Statuses:
        return await self._control.statuses()

    async def admit(self, presented: PresentedCredentials) -> ModelControl:
        check_token(self._token, presented)
        return self._control

    def __repr__(self) -> str:
        return f"<TokenAccess to {self._control!r} by {self._token!r}>"


def publish_token(token: OperatorToken, address: str, named: Path | None) -> None:
    """Write the token's file for the port of HOST:PORT. Raises StartError where a file was named that takes nothing."""
    try:
        token.publish(port_of(f"//{address}"), named)
    except OSError as error:
        if named is not None:
            words = f"cannot write {named} (key 'operator_token_file'): {error.strerror or error}"
            raise StartError(words) from error
        log.warning(
            "the operator's token could be written nowhere: no model can be loaded or unloaded by request",
            reason=str(error),
            way_out="set operator_token_file",
        )


def check_token(token: OperatorToken, presented: PresentedCredentials) -> None:
    """Raise Unauthenticated unless the operator's token is shown."""
    if token.admits(presented.authorization):
        return
    where = "nowhere: no folder takes it" if token.path is None else str(token.path)
    raise Unauthenticated(
        "loading and unloading models needs the operator's token, which this process's account and root can read, in "
        f"{where}: send `authorization: Bearer TOKEN`, or use `tidegate model load` as that account (a copy's path "
        f"goes into {FILE_VARIABLE})"
    )
