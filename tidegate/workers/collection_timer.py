"""The collection timer sums what garbage collections took in a worker process, for its parent's metrics.

A worker has no event loop that could lag, and no port to scrape: what its collections took since its last answer
travels with the next one. One clock reading at each end of a collection is all that it costs.
"""

from __future__ import annotations

import gc

from tidegate import clock


class CollectionTimer:
    """Mutable: counts from `start` until `close`, in whichever thread a collection runs."""

    def __init__(self) -> None:
        self._took_s = 0.0
        self._began_at = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._collected)

    def close(self) -> None:
        gc.callbacks.remove(self._collected)

    def take_s(self) -> float:
        """Seconds since this was last called."""
        took_s, self._took_s = self._took_s, 0.0
        return took_s

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began_at = clock.now()
        else:
            self._took_s += clock.now() - self._began_at

    def __repr__(self) -> str:
        return f"<CollectionTimer {self._took_s:.3f} s>"
