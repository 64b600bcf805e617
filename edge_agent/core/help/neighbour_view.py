"""A neighbour's view is what this device knows of another device of its site that answers for it.

    models      as it offers them, on the stream over which it is asked, when they change
    queue       the seconds that a request would wait there: with each heartbeat of the stream, once a second, and with
                each answer and refusal
    round trip  as the stream's pings measure it

How long it takes is round trip + wait + what its answers have taken without their waits (`help_times.py`). Unlike a
gateway's, the wait of a single device is known, and changes faster than answers could show.

A report that is older than STALE_S says nothing any more: the neighbour is not asked until it reports again.

It can be wrong by what has come there since the report; the neighbour looks at its own queue before it takes a request
(`neighbour_admission.py`).

Pure; instants are arguments.
"""

from __future__ import annotations

from typing import Final

from tidegate.fleet.offers import ModelOffer
from tidegate.types import LoadReport

STALE_S: Final = 5.0  # five heartbeats of a stream


class NeighbourView:
    """Mutable: `greeted` with each stream, then `loaded` and `measured`. Args: name: "edge/NAME", as configured."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._answers_as = name
        self._models: frozenset[str] = frozenset()
        self._load: LoadReport | None = None
        self._loaded_at = 0.0
        self._rtt_s = 0.0

    def greeted(self, answers_as: str, offers: tuple[ModelOffer, ...]) -> None:
        """A stream stands. Args: answers_as: the name that the other side gives."""
        self._answers_as = answers_as
        self._load = None
        self._offer(offers)

    def loaded(self, load: LoadReport, offers: tuple[ModelOffer, ...] | None, now: float) -> None:
        """It reported its queue. Args: offers: what it answers now; None: as before."""
        self._load, self._loaded_at = load, now
        if offers is not None:
            self._offer(offers)

    def measured(self, rtt_s: float) -> None:
        self._rtt_s = rtt_s

    def why_not(self, model: str, now: float) -> str:
        """Why it cannot be asked for this model; "" where it can. Args: model: "" is any."""
        if self._answers_as != self.name:
            return f"another device answers there, {self._answers_as}"
        if self._load is None:
            return "it has not told its queue yet"
        if now - self._loaded_at > STALE_S:
            return f"it has told nothing of its queue for {now - self._loaded_at:.0f} s"
        if model and model not in self._models:
            return f"it does not answer for {model!r}"
        return ""

    def took_s(self, learned_s: float | None) -> float:
        """Predicted seconds from the question to the answer.

        Args:
            learned_s: median of its answers without their waits; None: none is known.
        """
        wait_s = 0.0 if self._load is None else self._load.queue_delay_s
        return self._rtt_s + wait_s + (learned_s or 0.0)

    def told(self, now: float) -> dict[str, object]:
        """Its figures, for people."""
        load = self._load
        return {
            "models": sorted(self._models),
            "rtt_ms": round(self._rtt_s * 1e3, 1),
            "queue_delay_ms": None if load is None else round(load.queue_delay_s * 1e3, 1),
            "report_age_s": None if load is None else round(now - self._loaded_at, 1),
        }

    def _offer(self, offers: tuple[ModelOffer, ...]) -> None:
        self._models = frozenset(one.name for one in offers if one.answers)

    def __repr__(self) -> str:
        return f"<NeighbourView {self.name} {len(self._models)} models, {self._load}>"
