"""A pool that takes text: steps in a worker of the model's own, and the model in batches with others' requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from tests.cloud_pool.workers_support import make_unloadable, put, text
from tests.support.models.pipelines import expected_probabilities, wat_of_the_docs, weather_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.config import load
from tidegate.models.manifest import Batching
from tidegate.outcome import DeadlineExceeded, InvalidRequest, ModelNotFound, Overloaded, Unreachable
from tidegate.runtime.process import StartError
from tidegate.types import Call, Datatype, InferRequest, Reply
from tidegate.workers.process import EngineSpec, LoadResult, WorkerProcess

pytestmark = pytest.mark.slow
wasmtime = pytest.importorskip("wasmtime")
WITH_MODULES = {"steps": {"wasm": True}}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    modules = {name: bytes(wasmtime.wat2wasm(text)) for name, text in wat_of_the_docs().items()}
    weather_repository(tmp_path / "models", modules)
    return tmp_path / "models"


@asynccontextmanager
async def pool(repository: Path, /, **keys: Any) -> AsyncIterator[PoolApp]:
    defaults: dict[str, Any] = {"grpc_port": 0, "model_repository": repository, "warmup_budget_s": 0.5, "device": "cpu"}
    async with PoolApp(load(PoolConfig, **(defaults | keys)), draw=lambda: 0.1) as app:
        yield app


async def asked(app: PoolApp, *texts: str | bytes, budget_s: float = 30.0) -> Reply:
    array = np.empty(len(texts), object)
    array[:] = [text if isinstance(text, bytes) else text.encode() for text in texts]
    request = InferRequest("weather", (array_to_tensor("text", array, Datatype.BYTES),))
    return await app.host.infer(Call(request, "oip-grpc", clock.now(), clock.now() + budget_s))


def outputs(reply: Reply) -> dict[str, Any]:
    return {tensor.name: tensor_to_array(tensor) for tensor in reply.response.outputs}


async def eventually(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not what():
            await clock.sleep(0.01)


async def test_texts_of_many_callers_share_batches_and_each_has_its_own_answer(models: Path) -> None:
    texts = ["calm tide", "the storm of 1953", "calm " * 20, "tide", "x y"]
    async with pool(models, **WITH_MODULES) as app:
        replies = await asyncio.gather(*(asked(app, text) for text in texts))
        for text, reply in zip(texts, replies, strict=True):
            found = outputs(reply)["probabilities"]
            np.testing.assert_allclose(found, expected_probabilities(text), rtol=1e-5)
        assert outputs(await asked(app, *texts))["label"].tolist() == [
            outputs(reply)["label"][0].tolist() for reply in replies
        ]
        (offer,) = app.host.offers()
        points = offer.variants[0].cost
        assert points[0][0] == 1.0 and len(points) >= 2
        manifest = app.host.manifest("weather")
        assert [spec.name for spec in manifest.inputs] == ["text"]


async def test_what_a_step_refuses_is_its_callers_and_late_is_late(models: Path) -> None:
    async with pool(models, **WITH_MODULES) as app:
        refused, late, answered = await asyncio.gather(
            asked(app, b"\xff"), asked(app, "calm", budget_s=-0.1), asked(app, "calm"), return_exceptions=True
        )
        assert isinstance(refused, InvalidRequest) and "step tokenize (tokenizer.json)" in refused.message
        assert isinstance(late, DeadlineExceeded)
        assert isinstance(answered, Reply) and outputs(answered)["label"].tolist() == [[b"smooth"]]


async def test_no_more_requests_wait_for_steps_than_for_the_model(tmp_path: Path) -> None:
    modules = {name: bytes(wasmtime.wat2wasm(text)) for name, text in wat_of_the_docs().items()}
    batching = Batching(max_batch_size=8, max_queue_size=2, pad_axis="sequence")
    weather_repository(tmp_path / "models", modules, batching=batching)
    async with pool(tmp_path / "models", **WITH_MODULES) as app:
        replies = await asyncio.gather(*(asked(app, "calm") for _ in range(40)), return_exceptions=True)
        answered = [reply for reply in replies if isinstance(reply, Reply)]
        assert answered and all(outputs(reply)["label"].tolist() == [[b"smooth"]] for reply in answered)
        refused = [reply for reply in replies if isinstance(reply, Overloaded)]
        assert len(refused) == 40 - len(answered) > 0
        assert outputs(await asked(app, "calm"))["label"].tolist() == [[b"smooth"]]


async def test_the_steps_worker_is_started_again_when_it_dies(models: Path) -> None:
    async with pool(models, **WITH_MODULES) as app:
        children = psutil.Process().children()
        workers = [child.pid for child in children if "tidegate.workers.child" in child.cmdline()]
        (steps,) = [model for model in app.host.models if model.ready]
        for pid in workers:  # both workers of the pool: that of the steps and that of the batches
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not steps.ready)
        with pytest.raises(
            Unreachable, match=r"the steps of model 'weather:1'(: .*SIGKILL| are (loading|without a process) here)"
        ):
            await asked(app, "calm", budget_s=0.2)
        await eventually(lambda: steps.ready)
        assert outputs(await asked(app, "calm"))["label"].tolist() == [[b"smooth"]]


async def test_a_request_whose_steps_die_under_it_is_refused_as_one_that_another_pool_may_answer(models: Path) -> None:
    async with pool(models, models=["weather"], **WITH_MODULES) as app:
        workers = [psutil.Process(pid) for pid in all_workers()]
        for worker in workers:
            worker.suspend()
        asking = asyncio.create_task(asked(app, "a fine day"))
        for _ in range(5):
            await clock.sleep(0)  # until it is with the steps' worker
        for worker in workers:
            worker.kill()
        with pytest.raises(Unreachable, match=r"the steps of model 'weather:1': .*was killed by SIGKILL"):
            await asking


async def test_a_pool_that_may_not_run_modules_says_which_key(models: Path) -> None:
    with pytest.raises(StartError, match=r"key 'steps\.wasm' is false"):
        async with pool(models):
            pass
    with pytest.raises(StartError, match=r"key 'steps\.wasm' is false"):
        async with pool(models, model_control="explicit"):
            pass


async def test_a_model_that_no_worker_loads_is_left_out_with_its_steps(models: Path) -> None:
    put(models, "one")
    make_unloadable(models / "weather" / "1")
    async with pool(models, **WITH_MODULES) as app:
        assert [one.name for one in app.host.offers()] == ["one"] and len(all_workers()) == 1
        with pytest.raises(ModelNotFound, match="'weather' is not served by pool/pool for now"):
            await asked(app, "a fine day")


async def test_a_model_whose_steps_do_not_start_keeps_no_other_away(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_engine = WorkerProcess.load

    async def dying(self: WorkerProcess, spec: EngineSpec) -> LoadResult:
        if spec.steps is not None:
            psutil.Process(self.pid).kill()
        return await load_engine(self, spec)

    monkeypatch.setattr(WorkerProcess, "load", dying)
    put(models, "one")
    async with pool(models, **WITH_MODULES) as app:
        assert [one.name for one in app.host.offers()] == ["one"] and len(all_workers()) == 1
        with pytest.raises(ModelNotFound, match="'weather' is not served by pool/pool for now"):
            await asked(app, "a fine day")
    with pytest.raises(StartError, match=r"model 'weather:1' cannot be served: .*killed by SIGKILL"):
        async with pool(models, models=("one", "weather"), **WITH_MODULES):
            raise AssertionError("it started")


def all_workers() -> list[int]:
    """The worker processes of this test's pools: a model's, and its steps'."""
    return sorted(one.pid for one in psutil.Process().children() if "tidegate.workers.child" in one.cmdline())


async def test_where_models_come_and_go_their_steps_come_and_go_with_them(models: Path, tmp_path: Path) -> None:
    keys = {"model_control": "explicit", "models": (), "operator_token_file": tmp_path / "token", **WITH_MODULES}
    async with pool(models, **keys) as app:
        assert app.host.offers() == ()
        for _ in range(2):
            await app.control.load("weather")
            assert len(all_workers()) == 2
            reply = await asked(app, "calm tide")
            np.testing.assert_allclose(outputs(reply)["probabilities"], expected_probabilities("calm tide"), rtol=1e-5)
            (offer,) = app.host.offers()
            assert offer.state == "ready" and offer.variants[0].cost
            await app.control.unload("weather")
            assert all_workers() == []


async def test_a_model_whose_steps_failed_to_start_leaves_nothing_behind_and_can_be_loaded_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_engine, killed = WorkerProcess.load, list[int]()

    async def dying_once(self: WorkerProcess, spec: EngineSpec) -> LoadResult:
        if spec.steps is not None and self.pid is not None and not killed:
            killed.append(self.pid)
            psutil.Process(self.pid).kill()
        return await load_engine(self, spec)

    monkeypatch.setattr(WorkerProcess, "load", dying_once)
    keys = {"model_control": "explicit", "models": (), "operator_token_file": tmp_path / "token", **WITH_MODULES}
    async with pool(models, **keys) as app:
        with pytest.raises(InvalidRequest, match="killed by SIGKILL"):
            await app.control.load("weather")
        assert all_workers() == []
        await app.control.load("weather")
        reply = await asked(app, "calm tide")
        np.testing.assert_allclose(outputs(reply)["probabilities"], expected_probabilities("calm tide"), rtol=1e-5)


async def test_a_reload_under_traffic_loses_no_answer(models: Path, tmp_path: Path) -> None:
    keys = {"model_control": "explicit", "operator_token_file": tmp_path / "token", **WITH_MODULES}
    async with pool(models, **keys) as app:
        over = asyncio.Event()

        async def caller() -> int:
            answered = 0
            while not over.is_set():
                reply = await asked(app, "storm tide")
                found = outputs(reply)["probabilities"]
                np.testing.assert_allclose(found, expected_probabilities("storm tide"), rtol=1e-5)
                answered += 1
            return answered

        callers = [asyncio.create_task(caller()) for _ in range(4)]
        before = all_workers()
        manifest = models / "weather" / "1" / "model.yaml"
        manifest.write_text(f"{manifest.read_text()}summary: the same once more\n")
        await app.control.load("weather")
        over.set()
        assert min(await asyncio.gather(*callers)) > 0
        assert len(all_workers()) == 2 and not set(before) & set(all_workers())


async def test_a_model_that_went_out_of_memory_comes_back_with_its_steps(models: Path, tmp_path: Path) -> None:
    put(models, "one")
    keys = {"model_control": "explicit", "resident_models": 1, "operator_token_file": tmp_path / "token"}
    async with pool(models, **keys, **WITH_MODULES) as app:
        for _ in range(2):
            reply = await asked(app, "calm tide", budget_s=60.0)
            np.testing.assert_allclose(outputs(reply)["probabilities"], expected_probabilities("calm tide"), rtol=1e-5)
            assert {offer.name: offer.state for offer in app.host.offers()} == {"weather": "ready", "one": "evicted"}
            assert len(all_workers()) == 2
            arrays = text(4)
            request = InferRequest("one", tuple(array_to_tensor(name, arrays[name], Datatype.INT64) for name in arrays))
            await app.host.infer(Call(request, "oip-grpc", clock.now(), clock.now() + 60.0))
            assert {offer.name: offer.state for offer in app.host.offers()} == {"weather": "evicted", "one": "ready"}
            assert len(all_workers()) == 1


async def test_steps_that_may_not_run_here_are_refused_when_the_model_is_loaded(models: Path, tmp_path: Path) -> None:
    keys = {"model_control": "explicit", "models": (), "operator_token_file": tmp_path / "token"}
    async with pool(models, **keys) as app:
        with pytest.raises(Exception, match="wasm"):
            await app.control.load("weather")
        assert app.host.offers() == () and all_workers() == []
