"""What a worker promises: the real process and the fake that stands for it elsewhere in these tests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cloud_pool.workers.device_worker import EngineProcess
from tests.cloud_pool.workers_support import Arrays, spin, text, write_spin_model, write_text_model
from tests.support.pool.fake_worker import BAD_ID, FakeWorker
from tidegate.outcome import InternalError
from tidegate.workers.process import EngineSpec, WorkerDied, WorkerProcess

FOREVER = 10**12  # turns of the spin model


@dataclass
class Subject:
    process: EngineProcess
    kill: Callable[[], None]
    folder: Path

    async def load_all(self) -> None:
        await self.process.load(EngineSpec("text", "onnx", self.folder / "text.onnx", ("sum", "twice")))
        await self.process.load(EngineSpec("spin", "onnx", self.folder / "spin.onnx", ("count",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worker")
    write_text_model(path / "text.onnx")
    write_spin_model(path / "spin.onnx")
    return path


@asynccontextmanager
async def fake(folder: Path) -> AsyncIterator[Subject]:
    def service_s(inputs: Arrays) -> float:
        return 1e-6 * float(inputs["turns"]) if "turns" in inputs else 0.0

    async with FakeWorker(service_s=service_s) as process:
        yield Subject(process, process.kill, folder)


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[Subject]:
    async with WorkerProcess("contract") as process:

        def kill() -> None:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

        yield Subject(process, kill, folder)


@pytest.fixture(params=[fake, pytest.param(real, marks=pytest.mark.slow)], ids=["fake", "real"])
async def subject(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Subject]:
    async with request.param(folder) as one:
        await one.load_all()
        yield one


async def once(awaitable: Awaitable[object]) -> asyncio.Task[object]:
    """A task that has had its first turns."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(5):
        await asyncio.sleep(0)  # noqa: TID251 - gives turns, waits for nothing
    assert isinstance(task, asyncio.Task)
    return task


async def test_outputs_come_by_name_with_the_time_they_took(subject: Subject) -> None:
    computed = await subject.process.infer("text", text(3, rows=2, fill=5))
    assert computed.outputs["sum"].tolist() == [[15.0], [15.0]]
    assert computed.outputs["twice"].tolist() == [[10, 10, 10]] * 2
    assert computed.outputs["sum"].dtype == np.float32
    assert computed.compute_s >= 0.0


async def test_an_engines_error_is_an_answer_and_the_worker_lives_on(subject: Subject) -> None:
    with pytest.raises(InternalError, match="text"):
        await subject.process.infer("text", text(3, fill=BAD_ID))
    assert subject.process.alive
    assert (await subject.process.infer("text", text(3))).outputs["sum"].tolist() == [[3.0]]


async def test_an_engine_that_is_not_loaded_is_named(subject: Subject) -> None:
    with pytest.raises(InternalError, match="'nothing'"):
        await subject.process.infer("nothing", text(3))


async def test_an_artefact_that_does_not_exist_is_named(subject: Subject) -> None:
    with pytest.raises(InternalError, match=r"gone\.onnx"):
        await subject.process.load(EngineSpec("gone", "onnx", subject.folder / "gone.onnx", ("y",)))


async def test_calls_at_once_get_their_own_answers(subject: Subject) -> None:
    answers = await asyncio.gather(*[subject.process.infer("text", text(2, fill=n)) for n in range(20)])
    assert [float(answer.outputs["sum"][0, 0]) for answer in answers] == [2.0 * n for n in range(20)]


async def test_when_it_is_killed_every_pending_call_fails_at_once_and_so_do_later_ones(subject: Subject) -> None:
    pending = [await once(subject.process.infer("spin", spin(FOREVER))) for _ in range(4)]
    subject.kill()
    failures = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(failure) for failure in failures] == [WorkerDied] * 4
    assert await subject.process.died() == "was killed by SIGKILL"
    assert not subject.process.alive
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await subject.process.infer("text", text(3))


@pytest.mark.slow
async def test_a_cancelled_call_that_has_not_begun_costs_nothing(subject: Subject) -> None:
    first = await once(subject.process.infer("spin", spin(100_000)))
    waiting = [await once(subject.process.infer("spin", spin(FOREVER))) for _ in range(3)]
    for task in waiting:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await first
    # Had any of them begun, this would not be answered in a lifetime.
    assert (await subject.process.infer("text", text(4))).outputs["sum"].tolist() == [[4.0]]


async def test_a_call_that_is_cancelled_while_it_computes_does_not_disturb_the_next(subject: Subject) -> None:
    left = await once(subject.process.infer("spin", spin(100_000)))
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (await subject.process.infer("text", text(4))).outputs["sum"].tolist() == [[4.0]]
