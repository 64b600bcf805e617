"""A pool's generating workers beside its others: kept apart, replaced and recycled, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from structlog.testing import capture_logs

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from tests.cloud_pool.workers_support import text, text_repository
from tests.support.models.talking import talker_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load as load_config
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.outcome import ModelNotFound, Unreachable
from tidegate.runtime.process import StartError
from tidegate.types import Call, Datatype, InferRequest, Reply
from tidegate.workers.process import EngineSpec, LoadResult, WorkerProcess

pytestmark = pytest.mark.slow


@asynccontextmanager
async def pool(folder: Path, keys: dict[str, Any] | None = None, **pace: Any) -> AsyncIterator[PoolApp]:
    models = talker_repository(text_repository(folder / "models"), **pace)
    places = {"grpc_port": 0, "model_repository": models, "warmup_budget_s": 0.5}
    async with PoolApp(load_config(PoolConfig, **(places | (keys or {}))), draw=lambda: 0.1) as app:
        yield app


def talk(app: PoolApp, max_tokens: int, stream: TokenStream | None = None) -> asyncio.Task[Reply]:
    now = clock.now()
    request = infer_request("talker", GenerateRequest((5, 6, 7), max_tokens))
    return asyncio.create_task(app.host.infer(Call(request, "link", now, now + 60.0, tokens=stream)))


async def embed(app: PoolApp, length: int) -> Reply:
    inputs = tuple(array_to_tensor(name, one, Datatype.INT64) for name, one in text(length).items())
    now = clock.now()
    return await app.host.infer(Call(InferRequest("text", inputs), "link", now, now + 30.0))


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not true():
            await clock.sleep(0.002)


def workers() -> dict[int, psutil.Process]:
    children = psutil.Process().children()
    return {one.pid: one for one in children if "tidegate.workers.child" in one.cmdline()}


def generating(app: PoolApp) -> psutil.Process:
    """The worker of `talker`."""
    (replica,) = app.generating.replicas
    (worker,) = replica.workers.values()
    return workers()[worker.pid or 0]


async def test_single_answers_are_given_while_a_model_generates_and_neither_falls_with_the_other(
    tmp_path: Path,
) -> None:
    async with pool(tmp_path, step_ms=20.0) as app:
        assert {offer.name: offer.state for offer in app.host.offers()} == {"talker": "ready", "text": "ready"}
        stream = TokenStream()
        endless = talk(app, 500, stream)
        await stream.take()
        assert len(workers()) == 2
        for length in range(1, 30):
            await embed(app, length)
        assert not endless.done() and app.host.load_report().in_flight == 1

        talker = generating(app)
        (other,) = [one for one in workers().values() if one.pid != talker.pid]
        with capture_logs() as logs:
            other.send_signal(signal.SIGKILL)
            assert (await embed(app, 3)).response.outputs
            talker.send_signal(signal.SIGKILL)
            with pytest.raises(Unreachable):
                await endless
            assert (await embed(app, 3)).response.outputs
            await eventually(lambda: [entry["event"] for entry in logs].count("worker back") == 2)
        assert len(ids_of((await talk(app, 5)).response.outputs[0])) == 5


@pytest.mark.parametrize("successor_first", [True, False])
async def test_a_worker_that_is_replaced_ends_what_it_has_begun(tmp_path: Path, successor_first: bool) -> None:
    async with pool(tmp_path, step_ms=10.0) as app:
        (replica,) = app.generating.replicas
        before, stream = generating(app).pid, TokenStream()
        going_on = talk(app, 150, stream)
        await stream.take()

        replaced = asyncio.create_task(replica.recycle(successor_first=successor_first))
        if successor_first:
            await eventually(lambda: len(replica.workers) == 2)
            assert len(ids_of((await talk(app, 5)).response.outputs[0])) == 5
        assert not going_on.done()
        assert len(ids_of((await going_on).response.outputs[0])) == 150
        assert await replaced
        assert generating(app).pid != before and replica.state == "ready" and replica.lost_workers.count == 0
        assert len(ids_of((await talk(app, 5)).response.outputs[0])) == 5


async def test_a_worker_is_recycled_after_so_many_answers(tmp_path: Path) -> None:
    keys = {"recycling": {"check_s": 0.05, "after_requests": 10, "min_gap_s": 1000.0}}
    async with pool(tmp_path, keys) as app:
        before = generating(app).pid
        with capture_logs() as logs:
            for _ in range(12):
                await talk(app, 2)
            await eventually(lambda: any(entry["event"] == "worker back" for entry in logs))
        (recycled,) = [entry for entry in logs if entry["event"] == "worker recycled"]
        assert recycled["reason"].startswith("served: ") and "talker" in recycled["worker"]
        assert app.steward is not None and app.steward.recycles == {"served": 1}
        assert generating(app).pid != before
        assert len(ids_of((await talk(app, 5)).response.outputs[0])) == 5


async def test_a_pool_of_nothing_but_a_generating_model_starts_no_other_worker(tmp_path: Path) -> None:
    keys = {"models": ("talker",), "workers": 2}
    async with pool(tmp_path, keys) as app:
        assert len(workers()) == 1 and app.host.ready()
        assert len(ids_of((await talk(app, 5)).response.outputs[0])) == 5
    assert workers() == {}


async def test_a_generating_model_that_does_not_start_keeps_no_other_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_engine = WorkerProcess.load

    async def load(self: WorkerProcess, spec: EngineSpec) -> LoadResult:
        if spec.generation is not None:
            os.kill(self.pid or 0, signal.SIGKILL)
        return await load_engine(self, spec)

    monkeypatch.setattr(WorkerProcess, "load", load)
    with capture_logs() as logs:
        async with pool(tmp_path) as app:
            assert app.host.ready() and [offer.name for offer in app.host.offers()] == ["text"]
            assert (await embed(app, 3)).response.outputs
            with pytest.raises(ModelNotFound, match="'talker' is not served by pool/pool for now"):
                await talk(app, 5)
            assert app.generating.replicas == [] and len(workers()) == 1
    (missed,) = [one for one in logs if one["event"] == "a model is not served"]
    assert missed["model"] == "talker" and "killed by SIGKILL" in missed["reason"]
    named = load_config(PoolConfig, grpc_port=0, model_repository=tmp_path / "models", models=("text", "talker"))
    with pytest.raises(StartError, match=r"talker:1/.* cannot be served: .*killed by SIGKILL"):
        async with PoolApp(named):
            raise AssertionError("it started")


async def test_what_a_generating_model_held_is_free_once_its_workers_have_ended(tmp_path: Path) -> None:
    root = talker_repository(tmp_path / "models")
    keys = {"grpc_port": 0, "model_repository": root, "warmup_budget_s": 0.5, "model_control": "explicit"}
    config = load_config(PoolConfig, **keys, operator_token_file=tmp_path / "token", metrics_port=0)
    async with PoolApp(config, draw=lambda: 0.1) as app:
        assert await held_bytes(app) > 0
        await app.control.unload("talker")
        assert await held_bytes(app) == 0


async def held_bytes(app: PoolApp) -> float:
    """What the pool accounts for as held by its workers."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{app.metrics_address}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(one.split()[-1]) for one in lines if "memory_held_bytes{" in one)
