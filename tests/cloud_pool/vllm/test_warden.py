"""The warden by itself: what it starts ends with the pool, and ends as it would without a warden."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from cloud_pool.vllm.session import descendants, session_members
from cloud_pool.vllm.warden import CANNOT_START
from tests.support.processes import until_ended

pytestmark = pytest.mark.slow

# Starts a process of its own, which ignores SIGTERM, prints both ids, and waits.
SERVER = """
import os, signal, subprocess, sys, time
quiet = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", quiet], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(1000)
"""


class Warden:
    """One that was started as the pool starts it; `lifeline` is the pool's end of the pipe, until `end`."""

    def __init__(self, folder: Path, *command: str, cores: str = "") -> None:
        ends, self.lifeline = os.pipe()
        folder.mkdir()
        words = (sys.executable, "-P", "-m", "cloud_pool.vllm.warden", str(ends), str(folder), cores)
        self.process = subprocess.Popen(
            [*words, *command], pass_fds=(ends,), stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        os.close(ends)

    @property
    def pid(self) -> int:
        return self.process.pid

    def pids(self) -> tuple[int, int]:
        """Of the server, and of what it has started."""
        assert self.process.stdout is not None
        server, child = map(int, self.process.stdout.readline().split())
        return server, child

    def end(self) -> None:
        """As when the pool is gone."""
        lifeline, self.lifeline = self.lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Warden]]:
    started: list[Warden] = []

    def start_one(*command: str, cores: str = "") -> Warden:
        started.append(Warden(tmp_path / "f", *command, cores=cores))
        return started[-1]

    yield start_one
    for one in started:
        one.end()
        with one.process as process:
            process.wait(10.0)


async def test_when_the_pools_end_of_the_lifeline_closes_all_of_them_end_with_their_folder(
    tmp_path: Path, start: Callable[..., Warden]
) -> None:
    one = start(sys.executable, "-c", SERVER)
    server, child = one.pids()
    (tmp_path / "f" / "http.sock").touch()
    assert set(session_members(one.pid)) == set(descendants(one.pid)) == {one.pid, server, child}
    one.end()
    await until_ended(server, child, one.pid)
    assert not (tmp_path / "f").exists()


async def test_a_warden_that_is_killed_takes_the_server_along(start: Callable[..., Warden]) -> None:
    one = start(sys.executable, "-c", SERVER)
    server, child = one.pids()
    one.process.kill()
    await until_ended(server)
    os.kill(child, signal.SIGKILL)  # which the pool does, `test_vllm_pool.py`


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_servers_end_is_the_wardens(start: Callable[..., Warden], code: str, status: int) -> None:
    assert start(sys.executable, "-c", code).process.wait(20.0) == status


def test_a_request_to_end_goes_on_to_the_server(start: Callable[..., Warden]) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(1, 2, flush=True); "
    one = start(sys.executable, "-c", code + "signal.pause()")
    one.pids()
    one.process.terminate()
    assert one.process.wait(20.0) == 7


def test_a_command_that_cannot_be_started_is_told(start: Callable[..., Warden]) -> None:
    one = start("/no/such/vllm")
    assert one.process.wait(20.0) == CANNOT_START
    assert one.process.stdout is not None and b"/no/such/vllm cannot be started" in one.process.stdout.read()


def test_the_server_runs_on_the_cores_that_are_its(start: Callable[..., Warden]) -> None:
    core = min(os.sched_getaffinity(0))
    one = start(sys.executable, "-c", "import os; print(*os.sched_getaffinity(0), 0, flush=True)", cores=str(core))
    assert one.pids() == (core, 0)
