"""The answer to a scrape: all families of a process, in the format that the scraper accepts.

A scraper that accepts OpenMetrics gets it, with exemplars; every other scraper gets the classic text format. Beside a
process's own families there are those of the process itself: resident memory, CPU time, open files (`process_…`).

Where several gateways share one address, `sharing` merges what all of them counted (`sharing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from tidegate.metrics.sharing import SharedMetrics

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS: Final = "application/openmetrics-text"

Collect = Callable[[], Iterable[Metric]]


class Exposition:
    """`render` answers one scrape. A registry of its own: several gateways may live in one process (in tests they do).

    Args:
        collect: makes the process's families.
        sharing: None: this process answers for itself alone.
    """

    def __init__(self, collect: Collect, sharing: SharedMetrics | None = None) -> None:
        self._sources: list[Collect] = [collect]
        self._sharing = sharing
        self._process = ProcessCollector(registry=None)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(self, source: Collect) -> None:
        """More families, from another part of the process."""
        self._sources.append(source)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        if self._sharing is None:
            yield from self.own()
        else:
            yield from self._sharing.merged(list(self.own()))

    def own(self) -> Iterator[Metric]:
        """The families of this process alone."""
        for source in self._sources:
            yield from source()
        yield from self._process.collect()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body, and its content type, for this Accept header."""
        if _OPENMETRICS in accept:
            body: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), TEXT

    def __repr__(self) -> str:
        return f"<Exposition of {len(self._sources)} sources>"
