"""The counts of a target over its served requests: outcomes, stage times, and requests in progress.

Pure, and without the client library, so that an edge or a pool counts at the cost of a few additions whether or not
it is ever scraped; `serving.py` makes the families. Models are those that are served here, so labels are
bounded by the repository.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tidegate.metrics.histogram import STAGES_S, Histogram
from tidegate.outcome import Outcome
from tidegate.types import Reply

STAGES: Final = ("queue", "batch_wait", "compute")


class ServedCounts:
    """Mutable: `began` once a request, then `answered` or `ended`."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str, Outcome]] = Counter()  # (model, version, how it ended)
        self.pending: Counter[tuple[str, str]] = Counter()  # (model, version)
        self.stages: dict[tuple[str, str], Histogram] = {}  # (model, stage)

    def began(self, model: str, version: str) -> None:
        self.pending[model, version] += 1

    def answered(self, model: str, version: str, reply: Reply) -> None:
        self.pending[model, version] -= 1
        late = reply.budget_left_s is not None and reply.budget_left_s < 0.0
        degraded = reply.route is not None and reply.route.degraded
        self.outcomes[model, version, Outcome.LATE if late else Outcome.DEGRADED if degraded else Outcome.OK] += 1
        took = reply.stages.get
        self._took(model, "queue", took("queue", 0.0) - reply.batch_wait_s)
        self._took(model, "batch_wait", reply.batch_wait_s)
        self._took(model, "compute", took("compute", 0.0))

    def ended(self, model: str, version: str, outcome: Outcome) -> None:
        """Without an answer."""
        self.pending[model, version] -= 1
        self.outcomes[model, version, outcome] += 1

    def _took(self, model: str, stage: str, seconds: float) -> None:
        found = self.stages.get((model, stage))
        if found is None:
            found = self.stages[model, stage] = Histogram(STAGES_S)
        found.observe(seconds)

    def __repr__(self) -> str:
        return f"<ServedCounts {sum(self.outcomes.values())} requests>"
