"""A gateway with faults that a signal turns on; all else is the real one.

SIGUSR1 makes its predictor raise, as a defect in an estimator would, and the next one mends it. SIGUSR2 steps its wall
clock (`tests/support/odd_clock.py`).

Two things serve those who watch. What placing takes of its thread's CPU is written beside its configuration
(`decisions_of`): by the clock a decision also lasts while another process has the core. And what it remembers is kept
out of the garbage collector's sight: the matrix asks for 20,000 decisions where a gateway usually keeps 256, they are
some hundred objects each, and looking through the new ones halted the loop for 25 to 70 ms every few hundred requests.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from gateway.__main__ import gateway
from gateway.core.admission.placement_guard import AdmissionGuard
from gateway.core.history.recorder import FlightRecorder
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import Candidate, Choice, Decision
from gateway.core.placement.utility import UtilityPlacer
from tests.support.odd_clock import step_on_signal

_MANY: Final = 1_000  # remembered decisions that are more than a garbage collector should look through
_FREEZE_EVERY: Final = 100


def mispredict_on_signal() -> None:
    whole = UtilityPlacer.choose
    failing = False

    def turn(*_: object) -> None:
        nonlocal failing
        failing = not failing

    def choose(self: UtilityPlacer, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        if failing:
            raise ZeroDivisionError("this predictor fails on purpose")
        return whole(self, candidates, ask, now)

    UtilityPlacer.choose = choose  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, turn)


def decisions_of(config: Path) -> Path:
    """The file in which a gateway with this configuration says, a line each: when it placed, in how much CPU time."""
    return config.with_suffix(".decisions")


def tell_what_placing_takes(path: Path) -> None:
    whole = AdmissionGuard.decide
    told = path.open("a", buffering=1)

    def decide(self: AdmissionGuard, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        began = time.thread_time()
        decision = whole(self, ask, now, exclude)
        told.write(f"{now:.6f} {time.thread_time() - began:.9f}\n")
        return decision

    AdmissionGuard.decide = decide  # type: ignore[method-assign]


def keep_memories_from_the_collector() -> None:
    whole, added = FlightRecorder.add, 0

    def add(self: FlightRecorder, *args: Any, **named: Any) -> None:
        nonlocal added
        whole(self, *args, **named)
        added += 1
        if added % _FREEZE_EVERY == 0 and self._most > _MANY:
            gc.collect(1)  # or what is garbage would be kept as well
            gc.freeze()

    FlightRecorder.add = add  # type: ignore[method-assign]


if __name__ == "__main__":
    keep_memories_from_the_collector()
    tell_what_placing_takes(decisions_of(Path(sys.argv[sys.argv.index("--config") + 1])))
    mispredict_on_signal()
    step_on_signal()
    gateway(prog_name="odd gateway")
