"""A target's model: what the common pipeline asks of one model version, on an edge or in a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from numpy.typing import NDArray

from tidegate.fleet.offers import ModelOffer
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.work import Work
from tidegate.oip.host import ModelStatistics
from tidegate.trace_context import Trace
from tidegate.types import NO_PARAMETERS, Call, Parameters


class Computation(msgspec.Struct, frozen=True, eq=False):  # one a request: a dataclass takes five times as long
    """One call that is to be computed, with what the pipeline has found out about it."""

    call: Call
    arrays: dict[str, NDArray[Any]]  # the inputs
    variant: Variant
    work: Work
    deadline: float
    trace: Trace | None


class Computed(msgspec.Struct, frozen=True, eq=False):
    """The outputs of a computation, and how they came about.

    `withheld` are outputs that are sent only when the request names them. `degraded` says that a lesser variant
    answered than the one that normally would have. `parameters` are the answer's. `pace_s` is the time by which answers
    of different lengths can be compared, where `compute_s` is not.
    """

    outputs: Mapping[str, NDArray[Any]]
    queue_s: float
    compute_s: float
    batch_rows: int
    batch_wait_s: float = 0.0
    degraded: bool = False
    withheld: frozenset[str] = frozenset()
    parameters: Parameters = NO_PARAMETERS
    pace_s: float | None = None


class TargetModel(Protocol):
    """One version of a model on one target."""

    @property
    def label(self) -> str:
        """Names the model in refusals."""
        ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def variants(self) -> Sequence[Variant]:
        """The variants that this target has."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the model can be served now."""
        ...

    def offer(self) -> ModelOffer:
        """What gateways hear of the model."""
        ...

    def statistics(self) -> ModelStatistics: ...

    def choose(self, variants: Sequence[Variant], work: Work, demanded: str) -> Variant:
        """Choose among the variants that satisfy the demand; there is at least one.

        Raises:
            NotSupported: none of them takes this work.
            Unreachable: the model has no worker now.
        """
        ...

    async def compute(self, computation: Computation) -> Computed:
        """Wait for a turn, and compute. Raises ServeError."""
        ...

    def ended(self, took_s: float, error: BaseException | None) -> None:
        """Take note that a call has ended, with this error or with an answer."""
        ...
