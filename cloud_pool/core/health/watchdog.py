"""How long a batch of a pool may take before its worker counts as hung: `tidegate/workers/watchdog.py`, for batches.

What a batch of its size takes is read from the instance's own latency model. The floor is higher than on a device: a
GPU's first kernel of a shape takes longer than any table knows, and a worker that holds every model of the pool takes
many times as long to replace. Gateways do not wait for it: they leave a pool that owes them answers after a fraction of
a second (`gateway/core/health/progress.py`). `hang_timeout_s` of the configuration is the most that is ever waited.

Source: docs/design/faults.md, "Watchdog".
"""

from __future__ import annotations

from typing import Final

from cloud_pool.core.batching.grouping import WorkShape
from cloud_pool.core.batching.latency_model import LatencyModel
from tidegate.workers.watchdog import patience_s

FLOOR_S: Final = 2.0


def batch_patience_s(service: LatencyModel, batch: WorkShape) -> float:
    """Seconds after which a batch of this shape is not slow but stuck."""
    return patience_s(service.predict_s(batch.units, batch.length) * max(1.0, service.quantile(0.99)), FLOOR_S)
