"""Slow start gives a new worker a growing share of the work instead of its full share at once.

A new worker is warm at the sizes that warm-up ran, and cold at the others: allocators, kernel choices and caches fill
with real work, and what is slow in its first seconds should be slow for few. Its share grows linearly from FIRST_SHARE
to all in `WARM_S`. A share of w means that after a batch of d seconds it rests for d · (1/w - 1), at most MOST_REST_S.

The other workers do its part meanwhile, so slow start applies only where another worker serves. Pure.

Source: Envoy's and NGINX's slow start; here over time shares instead of weights, because workers pull.
"""

from __future__ import annotations

from typing import Final

WARM_S: Final = 10.0
FIRST_SHARE: Final = 0.2
MOST_REST_S: Final = 0.5


def rest_s(age_s: float, batch_s: float) -> float:
    """Seconds that a worker of this age rests after a batch."""
    # A worker that works d and rests r has the share d / (d + r), so r = d · (1/share - 1).
    share = min(1.0, FIRST_SHARE + (1.0 - FIRST_SHARE) * max(0.0, age_s) / WARM_S)
    return min(MOST_REST_S, batch_s * (1.0 / share - 1.0))
