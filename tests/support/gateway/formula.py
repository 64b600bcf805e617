"""A cost by a formula of the work, for what plans calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cloud_pool.core.batching.batch_cost import Numbers


class Formula:
    """A `BatchCost` on which only the padded work counts."""

    def __init__(self, service_s: Callable[[float], float]) -> None:
        self._service_s = service_s

    def predict_s(self, units: float, length: float) -> float:
        return self._service_s(units)

    def predict_many_s(self, units: Numbers, lengths: Numbers) -> Numbers:
        found: Numbers = np.vectorize(self._service_s, otypes=[float])(units)
        return found

    def quantile(self, share: float) -> float:
        return 1.0
