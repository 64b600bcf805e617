"""Discovery runs the sources of targets, and folds what they report into one set.

Each source runs on its own and reports its whole set; a source that fails hurts no other. Changes are logged once: a
source that is away, that is back, a target that is refused since another source has its id. The same is shown to
operators as conditions, for as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

import structlog

from gateway.config.discovery import SourceConfig
from gateway.core.access.networks import AllowedNetworks, host_and_port
from gateway.core.fleet.found_targets import MOST_TARGETS, Found, FoundTargets
from gateway.core.fleet.target import TargetSpec
from gateway.discovery.announce_source import AnnounceSource
from gateway.discovery.file_source import FileSource
from gateway.discovery.kubernetes_source import KubernetesSource
from gateway.discovery.reports import Report, SourceAway, SourceReport, SourceSaid, TargetSource
from tidegate import clock
from tidegate.config import ConfigError
from tidegate.fleet.topics import is_name
from tidegate.oip.check import quoted_input
from tidegate.runtime.process import StartError
from tidegate.security.certificate_identity import CertificateIdentity

NAMED: Final = 8  # refusals in one warning

log = structlog.get_logger(__name__)


class Discovery:
    """`async with` runs the sources. Raises StartError where one can never work.

    Args:
        sections: the sources, in the order in which they get an id that two of them say at once.
        found: the set that they are folded into.
        on_change: called on the loop after each change of it.
        draw: chance, uniform in [0, 1), for the waits between vain attempts.
        has_tls: whether the gateway has a certificate.
        networks: where pools that announce themselves may be.
    """

    def __init__(
        self,
        sections: Sequence[SourceConfig],
        found: FoundTargets,
        on_change: Callable[[], None],
        draw: Callable[[], float],
        *,
        has_tls: bool,
        networks: AllowedNetworks,
    ) -> None:
        self._found = found
        self._has_tls = has_tls
        self._on_change = on_change
        self._sources = [
            _source_of(section, self.fold, draw, has_tls=has_tls, networks=networks) for section in sections
        ]
        self._refused: dict[tuple[str, str], str] = {}  # as logged
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Discovery:
        async with self._stack:
            for source in self._sources:
                try:
                    await self._stack.enter_async_context(source)
                except ConfigError as error:
                    raise StartError(f"key 'discovery', {source.name}: {error}") from error
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def announced(self) -> AnnounceSource | None:
        """The source that hears what pools announce, for the connection to the broker; None where there is none."""
        return next((one for one in self._sources if isinstance(one, AnnounceSource)), None)

    def fold(self, report: SourceReport) -> None:
        """Take in what a source reports."""
        state, now = self._found.sources[report.source], clock.now()
        if isinstance(report, SourceAway):
            if state.why != report.why:
                log.warning("a source of targets is away: what it said holds", source=report.source, why=report.why)
            self._found.away(report.source, report.why, now)
        else:
            if state.why:
                log.info("a source of targets is back", source=report.source)
            found, warning = self._checked(report)
            if warning and warning != state.warning:
                log.warning("a source of targets says what cannot be used", source=report.source, why=warning)
            self._found.say(report.source, found, now, warning=warning)
            self._log_refusals()
        self._on_change()

    def _checked(self, report: SourceReport) -> tuple[list[Found], str]:
        """What of it can be targets, and what cannot, in words: an odd target must not cost the others."""
        assert isinstance(report, SourceSaid)
        odd = [report.warning] if report.warning else []
        if len(report.found) > MOST_TARGETS:
            odd.append(f"{len(report.found)} targets are more than {MOST_TARGETS}: the rest is not used")
        found, refused = [], []
        for one in report.found[:MOST_TARGETS]:
            if why := _why_not(one.spec, has_tls=self._has_tls):
                refused.append(f"{quoted_input(one.spec.id)}: {why}")
            else:
                found.append(one)
        more = [f"and {len(refused) - NAMED} more"] if len(refused) > NAMED else []
        return found, "; ".join([*odd, *refused[:NAMED], *more])

    def _log_refusals(self) -> None:
        refused = {(source, target_id): why for source, target_id, why, _ in self._found.refusals()}
        for (source, target_id), why in refused.items():
            if self._refused.get((source, target_id)) != why:
                log.warning("a target is refused: its id is taken", target=target_id, source=source, why=why)
        self._refused = refused

    def __repr__(self) -> str:
        return f"<Discovery {self._sources!r}>"


def _why_not(spec: TargetSpec, *, has_tls: bool) -> str:
    """Why this cannot be a target; "" where it can."""
    name = spec.id.partition("/")[2]
    if not is_name(name):
        return "its name must be 1 to 64 letters, digits and . _ ~ -, starting with a letter or digit"
    if not spec.foreign and host_and_port(spec.address) is None:
        return f"its address {quoted_input(spec.address)} is no HOST:PORT"
    if has_tls and spec.encrypted and not spec.foreign:
        try:
            CertificateIdentity.parse(spec.id)
        except ValueError as error:
            return f"no certificate can be its own: {error}"
    return ""


def _source_of(
    section: SourceConfig,
    report: Report,
    draw: Callable[[], float],
    *,
    has_tls: bool,
    networks: AllowedNetworks,
) -> TargetSource:
    if section.path is not None:
        return FileSource(section.label, section.path, report, has_tls=has_tls)
    if section.source == "announce":
        return AnnounceSource(section, report, networks)
    if section.source == "kubernetes":
        return KubernetesSource(section, report, draw)
    try:
        # Needed only by those who have such a source.
        from gateway.discovery.dns_source import DnsSource
    except ModuleNotFoundError as error:
        raise StartError("key 'discovery': source: dns needs dnspython: pip install 'tidegate[discovery]'") from error
    return DnsSource(section, report, draw)
