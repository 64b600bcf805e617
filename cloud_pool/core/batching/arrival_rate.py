"""The arrival rate predicts how busy the device will be with future requests, and how little slack urgent ones have.

A batch cannot be interrupted, and requests arrive while it runs. Whether a long batch may start, and how long it may
be, is a question about requests that are not here yet; the best guess is the requests of the last moments.

    load      device-seconds a second that lately came in, over LOAD_S, times MARGINAL_RATIO: a new request shares the
              calls of the requests that wait, and adds less than it would take alone
    tight_s   the slack that nine of ten requests have at least on arrival, followed by small steps of its logarithm:
              where one in ten is tight, batches are kept short for it, and a rare one does not split everything

Invariants: stretch times workers is between 1 and MAX_STRETCH; O(1), no clock. It lags behind a step of the load by
about LOAD_S.

Source: the quantile by stochastic approximation, Robbins and Monro 1951.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Final

LOAD_S: Final = 1.0
MARGINAL_RATIO: Final = 0.6  # simulated: 1 gives up long requests for nothing, 0 lets them pass more valuable ones
MAX_STRETCH: Final = 10.0
_QUANTILE: Final = 0.1
_STEP: Final = 0.1  # of the logarithm; a tenth of it upwards for each request that has more slack


class ArrivalRate:
    """Mutable: `record` each arrival."""

    def __init__(self) -> None:
        self._load = 0.0
        self._load_at = -inf
        self._rate = 0.0
        self._log_tight_s = inf

    def record(self, work_s: float, slack_s: float, now: float) -> None:
        """Learn from an arrival: the device-seconds that the request should take, and its slack beyond them."""
        # Load and rate decay exponentially since the last arrival; each arrival then adds its part of LOAD_S.
        kept = self._kept(now)
        self._load = self._load * kept + MARGINAL_RATIO * work_s / LOAD_S
        self._rate = self._rate * kept + 1.0 / LOAD_S
        self._load_at = max(now, self._load_at)
        # Robbins and Monro: the steps down are nine times as large as the steps up, so the estimate settles where one
        # arrival in ten has less slack.
        slack = log(max(slack_s, 1e-4))
        if self._log_tight_s == inf:
            self._log_tight_s = slack
        else:
            self._log_tight_s += _STEP * (_QUANTILE if slack >= self._log_tight_s else _QUANTILE - 1.0)

    def load(self, now: float) -> float:
        """Device-seconds a second."""
        return self._load * self._kept(now)

    @property
    def rate(self) -> float:
        """Arrivals a second, as of the last one."""
        return self._rate

    def stretch(self, now: float, workers: int = 1) -> float:
        """How many times longer work takes if all arrivals meanwhile go before it, shared by this many workers.

        With a share `load` of the time taken by arrivals, work of s seconds takes s / (1 - load).
        """
        free = 1.0 - self.load(now) / workers
        return (1.0 / free if free > 1.0 / MAX_STRETCH else MAX_STRETCH) / workers

    @property
    def tight_s(self) -> float:
        """Seconds of slack; infinity before the first arrival."""
        return exp(self._log_tight_s)

    def _kept(self, now: float) -> float:
        """The share of the past that still counts."""
        return exp(-max(0.0, now - self._load_at) / LOAD_S)

    def __repr__(self) -> str:
        return f"<ArrivalRate load {self._load:.2f}, tight ones have {self.tight_s * 1e3:.0f} ms>"
