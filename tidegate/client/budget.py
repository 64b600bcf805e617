"""What is left of a call's budget over all of its tries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidegate.oip.budget import BUDGET_HEADER
from tidegate.outcome import DeadlineExceeded

# The gateway answers within the budget, late ones with a refusal that has a reason. A client that gave up in the same
# instant would never read it, so it waits this much longer for what may not come at all.
GRACE_S: Final = 1.0
UNBOUNDED_S: Final = 600.0  # without a budget of its own the model's counts, which the client does not know


@dataclass(frozen=True)
class CallBudget:
    """A deadline by this machine's clock, or none."""

    deadline: float | None

    @classmethod
    def of(cls, budget_s: float | None, now: float) -> CallBudget:
        """Raises ValueError where it is not positive."""
        if budget_s is not None and not 0 < budget_s < float("inf"):
            raise ValueError(f"budget_s has to be a positive number of seconds, not {budget_s!r}")
        return cls(None if budget_s is None else now + budget_s)

    def left_s(self, now: float) -> float | None:
        return None if self.deadline is None else self.deadline - now

    def headers(self, now: float) -> dict[str, str]:
        """What the server is told. Raises DeadlineExceeded where nothing is left."""
        left_s = self.left_s(now)
        if left_s is None:
            return {}
        if left_s <= 0:
            raise DeadlineExceeded("the budget was used up before the request could be sent")
        return {BUDGET_HEADER: f"{left_s * 1e3:.3f}"}

    def is_over(self, now: float) -> bool:
        """Whether even a refusal for lateness would be here by now."""
        return self.deadline is not None and now > self.deadline + GRACE_S

    def patience_s(self, now: float) -> float:
        """How long to wait for the next byte."""
        left_s = self.left_s(now)
        return UNBOUNDED_S if left_s is None else max(left_s, 0.0) + GRACE_S
