"""Two agents of one name, two gateways and a broker in virtual time: whatever is lost or late, one of the two stays.

What agents and gateways decide is the product's code. The broker is a model of what brokers do to two clients with one
id: the later connection takes the session, the earlier one notices at once or much later, wills and commands go to
whoever has the session by then, and anything may be lost. Chance is a seed, so each run is exact.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from edge_agent.core.name_dispute import NameDispute
from edge_agent.core.reporting import Publication, Reporting
from gateway.fleet_sync.registry import Effect, EpochHint, FleetRegister, NameTaken
from tests.support.mqtt.fleet import agent_state
from tidegate.fleet.topics import Topics
from tidegate.mqtt.redial import RedialPolicy, SessionEnd

pytestmark = pytest.mark.slow

TOPICS = Topics("f1")
DEVICE = "kiosk"
SESSION_TIMEOUT_S = 20.0  # as `MqttLink`: an attempt that gets no answer


class World:
    """The instants to come, the broker's one session for the name, and the gateways that hear it."""

    def __init__(self, seed: int, *, loss: float, limbo: float) -> None:
        self.now = 1_000.0
        self.chance = random.Random(seed)
        self.loss, self.limbo = loss, limbo
        self.registers = [FleetRegister(TOPICS, draw=self.chance.random) for _ in range(2)]
        self.holder: SimulatedAgent | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._serial), act))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = until

    def lost(self) -> bool:
        return self.chance.random() < self.loss

    def takes_session(self, agent: SimulatedAgent) -> None:
        before, self.holder = self.holder, agent
        if before is not None and before is not agent:
            self.hear(before.will)
            late = SESSION_TIMEOUT_S if self.chance.random() < self.limbo else 0.02 * self.chance.random()
            self.after(late, before.hung_up_for(before.session))

    def hear(self, publication: Publication) -> None:
        topic = TOPICS.up(DEVICE, publication.kind)
        for register in self.registers:
            if not self.lost():
                for effect in register.fold(topic, publication.payload, self.now):
                    self.after(max(0.0, effect.at - self.now) + 0.01, self._command(register, effect))

    def _command(self, register: FleetRegister, effect: Effect) -> Callable[[], None]:
        def deliver() -> None:
            if register.is_wanted(effect) and self.holder is not None and not self.lost():
                self.holder.obey(effect)

        return deliver


class SimulatedAgent:
    """An agent as `EdgeSync` and `MqttLink` are one: the same decisions, without sockets."""

    def __init__(self, world: World, name: str, *, started_at: float, has_clock: bool) -> None:
        self.name, self._world, self._has_clock = name, world, has_clock
        draw = world.chance.random
        self.dispute = NameDispute(draw)
        self._redial = RedialPolicy(draw, base_s=0.5, cap_s=30.0)
        self._reporting = Reporting(DEVICE, boot=name, started_at=started_at, draw=draw)
        self._epoch, self._at_least = 0, 1
        self._state = agent_state(urls=(f"{name}:9001",))
        self.session, self.connected, self._began_at = 0, False, 0.0
        self.will = self._reporting.will(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def connect(self) -> None:
        self._epoch = max(self._epoch + 1, self._at_least, int(self._world.now) if self._has_clock else 1)
        if self._world.chance.random() < self._world.limbo:  # the broker begins with it, and never answers
            self._world.after(SESSION_TIMEOUT_S, lambda: self._redial_after(SessionEnd.AWAY))
        else:
            self._world.after(0.02 * self._world.chance.random(), self._connected)

    def hung_up_for(self, session: int) -> Callable[[], None]:
        def hang_up() -> None:
            if self.connected and self.session == session:
                self._ended()

        return hang_up

    def obey(self, effect: Effect) -> None:
        world = self._world
        if isinstance(effect, EpochHint | NameTaken):
            if effect.seen != self._reporting.epoch or effect.boot not in ("", self.name):
                return
            if isinstance(effect, EpochHint):
                self._at_least = effect.minimum
            else:
                self.dispute.refused(effect.reason, world.now)
            world.holder = None  # a DISCONNECT: no will
            self._ended()
        else:
            self._publish(self._reporting.resync(self._state, world.now, 0.0))

    def _connected(self) -> None:
        self._world.takes_session(self)
        self.will = self._reporting.will(self._epoch)
        self.session, self.connected, self._began_at = self.session + 1, True, self._world.now
        self._publish(self._reporting.connected(self._epoch, self._state, self._world.now, 0.0))
        self._world.after(1.0, self._beat_in(self.session))

    def _beat_in(self, session: int) -> Callable[[], None]:
        def beat() -> None:
            if self.connected and self.session == session:
                self._publish(self._reporting.due(self._state, self._world.now + 0.2, 0.0))
                self._world.after(1.0, beat)

        return beat

    def _publish(self, publications: list[Publication]) -> None:
        if self._world.holder is self:  # else into a connection that the broker has given up
            for publication in publications:
                self._world.hear(publication)

    def _ended(self) -> None:
        self.connected = False
        self._reporting.disconnected()
        self._redial_after(SessionEnd.of_session(self._world.now - self._began_at))

    def _redial_after(self, end: SessionEnd) -> None:
        self._world.after(max(self._redial.wait_s(end), self.dispute.until - self._world.now), self.connect)


def settles(seed: int, *, loss: float, limbo: float, clocks: tuple[bool, bool], within_s: float) -> tuple[World, float]:
    """Two agents of one name from their start until one keeps it in peace; how long it took."""
    world = World(seed, loss=loss, limbo=limbo)
    older = SimulatedAgent(world, "older", started_at=world.now - 50.0, has_clock=clocks[0])
    newer = SimulatedAgent(world, "newer", started_at=world.now, has_clock=clocks[1])
    older.connect()
    world.after(world.chance.choice((0.0, 0.001, 0.5, 5.0)), newer.connect)
    began_at = world.now
    while world.now < began_at + within_s:
        world.run(world.now + 0.5)
        assert not older.dispute.standing_down(world.now), "the one that has run longer is never sent away"
        if (
            newer.dispute.standing_down(world.now)
            and older.connected
            and world.holder is older
            and _shown(world, older)
        ):
            return world, world.now - began_at
    raise AssertionError(f"seed {seed}: {older.dispute} {newer.dispute}, {world.holder and world.holder.name} has it")


def _shown(world: World, agent: SimulatedAgent) -> bool:
    """Whether each gateway shows this agent, usable, as it is now."""
    (views) = [register.view(DEVICE, world.now) for register in world.registers]
    return all(
        view is not None and view.freshness.is_usable and view.epoch == agent.epoch and view.urls[0] == "older:9001"
        for view in views
    )


@pytest.mark.parametrize("clocks", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize(
    ("loss", "limbo", "within_s"), [(0.0, 0.0, 10.0), (0.3, 0.0, 200.0), (0.0, 0.3, 400.0), (0.3, 0.3, 400.0)]
)
def test_one_of_two_agents_keeps_the_name_whatever_is_lost_or_late(
    loss: float, limbo: float, within_s: float, clocks: tuple[bool, bool]
) -> None:
    for seed in range(8):
        settles(seed, loss=loss, limbo=limbo, clocks=clocks, within_s=within_s)


def test_once_it_is_settled_the_refused_agent_costs_the_other_its_session_seldom() -> None:
    for seed in range(3):
        world, _ = settles(seed, loss=0.2, limbo=0.0, clocks=(True, True), within_s=200.0)
        assert world.holder is not None and world.holder.name == "older"
        older, before = world.holder, world.holder.session
        world.run(world.now + 3600.0)
        assert older.session - before <= 12, "attempts are 60 s to 10 min apart"
