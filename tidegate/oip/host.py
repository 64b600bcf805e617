"""`ModelHost` is the interface behind every OIP server: the gateway, an edge agent and the pool each implement it.

The servers in this package (`grpc_server`, `http_server`) and the answering end of the link stream know only this
interface, so all three processes speak the protocol with the same code and the same errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.models.manifest import Manifest
from tidegate.types import Call, Reply


@dataclass(slots=True)
class TimedCount:
    """A count of events and the nanoseconds they took, as OIP statistics print them."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.ns += int(seconds * 1e9)


@dataclass(slots=True)
class ModelStatistics:
    """Triton's statistics of one model version, cumulative since the start."""

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0  # rows
    execution_count: int = 0  # batches
    success: TimedCount = field(default_factory=TimedCount)
    fail: TimedCount = field(default_factory=TimedCount)
    queue: TimedCount = field(default_factory=TimedCount)
    compute_infer: TimedCount = field(default_factory=TimedCount)
    batches: dict[int, TimedCount] = field(default_factory=dict)  # rows of the batch → its executions


class ModelHost(Protocol):
    """The methods that an OIP server calls on the process behind it."""

    @property
    def server_name(self) -> str: ...

    def ready(self) -> bool:
        """Whether everything that is configured can be served now."""
        ...

    def manifests(self) -> Sequence[Manifest]:
        """Every model version that exists here, loaded or not."""
        ...

    def manifest(self, name: str, version: str = "") -> Manifest:
        """The manifest of one version, or of the highest when `version` is empty. Raises ModelNotFound."""
        ...

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether the model can be served now; False also for one that does not exist."""
        ...

    def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        """Statistics of all models, or of one. Raises ModelNotFound."""
        ...

    def infer(self, call: Call) -> Awaitable[Reply]:
        """Answer a checked call. Raises ServeError."""
        ...
