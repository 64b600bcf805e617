"""Token gaps are the times between the tokens of one variant's answers on one target, as they come in here.

What a link adds, and what others in the batch add, is in them: they say how long a silence is usual. Gaps are counted
in bins that grow by a fifth, so the percentile is at most that much too long. When `MOST` are counted all counts are
halved, so that what was usual fades within a few thousand tokens.

A stream that has stopped adds nothing here: only a token that came ends a gap. So a target that hangs does not learn
its own silence.

It can be wrong where tokens come many at a time: gaps within a burst count as well, and a hundred tokens a burst would
hide the pause between two.
Invariants: O(1) to record; at most `_BINS` counts.
"""

from __future__ import annotations

from math import log
from typing import Final

from tidegate.estimate.quantiles import bins_at

FEWEST: Final = 16  # gaps, below which nothing is said
MOST: Final = 4096
_LEAST_S: Final = 1e-4
_GROWTH: Final = 1.2
_PER_LOG: Final = 1.0 / log(_GROWTH)
_BINS: Final = 72  # up to 40 s
_READ_EVERY: Final = 64  # gaps between two readings of the percentile
_SHARE: Final = 0.99


class TokenGaps:
    """Mutable: `record` each gap; `p99_s` is what 99 of 100 gaps take at most."""

    __slots__ = ("_counts", "_p99_s", "_read_at", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self._total = 0
        self._p99_s: float | None = None
        self._read_at = FEWEST

    def record(self, gap_s: float) -> None:
        """A token came so long after the one before."""
        bin = int(log(gap_s / _LEAST_S) * _PER_LOG) + 1 if gap_s > _LEAST_S else 0
        self._counts[bin if bin < _BINS else _BINS - 1] += 1
        self._total += 1
        if self._total >= MOST:
            self._counts = [count // 2 for count in self._counts]
            self._total = self._read_at = sum(self._counts)

    @property
    def p99_s(self) -> float | None:
        """Seconds; None while too few gaps are known."""
        if self._total >= self._read_at:
            self._read_at = self._total + _READ_EVERY
            (bin,) = bins_at(dict(enumerate(self._counts)), (_SHARE,))
            self._p99_s = _LEAST_S * _GROWTH**bin
        return self._p99_s

    def __repr__(self) -> str:
        return f"<TokenGaps of {self._total} gaps>"
