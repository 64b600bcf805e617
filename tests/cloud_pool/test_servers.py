"""Several servers of one pool: what each gets of the whole, and real ones, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cloud_pool.config import PoolConfig
from cloud_pool.servers import check_servers, server_config
from cloud_pool.workers.memory_limit import MemoryLimit
from tests.cloud_pool.workers_support import text_repository
from tidegate.config import load
from tidegate.runtime.process import StartError

WITHIN_S = 60.0


def test_each_server_has_a_name_and_ports_of_its_own_and_its_part_of_the_cores() -> None:
    whole = load(PoolConfig, servers=2, grpc_port=8101, metrics_port=9100, advertise="pool.lan:8101", workers=64)
    own = server_config(whole, 1)
    assert (own.name, own.grpc_port, own.metrics_port, own.advertise) == ("pool-1", 8102, 9101, "pool.lan:8102")
    assert own.threads == max(1, len(os.sched_getaffinity(0)) // 128)
    assert own.limits.max_held_bytes == whole.limits.max_held_bytes // 2


def test_the_memory_limit_is_divided_whether_it_is_configured_or_found() -> None:
    assert MemoryLimit(100.0, 50.0, sharing=4).of(None) == 25.0
    assert MemoryLimit(None, 1000.0, sharing=3).of(None) == pytest.approx(300.0)
    assert MemoryLimit(None, 1000.0, sharing=3).of(2000.0) == pytest.approx(600.0)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"grpc_port": 0}, "servers"),
        ({"grpc_port": 65535}, "65536"),
        ({"grpc_port": 8101, "metrics_port": 8102}, "metrics_port"),
        ({"cpu_affinity": True}, "cpu_affinity"),
    ],
)
def test_keys_that_do_not_go_with_several_servers_are_named(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(StartError, match=named):
        check_servers(load(PoolConfig, servers=2, **keys))


@pytest.mark.slow
async def test_a_killed_server_comes_back_while_the_other_answers_and_a_signal_ends_all(tmp_path: Path) -> None:
    port = _two_free_ports()
    keys = {"grpc_port": port, "servers": 2, "warmup_budget_s": 0.5, "device": "cpu"}
    config = tmp_path / "pool.yaml"
    config.write_text(yaml.safe_dump({**keys, "model_repository": str(text_repository(tmp_path / "models"))}))
    command = (sys.executable, "-m", "cloud_pool", "--config", str(config))
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        ready = await _event(parent, "ready")
        pids = {name: one["pid"] for name, one in ready["servers"].items()}
        assert sorted(pids) == ["pool-0", "pool-1"]
        assert await _answers(port) and await _answers(port + 1)
        os.kill(pids["pool-1"], signal.SIGKILL)
        ended = await _event(parent, "server_ended")
        assert (ended["name"], ended["how"]) == ("pool-1", "was ended by SIGKILL")
        assert await _answers(port)
        back = await _event(parent, "server_ready")
        assert back["name"] == "pool-1" and back["pid"] != pids["pool-1"]
        assert await _answers(port + 1)
        parent.terminate()
        assert await asyncio.wait_for(parent.wait(), WITHIN_S) == 0
        for pid in (pids["pool-0"], back["pid"]):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        if parent.returncode is None:
            parent.terminate()
            await parent.wait()


async def _event(process: asyncio.subprocess.Process, wanted: str) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(WITHIN_S):
        while line := await process.stdout.readline():
            event: dict[str, Any] = json.loads(line)
            if event["event"] == wanted:
                return event
    raise AssertionError(f"it ended before {wanted}")


async def _answers(port: int) -> bool:
    """Whether OIP's ServerReady says yes there: field 1, true."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        said: bytes = await ask(b"", timeout=10.0, wait_for_ready=True)
        return said == b"\x08\x01"


def _two_free_ports() -> int:
    """The first of two that are free next to each other."""
    for _ in range(50):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two ports are free")
