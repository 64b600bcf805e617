"""An agent whose disk takes nothing starts, answers, says so, and goes on when there is room again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edge_agent import app as edge_app
from edge_agent.delivery import deployer
from tests.support.edge.rollout_edge import answer, edge
from tests.support.full_disk import small_disk
from tidegate import clock

pytestmark = pytest.mark.slow


async def test_a_full_disk_costs_what_is_to_be_kept_and_not_the_serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_app, "SAVE_AGAIN_S", 0.05)
    monkeypatch.setattr(deployer, "REST_S", 0.05)
    with small_disk(folder / "state") as disk:
        disk.fill()
        async with edge(folder) as app:
            assert (await answer(app))[1] == 6.0
            assert app.state().conditions.unwritable
            assert app.deployment.disk_trouble
            assert "disk takes no writes" in app.state().conditions.in_words()
            epoch = app.state().load.epoch
            disk.empty()
            async with asyncio.timeout(20.0):
                while app.state().conditions.unwritable:
                    await clock.sleep(0.02)
            assert (folder / "state" / "epoch").read_text() == f"{epoch}\n"


async def test_a_disk_that_has_become_read_only_serves_what_it_holds(folder: Path) -> None:
    with small_disk(folder / "state", size="1m") as disk:
        async with edge(folder) as app:
            before = app.state().load.epoch
        disk.read_only()
        async with edge(folder) as app:
            assert (await answer(app))[1] == 6.0
            assert app.state().load.epoch > before
            assert app.state().conditions.unwritable
