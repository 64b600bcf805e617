"""The task behind a link to the broker: order, waiting, the goodbye, and defects that are not silent."""

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
        self.breaks = False
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
        if self.breaks:
            raise KeyError("a defect")
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
        self.stumbles_over: LinkEvent | None = None
        self.turns: list[float] = []
        self._goodbye = goodbye
        self.loop = MqttLoop(
            lambda on_activity: cast("MqttLink", Line(on_activity)),
            name="party",
            take_in=self._take_in,
            turn=self._turn,
            farewell=lambda: self._goodbye,
            crash_means="somebody will look dead",
        )

    @property
    def line(self) -> Line:
        return cast("Line", self.loop.link)

    def _take_in(self, event: LinkEvent) -> None:
        if event is self.stumbles_over:
            raise ValueError("a defect")
        self.heard.append(event)

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
async def test_a_defect_in_a_turn_costs_that_turn_and_is_told_now_and_then() -> None:
    party, began_at = Party(), clock.now()
    with capture_logs() as logs:
        async with party.loop:
            await settle()
            party.fault = KeyError("a defect")
            party.loop.wake()
            await clock.sleep(10.5)
            party.fault = None
            await clock.sleep(60.0)
            party.line.brings(EVENTS[0])
            await settle()
    assert party.turns == [began_at, *(began_at + number for number in range(12)), began_at + 70.5]
    assert party.heard == [EVENTS[0]]
    words = "what is due to be published waits, for a defect"
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [(words, "error")] * 2
    assert party.line.said == ["flushed", "left"]


@on_virtual_time
async def test_a_message_that_meets_a_defect_is_passed_by_and_those_behind_it_are_not() -> None:
    party = Party()
    party.stumbles_over = EVENTS[1]
    with capture_logs() as logs:
        async with party.loop:
            await settle()
            party.line.brings(*EVENTS)
            await settle()
    assert party.heard == [EVENTS[0], *EVENTS[2:]]
    assert [entry["event"] for entry in logs] == ["a message was passed by, for a defect"]


@on_virtual_time
async def test_a_crash_is_told_with_what_it_means_and_the_goodbye_is_said_all_the_same() -> None:
    party = Party()
    with capture_logs() as logs:
        async with party.loop:
            await settle()
            party.line.breaks = True
            party.loop.wake()
            await settle()
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("somebody will look dead", "error")]
    assert party.line.said == ["flushed", "left"]
