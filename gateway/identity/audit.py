"""The audit log: one structured line for each action, with the credential that performed it (`audit=ACTION`).

Refusals come in floods, so they are coalesced by reason, credential and peer's host; the lines' `count` add up.
Requests of operators on loopback are coalesced too, since no credential is required there and dashboards poll every
second: `who` is then "local", and one line a minute of each kind says how often, at level info if nothing was changed.
Lines name credentials by their public ids. No secret ever reaches this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import structlog

from gateway.identity.event_throttle import EventCoalescer
from gateway.identity.keyring import Changes
from tidegate import clock
from tidegate.oip.guard import PresentedCredentials
from tidegate.runtime.logs import AUDIT

log = structlog.get_logger(AUDIT)

LOCAL: Final = "local"  # any account of this machine: each can open a connection to loopback
LOCAL_WINDOW_S: Final = 60.0


class Audit:
    """Writes audit lines. Mutable: events that are held back to be counted; `close` writes the rest of them."""

    def __init__(self, write: Callable[..., Any] | None = None) -> None:
        self._write = write or log.warning
        self._write_info = write or log.info  # reads on loopback
        self._refusals = EventCoalescer()
        self._local = EventCoalescer(LOCAL_WINDOW_S)
        self._sweep_at = 0.0

    def refused(self, reason: str, who: str, presented: PresentedCredentials) -> None:
        now = clock.now()
        kind = (reason, who, presented.protocol, host_of(presented.peer))
        count = self._refusals.seen(kind, now)
        if count:
            self._refusal_line(kind, count)
        if now >= self._sweep_at:
            self._sweep_at = now + 1.0
            self._flush(now)

    def admin(self, who: str, method: str, path: str, peer: str, status: int) -> None:
        self._write("audit", audit="admin", who=who, what=f"{method} {path}", peer=host_of(peer), status=status)

    def local(self, method: str, path: str, peer: str, status: int) -> None:
        now = clock.now()
        kind = (f"{method} {path}", host_of(peer), status)
        count = self._local.seen(kind, now)
        if count:
            self._local_line(kind, count)
        for over, held in self._local.due(now):
            self._local_line(over, held)

    def keys_changed(self, changes: Changes) -> None:
        for action, ids in changes.items():
            if ids:
                self._write("audit", audit=f"keys-{action}", ids=",".join(ids[:50]), count=len(ids))

    def close(self) -> None:
        self._flush(float("inf"))
        for kind, count in self._local.due(float("inf")):
            self._local_line(kind, count)

    def _flush(self, now: float) -> None:
        for kind, count in self._refusals.due(now):
            self._refusal_line(kind, count)

    def _local_line(self, kind: Any, count: int) -> None:
        what, peer, status = kind if isinstance(kind, tuple) else (kind, "", 0)
        write = self._write_info if what.lower().startswith("get ") and status < 400 else self._write
        write("audit", audit="admin", who=LOCAL, what=what, peer=peer, status=status, count=count)

    def _refusal_line(self, kind: Any, count: int) -> None:
        reason, who, protocol, peer = kind if isinstance(kind, tuple) else (kind, "", "", "")
        self._write("audit", audit="refused", reason=reason, who=who, protocol=protocol, peer=peer, count=count)

    def __repr__(self) -> str:
        return f"<Audit {self._refusals!r}>"


def host_of(peer: str) -> str:
    """Return the host of a peer, as HTTP ("10.0.0.1") or gRPC ("ipv4:10.0.0.1:40312") names it, without the port."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
