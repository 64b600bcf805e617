"""Several servers of one pool: what each gets of the whole, and real ones, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cloud_pool.config import PoolConfig
from cloud_pool.servers import check_ports, check_servers, server_config
from cloud_pool.workers.memory_limit import MemoryLimit
from gateway.app import Gateway
from gateway.config.targets import TargetConfig
from tests.cloud_pool.models import TEXT
from tests.cloud_pool.workers_support import text, text_repository
from tests.support.gateway.app import config_over
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.runtime.process import StartError
from tidegate.testing.ports import free_ports
from tidegate.types import Call, Datatype, InferRequest

WITHIN_S = 60.0
REQUESTS = 300  # that many fit into the queue of the server that is left
CALLERS = 16  # each asks again once it is answered: as often as the machine can


async def asked_by_all(ask: Callable[[int], Awaitable[None]]) -> None:
    """Ask for each number, in order."""
    numbers = iter(range(REQUESTS))

    async def caller() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*[caller() for _ in range(CALLERS)])


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
        ({"grpc_port": 8101, "metrics_port": 8101}, "metrics_port"),
        ({"advertise": "pool.lan:65535"}, "advertise"),
        ({"name": "n" * 63}, "longer than 64 characters"),
        ({"operator_token_file": "token"}, "operator_token_file"),
        ({"cpu_affinity": True}, "cpu_affinity"),
    ],
)
def test_keys_that_do_not_go_with_several_servers_are_named(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(StartError, match=named):
        check_servers(load(PoolConfig, servers=2, **keys))


def test_a_port_that_is_taken_is_found_before_any_server_starts() -> None:
    first = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen(1)
        with pytest.raises(StartError) as refused:
            check_ports(load(PoolConfig, servers=2, host="127.0.0.1", grpc_port=first))
    assert f"key 'grpc_port' = {first}: pool-1 cannot listen on 127.0.0.1:{first + 1}" in str(refused.value)


def test_a_gpus_memory_for_vllm_is_divided() -> None:
    whole = load(PoolConfig, servers=3, vllm={"gpu_memory_ratio": 0.9})
    assert server_config(whole, 2).vllm.gpu_memory_ratio == pytest.approx(0.3)


@pytest.mark.slow
async def test_behind_a_gateway_a_killed_server_costs_no_request(tmp_path: Path) -> None:
    """One target in the gateway's file is both servers; the one that serves is killed in the middle."""
    port = free_ports(2)
    models = text_repository(tmp_path / "models", queue=REQUESTS)
    config = tmp_path / "pool.yaml"
    keys = {"grpc_port": port, "servers": 2, "warmup_budget_s": 0.5, "device": "cpu", "threads": 1}
    config.write_text(yaml.safe_dump({**keys, "model_repository": str(models)}))
    command = (sys.executable, "-m", "cloud_pool", "--config", str(config))
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        ready = await _event(parent, "ready")
        target = TargetConfig(name="pool", address=f"127.0.0.1:{port}", servers=2)  # type: ignore[call-arg]
        async with Gateway(config_over(models, target)) as gateway:
            await gateway.static_targets_tried(30.0)
            assert set(gateway.fleet.targets) == {"pool/pool-0", "pool/pool-1"}
            before: Counter[str] = Counter()
            after: Counter[str] = Counter()
            killed = ""

            async def ask(number: int) -> None:
                nonlocal killed
                if number == 100:
                    killed = before.most_common(1)[0][0].removeprefix("pool/")
                    os.kill(ready["servers"][killed]["pid"], signal.SIGKILL)
                now = clock.now()
                reply = await gateway.dispatcher.infer(Call(text_request(), "oip-grpc", now, now + 10.0))
                assert reply.route is not None
                (after if killed else before)[reply.route.served_by] += 1

            await asked_by_all(ask)
            assert before.total() + after.total() == REQUESTS
            assert after[{"pool-0": "pool/pool-1", "pool-1": "pool/pool-0"}[killed]] > 100
            back = await _event(parent, "server_ready")
            assert back["name"] == killed
            async with asyncio.timeout(WITHIN_S):
                while not gateway.fleet.targets[f"pool/{killed}"].up:
                    await clock.sleep(0.05)
    finally:
        if parent.returncode is None:
            parent.terminate()
            await parent.wait()


@pytest.mark.slow
async def test_a_killed_server_and_one_that_hangs_come_back_while_the_other_answers(
    tmp_path: Path,
) -> None:
    port = free_ports(2)
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
        config.write_text(yaml.safe_dump({**keys, "name": "other", "grpc_port": port + 7, "servers": 5}))
        os.kill(pids["pool-1"], signal.SIGKILL)
        ended = await _event(parent, "server_ended")
        assert (ended["name"], ended["how"]) == ("pool-1", "was ended by SIGKILL")
        assert await _answers(port)
        back = await _event(parent, "server_ready")
        assert back["name"] == "pool-1" and back["pid"] != pids["pool-1"]
        assert await _answers(port + 1)
        os.kill(pids["pool-0"], signal.SIGSTOP)  # its ports stay open, and nothing is answered there
        ended = await _event(parent, "server_ended")
        assert (ended["name"], ended["how"]) == ("pool-0", "was ended by SIGKILL, silent for 5 s")
        assert await _answers(port + 1)
        unstuck = await _event(parent, "server_ready")
        assert unstuck["name"] == "pool-0" and await _answers(port)
        parent.terminate()
        assert await asyncio.wait_for(parent.wait(), WITHIN_S) == 0
        for pid in (unstuck["pid"], back["pid"]):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        if parent.returncode is None:
            parent.terminate()
            await parent.wait()


@pytest.mark.slow
async def test_a_pool_of_two_servers_that_is_asked_to_end_loses_no_request_beside_another(tmp_path: Path) -> None:
    models = text_repository(tmp_path / "models", queue=REQUESTS)
    ports = free_ports(3)
    keys = {"warmup_budget_s": 0.5, "device": "cpu", "threads": 1, "model_repository": str(models)}
    pools = []
    for name, port, servers in (("two", ports, 2), ("one", ports + 2, 1)):
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump({**keys, "name": name, "grpc_port": port, "servers": servers}))
        command = (sys.executable, "-m", "cloud_pool", "--config", str(config))
        pools.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
    try:
        for pool in pools:
            await _event(pool, "ready")
        targets = (
            TargetConfig(name="two", address=f"127.0.0.1:{ports}", servers=2),  # type: ignore[call-arg]
            TargetConfig(name="one", address=f"127.0.0.1:{ports + 2}"),  # type: ignore[call-arg]
        )
        served: list[Counter[str]] = [Counter(), Counter()]  # before the signal, and after the pool has ended
        async with Gateway(config_over(models, *targets)) as gateway:
            await gateway.static_targets_tried(30.0)

            async def ask(number: int) -> None:
                if number == 100:
                    pools[0].terminate()
                ended = pools[0].returncode is not None
                now = clock.now()
                reply = await gateway.dispatcher.infer(Call(text_request(), "oip-grpc", now, now + 10.0))
                assert reply.route is not None
                served[ended][reply.route.served_by] += 1

            await asked_by_all(ask)
            assert await asyncio.wait_for(pools[0].wait(), WITHIN_S) == 0
            for number in range(20):
                await ask(number)
        assert served[0].total() + served[1].total() == REQUESTS + 20
        assert set(served[1]) == {"pool/one"}
    finally:
        for pool in pools:
            if pool.returncode is None:
                pool.terminate()
                await pool.wait()


def text_request() -> InferRequest:
    tensors = [array_to_tensor(name, array, Datatype.INT64) for name, array in text(4).items()]
    return InferRequest(TEXT.name, tuple(tensors))


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
