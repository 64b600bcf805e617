"""A child that is started by `vfork`: how it ends, who hears of it, and that nothing is copied for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tidegate import clock
from tidegate.runtime.spawned_process import SpawnedProcess, spawn

FORKS = """
import asyncio, ctypes, uvloop
from tidegate.workers.process import WorkerProcess

forks = []
count = ctypes.CFUNCTYPE(None)(lambda: forks.append(1))
ctypes.CDLL(None).__register_atfork(count, None, None, None)

async def main():
    async with WorkerProcess("w"):
        pass

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
print(len(forks))
"""


def started(*command: str) -> SpawnedProcess:
    return spawn(command, pass_fds=(), env=os.environ)


def no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_an_end_is_told_with_its_status_to_each_who_waits(
    monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
        no_pidfd(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    reading, writing = os.pipe()
    stays = f"read _ < /proc/self/fd/{reading}; exit 7"
    child = spawn(["/bin/sh", "-c", stays], pass_fds=(reading,), env=os.environ)
    left = asyncio.ensure_future(child.wait())
    await clock.sleep(0)
    left.cancel()
    os.close(reading)
    os.close(writing)
    assert list(await asyncio.gather(child.wait(), child.wait())) == [7, 7]
    assert await child.wait() == 7 and left.cancelled()
    assert repr(child) == f"<SpawnedProcess {child.pid} ended with 7>"
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_a_killed_child_ends_with_the_signals_number(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    if not has_pidfd:
        no_pidfd(monkeypatch)
    child = started("/bin/cat", "/dev/zero")
    assert repr(child) == f"<SpawnedProcess {child.pid} running>"
    child.kill()
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    child.kill()  # of an end that is known: no signal to whoever has its id now


async def test_a_program_that_is_not_there_is_an_error_and_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        started("/nowhere/python")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_child_has_the_descriptors_and_the_environment_that_it_is_given() -> None:
    reading, writing = os.pipe()
    says = f"echo $SAID > /proc/self/fd/{writing}"
    child = spawn(["/bin/sh", "-c", says], pass_fds=(writing,), env={"SAID": "the tide is high"})
    os.close(writing)
    assert await child.wait() == 0
    assert os.read(reading, 100) == b"the tide is high\n"
    os.close(reading)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts forks as glibc tells of them")
def test_no_worker_is_started_by_a_fork_under_uvloop() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert ran.stdout == "0\n"
