"""A batch cost predicts the seconds of one call, given its padded work and the length of its rows.

Planning compares thousands of calls that are never made with the one that is, so whole arrays are predicted at once;
one by one they would cost more than everything else that a batcher does.
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

Numbers = NDArray[Any]


class BatchCost(Protocol):
    """Predictions never fall when work or row length grows."""

    def predict_s(self, units: float, length: float) -> float:
        """Median seconds of a call with this much work, padding included, in rows of this length."""

    def predict_many_s(self, units: Numbers, lengths: Numbers) -> Numbers:
        """The same for arrays that can be broadcast together."""

    def quantile(self, share: float) -> float:
        """The factor by which a prediction is multiplied so that this share of calls takes less."""
