"""When tokens came: of every stream the time to the first, and between any two that follow each other."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np


class TokenTimes:
    """Mutable. Instants are of one clock; only what comes after `begin` counts, and a first token only where its
    request was sent after it.
    """

    def __init__(self) -> None:
        self._began_at = float("inf")
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}  # by stream: when its last token came
        self._first_s = array("d")
        self._between_s = array("d")
        self._tokens = 0
        self._failed = 0

    def begin(self, now: float) -> None:
        self._began_at = now

    def sent(self, stream: int, now: float) -> None:
        self._sent[stream] = now

    def tokens(self, stream: int, made: int, now: float) -> None:
        """So many came together: the first of them after the time since the last, the others at once."""
        last_at = self._last.get(stream)
        self._last[stream] = now
        if now < self._began_at:
            return
        self._tokens += made
        if last_at is None:
            sent_at = self._sent[stream]
            if sent_at >= self._began_at:
                self._first_s.append(now - sent_at)
        else:
            self._between_s.append(now - last_at)
        self._between_s.extend([0.0] * (made - 1))

    def ended(self, stream: int, now: float, *, failed: bool = False) -> None:
        del self._sent[stream]
        self._last.pop(stream, None)
        self._failed += failed and now >= self._began_at

    def figures(self, now: float) -> dict[str, Any]:
        """Seconds; `between` is the time between two tokens of one stream."""
        elapsed_s = now - self._began_at
        found: dict[str, Any] = {
            "elapsed_s": elapsed_s,
            "tokens": self._tokens,
            "tokens_per_s": self._tokens / elapsed_s,
            "answers": len(self._first_s),
            "errors": self._failed,
        }
        for name, values in (("first", self._first_s), ("between", self._between_s)):
            cuts = np.percentile(np.asarray(values), (50, 99)) if values else (0.0, 0.0)
            found |= {f"{name}_p50_s": float(cuts[0]), f"{name}_p99_s": float(cuts[1])}
        return found
