"""A gateway that finds its edges over a real broker, and keeps using them when the broker is gone."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from edge_agent.core.reporting import AgentState
from edge_agent.fleet.epoch import EpochStore
from edge_agent.fleet.sync import EdgeSync
from gateway.app import Gateway
from tests.support.gateway.app import Far, ask, configured, running, until
from tests.support.mqtt.brokers import Embedded
from tidegate import clock
from tidegate.fleet.conditions import UNTOLD, DeviceConditions
from tidegate.fleet.messages import Admission
from tidegate.types import LoadReport

pytestmark = pytest.mark.slow


async def test_an_edge_is_found_over_mqtt_and_stays_in_use_without_the_broker(tmp_path: Path) -> None:
    edge = Far("edge/attic")
    with Embedded(tmp_path) as broker:
        async with running(edge):
            load = LoadReport(1, 1, queued=0, in_flight=0, queue_delay_s=0.0)
            state = AgentState(edge.offers, (edge.address,), load)
            epochs = EpochStore(tmp_path / "epoch")
            agent = EdgeSync(
                broker.url,
                fleet="f",
                device="attic",
                state=lambda: state,
                epochs=epochs,
                draw=lambda: 0.5,
                interval_s=0.2,
            )
            config = configured(tmp_path, mqtt=broker.url, fleet="f")
            async with agent, Gateway(config) as gateway, aiohttp.ClientSession() as session:
                await until(lambda: gateway.host.model_ready("echo"), 10.0)
                assert (await ask(gateway, session))[2]["tidegate-served-by"] == "edge/attic"

                broker.kill()
                await until(lambda: not agent.connected, 10.0)
                assert (await ask(gateway, session))[2]["tidegate-served-by"] == "edge/attic"


async def test_what_an_edge_says_of_its_battery_and_heat_moves_its_work(tmp_path: Path) -> None:
    edges = {"attic": Far("edge/attic"), "cellar": Far("edge/cellar")}
    told = {"attic": UNTOLD, "cellar": DeviceConditions(battery=0.3)}
    closed: set[str] = set()
    sequences = count(1)

    def agent(broker: Embedded, name: str) -> EdgeSync:
        def state() -> AgentState:
            load = LoadReport(1, next(sequences), queued=0, in_flight=0, queue_delay_s=0.0)
            admission: Admission = "closed" if name in closed else "open"
            return AgentState(edges[name].offers, (edges[name].address,), load, admission, told[name])

        epochs = EpochStore(tmp_path / name)
        return EdgeSync(broker.url, fleet="f", device=name, state=state, epochs=epochs, draw=lambda: 0.5)

    with Embedded(tmp_path) as broker:
        config = configured(tmp_path, mqtt=broker.url, fleet="f")
        async with (
            running(*edges.values()),
            agent(broker, "attic") as attic,
            agent(broker, "cellar") as cellar,
            Gateway(config) as gateway,
            aiohttp.ClientSession() as session,
        ):

            async def serves(name: str) -> None:
                async with asyncio.timeout(10.0):
                    while (await ask(gateway, session))[2].get("tidegate-served-by") != f"edge/{name}":
                        await clock.sleep(0.02)

            await until(lambda: len(gateway.fleet.offered("echo", "3")) == 2, 10.0)
            await until(lambda: gateway.fleet.targets["edge/cellar"].conditions.battery == 0.3, 10.0)
            await serves("attic")

            told["attic"], told["cellar"] = (
                DeviceConditions(throttled=True, metered=True),
                DeviceConditions(battery=0.9),
            )
            attic.notify()
            await until(lambda: gateway.fleet.targets["edge/attic"].conditions.throttled, 10.0)
            cellar.notify()
            await until(lambda: gateway.fleet.targets["edge/attic"].conditions.throttled, 10.0)
            await serves("cellar")
            async with session.get(gateway.addresses["admin"] + "/v1/state") as response:
                targets = {one["id"]: one for one in (await response.json())["targets"]}
            assert targets["edge/attic"]["conditions"] == "throttled; metered link"
            assert targets["edge/attic"]["price"] == 5 * targets["edge/cellar"]["price"]

            closed.add("cellar")
            cellar.notify()
            await serves("attic")
