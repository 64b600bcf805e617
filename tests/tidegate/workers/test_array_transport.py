"""Large arrays through shared memory, with real workers: they arrive, nothing piles up, a death frees everything."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.cloud_pool.workers_support import spin, text, write_spin_model, write_text_model
from tidegate import clock
from tidegate.workers.array_transport import OUTPUTS
from tidegate.workers.process import ComputeResult, EngineSpec, WorkerDied, WorkerProcess
from tidegate.workers.shared_memory import KEPT_BYTES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memfd here"),
]
LENGTH = 1 << 16  # 1 MiB of inputs a row, 0.5 MiB of outputs


@asynccontextmanager
async def worker(folder: Path, **more: Any) -> AsyncIterator[WorkerProcess]:
    async with WorkerProcess("w", **more) as subject:
        await subject.load(EngineSpec("text", "onnx", write_text_model(folder / "text.onnx"), ("sum", "twice")))
        yield subject


def is_shared(array: NDArray[Any]) -> bool:
    """Whether its memory is that of a segment."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split(maxsplit=1)[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return "memfd:tidegate-arrays" in line
    raise AssertionError("the array is nowhere")


def segment_files() -> int:
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return sum("tidegate-arrays" in link for link in links)


def segment_bytes() -> int:
    """The memory in all segments."""
    opened = (entry.path for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))
    return sum(os.stat(path).st_blocks * 512 for path in opened if "tidegate-arrays" in os.readlink(path))


def segment_maps() -> int:
    return Path("/proc/self/maps").read_text().count("tidegate-arrays")


def shared_names(pid: int | None) -> set[str]:
    """The names in /dev/shm that a process has open or mapped; other processes may have names of their own there."""
    mapped = [line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line]
    opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return {path for path in (*mapped, *opened) if path.startswith("/dev/shm/")}


async def computed(subject: WorkerProcess, fill: int, rows: int = 1) -> ComputeResult:
    return await subject.infer("text", text(LENGTH, rows=rows, fill=fill))


async def test_large_arrays_come_in_shared_memory_and_small_ones_do_not(tmp_path: Path) -> None:
    async with worker(tmp_path) as subject:
        large, small = await computed(subject, 3), await subject.infer("text", text(8, fill=2))
        assert is_shared(large.outputs["twice"])
        assert large.outputs["twice"].tolist() == [[6] * LENGTH]
        assert not is_shared(small.outputs["twice"])
        assert small.outputs["sum"].tolist() == [[16.0]]


async def test_whoever_keeps_the_outputs_gets_them_unchanged_and_the_others_by_the_socket(tmp_path: Path) -> None:
    async with worker(tmp_path) as subject:
        kept = [await computed(subject, fill) for fill in range(1, OUTPUTS + 3)]
        assert [is_shared(one.outputs["twice"]) for one in kept] == [True] * OUTPUTS + [False] * 2
        assert [one.outputs["twice"][0, -1] for one in kept] == [2 * fill for fill in range(1, OUTPUTS + 3)]
        del kept
        assert is_shared((await computed(subject, 1)).outputs["twice"]), (
            "they are free again, which the call itself says"
        )


async def test_large_outputs_that_nobody_reads_take_no_memory_while_no_call_comes(tmp_path: Path) -> None:
    async with worker(tmp_path) as subject:
        rows = 1 + KEPT_BYTES // (8 * LENGTH)
        answers = [await computed(subject, fill, rows=rows) for fill in (1, 2)]
        assert segment_bytes() > 2 * KEPT_BYTES
        assert [one.outputs["twice"][-1, -1] for one in answers] == [2, 4], "what is read stays"
        answers.clear()
        await clock.sleep(0)  # until then the task holds what it was woken with
        assert segment_bytes() == 0
        assert (await computed(subject, 3, rows=rows)).outputs["twice"][-1, -1] == 6


async def test_two_calls_at_once_have_a_segment_each(tmp_path: Path) -> None:
    async with worker(tmp_path) as subject:
        answers = await asyncio.gather(*(computed(subject, fill) for fill in range(1, 9)))
        assert [one.outputs["sum"][0, 0] for one in answers] == [float(LENGTH * fill) for fill in range(1, 9)]


async def test_a_cancelled_call_leaves_its_segment_to_the_next(tmp_path: Path) -> None:
    async with worker(tmp_path) as subject:
        await subject.load(EngineSpec("spin", "onnx", write_spin_model(tmp_path / "spin.onnx"), ("count",)))
        for _ in range(5):
            busy = asyncio.create_task(subject.infer("spin", spin(10**5)))
            behind = asyncio.create_task(computed(subject, 1))
            await clock.sleep(0)
            behind.cancel()
            await asyncio.gather(busy, behind, return_exceptions=True)
        assert is_shared((await computed(subject, 2)).outputs["twice"])
        assert "Outgoing 2 of 2 segments free" in repr(subject)


async def test_a_killed_worker_leaves_no_file_no_mapping_and_no_name(tmp_path: Path) -> None:
    names = set[str]()
    for _ in range(3):
        async with worker(tmp_path) as subject:
            await computed(subject, 1)
            last = await computed(subject, 7)
            assert subject.pid is not None
            names |= shared_names(subject.pid) | shared_names(os.getpid())
            os.kill(subject.pid, signal.SIGKILL)
            await subject.died()
            with pytest.raises(WorkerDied):
                await computed(subject, 1)
            assert last.outputs["twice"][0, 0] == 14, "what was handed out is still there"
            assert segment_maps() == 1
            del last
    gc.collect()
    assert segment_files() == 0
    assert segment_maps() == 0
    assert not names & {entry.path for entry in os.scandir("/dev/shm")}


async def test_memory_stays_as_it_is_however_many_calls_there_are(tmp_path: Path) -> None:
    async with worker(tmp_path) as subject:

        async def resident_after(calls: int) -> tuple[int, int]:
            for n in range(calls):
                await computed(subject, 1, rows=1 + n % 8)
            return psutil.Process().memory_info().rss, psutil.Process(subject.pid).memory_info().rss

        before, after = await resident_after(24), await resident_after(96)
        grown = np.subtract(after, before)
        assert max(grown) < 16 << 20, "96 calls brought 430 MiB of inputs"


async def test_a_system_without_such_memory_sends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    async with worker(tmp_path) as subject:
        answer = await computed(subject, 3)
        assert not is_shared(answer.outputs["twice"])
        assert answer.outputs["twice"][0, 0] == 6
