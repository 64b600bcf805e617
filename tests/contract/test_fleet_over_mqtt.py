"""Agents and gateways over a real broker: found without configuration, lost without panic, back after anything."""

from __future__ import annotations

import asyncio
import signal
import uuid
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from edge_agent.fleet.epoch import EpochStore
from gateway.fleet_sync.freshness import DeviceView, Freshness
from tests.support.gateway.app import until
from tests.support.mqtt.brokers import BrokerProcess
from tests.support.mqtt.device_messages import Device, offer, spoken
from tests.support.mqtt.fleet import Agent, Gateway, agent_process, agent_state, say, say_all
from tidegate import clock
from tidegate.fleet.messages import MAX_EPOCH, Death
from tidegate.fleet.name_conflict import FIRST_STAND_DOWN_S
from tidegate.fleet.topics import DeviceTopic, Topics
from tidegate.mqtt.link import MqttLink

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet() -> str:
    """A namespace of this test alone."""
    return f"f-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def device() -> str:
    """Client ids are the broker's, not the fleet's."""
    return f"kiosk-{uuid.uuid4().hex[:10]}"


# -- found -----------------------------------------------------------------------------------------------------------


async def test_a_gateway_finds_an_agent_with_no_configuration(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway, agent = Gateway(broker, fleet), Agent(broker, fleet, device, tmp_path, agent_version="0.1.0")
    async with gateway.sync, agent.sync:
        view = await gateway.sees(device, Freshness.FRESH)
        assert view.offers == agent.state.offers
        assert view.urls == agent.state.urls
        assert view.epoch == agent.sync.epoch
        assert (view.accepting, view.agent) == (True, "0.1.0")
        assert gateway.sync.connected and agent.sync.connected


async def test_a_gateway_that_starts_later_finds_the_agents_that_are_there(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    first, later, agent = (
        Gateway(broker, fleet),
        Gateway(broker, fleet, "later"),
        Agent(broker, fleet, device, tmp_path),
    )
    async with agent.sync:
        async with first.sync:
            await first.sees(device, Freshness.FRESH)
        async with later.sync:
            view = await later.sees(device, Freshness.FRESH)
        assert later.sync.register.counts["asked"] <= 1
    assert view.epoch == agent.sync.epoch


async def test_agents_hear_of_gateways_and_of_their_leaving(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway, agent = Gateway(broker, fleet), Agent(broker, fleet, device, tmp_path)
    name = f"main-{fleet}"
    async with agent.sync:
        async with gateway.sync:
            await gateway.sees(device, Freshness.FRESH)
            await until(lambda: name in agent.sync.gateways)
            assert agent.sync.gateways[name].online
        await until(lambda: not agent.sync.gateways[name].online)


async def test_news_of_an_agent_arrive_long_before_its_next_heartbeat(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway, agent = Gateway(broker, fleet), Agent(broker, fleet, device, tmp_path, interval_s=30.0)
    async with gateway.sync, agent.sync:
        await gateway.sees(device, Freshness.FRESH)
        agent.state = agent_state(offers=(offer(), offer("minilm")), admission="draining")
        agent.sync.notify()
        view = await gateway.changed.until(lambda: (seen := gateway.view(device)) and len(seen.offers) == 2 and seen)
        assert view
        await gateway.changed.until(lambda: (seen := gateway.view(device)) and not seen.accepting)


# -- lost ------------------------------------------------------------------------------------------------------------


async def test_a_killed_agent_is_suspect_then_dead_and_comes_back_with_a_greater_epoch(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway = Gateway(broker, fleet)
    async with gateway.sync:
        with agent_process(broker, fleet, device, tmp_path) as process:
            born = await gateway.sees(device, Freshness.FRESH)
            process.kill()
            suspect = await gateway.sees(device, Freshness.SUSPECT, Freshness.DEAD)
            assert suspect.reason == "its last will came"
            await gateway.sees(device, Freshness.DEAD)
        with agent_process(broker, fleet, device, tmp_path):
            await gateway.sees(device, Freshness.FRESH, epoch_over=born.epoch)


async def test_a_stopped_agent_is_noticed_by_its_silence_and_believed_again(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    """SIGSTOP: the connection stands, no will comes; within ten intervals it is dead all the same."""
    gateway = Gateway(broker, fleet)
    async with gateway.sync:
        with agent_process(broker, fleet, device, tmp_path) as process:
            await gateway.sees(device, Freshness.FRESH)
            process.send_signal(signal.SIGSTOP)
            await gateway.sees(device, Freshness.STALE)
            await gateway.sees(device, Freshness.SUSPECT)
            assert (await gateway.sees(device, Freshness.DEAD)).reason.startswith("silent for")
            process.send_signal(signal.SIGCONT)
            await gateway.sees(device, Freshness.FRESH)


async def test_a_shut_down_agent_is_dead_at_once_and_says_why(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway, agent = Gateway(broker, fleet), Agent(broker, fleet, device, tmp_path)
    async with gateway.sync:
        async with agent.sync:
            await gateway.sees(device, Freshness.FRESH)
            agent.sync.leave_with("update")
        dead = await gateway.sees(device, Freshness.DEAD)
        assert dead.reason == "said goodbye: update"


async def test_the_late_will_of_a_superseded_session_does_not_kill_the_new_one(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    """The broker sends the stopped agent's will when its successor takes over, around the successor's birth."""
    gateway, observer = Gateway(broker, fleet), Gateway(broker, fleet, "late")
    async with gateway.sync:
        with agent_process(broker, fleet, device, tmp_path) as zombie:
            born = await gateway.sees(device, Freshness.FRESH)
            zombie.send_signal(signal.SIGSTOP)
            with agent_process(broker, fleet, device, tmp_path):
                successor = await gateway.sees(device, Freshness.FRESH, epoch_over=born.epoch)
                # Late for sure: the will of the first session, said once more by the broker's book.
                say(broker, *spoken(Death(device, born.epoch, "lost"), Topics(fleet)), retain=True)
                folded = gateway.sync.register.counts["folded"]
                await gateway.changed.until(lambda: gateway.sync.register.counts["folded"] > folded + 3)
                assert (await gateway.sees(device, Freshness.FRESH)).epoch == successor.epoch
                async with observer.sync:  # and neither for one who learns it from the retained registers
                    assert (await observer.sees(device, Freshness.FRESH)).epoch == successor.epoch


async def test_a_retained_ghost_never_looks_usable(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    topics = Topics(fleet)
    ghost = Device(name=device, epoch=1_700_000_000, interval_ms=100)
    say(broker, *spoken(ghost.birth_message(50.0), topics), retain=True)
    gateway = Gateway(broker, fleet)
    seen: list[Freshness] = []

    async with gateway.sync:
        await gateway.sees(device, Freshness.SUSPECT)
        await gateway.changed.until(lambda: _note(gateway.view(device), seen) is Freshness.DEAD)
    assert set(seen) <= {Freshness.SUSPECT, Freshness.DEAD}


def _note(view: DeviceView | None, seen: list[Freshness]) -> Freshness | None:
    if view is not None:
        seen.append(view.freshness)
    return view.freshness if view else None


# -- healed ----------------------------------------------------------------------------------------------------------


async def test_after_a_killed_broker_has_lost_everything_all_converges_again(
    own_broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway = Gateway(own_broker, fleet)
    names = [f"{device}-{index}" for index in range(3)]
    agents = [Agent(own_broker, fleet, name, tmp_path) for name in names]
    async with gateway.sync, agents[0].sync, agents[1].sync, agents[2].sync:
        born = [await gateway.sees(name, Freshness.FRESH) for name in names]
        own_broker.kill()
        for view in born:
            await gateway.sees(view.name, Freshness.CONTROL_LOST)  # our silence is not their death
        own_broker.start()
        for view in born:
            await gateway.sees(view.name, Freshness.FRESH, epoch_over=view.epoch)


async def test_a_fleet_is_back_within_seconds_of_its_broker_however_often_and_long_that_was_away(
    own_broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    luck = [0.0]  # of the waits between attempts: none, so that an outage of hours passes at once
    gateway = Gateway(own_broker, fleet, draw=lambda: luck[0], backoff_cap_s=30.0)
    agent = Agent(own_broker, fleet, device, tmp_path, draw=lambda: luck[0], backoff_cap_s=30.0)
    links = (gateway.sync.link, agent.sync.link)
    async with gateway.sync, agent.sync:
        view = await gateway.sees(device, Freshness.FRESH)
        for last in (False, False, False, True):
            own_broker.kill()
            await until(lambda: all(not link.connected and link.failures > 20 for link in links))
            if last:  # both have just begun the longest wait that there is
                luck[0] = 0.999
                for link in links:
                    await until(partial(_tried_again, link, link.failures))
            own_broker.start()
            async with asyncio.timeout(30.0):
                view = await gateway.sees(device, Freshness.FRESH, epoch_over=view.epoch)


def _tried_again(link: MqttLink, failures: int) -> bool:
    return link.failures > failures


async def test_a_birth_that_the_broker_lost_is_asked_for(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    topics = Topics(fleet)
    first, second = Gateway(broker, fleet), Gateway(broker, fleet, "second")
    async with Agent(broker, fleet, device, tmp_path).sync:
        async with first.sync:
            await first.sees(device, Freshness.FRESH)
        for kind in (DeviceTopic.BIRTH, DeviceTopic.INVENTORY):
            say(broker, topics.up(device, kind), b"", retain=True)
        async with second.sync:
            await second.sees(device, Freshness.FRESH)
            assert second.sync.register.counts["asked"] == 1


class In1970(EpochStore):
    """The epoch store of a device without a clock battery."""

    def bump(self, now_utc_s: float, *, at_least: int = 1) -> int:
        return super().bump(12.0, at_least=at_least)


async def test_a_wiped_device_without_a_clock_is_believed_again_after_a_hint(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway = Gateway(broker, fleet)
    async with gateway.sync:
        async with Agent(broker, fleet, device, tmp_path).sync:
            before = await gateway.sees(device, Freshness.FRESH)
        await gateway.sees(device, Freshness.DEAD)
        wiped = Agent(broker, fleet, device, tmp_path, epochs=In1970(tmp_path / "wiped"))
        async with wiped.sync:
            after = await gateway.sees(device, Freshness.FRESH, epoch_over=before.epoch)
        assert after.epoch < MAX_EPOCH


async def test_commands_that_make_no_sense_change_nothing(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    topics, gateway, agent = Topics(fleet), Gateway(broker, fleet), Agent(broker, fleet, device, tmp_path)
    async with gateway.sync, agent.sync:
        born = await gateway.sees(device, Freshness.FRESH)
        for payload in (
            b"garbage",
            b'{"cid":"1","op":"format-disk"}',
            b'{"cid":"2","op":"epoch_hint","seen":1,"min":5}',  # about another session
            b'{"cid":"3","op":"epoch_hint","seen":%d,"boot":"other","min":5}' % born.epoch,
        ):
            say(broker, topics.command(device), payload)
        say(broker, topics.gateway_heartbeat("main"), b"garbage")
        folded = gateway.sync.register.counts["folded"]
        await gateway.changed.until(lambda: gateway.sync.register.counts["folded"] > folded + 3)
        assert (await gateway.sees(device, Freshness.FRESH)).epoch == born.epoch


async def test_of_two_agents_of_one_name_the_longer_running_one_is_kept_and_the_other_stays_away(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway = Gateway(broker, fleet)
    ended: list[str] = []
    gateway.sync.register.claims.on_change = lambda conflict, begun, _now: ended.append(conflict.device)
    first = Agent(broker, fleet, device, tmp_path / "first", started_at=clock.now() - 100.0)
    second = Agent(broker, fleet, device, tmp_path / "second", started_at=clock.now() - 1.0)
    first.state, second.state = agent_state(urls=("10.0.0.1:9001",)), agent_state(urls=("10.0.0.2:9001",))
    with capture_logs() as lines:
        async with gateway.sync, first.sync:
            await gateway.sees(device, Freshness.FRESH)
            async with second.sync:
                await until(lambda: second.sync.dispute.standing_down(clock.now()))
                await until(lambda: first.sync.connected and not second.sync.connected)
                view = await gateway.changed.until(lambda: _kept(gateway.view(device), first))
                assert view and view.urls == ("10.0.0.1:9001",)
                (conflict,) = gateway.sync.register.claims.standing(clock.now())
                assert "10.0.0.1:9001" in conflict.kept.address and "10.0.0.2:9001" in conflict.refused.address
                assert not first.sync.dispute.standing_down(clock.now())
                assert 0.75 * FIRST_STAND_DOWN_S - 5.0 < second.sync.dispute.until - clock.now() <= FIRST_STAND_DOWN_S
                session = first.sync.epoch
                await gateway.changed.until(partial(_beats, gateway, 5, gateway.sync.register.counts["folded"]))
                assert first.sync.epoch == session, "nobody takes its session any more"
            assert (await gateway.sees(device, Freshness.FRESH)).urls == ("10.0.0.1:9001",), "no goodbye for both"
    assert ended == [device]
    (told,) = [line for line in lines if line["event"].startswith("another agent has this device's name")]
    assert "10.0.0.1:9001" in told["reason"] and told["device"] == device and told["epoch"] and told["wait_s"] > 0


def _kept(view: DeviceView | None, agent: Agent) -> DeviceView | None:
    return view if view is not None and view.epoch == agent.sync.epoch and view.freshness is Freshness.FRESH else None


def _beats(gateway: Gateway, count: int, since: int) -> bool:
    return gateway.sync.register.counts["folded"] >= since + count


# -- bounded ---------------------------------------------------------------------------------------------------------


async def test_a_flood_of_five_thousand_heartbeats_costs_neither_memory_nor_neighbours(
    broker: BrokerProcess, fleet: str, device: str, tmp_path: Path
) -> None:
    gateway, neighbour = Gateway(broker, fleet), Agent(broker, fleet, device, tmp_path)
    flooder = Device(name=f"{device}-flood", epoch=5, interval_ms=60_000)
    topics = Topics(fleet)
    async with gateway.sync, neighbour.sync:
        await gateway.sees(device, Freshness.FRESH)
        flood = [spoken(flooder.birth_message(1.0), topics)]
        flood += [spoken(flooder.heartbeat_message(1.0, queued=index), topics) for index in range(5000)]
        most_waiting = 0

        def look() -> bool:
            nonlocal most_waiting
            most_waiting = max(most_waiting, len(gateway.sync.link.inbox))
            view = gateway.view(flooder.name)
            return view is not None and view.load is not None and view.load.queued == 4999

        told_before = gateway.told
        async with asyncio.TaskGroup() as group:  # a sender that fails ends the wait
            group.create_task(asyncio.to_thread(say_all, broker, flood))
            await gateway.changed.until(look)
        assert most_waiting < 100
        assert gateway.told - told_before < 2500  # told together, not one by one
        assert len(gateway.sync.register) == 2
        await gateway.sees(device, Freshness.FRESH)
