"""A worker that gets no core is waited for; one that is stuck is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_pool.workers.device_worker import DeviceWorker
from tests.cloud_pool.workers_support import text
from tests.support.loop import elapsed, on_virtual_time
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.runtime.starvation import starved_s
from tidegate.workers.process import EngineSpec, WorkerDied

PATIENCE_S, TAKES_S = 1.0, 2.5


async def served_by(process: FakeWorker) -> DeviceWorker:
    await process.load(EngineSpec("text", "onnx", Path(__file__), ()))
    process.service_s = lambda _: TAKES_S
    return DeviceWorker(process, device="cpu", threads=1, hang_timeout_s=PATIENCE_S)


@on_virtual_time
async def test_one_that_was_kept_from_running_most_of_the_time_gets_longer() -> None:
    async with FakeWorker() as process:
        worker, began_at = await served_by(process), clock.now()
        process.kept_from_running_s = lambda: 0.9 * (clock.now() - began_at)
        _, took_s = await elapsed(worker.infer("text", text(3)))
        assert took_s == pytest.approx(TAKES_S)


@on_virtual_time
async def test_one_that_could_run_is_given_up_after_its_patience() -> None:
    async with FakeWorker() as process:
        worker, began_at = await served_by(process), clock.now()
        with pytest.raises(WorkerDied, match="hung for 1 s"):
            await worker.infer("text", text(3))
        assert clock.now() - began_at == pytest.approx(PATIENCE_S)


@on_virtual_time
async def test_nobody_is_waited_for_without_end() -> None:
    async with FakeWorker() as process:
        worker, began_at = await served_by(process), clock.now()
        process.service_s = lambda _: 1000.0
        process.kept_from_running_s = lambda: 2.0 * (clock.now() - began_at)
        with pytest.raises(WorkerDied):
            await worker.infer("text", text(3))
        assert clock.now() - began_at < 5.0 * PATIENCE_S


def test_the_seconds_are_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("266093240 2500000000 119\n")
    assert starved_s(7, tmp_path) == 2.5


@pytest.mark.parametrize("words", ["", "12", "a b c"])
def test_where_nobody_knows_it_is_none(tmp_path: Path, words: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text(words)
    assert starved_s(7, tmp_path) == 0.0
    assert starved_s(None, tmp_path) == 0.0
