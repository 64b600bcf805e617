"""One request as it stands before a worker, with the caller that its answer goes back to."""

from __future__ import annotations

from typing import Final, Protocol

from tidegate.outcome import ServeError
from tidegate.types import Accepted, LoadReport

VERSION: Final = "1"  # of every simulated model


class JobCaller(Protocol):
    """The caller that a job's answer goes back to: a stream, or a device's own callers, which need none."""

    def accepted(self, job: SimulatedJob, word: Accepted) -> None: ...
    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None: ...
    def refused(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None: ...


class SimulatedJob:
    """One request as it stands before a worker: `deadline` is its arrival there and its budget. `id` is below 0 for
    a device's own."""

    __slots__ = (
        "answer_bytes", "arrived_at", "asker", "deadline", "due", "id", "length", "luck", "model", "priority", "rows",
        "settled", "units", "useful_s",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        asker: JobCaller,
        model: str,
        *,
        rows: int,
        length: int,
        deadline: float,
        priority: int,
        luck: float,
        answer_bytes: int = 0,
    ) -> None:
        self.id = id
        self.asker = asker
        self.model = model
        self.rows = rows
        self.length = length
        self.units = float(rows * length)
        self.deadline = deadline
        self.priority = priority
        self.luck = luck
        self.answer_bytes = answer_bytes
        self.arrived_at = 0.0
        self.due = 0.0  # when its caller's deadline is, by the caller's clock; 0 for a device's own
        self.settled = False  # answered, refused or given up
        self.useful_s = 0.0  # its share of the compute that made its answer

    def __repr__(self) -> str:
        return f"<SimulatedJob {self.id} {self.model} {self.rows}x{self.length} due {self.deadline:.3f}>"


class _NoCaller:
    """The caller of a job that is only foreseen, or that needs no answer."""

    def accepted(self, job: SimulatedJob, word: Accepted) -> None: ...

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None: ...

    def refused(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None: ...


NO_CALLER: Final[JobCaller] = _NoCaller()
