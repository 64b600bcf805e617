"""One request as it stands before a worker, with the caller that its answer goes back to."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple, Protocol

from gateway.core.estimate.token_calibration import GenerationBudget
from tidegate.outcome import ServeError
from tidegate.types import Accepted, LoadReport

VERSION: Final = "1"  # of every simulated model


class JobGeneration:
    """Mutable: the part of a job that generates: what is asked, and what it took so far."""

    __slots__ = (
        "answered", "budget", "first_budget_s", "first_by", "first_s", "length", "made", "max_tokens", "prefilled",
        "prompt", "rest_s", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        prompt: int,
        length: int,
        max_tokens: int,
        *,
        budget: GenerationBudget | None = None,
        leaves_after: int = 0,
        answered: int = 0,
    ) -> None:
        """Args:
        answered: tokens of the answer that another worker has made: they are part of the prompt, and no part of the
            other lengths.
        length: tokens that the answer will have.
        budget: of its caller, by which an oracle judges it.
        leaves_after: how many tokens its caller waits for; 0: for all.
        """
        self.answered = answered
        self.prompt = prompt
        self.length = length
        self.max_tokens = max_tokens
        self.budget = budget
        self.wanted = min(length, max_tokens, leaves_after or max_tokens)
        self.made = 0
        self.prefilled = 0  # tokens of the prompt that were computed
        self.first_budget_s: float | None = None  # as it is said on the way: from its arrival at the worker on ...
        self.first_by = inf  # ... and the instant that this makes there
        self.first_s = 0.0  # in its slot, until the first token ...
        self.rest_s = 0.0  # ... and from there on

    def token(self, place: int) -> int:
        """The id of a token that this job makes, by its place from 0: one for each place of the whole answer."""
        return self.answered + place

    def __repr__(self) -> str:
        return f"<JobGeneration {self.prompt}+{self.made}/{self.length}>"


class JobCaller(Protocol):
    """The caller that a job's answer goes back to: a stream, or a device's own callers, which need none."""

    def accepted(self, job: SimulatedJob, word: Accepted) -> None: ...
    def made(self, jobs: Sequence[SimulatedJob]) -> None:
        """A step is done: each of these generations has one more token."""
        ...

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None: ...
    def refused(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None: ...


class SimulatedJob:
    """One request as it stands before a worker: `deadline` is its arrival there and its budget. `id` is below 0 for
    a device's own."""

    __slots__ = (
        "answer_bytes", "arrived_at", "asker", "deadline", "due", "generation", "id", "length", "luck", "model",
        "priority", "queue_s", "request", "rows", "settled", "units", "useful_s",
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
        generation: JobGeneration | None = None,
        request: object = None,
    ) -> None:
        """Args: request: the `SimulatedRequest` that it is an attempt of, which a site places once more."""
        self.request = request
        self.queue_s = 0.0  # once it was answered: in its worker's queue
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
        self.generation = generation
        self.arrived_at = 0.0
        self.due = 0.0  # when its caller's deadline is, by the caller's clock; 0 for a device's own
        self.settled = False  # answered, refused or given up
        self.useful_s = 0.0  # its share of the compute that made its answer

    def __repr__(self) -> str:
        return f"<SimulatedJob {self.id} {self.model} {self.rows}x{self.length} due {self.deadline:.3f}>"


class ForeseenEnd(NamedTuple):
    """The instants at which a job will truly be done, and at which the first token of a generation will be there."""

    done_at: float
    first_at: float | None = None


class _NoCaller:
    """The caller of a job that is only foreseen, or that needs no answer."""

    def accepted(self, job: SimulatedJob, word: Accepted) -> None: ...

    def made(self, jobs: Sequence[SimulatedJob]) -> None: ...

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None: ...

    def refused(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None: ...


NO_CALLER: Final[JobCaller] = _NoCaller()
