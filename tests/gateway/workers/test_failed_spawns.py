"""Processes that do not start, or that hang: what becomes of their place, of a restart in turn, and of what was opened.

The supervisor and its sockets are real. Its processes are small ones that say they serve, again and again, and do
nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway.config.gateway import GatewayConfig
from gateway.workers import gateway_process, supervisor
from gateway.workers.gateway_process import GatewayProcess
from gateway.workers.messages import Leave, Member, PartAssignment, Serving, Tell
from gateway.workers.supervisor import CannotReplace, GatewaySupervisor
from tidegate import clock
from tidegate.config import load
from tidegate.runtime import events, process_silence
from tidegate.runtime.process import StartError
from tidegate.runtime.spawned_process import SpawnedProcess, spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]  # a gateway that has lost a process for good may not end

REASON = f"could not be started: [Errno {errno.EAGAIN}] {os.strerror(errno.EAGAIN)}"
SERVES_UNTIL_TOLD = """
import select, signal, socket, sys, time
end = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))  # hangs
end.sendall(bytes.fromhex(sys.argv[2]))
spoke_at = time.monotonic()
while True:
    comes = select.select([end], [], [], 0.1)[0]
    if time.monotonic() > spoke_at + 0.2:  # whatever comes
        end.sendall(bytes.fromhex(sys.argv[3]))
        spoke_at = time.monotonic()
    if not comes:
        continue
    length = end.recv(4, socket.MSG_WAITALL)
    if not length or end.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL) == bytes.fromhex(sys.argv[4]):
        break
"""


class Spawns:
    """In the place of `spawn`.

    Attributes:
        fails: of each of the next calls, whether it fails, as it does where there are too many processes.
        hang: of each of the next processes, whether it says nothing.
    """

    def __init__(self) -> None:
        self.fails: list[bool] = []
        self.hang: list[bool] = []
        self.pids: list[int] = []

    def __call__(self, command: Sequence[str], **keys: Any) -> SpawnedProcess:
        if self.fails and self.fails.pop(0):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        words = [*map(_framed, (Serving(addresses={}, models=[]), Tell("keeper", "alive", b"")))]
        words.append(msgspec.msgpack.encode(Leave()).hex())
        channel_fd = command[command.index("--part") + 1]
        program = "import time; time.sleep(100)" if self.hang and self.hang.pop(0) else SERVES_UNTIL_TOLD
        process = spawn([sys.executable, "-I", "-S", "-c", program, channel_fd, *words], **keys)
        self.pids.append(process.pid)
        return process


def _framed(message: msgspec.Struct) -> str:
    encoded = msgspec.msgpack.encode(message)
    return (len(encoded).to_bytes(4, "big") + encoded).hex()


@pytest.fixture
def spawns(monkeypatch: pytest.MonkeyPatch) -> Spawns:
    made = Spawns()
    monkeypatch.setattr(gateway_process, "spawn", made)
    monkeypatch.setattr(supervisor, "STARTS_WITHIN_S", 10.0)
    monkeypatch.setattr(random, "random", lambda: 0.1)  # waits are short
    return made


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Of which processes the end was told, and how."""
    told: list[tuple[str, str]] = []

    def emit(event: str, **fields: Any) -> None:
        if event == "worker_ended":
            told.append((fields["name"], fields["how"]))

    monkeypatch.setattr(events, "emit", emit)
    return told


def _gateway(folder: Path) -> GatewaySupervisor:
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump({"workers": 2, "http_port": 0, "grpc_port": 0, "drain_s": 1.0}))
    return GatewaySupervisor(load(GatewayConfig, path), path)


def _members(gateway: GatewaySupervisor) -> dict[str, Member]:
    return {one.name: one for one in gateway.members()}


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not holds():
            await clock.sleep(0.01)


@pytest.mark.parametrize("name", ["keeper", "worker-1"])
async def test_a_process_that_the_system_would_not_start_is_tried_again(
    tmp_path: Path, spawns: Spawns, ends: list[tuple[str, str]], name: str
) -> None:
    async with _gateway(tmp_path) as gateway:
        before = _members(gateway)
        spawns.fails = [True, True]
        os.kill(before[name].pid, signal.SIGKILL)
        await _until(lambda: _members(gateway)[name].state == "ready" and _members(gateway)[name].ended > 0)
        after = _members(gateway)
    assert after[name].pid == spawns.pids[-1] != before[name].pid
    assert ends == [(name, "was ended by SIGKILL"), (name, REASON), (name, REASON)]
    assert (after[name].ended, after[name].why) == (3, f"{name} {REASON}")
    assert {one: after[one].pid for one in after if one != name} == {
        one: before[one].pid for one in before if one != name
    }


async def test_a_process_that_a_nameless_signal_ends_is_started_again(
    tmp_path: Path, spawns: Spawns, ends: list[tuple[str, str]]
) -> None:
    async with _gateway(tmp_path) as gateway:
        number = signal.SIGRTMIN + 3  # Python has names for the first and the last only
        os.kill(_members(gateway)["worker-1"].pid, number)
        await _until(lambda: _members(gateway)["worker-1"].state == "ready" and bool(ends))
    assert ends == [("worker-1", f"was ended by signal {int(number)}")]


@pytest.mark.parametrize("name", ["keeper", "worker-1"])
@pytest.mark.parametrize(("by", "ended_by"), [(signal.SIGUSR1, "SIGABRT"), (signal.SIGSTOP, "SIGKILL")])
async def test_a_process_that_is_silent_is_killed_and_started_again(
    tmp_path: Path,
    spawns: Spawns,
    ends: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    by: signal.Signals,
    ended_by: str,
) -> None:
    monkeypatch.setattr(process_silence, "HANGS_AFTER_S", 2.0)
    monkeypatch.setattr(supervisor, "LOOK_S", 0.2)
    async with _gateway(tmp_path) as gateway:
        before = _members(gateway)
        await clock.sleep(2.5)
        assert ends == [] and _members(gateway).keys() == before.keys()
        os.kill(before[name].pid, by)
        await _until(lambda: bool(ends) and _members(gateway)[name].state == "ready")
        after = _members(gateway)
    assert ends == [(name, f"was ended by {ended_by}, silent for 2 s")]
    assert {one for one in after if after[one].pid != before[one].pid} == {name}


async def test_a_process_whose_start_never_ends_is_killed_and_started_again(
    tmp_path: Path, spawns: Spawns, ends: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _gateway(tmp_path) as gateway:
        monkeypatch.setattr(supervisor, "STARTS_WITHIN_S", 1.0)
        monkeypatch.setattr(supervisor, "LOOK_S", 0.2)
        spawns.hang = [True]
        os.kill(_members(gateway)["worker-1"].pid, signal.SIGKILL)
        await _until(lambda: len(ends) == 2 and _members(gateway)["worker-1"].state == "ready")
    assert ends[1] == ("worker-1", "was ended by SIGABRT, for it hung in its start")


async def test_a_keeper_whose_successor_the_system_would_not_start_at_once_is_replaced_all_the_same(
    tmp_path: Path, spawns: Spawns
) -> None:
    async with _gateway(tmp_path) as gateway:
        before = _members(gateway)
        spawns.fails = [False, False, True]  # the keeper is the last
        await gateway.restart_in_turn()
        after = _members(gateway)
    assert all(after[name].pid != before[name].pid and after[name].state == "ready" for name in before)
    assert {name: one.ended for name, one in after.items()} == {"keeper": 1, "worker-1": 0, "worker-2": 0}


async def test_a_successor_that_the_system_would_not_start_ends_the_restart_and_what_served_goes_on(
    tmp_path: Path, spawns: Spawns, ends: list[tuple[str, str]]
) -> None:
    async with _gateway(tmp_path) as gateway:
        before = _members(gateway)
        spawns.fails = [True]
        with pytest.raises(CannotReplace) as refused:
            await gateway.restart_in_turn()
        same = _members(gateway)
        await gateway.restart_in_turn()
        after = _members(gateway)
    assert str(refused.value) == f"worker-1: its successor {REASON}"
    assert {name: one.pid for name, one in same.items()} == {name: one.pid for name, one in before.items()}
    assert all(after[name].pid != before[name].pid and after[name].state == "ready" for name in before)
    assert ends == []


async def test_a_process_that_the_system_will_not_start_ends_the_gateways_start_with_the_reason(
    tmp_path: Path, spawns: Spawns
) -> None:
    spawns.fails = [True]
    with pytest.raises(StartError) as refused:
        await _gateway(tmp_path).__aenter__()
    assert str(refused.value) == f"keeper {REASON}"


@pytest.mark.parametrize("fails", ["the process", "its channel"])
async def test_what_was_opened_for_a_process_that_could_not_be_started_is_closed(
    spawns: Spawns, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    opened: list[socket.socket] = []
    changes: list[str] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = make_pair()
        opened.extend((ours, theirs))
        return ours, theirs

    async def no_channel(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    make_pair = socket.socketpair
    part = PartAssignment("worker", 1, 1, sockets=[], http_port=0, grpc_port=0, folder="", generation=1)
    process = GatewayProcess(part, None, lambda *_: None, lambda: changes.append(process.state))
    with monkeypatch.context() as patched:
        patched.setattr(gateway_process.socket, "socketpair", pair)
        if fails == "the process":
            spawns.fails = [True]
        else:
            patched.setattr(gateway_process.ProcessChannel, "open", no_channel)
        await process.start()
    assert process.over.is_set() and process.settled.is_set()
    assert (process.state, changes, process.how) == ("down", ["down"], REASON)
    assert [one.fileno() for one in opened] == [-1, -1]
    for pid in spawns.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    await process.aclose()
