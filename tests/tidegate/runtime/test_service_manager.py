"""What systemd hears of a process that it has started: over a real socket, of a real process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.runtime.service_manager import ALIVE, READY, STOPPING, ServiceManager

PROCESS = """
import asyncio, os, sys, time
from edge_agent.config import EdgeConfig
from tidegate.runtime import events
from tidegate.runtime.process import run

async def serve(config):
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys(), "its children say nothing"
    await asyncio.sleep(0.3)
    events.emit("ready")
    if sys.argv[1] == "hangs":
        await asyncio.sleep(0.5)
        stuck()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.3)

def stuck():
    while True:
        time.sleep(1.0)

parent_pid = int(sys.argv[2]) if len(sys.argv) > 2 else None
run("edge", EdgeConfig, serve, path=None, parent_pid=parent_pid)
"""


class Systemd:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def environment(self, watchdog_s: float) -> dict[str, str]:
        words = {"NOTIFY_SOCKET": self.address, "TIDEGATE_EDGE_NAME": "e", "TIDEGATE_EDGE_STATE_DIR": "/nowhere"}
        return os.environ | words | ({"WATCHDOG_USEC": str(int(1e6 * watchdog_s))} if watchdog_s else {})

    def hears(self, within_s: float) -> str:
        """The next word; "" where none comes."""
        self.socket.settimeout(within_s)
        try:
            return self.socket.recv(100).decode()
        except TimeoutError:
            return ""

    def hears_until(self, word: str, within_s: float = 30.0) -> list[str]:
        heard = [self.hears(within_s)]
        while heard[-1] not in (word, ""):
            heard.append(self.hears(within_s))
        return heard


@pytest.fixture(params=["a path", "an abstract name"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    manager = Systemd(str(tmp_path / "notify") if request.param == "a path" else f"@tidegate-test-{os.getpid()}")
    yield manager
    manager.socket.close()


def started(systemd: Systemd, how: str, *words: str, watchdog_s: float = 0.6) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, how, *words]
    return subprocess.Popen(command, env=systemd.environment(watchdog_s), stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_systemd_hears_that_it_serves_that_it_lives_and_that_it_ends(systemd: Systemd) -> None:
    with started(systemd, "serves") as process:
        try:
            assert set(systemd.hears_until(READY)) == {ALIVE, READY}
            assert systemd.hears_until(ALIVE) == [ALIVE] == systemd.hears_until(ALIVE)
            process.terminate()
            assert systemd.hears_until(STOPPING)[-1] == STOPPING
            assert systemd.hears(5.0) == ALIVE, "while it drains, too"
            assert process.wait(10.0) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_a_process_whose_loop_hangs_says_nothing_and_says_where_it_stands_when_it_is_ended_for_it(
    systemd: Systemd,
) -> None:
    with started(systemd, "hangs") as process:
        try:
            systemd.hears_until(READY)
            assert set(systemd.hears_until("", 3.0)) == {ALIVE, ""}
            process.send_signal(signal.SIGABRT)  # as systemd does after `WatchdogSec`
            assert process.wait(10.0) == -signal.SIGABRT
            assert process.stderr is not None and "in stuck" in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.slow
def test_without_a_watchdog_it_says_only_that_it_serves_and_a_child_of_another_process_says_nothing(
    systemd: Systemd,
) -> None:
    with started(systemd, "serves", watchdog_s=0.0) as process:
        try:
            assert systemd.hears_until("", 3.0) == [READY, ""]
        finally:
            process.kill()
    with started(systemd, "serves", str(os.getpid())) as process:
        try:
            assert systemd.hears_until("", 3.0) == [""]
        finally:
            process.kill()


@on_virtual_time
async def test_another_processs_watchdog_and_one_that_is_no_number_are_none() -> None:
    of = {"NOTIFY_SOCKET": "/run/s", "WATCHDOG_USEC": "3000000"}
    assert (
        ServiceManager.of({**of, "WATCHDOG_PID": "7"}, 7).watchdog_s == ServiceManager.of({**of}, 7).watchdog_s == 3.0
    )
    assert ServiceManager.of({**of, "WATCHDOG_PID": "8"}, 7).watchdog_s is None
    for wrong in ("", "0", "-1", "soon"):
        assert ServiceManager.of({**of, "WATCHDOG_USEC": wrong}, 7).watchdog_s is None
    manager = ServiceManager.of({**of}, 7)
    async with manager.watching():  # its socket is gone: nothing is lost but the word
        await clock.sleep(2.0)
    assert repr(manager) == "<ServiceManager '/run/s', silent for 3 s at most>"
