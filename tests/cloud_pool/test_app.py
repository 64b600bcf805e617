"""A whole pool: real sockets, a real worker with the demo models, unmodified clients and a gateway's link."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc.aio as triton
from numpy.typing import NDArray
from structlog.testing import capture_logs

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from gateway.core.fleet.link_events import LinkEvent, LinkLoad, LinkUp
from gateway.targets.link import LinkTarget
from tests.cloud_pool.workers_support import text, text_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.config import load
from tidegate.models.repository import Repository
from tidegate.outcome import InvalidRequest, NotSupported
from tidegate.runtime.process import StartError
from tidegate.types import Call, Datatype, InferRequest, Reply
from tidegate.workers import sandbox_check

pytestmark = pytest.mark.slow


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return text_repository(tmp_path / "models")


@asynccontextmanager
async def pool(repository: Path, *models: str, **keys: Any) -> AsyncIterator[PoolApp]:
    defaults = {"grpc_port": 0, "model_repository": repository, "models": models, "warmup_budget_s": 0.5}
    async with PoolApp(load(PoolConfig, **(defaults | keys)), draw=lambda: 0.1) as app:
        yield app


async def eventually(what: Callable[[], bool]) -> None:
    """Wait for something that another process or socket is about to do."""
    async with asyncio.timeout(30.0):
        while not what():
            await clock.sleep(0.002)


def words(length: int, rows: int = 1, fill: int = 1) -> InferRequest:
    arrays = text(length, rows=rows, fill=fill)
    return InferRequest("text", tuple(array_to_tensor(name, one, Datatype.INT64) for name, one in arrays.items()))


def minilm(ids: NDArray[Any], mask: NDArray[Any] | None = None) -> InferRequest:
    mask = np.ones_like(ids) if mask is None else mask
    arrays = {"input_ids": ids, "attention_mask": mask}
    return InferRequest("minilm", tuple(array_to_tensor(name, one, Datatype.INT64) for name, one in arrays.items()))


async def ask(app: PoolApp, request: InferRequest, *, budget_s: float = 60.0) -> Reply:
    now = clock.now()
    return await app.host.infer(Call(request, "link", now, now + budget_s))


def first_output(reply: Reply) -> NDArray[Any]:
    return tensor_to_array(reply.response.outputs[0])


def worker_of() -> psutil.Process:
    """The one worker process of this one."""
    (worker,) = [child for child in psutil.Process().children() if "tidegate.workers.child" in child.cmdline()]
    return worker


async def test_an_unmodified_client_is_answered(texts: Path) -> None:
    async with pool(texts, "text") as app, triton.InferenceServerClient(app.address) as client:
        assert await client.is_model_ready("text")
        wanted = [
            triton.InferInput(name, array.shape, "INT64").set_data_from_numpy(array)
            for name, array in text(5, rows=2, fill=3).items()
        ]
        answer = await client.infer("text", wanted)
        assert answer.as_numpy("sum").tolist() == [[15.0], [15.0]]
        parameters = answer.get_response().parameters
        assert parameters["tidegate-served-by"].string_param == "pool/pool"
        assert "variant=fp32" in parameters["tidegate-route"].string_param
        assert app.ready_event() == {
            "role": "pool",
            "name": "pool",
            "addresses": {"grpc": app.address},
            "models": [{"name": "text", "version": "1", "variants": ["fp32"]}],
        }


async def test_texts_get_the_same_embedding_alone_and_in_any_company(
    demo_repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nominal(*_: object, **__: object) -> tuple[tuple[float, float], ...]:
        # What is grouped depends on the measured table; a busy machine's would leave nothing to compare.
        return (1.0, 0.0083), (64.0, 0.024), (512.0, 0.135), (4096.0, 1.1)

    monkeypatch.setattr("cloud_pool.workers.supervisor.measure", nominal)
    random = np.random.default_rng(5)
    lengths = [3, 250, 17, 18, 40, 5, 41, 16, 96, 12, 12, 90]
    ids = [random.integers(1000, 30_000, (1, length)) for length in lengths]
    async with pool(demo_repository.root, "minilm") as app:
        alone = [first_output(await ask(app, minilm(one))) for one in ids]
        replies = await asyncio.gather(*[ask(app, minilm(one)) for one in ids])
        for one, reply in zip(alone, replies, strict=True):
            assert float((one * first_output(reply)).sum()) >= 0.99999
        assert max(reply.batch_size for reply in replies) > 2

        padded = np.zeros((1, 64), np.int64)
        padded[:, :17] = ids[2]
        mask = (np.arange(64) < 17).astype(np.int64)[None]
        by_caller = first_output(await ask(app, minilm(padded, mask)))
        assert float((by_caller * alone[2]).sum()) >= 0.99999

        nothing = first_output(await ask(app, minilm(padded, np.zeros_like(mask))))
        assert np.isfinite(nothing).all()


async def test_a_killed_worker_comes_back_and_patient_callers_are_still_answered(texts: Path) -> None:
    async with pool(texts, "text") as app:
        first = worker_of()
        with capture_logs() as logs:
            calls = [asyncio.create_task(ask(app, words(n, fill=n))) for n in range(1, 17)]
            await clock.sleep(0)
            first.send_signal(signal.SIGKILL)
            replies = await asyncio.gather(*calls)
            assert [float(first_output(reply)[0, 0]) for reply in replies] == [n * n for n in range(1, 17)]
            await eventually(app.host.ready)
        assert worker_of().pid != first.pid
        assert "worker lost" in [entry["event"] for entry in logs]


async def test_a_gateway_learns_offers_with_measured_costs_and_is_answered(texts: Path) -> None:
    told: list[LinkEvent] = []
    async with pool(texts, "text") as app:
        target = LinkTarget("pool/pool", app.address, gateway_name="test", on_event=told.append, draw=lambda: 0.1)
        async with target:
            await eventually(lambda: target.connected)
            up = next(event for event in told if isinstance(event, LinkUp))
            assert (up.name, up.epoch) == ("pool/pool", app.host.epoch)
            (variant,) = up.offers[0].variants
            assert [units for units, _ in variant.cost][:2] == [1.0, 4.0]
            heard: list[object] = []

            async def infer(variant: str) -> Reply:
                return await target.infer(
                    words(7), variant=variant, budget_s=30.0, priority=0, traceparent="", on_accepted=heard.append
                )

            reply = await infer("fp32")
            assert float(first_output(reply)[0, 0]) == 7.0
            assert reply.load is not None and reply.load.epoch == app.host.epoch
            assert reply.stages["compute"] > 0.0
            assert len(heard) == 1
            with pytest.raises((NotSupported, InvalidRequest)):
                await infer("int8")
            with capture_logs():
                worker_of().kill()
                await eventually(lambda: any(isinstance(event, LinkLoad) and event.offers for event in told))
                await eventually(app.host.ready)


async def test_a_taken_port_is_named_with_its_key(texts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port} \(key 'grpc_port'\)"):
            async with pool(texts, "text", grpc_port=port):
                raise AssertionError("it started")


BLOCKED = ("aiohttp", "paho", "amqtt", "onnxruntime", "tokenizers", "transformers", "torch")
RUN_BLOCKED = f"""
import sys
for name in {BLOCKED}:
    sys.modules[name] = None
from cloud_pool.cli import pool
pool(prog_name="pool")
"""


def test_the_process_serves_without_other_parts_libraries_and_ends_at_a_signal(demo_repository: Repository) -> None:
    environment = os.environ | {
        "TIDEGATE_POOL_MODEL_REPOSITORY": str(demo_repository.root),
        "TIDEGATE_POOL_MODELS": '["digits"]',
        "TIDEGATE_POOL_GRPC_PORT": "0",
    }
    command = [sys.executable, "-W", "error", "-c", RUN_BLOCKED]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] in ("ready", "failed"):
                break
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30.0) == 0
        told = process.stderr.read()
    assert told.startswith("pool/pool serves 1 model on auto, at 127.0.0.1:")
    assert ": image FP32[batch, 1, 8, 8] → " in told
    assert told.endswith("tier: pool, address: '" + events[-1]["addresses"]["grpc"] + "'}]\n")  # and nothing after it
    assert [event["event"] for event in events] == ["progress", "progress", "ready"]
    assert len(children) == 1 and not children[0].is_running()


def test_a_wrong_configuration_is_one_event_and_a_failure(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text("devise: cuda\n")
    command = [sys.executable, "-m", "cloud_pool", "--config", str(tmp_path / "pool.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    event = json.loads(done.stdout)
    assert (event["event"], event["role"]) == ("failed", "pool")
    assert "did you mean 'device'?" in event["reason"]


async def test_a_pool_tells_gateways_what_the_workers_sandbox_lacks(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_check, "missing_here", lambda: ())
    async with pool(texts, "text") as app:
        assert {offer.sandbox for offer in app.host.offers()} == {""}
    async with pool(texts, "text", sandbox="off") as app:
        assert {offer.sandbox for offer in app.host.offers()} == {"the key `sandbox` is off"}
