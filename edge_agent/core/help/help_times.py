"""Help times predict how long one gateway takes to answer, by model: the way there and back, its wait, its compute.

The first answer of a model is the table, and what its answers have shown since corrects it (`ServiceTime`), so that a
link that got slow or a pool that got busy is learned in some ten answers, and forgotten while nothing is asked. One
figure a model, whatever the size of a request: a device asks mostly for what is too large for it, which is alike.

A question that had no answer in time took at least as long as it waited, and is learned as that.

Bounded: MOST_MODELS; beyond, the one that was first known is forgotten. Pure.
"""

from __future__ import annotations

from typing import Final

from tidegate.estimate.service_time import ServiceTime

MOST_MODELS: Final = 256
LEAST_PATIENCE_S: Final = 0.25
_LEAST_S: Final = 1e-4
_QUESTION: Final = 1.0  # every question is one unit of work


class HelpTimes:
    """Mutable: `answered` and `silent` after each question, `took_s` before the next."""

    def __init__(self) -> None:
        self._by_model: dict[str, ServiceTime] = {}

    def took_s(self, model: str, now: float) -> float | None:
        """Median seconds of the next answer; None: none is known."""
        time = self._by_model.get(model)
        if time is None:
            return None
        time.relax(now)
        return time.predict_s(_QUESTION)

    def patience_s(self, model: str) -> float:
        """Seconds of silence that say something of the gateway: a caller's own short budget does not."""
        time = self._by_model.get(model)
        return LEAST_PATIENCE_S if time is None else max(LEAST_PATIENCE_S, 2.0 * time.predict_s(_QUESTION))

    def answered(self, model: str, seconds: float) -> None:
        """An answer came after so long."""
        time = self._by_model.get(model)
        if time is not None:
            time.record(_QUESTION, seconds)
            return
        if len(self._by_model) >= MOST_MODELS:
            del self._by_model[next(iter(self._by_model))]
        self._by_model[model] = ServiceTime(((_QUESTION, max(_LEAST_S, seconds)),))

    def silent(self, model: str, seconds: float) -> None:
        """No answer came within so long."""
        time = self._by_model.get(model)
        if time is not None and seconds > time.predict_s(_QUESTION):
            time.record(_QUESTION, seconds)

    def __repr__(self) -> str:
        return f"<HelpTimes of {len(self._by_model)} models>"
