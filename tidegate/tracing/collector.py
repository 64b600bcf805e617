"""The connection to the collector that a configuration names; OpenTelemetry is imported only if one is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self

from tidegate.config import ConfigError
from tidegate.tracing.config import TracingConfig
from tidegate.tracing.span import Span


class Collector(Protocol):
    """Where spans go, inside `async with`: `tidegate.tracing.export.SpanExport`, or a fake in tests."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of spans so far, by their outcome."""

    def add(self, spans: Iterable[Span]) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def collector_of(config: TracingConfig | None, service: str, name: str) -> Collector | None:
    """Args: service, name: what traces call this process.

    Raises:
        ConfigError: the libraries are not installed.
    """
    if config is None:
        return None
    try:
        from tidegate.tracing.export import SpanExport
    except ModuleNotFoundError as error:
        raise ConfigError(f"section 'tracing' needs {error.name}: pip install 'tidegate[tracing]'") from error
    return SpanExport(config, service, name)
