"""The dial pace bounds how often a gateway dials devices, since each dial takes some 4 ms of its one core.

    first dials    of a device that has just been heard of, or whose link stood: FIRST_PER_S, after a burst
    dials again    of one where the last dial led nowhere: AGAIN_PER_S, after a burst

Addresses that nobody can reach are no accident: devices behind a NAT that dial out themselves, births that a broker
kept of devices that are switched off. Some five hundred of them, each dialled every two seconds, took all of a
gateway's core, and the links to all other devices fell silent; a few thousand kept births did the same at its start.

A device of which the fleet hears again goes before all that wait (`hurry`): its network is back.

Invariants: each that waits gets its turn, in the order of coming within its queue; one that gives up holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tidegate import clock

FIRST_PER_S: Final = 100.0
FIRST_BURST: Final = 64.0
AGAIN_PER_S: Final = 25.0
AGAIN_BURST: Final = 32.0


class _DialQueue:
    """Those that wait, oldest first, and a bucket of turns that fills with time."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.waiting: OrderedDict[str, asyncio.Future[None]] = OrderedDict()
        self.timer: asyncio.TimerHandle | None = None
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = 0.0

    def take(self, now: float) -> bool:
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True

    @property
    def next_in_s(self) -> float:
        """How long after the last `take` the next turn is there."""
        return max(0.0, 1.0 - self._level) / self._per_s

    def __repr__(self) -> str:
        return f"<_DialQueue {len(self.waiting)} waiting>"


class DialPace:
    """`turn` returns when a device may be dialled: at once, unless very many are."""

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self._now = now
        self._first = _DialQueue(FIRST_PER_S, FIRST_BURST)
        self._again = _DialQueue(AGAIN_PER_S, AGAIN_BURST)

    async def turn(self, target_id: str, *, again: bool) -> None:
        """Wait for the turn to dial.

        Args:
            again: whether the last dial led nowhere.
        """
        queue = self._again if again else self._first
        if not queue.waiting and queue.take(self._now()):
            return
        future = asyncio.get_running_loop().create_future()
        queue.waiting[target_id] = future
        self._arm(queue)
        try:
            await future
        finally:
            for one in (self._first, self._again):
                if one.waiting.get(target_id) is future:
                    del one.waiting[target_id]

    def hurry(self, target_id: str) -> None:
        """Let this one go before all others, if it waits."""
        future = self._again.waiting.pop(target_id, None) or self._first.waiting.get(target_id)
        if future is not None:
            self._first.waiting[target_id] = future
            self._first.waiting.move_to_end(target_id, last=False)
            self._arm(self._first)

    def _arm(self, queue: _DialQueue) -> None:
        if queue.timer is None:
            queue.timer = asyncio.get_running_loop().call_later(queue.next_in_s, self._serve, queue)

    def _serve(self, queue: _DialQueue) -> None:
        queue.timer = None
        while queue.waiting and queue.take(self._now()):
            _, future = queue.waiting.popitem(last=False)
            if not future.done():
                future.set_result(None)
        if queue.waiting:
            self._arm(queue)

    def __repr__(self) -> str:
        return f"<DialPace {len(self._first.waiting)} to be dialled, {len(self._again.waiting)} again>"
