"""What an edge relies on in a worker, of the real process and of the fake that stands for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from edge_agent.runner import Worker
from tests.support.fake_worker import FakeWorker
from tests.support.tiny_models import FOREVER, tiny_repository
from tidegate import clock
from tidegate.models.repository import Repository
from tidegate.outcome import InternalError
from tidegate.workers.process import EngineSpec, WorkerDied, WorkerProcess

X = np.array([[1.0, -3.0]], dtype=np.float32)


class Subject:
    """A worker with what a test needs to load into it and to kill it."""

    def __init__(self, worker: Worker, artefacts: dict[str, Path], kill: Callable[[], None]) -> None:
        self.worker = worker
        self.artefacts = artefacts
        self.kill = kill

    async def load(self, name: str, outputs: tuple[str, ...]) -> None:
        await self.worker.load(EngineSpec(name, "onnx", self.artefacts[name], outputs))


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slow)])
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    missing = {"missing": tmp_path / "missing.onnx"}
    if request.param == "fake":
        async with FakeWorker() as fake:
            artefacts = {name: Path(f"{name}.onnx") for name in ("double", "rounds")}
            yield Subject(fake, artefacts | missing, fake.kill)
        return
    repository = Repository(tiny_repository(tmp_path / "models"))
    artefacts = {one.name: repository.artefact(one, one.variants[0]) for one in repository.manifests()}
    async with WorkerProcess("real") as real:
        assert real.pid is not None
        pid = real.pid
        yield Subject(real, artefacts | missing, lambda: os.kill(pid, signal.SIGKILL))


async def test_it_computes_with_the_engine_of_the_key(subject: Subject) -> None:
    await subject.load("double", ("y",))

    computed = await subject.worker.infer("double", {"x": X})

    np.testing.assert_array_equal(computed.outputs["y"], [[2.0, -6.0]])


async def test_an_artefact_that_does_not_load_is_an_error_that_names_it_and_the_worker_lives_on(
    subject: Subject,
) -> None:
    with pytest.raises(InternalError, match=r"missing\.onnx"):
        await subject.load("missing", ("y",))

    assert subject.worker.alive
    await subject.load("double", ("y",))


async def test_an_engine_that_refuses_is_an_error_of_that_call_alone(subject: Subject) -> None:
    await subject.load("double", ("y",))

    with pytest.raises(InternalError):
        await subject.worker.infer("double", {})
    with pytest.raises(InternalError, match="nothing"):
        await subject.worker.infer("nothing", {"x": X})

    assert (await subject.worker.infer("double", {"x": X})).outputs["y"][0, 0] == 2.0


async def test_killed_in_the_middle_of_a_call_it_fails_that_call_and_all_later_ones(subject: Subject) -> None:
    await subject.load("rounds", ("counted",))
    endless = asyncio.create_task(subject.worker.infer("rounds", {"rounds": np.array([FOREVER])}))
    waiting = asyncio.create_task(subject.worker.infer("rounds", {"rounds": np.array([0])}))
    await clock.sleep(0)  # lets both calls begin, no time passes

    subject.kill()

    assert await subject.worker.died() == "was killed by SIGKILL"
    for call in (endless, waiting):
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            await call
    assert not subject.worker.alive
    with pytest.raises(WorkerDied):
        await subject.worker.infer("rounds", {"rounds": np.array([0])})


async def test_a_caller_that_leaves_does_not_disturb_the_next(subject: Subject) -> None:
    await subject.load("double", ("y",))
    leaving = asyncio.create_task(subject.worker.infer("double", {"x": X}))
    await clock.sleep(0)  # lets the call begin, no time passes
    leaving.cancel()

    computed = await subject.worker.infer("double", {"x": X + 1})

    np.testing.assert_array_equal(computed.outputs["y"], [[4.0, -4.0]])
