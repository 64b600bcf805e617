"""What a call takes, as those who plan calls see it: a number of seconds for padded work in rows of one length.

Planning weighs thousands of calls that are never made against the one that is, so whole arrays are asked about at once;
one by one they would cost more than all else that a batcher does.
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

Numbers = NDArray[Any]


class BatchCost(Protocol):
    """Neither more work nor longer rows may cost less."""

    def predict_s(self, units: float, length: float) -> float:
        """Median seconds of a call of so much work, padding included, in rows of this length."""

    def predict_many_s(self, units: Numbers, lengths: Numbers) -> Numbers:
        """The same for arrays that can be broadcast together."""

    def quantile(self, share: float) -> float:
        """What a prediction is to be multiplied with, so that this share of calls takes less."""
