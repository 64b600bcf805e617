"""A soak trial decides whether a new generation has proved itself with real requests.

A generation passes after `duration_s` and `min_requests` answers; it fails as soon as its error rate is over `err_max`,
or its p95 is more than `p95_ratio_max` times that of the generation before. Both need a few answers first: one error of
one request is no rate. Only time with a link to the fleet counts, so a device without a network neither commits nor
rolls back because of it; and only the model's own errors count, not those caused by callers or overload.

Pure: `now` and whether the link stands are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tidegate.estimate.quantiles import nearest_rank
from tidegate.rollout.plan import Soak

FEW: Final = 20  # answers before a rate or a percentile means something
KEPT: Final = 512  # newest answers whose times are kept
_MAX_STEP_S: Final = 60.0  # counted between two ticks at most; a suspended device did not soak


def p95_s(times_s: Sequence[float]) -> float:
    """The time that 19 of 20 computations are within; of at least one time."""
    return nearest_rank(sorted(times_s), 0.95)


class ComputeTimes:
    """The compute times of a generation's newest answers."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=KEPT)

    def record(self, compute_s: float) -> None:
        self._times_s.append(compute_s)

    @property
    def p95_s(self) -> float | None:
        """The p95 of the kept times; None while they are too few."""
        return p95_s(self._times_s) if len(self._times_s) >= FEW else None


@dataclass(slots=True)
class SoakTrial:
    """Mutable: `record` each request, `tick` now and then.

    Args:
        before_p95_s: p95 of the generation before; None where it is not known, and then times are not compared.
    """

    rules: Soak
    before_p95_s: float | None
    requests: int = 0
    errors: int = 0
    soaked_s: float = 0.0
    times: ComputeTimes = field(default_factory=ComputeTimes)
    _ticked_at: float | None = None

    def record(self, compute_s: float | None) -> None:
        """Record one request: its compute time, or None if it failed by the model's own fault."""
        self.requests += 1
        if compute_s is None:
            self.errors += 1
        else:
            self.times.record(compute_s)

    def tick(self, now: float, *, linked: bool) -> None:
        if self._ticked_at is not None and linked:
            self.soaked_s += min(_MAX_STEP_S, max(0.0, now - self._ticked_at))
        self._ticked_at = now

    def failure(self) -> str:
        """Why the generation must be rolled back, "" while it need not."""
        rules, p95 = self.rules, self.times.p95_s
        if self.requests >= FEW and self.errors > rules.err_max * self.requests:
            return f"soak_errors: {self.errors} of {self.requests} requests failed, at most {rules.err_max:g} may"
        if rules.p95_ratio_max is not None and p95 is not None and self.before_p95_s:
            ratio = p95 / self.before_p95_s
            if ratio > rules.p95_ratio_max:
                return f"soak_slow: p95 is {ratio:.2f} times that of before, at most {rules.p95_ratio_max:g} is allowed"
        if rules.timeout_s and self.soaked_s >= rules.timeout_s and self.requests < rules.min_requests:
            return f"soak_starved: {self.requests} of {rules.min_requests} requests came in {self.soaked_s:.0f} s"
        return ""

    @property
    def passed(self) -> bool:
        """Whether the generation may be committed, provided that `failure` is empty."""
        enough = self.requests - self.errors >= self.rules.min_requests
        # Also below FEW, errors must not outweigh: one that failed its only request is not committed.
        return enough and self.soaked_s >= self.rules.duration_s and self.errors * 2 <= self.requests
