"""More models than memory in a whole pool: real processes come in and go out as they are asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from gateway.core.fleet.link_events import LinkEvent, LinkLoad
from gateway.targets.link import LinkTarget
from tests.cloud_pool.test_model_control import pool, shown, tensors, workers
from tests.cloud_pool.workers_support import put
from tidegate import clock

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("one", "two", "three", "always"):
        folder = put(tmp_path / "models", name)
        if name == "always":
            path = folder / "model.yaml"
            path.write_text(path.read_text() + "warm: always\n")
    return tmp_path / "models"


async def test_a_model_comes_in_when_it_is_asked_for_and_the_least_valuable_goes_out(
    root: Path, tmp_path: Path
) -> None:
    told: list[LinkEvent] = []
    async with pool(root, tmp_path, resident_models=2) as app, triton.InferenceServerClient(app.address) as client:
        assert app.host.ready() and len(workers()) == 2
        states = {offer.name: (offer.state, offer.cold_s > 0.0) for offer in app.host.offers()}
        assert states["always"] == ("ready", False)
        assert sorted(states.values()) == [("evicted", True), ("evicted", True), ("ready", False), ("ready", False)]
        link = LinkTarget("pool/pool", app.address, gateway_name="test", on_event=told.append, draw=lambda: 0.1)
        async with link:
            for name in ("one", "two", "three", "one"):
                answer = await client.infer(name, tensors(4), client_timeout=60.0)
                assert answer.as_numpy("sum").tolist() == [[4.0]]
                assert len(workers()) == 2
            async with asyncio.timeout(30.0):
                while not any(isinstance(event, LinkLoad) and event.offers for event in told):
                    await clock.sleep(0.01)
        assert {offer.name: offer.state for offer in app.host.offers()}["always"] == "ready"


async def test_a_request_that_cannot_wait_for_a_cold_start_is_sent_elsewhere_at_once(
    root: Path, tmp_path: Path
) -> None:
    async with pool(root, tmp_path, resident_models=1) as app, triton.InferenceServerClient(app.address) as client:
        began_at = clock.now()
        with pytest.raises(InferenceServerException, match="is not in memory here: it would take") as refused:
            await client.infer("one", tensors(4), timeout=100_000)
        assert refused.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        assert clock.now() - began_at < 1.0
        # what must stay leaves no room for another, however long it is waited for
        with pytest.raises(InferenceServerException, match="is not in memory here"):
            await client.infer("one", tensors(4), client_timeout=20.0)


async def test_models_are_loaded_and_unloaded_by_name_beside_it(root: Path, tmp_path: Path) -> None:
    keys = {"resident_models": 2, "models": ("one", "always")}
    async with pool(root, tmp_path, **keys) as app, triton.InferenceServerClient(app.address) as client:
        await client.load_model("two", headers=shown(tmp_path))  # offered; it comes in when it is asked for
        assert len(workers()) == 2
        assert (await client.infer("two", tensors(4), client_timeout=60.0)).as_numpy("sum").tolist() == [[4.0]]
        await client.unload_model("two", headers=shown(tmp_path))
        assert len(workers()) == 1
        assert sorted(offer.name for offer in app.host.offers()) == ["always", "one"]


async def test_what_models_cost_is_known_at_the_next_start(root: Path, tmp_path: Path) -> None:
    keys = {"resident_models": 1, "models": ("one", "two"), "state_dir": tmp_path / "state"}
    async with pool(root, tmp_path, **keys) as app:
        cost = {offer.name: offer.variants[0].cost for offer in app.host.offers()}
        assert cost["one"]
    async with pool(root, tmp_path, **keys) as app:
        again = {offer.name: offer.variants[0].cost for offer in app.host.offers()}
        assert again["one"] == cost["one"]
