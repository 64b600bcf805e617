"""The watchdog's patience is how long a batch may take before its worker counts as hung.

A kernel that is stuck never answers, and every request behind it waits in vain. How long a batch takes is known from
the instance's own latency model, so patience is RATIO times its 95th percentile and not a fixed time: a model of 20 ms
is given up after FLOOR_S and not after half a minute. The floor is for delays that no table knows: a first kernel of
its shape, a machine that is busy with something else. `hang_timeout_s` of the configuration is the most that is ever
waited.

A worker that gets no core is starved and not stuck: seconds in which it was ready to run and the kernel ran others do
not count against it (`remaining_patience_s`), up to LONGEST times its patience, because a machine that is this busy
serves no request. A worker that sleeps, or spins, gets no extension.

It can be wrong for a shape far off the measured ones: its worker is then restarted for nothing, and its members are
tried once more, each by itself.

Source: docs/design/faults.md, "Watchdog".
"""

from __future__ import annotations

from typing import Final

from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.latency_model import LatencyModel

RATIO: Final = 5.0
FLOOR_S: Final = 2.0
LONGEST: Final = 5.0  # of the patience, however long it was kept from running


def patience_s(service: LatencyModel, batch: WorkShape) -> float:
    """Seconds after which a batch of this shape is not slow but stuck."""
    p95_s = service.predict_s(batch.units, batch.length) * max(1.0, service.quantile(0.95))
    return max(FLOOR_S, RATIO * p95_s)


def remaining_patience_s(patience_s: float, *, elapsed_s: float, starved_s: float) -> float:
    """Seconds that a worker still gets, where it could not run for `starved_s` of the elapsed seconds."""
    return max(0.0, patience_s + min(starved_s, (LONGEST - 1.0) * patience_s) - elapsed_s)
