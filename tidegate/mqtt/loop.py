"""`MqttLoop` is the task behind a broker link: it folds messages, publishes what is due, and waits for either.

Agents and gateways are the same kind of participant: each owns a link, reads it in one task, and publishes at instants
of its own. The owner decides what to publish and what a message means (`take_in`, `turn`). This module ensures for both
that no flood of messages delays requests, that nothing is missed between looking and waiting, and that a goodbye is
acknowledged before the connection is closed.

A flood is folded for a tenth of the time at most (`cpu_share.py`); messages that come meanwhile replace those that wait
(`inbox.py`). Retained messages are folded as fast as they come, since a starting process waits for them.

A defect in taking in one message, or in one turn, is logged and costs that message or that turn: without this task a
device would look dead to everybody, for as long as its process runs. A task that crashes all the same logs the crash
with its consequences, since nothing else would notice soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

import structlog

from tidegate import clock
from tidegate.mqtt.cpu_share import DutyCycle
from tidegate.mqtt.link import LinkEvent, MqttLink, MqttMessage
from tidegate.runtime.owned_task import OwnedTask

FAREWELL_TIMEOUT_S: Final = 1.0
AFTER_DEFECT_S: Final = 1.0  # until the next turn
_SHARE, _BURST_S = 0.1, 0.1
_COMPLAINS_EVERY_S: Final = 10.0

log = structlog.get_logger(__name__)


class MqttLoop:
    """Owns a link and one task, from `async with` to its end.

    Args:
        connect: makes the link, given the callback for activity.
        take_in: called with each event, in order.
        turn: called after those; publishes what is due; returns when to be called again at the latest. None: not before
            something comes or `wake` is called.
        farewell: called at the end; returns whether it published something that must be acknowledged.
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
        self._name = name
        self._complains_from = -inf
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
            until = self._take_turn()
            await clock.sleep(rest_s)  # whatever arrives, the requests get their turn
            if not self.link.inbox:
                await self._pause(until)

    def _take_in_all(self, events: list[LinkEvent]) -> float:
        """Fold the messages that have come; returns how long to pause before more."""
        began_at = clock.now()
        for event in events:
            try:
                self._take_in(event)
            except Exception:
                topic = event.topic if isinstance(event, MqttMessage) else ""
                self._complain("a message was passed by, for a defect", topic=topic)
        if any(isinstance(event, MqttMessage) and event.retained for event in events):
            return 0.0
        return self._duty.spend(began_at, clock.now())

    def _take_turn(self) -> float | None:
        try:
            return self._turn()
        except Exception:
            self._complain("what is due to be published waits, for a defect")
            return clock.now() + AFTER_DEFECT_S

    def _complain(self, words: str, **values: str) -> None:
        """Log the exception that is being handled; of many in a row one each ten seconds."""
        now = clock.now()
        if now >= self._complains_from:
            self._complains_from = now + _COMPLAINS_EVERY_S
            log.exception(words, task=self._name, **values)

    async def _pause(self, until: float | None) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._activity.wait()
        except TimeoutError:
            pass

    def __repr__(self) -> str:
        return f"<MqttLoop {self._task!r} {self.link!r}>"
