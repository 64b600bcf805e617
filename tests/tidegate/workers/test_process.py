"""What only the real worker process can show: how it starts and ends, whoever dies first."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import uvloop
from onnx import TensorProto, helper
from structlog.testing import capture_logs

from tests.cloud_pool.workers_support import (
    leave_room,
    rows_of_ones,
    spin,
    text,
    write_hungry_model,
    write_hungry_program,
    write_spin_model,
    write_text_model,
)
from tidegate import clock
from tidegate.models.digest import sha256_of
from tidegate.outcome import InternalError, InvalidRequest, OutOfMemory, TooLarge
from tidegate.runtime.spawned_process import SpawnedProcess
from tidegate.workers import channel, process
from tidegate.workers.process import EngineSpec, WorkerDied, WorkerProcess

pytestmark = pytest.mark.slow

PARENT = """
import asyncio, sys
from pathlib import Path
from tests.cloud_pool.workers_support import spin
from tidegate.workers.process import EngineSpec, WorkerProcess

async def main():
    async with WorkerProcess("orphan") as worker:
        await worker.load(EngineSpec("spin", "onnx", Path(sys.argv[1]), ("count",)))
        busy = asyncio.create_task(worker.infer("spin", spin(10**12)))
        print(worker.pid, flush=True)
        await busy

asyncio.run(main())
"""


@pytest.fixture
def spin_model(tmp_path: Path) -> Path:
    return write_spin_model(tmp_path / "spin.onnx")


def gone(pid: int, within_s: float = 30.0) -> bool:
    try:
        psutil.Process(pid).wait(within_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def parent_of(model: Path, *, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process with a worker that computes for ever."""
    return subprocess.Popen([sys.executable, "-c", PARENT, str(model)], env=env, stdout=subprocess.PIPE, text=True)


def worker_of(parent: subprocess.Popen[str]) -> int:
    """The worker's process id, once it computes."""
    assert parent.stdout is not None
    return int(parent.stdout.readline())


def test_a_worker_ends_when_its_parent_is_killed_even_while_it_computes(spin_model: Path) -> None:
    with parent_of(spin_model) as parent:
        pid = worker_of(parent)
        assert psutil.pid_exists(pid)
        parent.kill()
    assert gone(pid)


async def test_what_a_killed_parent_left_on_the_disk_is_removed_when_another_starts_a_worker(
    spin_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with parent_of(spin_model, env={**os.environ, "TMPDIR": str(place)}) as parent:
        pid = worker_of(parent)
        parent.kill()
    assert gone(pid)
    (left,) = place.iterdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    async with WorkerProcess("w") as worker:
        assert worker.alive
        async with asyncio.timeout(30.0):
            while left.exists():  # it goes in a thread that nobody waits for
                await clock.sleep(0.01)
        assert len(os.listdir(place)) == 1, "its own"
    assert os.listdir(place) == []


async def test_leaving_ends_a_worker_at_once_even_while_it_computes(spin_model: Path) -> None:
    async with WorkerProcess("w") as worker:
        await worker.load(EngineSpec("spin", "onnx", spin_model, ("count",)))
        busy = asyncio.create_task(worker.infer("spin", spin(10**12)))
        await clock.sleep(0.05)
        left_at = clock.now()
    assert clock.now() - left_at < 30.0  # of a computation of hours
    assert worker.pid is not None and gone(worker.pid)
    with pytest.raises(WorkerDied, match="exited with status 0"):
        await busy


async def test_a_worker_that_is_stopped_in_its_tracks_is_ended(spin_model: Path) -> None:
    async with WorkerProcess("w") as worker:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
            await clock.sleep(0)
    assert gone(worker.pid)
    assert repr(worker) == "<WorkerProcess w was killed by SIGKILL>"


async def test_a_worker_that_the_kernel_holds_is_left_there(monkeypatch: pytest.MonkeyPatch, spin_model: Path) -> None:
    """As one that hangs in a driver is: stopped here, and its kill does not come through."""
    kill = SpawnedProcess.kill
    monkeypatch.setattr(SpawnedProcess, "kill", lambda _: None)
    monkeypatch.setattr(process, "_KILLED_WITHIN_S", 0.2)
    async with WorkerProcess("w") as worker:
        assert worker.pid is not None
        await worker.load(EngineSpec("spin", "onnx", spin_model, ("count",)))
        os.kill(worker.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(worker.infer("spin", spin(1)))
        await clock.sleep(0.05)
        with capture_logs() as logs:
            left_at = clock.now()
            await worker.__aexit__(None, None, None)
            assert clock.now() - left_at < 20.0
        with pytest.raises(WorkerDied, match="does not end: the kernel holds process"):
            await waiting
        assert [one["pid"] for one in logs if one["log_level"] == "error"] == [worker.pid]
        assert not worker.alive and psutil.pid_exists(worker.pid)
        monkeypatch.setattr(SpawnedProcess, "kill", kill)
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(30.0):
            while psutil.pid_exists(worker.pid):  # it is reaped all the same
                await clock.sleep(0.01)


async def test_a_worker_that_dies_is_seen_to_though_a_fork_of_it_has_its_socket(
    monkeypatch: pytest.MonkeyPatch, spin_model: Path
) -> None:
    kept = list[socket.socket]()
    make = socket.socketpair

    def also_kept() -> tuple[socket.socket, socket.socket]:
        ours, theirs = make()
        kept.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", also_kept)
    async with WorkerProcess("w") as worker:
        monkeypatch.setattr(socket, "socketpair", make)
        assert worker.pid is not None
        await worker.load(EngineSpec("spin", "onnx", spin_model, ("count",)))
        busy = asyncio.create_task(worker.infer("spin", spin(10**12)))
        await clock.sleep(0.05)
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(20.0):
            with pytest.raises(WorkerDied, match="killed by SIGKILL"):
                await busy
    for one in kept:
        one.close()


def test_calls_at_a_worker_that_is_being_ended_fail_like_others_on_uvloop_too(spin_model: Path) -> None:
    """Which raises where something is written to a closed transport, and asyncio's own loop only warns."""

    async def ended() -> list[object]:
        worker = WorkerProcess("w")
        await worker.__aenter__()
        await worker.load(EngineSpec("spin", "onnx", spin_model, ("count",)))
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        calls = [asyncio.create_task(worker.infer("spin", spin(1))) for _ in range(2)]
        await clock.sleep(0.05)
        leaving = asyncio.create_task(worker.__aexit__(None, None, None))
        await clock.sleep(0.05)
        calls[0].cancel()
        late = asyncio.create_task(worker.infer("spin", spin(1)))
        outcomes = await asyncio.gather(*calls, late, return_exceptions=True)
        await leaving
        return [type(one) for one in outcomes]

    assert uvloop.run(ended()) == [asyncio.CancelledError, WorkerDied, WorkerDied]


async def test_a_worker_outlives_the_signals_that_a_whole_group_gets(tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        assert worker.pid is not None
        await worker.load(EngineSpec("text", "onnx", write_text_model(tmp_path / "text.onnx"), ("sum", "twice")))
        for one in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, one)
        assert (await worker.infer("text", text(3))).outputs["sum"].tolist() == [[3.0]]


async def test_a_worker_that_does_not_come_up_is_ended_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # a program that is there and never says hello
    worker = WorkerProcess("w", start_timeout_s=60.0)
    with pytest.raises(WorkerDied, match="worker w exited with status 1"):
        await worker.__aenter__()
    assert not worker.alive


async def test_a_program_that_is_not_there_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        await WorkerProcess("w").__aenter__()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_worker_that_was_never_started_says_so() -> None:
    worker = WorkerProcess("w")
    assert (worker.pid, worker.alive, repr(worker)) == (None, False, "<WorkerProcess w not started>")
    with pytest.raises(WorkerDied, match="not started"):
        await worker.infer("text", text(1))
    with pytest.raises(RuntimeError, match="not started"):
        await worker.died()


async def test_an_engine_that_loads_too_slowly_ends_the_worker(
    spin_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WorkerProcess("w") as worker:
        assert worker.pid is not None
        monkeypatch.setattr(worker, "_start_timeout_s", 0.5)
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"did not load 'spin' within 0\.5 s"):
            await worker.load(EngineSpec("spin", "onnx", spin_model, ("count",)))
        assert await worker.died() == "was killed by SIGKILL"


async def test_arrays_that_are_too_large_are_refused_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        monkeypatch.setattr(channel, "MAX_PAYLOAD_BYTES", 1000)
        with pytest.raises(TooLarge):
            await worker.infer("text", text(1000))
        assert worker.alive


async def test_what_an_engine_prints_never_reaches_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with WorkerProcess("w") as worker:
        with pytest.raises(InternalError):
            await worker.load(EngineSpec("x", "torchscript", Path(__file__), ("y",)))
    assert capfd.readouterr().out == ""


async def test_a_worker_imports_only_the_runtime_that_it_loads(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "text.onnx")
    async with WorkerProcess("w") as worker:
        assert worker.pid is not None
        await worker.load(EngineSpec("text", "onnx", model, ("sum", "twice")))
        maps = {Path(one.path).name for one in psutil.Process(worker.pid).memory_maps()}
    assert any("onnxruntime" in name for name in maps)
    assert not any("torch" in name or "cygrpc" in name for name in maps)


MIB = 1 << 20


async def test_a_call_that_finds_no_memory_is_a_failure_of_its_own_and_the_worker_lives_on(tmp_path: Path) -> None:
    model = write_hungry_model(tmp_path / "hungry.onnx", floats_per_row=4 * MIB)
    async with WorkerProcess("w") as worker:
        assert worker.pid is not None
        loaded = await worker.load(EngineSpec("hungry", "onnx", model, ("y",)))
        assert loaded.held_bytes is not None and 20 * MIB < loaded.held_bytes < 2048 * MIB
        peaks = [(await worker.infer("hungry", rows_of_ones(rows))).peak_bytes for rows in (1, 2, 4)]
        # At least 16 MiB a row; the arena that ONNX Runtime takes it from may double itself.
        assert all(peak is not None and 16 * rows * MIB <= peak for peak, rows in zip(peaks, (1, 2, 4), strict=True))
        leave_room(worker.pid, 128 * MIB)
        with pytest.raises(OutOfMemory, match=r"hungry\.onnx: ONNX Runtime cannot run it"):
            await worker.infer("hungry", rows_of_ones(64))
        assert (await worker.infer("hungry", rows_of_ones(2))).outputs["y"].tolist() == [[4.0 * MIB]] * 2


async def test_a_text_that_no_onnx_model_takes_is_its_callers_error(tmp_path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.STRING, ["rows"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    async with WorkerProcess("w") as worker:
        await worker.load(EngineSpec("same", "onnx", tmp_path / "m.onnx", ("y",)))
        with pytest.raises(InvalidRequest, match="element 0 is not UTF-8"):
            await worker.infer("same", {"x": np.array([b"\xff"], dtype=object)})
        answer = await worker.infer("same", {"x": np.array(["né".encode()], dtype=object)})
        assert [bytes(one) for one in answer.outputs["y"]] == ["né".encode()]


async def test_a_worker_that_is_started_again_loads_no_other_file_than_was_checked(tmp_path: Path) -> None:
    artefact = write_text_model(tmp_path / "text.onnx")
    spec = EngineSpec("text", "onnx", artefact, ("vector",), sha256=sha256_of(artefact))
    async with WorkerProcess("first") as worker:
        await worker.load(spec)
    write_spin_model(artefact)
    async with WorkerProcess("second") as worker:
        with pytest.raises(InternalError, match=rf"text\.onnx: has sha256 .*, but the manifest names {spec.sha256}"):
            await worker.load(spec)


async def test_torch_without_memory_says_so_too(tmp_path: Path) -> None:
    (folder := tmp_path / "hungry" / "1").mkdir(parents=True)
    path = write_hungry_program(folder / "hungry.pt2", floats_per_row=4 * MIB)
    async with WorkerProcess("w") as worker:
        assert worker.pid is not None
        await worker.load(EngineSpec("hungry", "torch-export", path, ("y",)))
        await worker.infer("hungry", rows_of_ones(2))
        leave_room(worker.pid, 128 * MIB)
        with pytest.raises(OutOfMemory, match="can't allocate memory"):
            await worker.infer("hungry", rows_of_ones(64))
        assert (await worker.infer("hungry", rows_of_ones(2))).outputs["y"].tolist() == [[4.0 * MIB]] * 2
