"""The watchdog's patience is how long a call may take before its worker counts as hung.

A call that is stuck never answers, and every request behind it waits in vain. How long a call takes is known from what
calls of its size have taken, so patience is `RATIO` times their 99th percentile and not a fixed time: a model of 20 ms
is given up after the floor and not after half a minute. The floor is for delays that no table knows.

A worker that gets no core is starved and not stuck: seconds in which it was ready to run and the kernel ran others are
its excuse, up to `LONGEST` times its patience, because a machine that is this busy serves no request. On a device the
seconds that it computed are one as well, up to the configured limit: some models take longer for one content than for
another of its size, and ending a worker that computes would only begin its work anew. One that sleeps, is stopped or
waits for ever has none.

It can be wrong for a shape far off the measured ones: its worker is then restarted for nothing.

Source: docs/design/faults.md, "Watchdog".
"""

from __future__ import annotations

from typing import Final

RATIO: Final = 6.0
FLOOR_S: Final = 0.5
LONGEST: Final = 5.0  # of the patience, whatever the excuse


def patience_s(p99_s: float, floor_s: float = FLOOR_S) -> float:
    """Seconds after which a call is not slow but stuck, where 99 of 100 such calls take `p99_s` at most."""
    return max(floor_s, RATIO * p99_s)


def remaining_patience_s(patience_s: float, *, elapsed_s: float, excused_s: float, longest: float = LONGEST) -> float:
    """Seconds that a worker still gets, with an excuse for `excused_s` of the elapsed seconds.

    Args:
        longest: times its patience that it gets in all.
    """
    return max(0.0, patience_s + min(excused_s, (longest - 1.0) * patience_s) - elapsed_s)
