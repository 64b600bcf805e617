"""The task behind a link to the broker: take in what has come, say what is due, and wait for the next of either.

Agents and gateways are participants of one kind here: each owns a link, reads it in one task, and has things to say at
instants of its own. What is said and what a message means is theirs (`take_in`, `turn`); that no flood of messages
keeps requests from their turn, that nothing is missed between looking and waiting, and that a goodbye is acknowledged
before the connection is closed, is the same for both and is here.

A flood is folded for a tenth of the time at most (`cpu_share.py`); what comes meanwhile replaces what waits
(`inbox.py`). What the broker retained is folded as fast as it comes, since who starts waits for it.

A task that crashes says so in the log with what that means for others: nobody else would notice soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from tidegate import clock
from tidegate.mqtt.cpu_share import DutyCycle
from tidegate.mqtt.link import LinkEvent, MqttLink, MqttMessage
from tidegate.runtime.owned_task import OwnedTask

FAREWELL_TIMEOUT_S: Final = 1.0
_SHARE, _BURST_S = 0.1, 0.1

log = structlog.get_logger(__name__)


class MqttLoop:
    """Owns a link and one task, from `async with` to its end.

    Args:
        connect: makes the link, given what it is to call on activity.
        take_in: called with each event, in order.
        turn: called after those; says what is due, and returns when to be called again at the latest. None: not before
            something comes or `wake` is called.
        farewell: called at the end; returns whether it said something that must be acknowledged.
        crash_means: for the log, if the task ever crashes.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], None]], MqttLink],
        *,
        name: str,
        take_in: Callable[[LinkEvent], None],
        turn: Callable[[], float | None],
        farewell: Callable[[], bool],
        crash_means: str,
    ) -> None:
        self._activity = asyncio.Event()
        self.link = connect(self._activity.set)
        self._take_in = take_in
        self._turn = turn
        self._farewell = farewell
        self._duty = DutyCycle(_SHARE, burst_s=_BURST_S)
        self._task = OwnedTask(self._run, name=name, crash_means=crash_means)

    async def __aenter__(self) -> MqttLoop:
        await self.link.__aenter__()
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        try:
            if self._farewell():
                await self.link.flush(FAREWELL_TIMEOUT_S)
        finally:
            await self.link.__aexit__()

    def wake(self) -> None:
        """Something changed: take another turn."""
        self._activity.set()

    async def _run(self) -> None:
        while True:
            self._activity.clear()
            rest_s = self._take_in_all(self.link.take())
            until = self._turn()
            await clock.sleep(rest_s)  # whatever arrives, the requests get their turn
            if not self.link.inbox:
                await self._pause(until)

    def _take_in_all(self, events: list[LinkEvent]) -> float:
        """Take in what has come; how long to rest before more."""
        began_at = clock.now()
        for event in events:
            self._take_in(event)
        if any(isinstance(event, MqttMessage) and event.retained for event in events):
            return 0.0
        return self._duty.spend(began_at, clock.now())

    async def _pause(self, until: float | None) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._activity.wait()
        except TimeoutError:
            pass

    def __repr__(self) -> str:
        return f"<MqttLoop {self._task!r} {self.link!r}>"
