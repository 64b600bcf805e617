"""Adaptive control adjusts batch size, concurrency and precision of the pool to latency, load and memory.

It turns three knobs, each with a reason to turn it, a reason to turn it back, and a gap between the two, so that no
turn becomes the reason for its opposite:

    knob          turned when                                       back when
    batch cap     p99 over its target, and batches alone take over  a device idles (busy under `idle_ratio`), or p99
                  half of the target: halved, down to 1/8           is under `calm_ratio` of the target: doubled
    concurrency   memory over `memory_ratio`: one worker less       memory under it by `memory_gap`: one more
                  computes at once, down to one; then the cap
    precision     p99 over its target for `patience_s` with nothing p99 under `calm_ratio` of the target for as long,
                  left to turn: the lesser variant, where allowed   and the full variant would fit: busy · its cost

A smaller batch helps only where it is the batch that makes an answer late; where it is the queue, smaller batches make
it longer, so there the cap goes up. Lesser precision is the last resort, is used only where the configuration allows
it, and each of its answers is declared as degraded.

Hysteresis: each knob rests for `dwell_s` after a turn. Each turn is returned with its reason, for the log and the
metrics, and is at most one step: the effect of one step is seen before the next.

Invariants: the cap is in {1, 1/2, 1/4, 1/8}; concurrency is at least 1 and at most the workers; precision is full
unless allowed. Latency is read as a share of the target, since models of one pool may have several. Pure.

Source: hysteresis and dwell as in any thermostat; one step at a time as in additive increase.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, Literal

Knob = Literal["batch_cap", "concurrency", "precision"]

LEAST_CAP: Final = 1 / 8
_BATCH_SHARE: Final = 0.5  # of the target: batches that take longer are the reason for late answers
_FITS: Final = 0.8  # of the device's time, by prediction, after the full variant is back


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Args:
    memory_ratio, memory_gap: shares of the memory that may be used; the gap is how far its use must fall.
    idle_ratio: share of the devices' time.
    calm_ratio: share of the target.
    """

    memory_ratio: float = 0.9
    memory_gap: float = 0.1
    idle_ratio: float = 0.5
    calm_ratio: float = 0.6
    dwell_s: float = 30.0
    patience_s: float = 60.0
    may_degrade: bool = False


@dataclass(frozen=True, slots=True)
class ControlReadings:
    """Readings since the last look.

    `p99_ratio` is the p99 of the answers, from arrival to answer, as a share of their models' latency target; None
    where answers were too few. `batch_ratio` is the p99 of the batches that could have been smaller, likewise.
    `full_cost_ratio`: how much longer the full variant computes than the lesser one.
    """

    busy_ratio: float
    memory_ratio: float
    p99_ratio: float | None
    batch_ratio: float
    workers: int
    full_cost_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class ControlAction:
    """One turned knob. `value` is its new setting; precision is 1 for full and 0 for the lesser."""

    knob: Knob
    value: float
    reason: str


class AdaptiveControl:
    """Mutable: `decide` with each look; read `batch_cap_ratio`, `concurrency` and `degraded` after it."""

    def __init__(self, limits: ControlLimits) -> None:
        self.batch_cap_ratio = 1.0
        self.held_back = 0  # workers that may not compute just now
        self.degraded = False
        self._limits = limits
        self._turned_at: dict[Knob, float] = {}
        self._late_since = inf
        self._calm_since = inf

    def concurrency(self, workers: int) -> int:
        """How many of these workers may compute at once."""
        return max(1, workers - self.held_back)

    def decide(self, seen: ControlReadings, now: float) -> list[ControlAction]:
        """The knobs that are turned now, each by a step at most."""
        late, calm = self._is_late(seen), self._is_calm(seen)
        self._late_since = min(self._late_since, now) if late else inf
        self._calm_since = min(self._calm_since, now) if calm else inf
        memory = self._turn_for_memory(seen, now)
        actions = [
            memory,
            self._turn_for_latency(seen, now) if memory is None else None,
            self._turn_precision(seen, now),
        ]
        return [action for action in actions if action is not None]

    def _is_late(self, seen: ControlReadings) -> bool:
        return seen.p99_ratio is not None and seen.p99_ratio > 1.0

    def _is_calm(self, seen: ControlReadings) -> bool:
        return seen.p99_ratio is None or seen.p99_ratio < self._limits.calm_ratio

    def _turn_for_memory(self, seen: ControlReadings, now: float) -> ControlAction | None:
        high, low = self._limits.memory_ratio, self._limits.memory_ratio - self._limits.memory_gap
        words = f"memory {seen.memory_ratio:.0%}"
        if seen.memory_ratio > high:
            if self.concurrency(seen.workers) > 1:
                return self._hold_back(self.held_back + 1, seen, now, f"{words}, over {high:.0%}")
            if not self._may_turn("concurrency", now):
                return None  # the effect of the last turn on the memory is still to be seen
            return self._cap(self.batch_cap_ratio / 2, now, f"{words}, over {high:.0%}")
        if self.held_back and seen.memory_ratio < low:
            return self._hold_back(self.held_back - 1, seen, now, f"{words}, under {low:.0%}")
        return None

    def _turn_for_latency(self, seen: ControlReadings, now: float) -> ControlAction | None:
        by_batches = seen.batch_ratio > _BATCH_SHARE
        if self._is_late(seen) and by_batches and seen.busy_ratio < 1.0 - 1e-9:
            return self._cap(
                self.batch_cap_ratio / 2, now, f"p99 {_share(seen.p99_ratio)}, batches {seen.batch_ratio:.0%}"
            )
        if self.batch_cap_ratio == 1.0 or seen.memory_ratio > self._limits.memory_ratio - self._limits.memory_gap:
            return None
        if self._is_late(seen):  # late because of waiting: larger batches get more done
            return self._cap(self.batch_cap_ratio * 2, now, f"p99 {_share(seen.p99_ratio)} by waiting")
        if seen.busy_ratio < self._limits.idle_ratio:
            return self._cap(self.batch_cap_ratio * 2, now, f"busy {seen.busy_ratio:.0%}")
        if self._is_calm(seen):
            return self._cap(self.batch_cap_ratio * 2, now, f"p99 {_share(seen.p99_ratio)}")
        return None

    def _turn_precision(self, seen: ControlReadings, now: float) -> ControlAction | None:
        limits = self._limits
        if not limits.may_degrade or not self._may_turn("precision", now):
            return None
        # Where all workers are busy all the time, answers are late by waiting: no cap is turned down then, and a pool
        # that waited for one would never lessen its precision when that helps most.
        by_batches = seen.batch_ratio > _BATCH_SHARE and seen.busy_ratio < 1.0 - 1e-9
        cap_could_help = by_batches and self.batch_cap_ratio > LEAST_CAP
        if not self.degraded and not cap_could_help and now - self._late_since >= limits.patience_s:
            return self._degrade(True, now, f"p99 {_share(seen.p99_ratio)}")
        fits = seen.busy_ratio * seen.full_cost_ratio < _FITS
        if self.degraded and fits and now - self._calm_since >= limits.patience_s:
            return self._degrade(False, now, f"p99 {_share(seen.p99_ratio)}, busy {seen.busy_ratio:.0%}")
        return None

    def _may_turn(self, knob: Knob, now: float) -> bool:
        return now - self._turned_at.get(knob, -inf) >= self._limits.dwell_s

    def _cap(self, ratio: float, now: float, reason: str) -> ControlAction | None:
        ratio = min(1.0, max(LEAST_CAP, ratio))
        if ratio == self.batch_cap_ratio or not self._may_turn("batch_cap", now):
            return None
        self.batch_cap_ratio = ratio
        return self._turned("batch_cap", ratio, now, reason)

    def _hold_back(self, count: int, seen: ControlReadings, now: float, reason: str) -> ControlAction | None:
        if not self._may_turn("concurrency", now):
            return None
        self.held_back = count
        return self._turned("concurrency", self.concurrency(seen.workers), now, reason)

    def _degrade(self, degraded: bool, now: float, reason: str) -> ControlAction:
        self.degraded = degraded
        return self._turned("precision", 0.0 if degraded else 1.0, now, reason)

    def _turned(self, knob: Knob, value: float, now: float, reason: str) -> ControlAction:
        self._turned_at[knob] = now
        return ControlAction(knob, value, reason)

    def __repr__(self) -> str:
        precision = "lesser" if self.degraded else "full"
        return f"<AdaptiveControl batches x{self.batch_cap_ratio:g}, {self.held_back} held back, {precision} precision>"


def _share(ratio: float | None) -> str:
    return "of too few answers" if ratio is None else f"{ratio:.0%} of its target"
