"""The task behind a link to the broker: order, waiting, the goodbye, and a crash that is not silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from structlog.testing import capture_logs

from tests.support.loop import on_virtual_time, settle
from tidegate import clock
from tidegate.mqtt.inbox import Inbox
from tidegate.mqtt.link import LinkEvent, MqttDisconnected, MqttLink
from tidegate.mqtt.loop import MqttLoop


class Line:
    """A link without a broker: tests put events in, and see whether it was flushed before it was left."""

    def __init__(self, on_activity: Callable[[], None]) -> None:
        self.inbox: Inbox[LinkEvent] = Inbox(99)
        self.said: list[str] = []
        self._on_activity = on_activity

    def brings(self, *events: LinkEvent) -> None:
        for event in events:
            self.inbox.put(event)
        self._on_activity()

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.said.append("left")

    def take(self, limit: int = 2) -> list[LinkEvent]:
        return self.inbox.take(limit)

    async def flush(self, timeout_s: float) -> bool:
        self.said.append("flushed")
        return True


class Party:
    """Somebody at the loop, who notes what happens and wants to be called at `wants`."""

    def __init__(self, *, goodbye: bool = True) -> None:
        self.wants: float | None = None
        self.fault: Exception | None = None
        self.heard: list[LinkEvent] = []
        self.turns: list[float] = []
        self._goodbye = goodbye
        self.loop = MqttLoop(
            lambda on_activity: cast("MqttLink", Line(on_activity)),
            name="party",
            take_in=self.heard.append,
            turn=self._turn,
            farewell=lambda: self._goodbye,
            crash_means="somebody will look dead",
        )

    @property
    def line(self) -> Line:
        return cast("Line", self.loop.link)

    def _turn(self) -> float | None:
        self.turns.append(clock.now())
        if self.fault is not None:
            raise self.fault
        until, self.wants = self.wants, None
        return until


EVENTS = tuple(MqttDisconnected(number, "gone") for number in range(5))


@on_virtual_time
async def test_all_that_came_is_taken_in_before_it_waits_again() -> None:
    party = Party()
    async with party.loop:
        await settle()
        assert len(party.turns) == 1, "it looks once, and waits"
        party.line.brings(*EVENTS)
        await settle()
    assert party.heard == list(EVENTS)
    assert len(party.turns) == 1 + 3, "in portions, with a turn after each"
    assert "party" in repr(party.loop)


@on_virtual_time
async def test_it_wakes_when_something_is_due_or_somebody_wakes_it() -> None:
    party, began_at = Party(), clock.now()
    party.wants = began_at + 5.0
    async with party.loop:
        await clock.sleep(60.0)
        assert party.turns == [began_at, began_at + 5.0]
        party.loop.wake()
        await settle()
        assert party.turns[2:] == [began_at + 60.0]


@on_virtual_time
async def test_a_goodbye_is_acknowledged_before_the_link_is_left_and_none_is_not_waited_for() -> None:
    for goodbye, said in ((True, ["flushed", "left"]), (False, ["left"])):
        async with (party := Party(goodbye=goodbye)).loop:
            await settle()
        assert party.line.said == said


@on_virtual_time
async def test_a_crash_is_told_with_what_it_means_and_the_goodbye_is_said_all_the_same() -> None:
    party = Party()
    with capture_logs() as logs:
        async with party.loop:
            await settle()
            party.fault = KeyError("a defect")
            party.loop.wake()
            await settle()
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("somebody will look dead", "error")]
    assert party.line.said == ["flushed", "left"]
