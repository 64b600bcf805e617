"""The certificate watch looks at a process's certificate each minute, and warns before it ends.

A certificate is looked at in handshakes, and a process whose links stand has none for weeks: a renewal that failed, and
files that cannot be used, were told of when it was too late. So the files are read here as a handshake would read them,
which logs what is wrong with them, and a certificate that is due for renewal or has ended is one warning a day.
"""

from __future__ import annotations

from typing import Final, Self

import structlog

from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask
from tidegate.security.authority import validity
from tidegate.security.tls import Tls

LOOK_S: Final = 60.0
AGAIN_S: Final = 86_400.0
log = structlog.get_logger(__name__)


class CertificateWatch:
    """Mutable: what was said last, and when. `async with` looks; without TLS it does nothing."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        issued = tls.issued() if tls is not None else None
        self._said = tls.state(issued) if tls is not None and issued is not None else ""  # the start has said it
        self._said_at = clock.now()
        self._task = OwnedTask(self._watch, name="certificate")

    async def __aenter__(self) -> Self:
        if self._tls is not None:
            self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    def validity_utc_s(self) -> tuple[float, float] | None:
        """When the certificate in use begins and ends; None without TLS."""
        if self._tls is None:
            return None
        begins, ends = validity(self._tls.fresh().cert)
        return begins.timestamp(), ends.timestamp()

    def look(self) -> None:
        """Warn if there is reason to, and it was not said within a day."""
        issued = self._tls.issued() if self._tls is not None else None
        if self._tls is None or issued is None:
            return
        state, now = self._tls.state(issued), clock.now()
        if state != self._said or now >= self._said_at + AGAIN_S:
            self._said, self._said_at = state, now
            self._tls.warn_of_end(issued)

    async def _watch(self) -> None:
        assert self._tls is not None
        while True:
            try:
                self._tls.fresh()
                self.look()
            except Exception:
                log.exception("the certificate cannot be looked at")  # a defect must not end the watch for good
            await clock.sleep(LOOK_S)

    def __repr__(self) -> str:
        return f"<CertificateWatch of {self._tls!r} {self._said or 'none'}>"
