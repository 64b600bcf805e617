"""What an attempt teaches, noted once at its launch and once at its end.

Both shells (the conductor and the simulator) report here, so that the estimators learn the same in life and in
simulation: the ledger counts it while it is under way; an answer teaches the cost of its compute, the link's round
trip, the target's health and whether its chance was claimed rightly; an error teaches health, and only where it is the
target's fault; our own cancellation teaches nothing but that an accept-ack was overdue.

An answer without stage times (a foreign server) still teaches: what is left of its total after the expected link and
wait is taken as compute.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.breaker import Verdict, verdict
from gateway.core.placement import Candidate
from tidegate.outcome import CallerError, Overloaded, ServeError
from tidegate.types import LoadReport


class Attempt:
    """One attempt under way. Mutable only by `answered`, `failed` and `cancelled`, of which one is called, once."""

    __slots__ = (
        "_body_bytes",
        "_breaker",
        "_key",
        "_ledger",
        "_link",
        "_probe",
        "_stake",
        "_units",
        "candidate",
        "launched_at",
    )

    def __init__(self, candidate: Candidate, key: int, units: float, now: float, body_bytes: int = 0) -> None:
        """Note the launch. `key` is unique among this gateway's attempts; `body_bytes` are the request's."""
        target = candidate.offered.target
        self.candidate = candidate
        self.launched_at = now
        self._key = key
        self._units = units
        self._body_bytes = body_bytes
        self._ledger, self._link, self._breaker = target.ledger, target.link, target.breaker
        self._probe = self._breaker.launched()
        self._stake = candidate.stake
        self._ledger.launch(key, candidate.compute_s, now, self._stake and self._stake.place)
        self._link.sent(key, now, body_bytes)

    def accepted(self, now: float) -> None:
        """Note that the target took it: its queue is another matter, but the link works."""
        self._link.accepted(self._key, now)

    def answered(self, stages: Mapping[str, float], load: LoadReport | None, now: float, body_bytes: int = 0) -> float:
        """Note an answer with its stage times and size; returns the link's share of its time, in seconds."""
        self._ledger.finish(self._key, now)
        self._link.ended(self._key, now, heard=True)
        if self._stake is not None:
            self._stake.prediction.answered(now)
        self._breaker.record(Verdict.SUCCESS, now, 0.0, probe=self._probe)
        offered, total_s = self.candidate.offered, now - self.launched_at
        if load is not None:
            self._ledger.report(load, "link", now)
        compute_s = stages.get("compute")
        if compute_s is None:
            unloaded_s = total_s - self.candidate.link_s - self.candidate.wait_s
            offered.cost.record(self._units, max(unloaded_s, 0.0))
            return min(total_s, self.candidate.link_s)
        offered.cost.record(self._units, compute_s)
        link_s = max(0.0, total_s - stages.get("queue", 0.0) - compute_s)
        self._link.record(link_s, now, self._body_bytes + body_bytes)
        return link_s

    def failed(self, error: ServeError, now: float, draw: float) -> None:
        """Note an error; `draw` is uniform in [0, 1)."""
        self._ledger.finish(self._key, now)
        # Only a refusal surely came from the far side: other errors may be our own word for silence.
        self._link.ended(self._key, now, heard=isinstance(error, Overloaded))
        if self._stake is not None and not isinstance(error, CallerError):
            self._stake.prediction.failed()
        self._breaker.record(verdict(error), now, draw, probe=self._probe)

    def cancelled(self, now: float) -> None:
        """Note that we gave it up ourselves. Where even its ack was overdue, that says something about the link."""
        self._ledger.finish(self._key, now)
        self._link.ended(self._key, now, heard=False)
        if self._stake is not None:
            self._stake.prediction.given_up(now)
        self._breaker.record(Verdict.IGNORED, now, 0.0, probe=self._probe)

    def __repr__(self) -> str:
        return f"<Attempt {self._key} at {self.candidate.target.id} since {self.launched_at:.3f}>"
