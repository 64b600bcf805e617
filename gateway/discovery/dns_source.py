"""The source `dns`: the targets behind a name, asked for again and again.

The next lookup comes when the answer's TTL has passed, at most `every_s` and at least `SOONEST_S` after the last one:
a headless Service changes within a second, and a TTL of zero must not make a loop. After a lookup without an answer
the waits grow to `LATEST_S`, so that a name server that is down is not asked every second by every gateway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
from pydantic import ValidationError

from gateway.config.discovery import SourceConfig
from gateway.core.fleet.found_targets import Found
from gateway.discovery.dns_lookup import DnsAnswer, DnsLookup, DnsTarget, NoAnswer
from gateway.discovery.reports import Report, SourceAway, SourceReport, SourceSaid
from tidegate import clock
from tidegate.fleet.topics import is_name
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import OwnedTask

SOONEST_S: Final = 0.5
LATEST_S: Final = 5.0

log = structlog.get_logger(__name__)


class DnsSource:
    """`async with` asks until its end. The first answer comes later than the start: a name server may be away."""

    def __init__(self, section: SourceConfig, report: Report, draw: Callable[[], float]) -> None:
        assert section.name is not None
        self.name = section.label
        self._section = section
        self._report = report
        self._lookup = DnsLookup(section.name, section.port, section.server, section.timeout_s)
        self._backoff = Backoff(draw, base_s=SOONEST_S, cap_s=max(LATEST_S, section.every_s))
        self._task = OwnedTask(self._ask, name=f"discovery {self.name}")

    async def __aenter__(self) -> DnsSource:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    async def _ask(self) -> None:
        while True:
            await clock.sleep(await self._look())

    async def _look(self) -> float:
        """Ask once, and return after how many seconds to ask again."""
        try:
            answer = await self._lookup.look()
        except NoAnswer as error:
            self._report(SourceAway(self.name, str(error)))
            return SOONEST_S + self._backoff.next_delay_s()
        except Exception as error:  # a defect must not end discovery for good
            log.exception("a lookup has failed", source=self.name)
            self._report(SourceAway(self.name, f"internal error: {type(error).__name__}"))
            return SOONEST_S + self._backoff.next_delay_s()
        self._backoff.reset()
        self._report(self._said(answer))
        return min(self._section.every_s, max(SOONEST_S, answer.ttl_s))

    def _said(self, answer: DnsAnswer) -> SourceReport:
        """What the answer says; one of which nothing can be used (of a hijacked or mistyped zone) is none."""
        found, odd = [], [answer.warning] if answer.warning else []
        for one in answer.targets:
            try:
                found.append(self._found(one))
            except ValueError as error:
                odd.append(f"{one.name}: {error}")
        if not found:
            return SourceAway(self.name, f"nothing of the answer can be used: {'; '.join(odd[:4])}")
        return SourceSaid(self.name, tuple(found), "; ".join(odd))

    def _found(self, one: DnsTarget) -> Found:
        """Raises ValueError where it cannot be a target."""
        if not is_name(one.name):
            raise ValueError("its host's first label is no name for a target")
        more = {"standby": True} if one.reserve else {}
        try:
            return Found(self._section.target(one.name, one.address, **more).spec)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from error

    def __repr__(self) -> str:
        return f"<DnsSource {self._lookup!r}>"
