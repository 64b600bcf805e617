"""A gateway that finds its edges over a real broker, and keeps using them when the broker is gone."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from edge_agent.core.reporting import AgentState
from edge_agent.epoch import EpochStore
from edge_agent.sync import EdgeSync
from gateway.app import Gateway
from tests.layers.test_gateway_app import Far, ask, configured, running, until
from tests.support.brokers import Embedded
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
