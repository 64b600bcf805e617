"""What a machine that stands still takes from a test whose seconds are real ones."""

from __future__ import annotations

from typing import Final, Self

from tidegate import clock
from tidegate.runtime.owned_task import OwnedTask

_TICK_S: Final = 0.01


class LostTime:
    """Within, adds up by how much its ticks came late: what the machine did meanwhile, it did not do here."""

    def __init__(self) -> None:
        self.s = 0.0
        self.longest_s = 0.0  # at once
        self._due_at = 0.0
        self._task = OwnedTask(self._run, name="lost time", crash_means="no time is found to be lost")

    async def __aenter__(self) -> Self:
        self._due_at = clock.now() + _TICK_S
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._look()
        await self._task.aclose()

    async def _run(self) -> None:
        while True:
            await clock.sleep(_TICK_S)
            self._look()

    def _look(self) -> None:
        late_s = clock.now() - self._due_at
        if late_s > _TICK_S:  # less is the loop's own way of turning
            self.s += late_s
            self.longest_s = max(self.longest_s, late_s)
        self._due_at = clock.now() + _TICK_S
