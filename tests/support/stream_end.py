"""How long a stream outlives its credential, on a machine that may stand still in the meantime.

The time of day is the test's (`time_of_day`): a certificate has its hour in which everything is set up, and ends at a
word. The seconds are real ones; those in which nothing ran here do not count (`LostTime`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from tests.support.lost_time import LostTime
from tidegate import clock

HOUR_S: Final = 3600.0
_LOOKED_S: Final = 1.6  # a stream is looked at each second


class TimeOfDay:
    """Runs as always, and ahead of the true one by what `passes` adds."""

    def __init__(self) -> None:
        self._true, self._ahead_s = clock.utc_s, 0.0

    def utc_s(self) -> float:
        return self._true() + self._ahead_s

    def passes(self, seconds: float) -> None:
        self._ahead_s += seconds


@pytest.fixture
def time_of_day(monkeypatch: pytest.MonkeyPatch) -> TimeOfDay:
    own = TimeOfDay()
    monkeypatch.setattr(clock, "utc_s", own.utc_s)
    return own


async def ended_s(after: Callable[[], object], ending: Awaitable[object]) -> float:
    """Seconds from `after` to the end of what `ending` awaits, which goes on before."""
    waiting = asyncio.ensure_future(ending)
    await clock.sleep(_LOOKED_S)
    assert not waiting.done(), "it goes on while its credential is good"
    async with LostTime() as lost:
        after()
        began_at = clock.now()
        await asyncio.wait_for(waiting, 30.0)
        took_s = clock.now() - began_at
    return took_s - lost.s
