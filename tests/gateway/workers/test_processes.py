"""A gateway of several processes, started as an operator starts it: who serves, who dies, and what callers notice.

A start is four processes that import a gateway each, so tests that leave the gateway as it was share one.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
import pytest_asyncio

from tests.support.gateway.app import BODY, INFER, Far, repository, running
from tests.support.gateway.processes import HEADERS, GatewayProcesses, calling
from tidegate import clock
from tidegate.runtime.ports import is_free
from tidegate.servers.address import port_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@asynccontextmanager
async def gateway_of(
    folder: Path, workers: int = 2, delay_s: float = 0.0, **keys: object
) -> AsyncIterator[GatewayProcesses]:
    pool = Far("pool/main")
    pool.host.takes_s = delay_s
    async with running(pool):
        targets = [{"name": "main", "address": pool.address}]
        words = {"model_repository": str(repository(folder)), "targets": targets, "workers": workers, **keys}
        async with GatewayProcesses(folder, **words) as gateway:
            yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcesses]:
    async with gateway_of(tmp_path_factory.mktemp("shared")) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared_gateway: GatewayProcesses) -> GatewayProcesses:
    """The shared gateway, with every process ready again after what the test before did to one."""
    async with aiohttp.ClientSession() as session:
        await shared_gateway.until_members(session)
    return shared_gateway


async def _status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.post(url, json=BODY, headers=HEADERS) as answer:
        await answer.read()
        return answer.status


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def _ends(gateway: GatewayProcesses, session: aiohttp.ClientSession) -> dict[str, int]:
    """Ends of each process by the metrics."""
    async with session.get(gateway.addresses["metrics"] + "/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'^tidegate_gateway_process_ends_total{name="([^"]+)"} (\d+)', text, re.MULTILINE)
    return {name: int(count) for name, count in found}


async def test_two_workers_answer_on_one_port_and_share_the_connections(gateway: GatewayProcesses) -> None:
    async with aiohttp.ClientSession() as session:
        url = gateway.addresses["http"] + INFER
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as callers:
            answers = [callers.post(url, json=BODY, headers=HEADERS) for _ in range(200)]
            statuses = Counter(one.status for one in await asyncio.gather(*answers))
            await clock.sleep(2.5)  # each worker says once a second how many it has
            members = await gateway.members(session)
        held = [members[name]["connections"] for name in ("worker-1", "worker-2")]
    assert statuses == {200: 200}
    assert sum(held) == 200
    assert all(0.3 <= one / 200 <= 0.7 for one in held), held  # far outside of what chance does to a fair hash
    assert [one["role"] for one in members.values()] == ["keeper", "worker", "worker"]


async def test_a_worker_killed_under_load_costs_its_own_requests_and_is_back_by_itself(tmp_path: Path) -> None:
    async with gateway_of(tmp_path) as gateway, aiohttp.ClientSession() as session:
        before = (await gateway.members(session))["worker-1"]["pid"]
        async with calling(gateway.addresses["http"], 8, keep=False, pause_s=0.005) as told:
            await clock.sleep(1.0)
            os.kill(before, signal.SIGKILL)
            await gateway.event("worker_ended")
            await gateway.until_members(session, **{"worker-1": before})
            await clock.sleep(0.5)
        members, ends = await gateway.members(session), await _ends(gateway, session)
    assert told.refused == 0
    assert len(told.broken) <= 8, told.broken  # each caller has one request at a time
    assert told.others == {}
    assert told.statuses[200] > 200
    assert members["worker-1"]["ended"] == 1
    assert "SIGKILL" in members["worker-1"]["why"]
    assert ends["worker-1"] == 1


async def test_a_connection_that_waits_for_a_dead_worker_is_taken_by_another(gateway: GatewayProcesses) -> None:
    async with aiohttp.ClientSession() as session:
        worker = (await gateway.members(session))["worker-1"]["pid"]
        os.kill(worker, signal.SIGSTOP)  # connections to its sockets are set up by the kernel, and wait
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as callers:
            url = gateway.addresses["http"] + INFER
            asked = [asyncio.create_task(callers.post(url, json=BODY, headers=HEADERS).__aenter__()) for _ in range(40)]
            await clock.sleep(2.0)
            waiting = [one for one in asked if not one.done()]
            os.kill(worker, signal.SIGKILL)
            answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30.0)
        await gateway.until_members(session, **{"worker-1": worker})
    assert waiting
    assert [one for one in answers if isinstance(one, BaseException) or one.status != 200] == []


async def test_a_connection_that_waits_for_a_worker_that_hangs_is_taken_by_another(gateway: GatewayProcesses) -> None:
    async with aiohttp.ClientSession() as session:
        worker = (await gateway.members(session))["worker-1"]["pid"]
        os.kill(worker, signal.SIGSTOP)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as callers:
            url = gateway.addresses["http"] + INFER
            asked = [callers.post(url, json=BODY, headers=HEADERS) for _ in range(40)]
            answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30.0)
        await gateway.until_members(session, **{"worker-1": worker})
        members = await gateway.members(session)
    assert [one for one in answers if isinstance(one, BaseException) or one.status != 200] == []
    assert members["worker-1"]["why"] == "worker-1 was ended by SIGKILL, silent for 5 s"


async def test_restarting_in_turn_under_load_refuses_no_connection_and_loses_no_request(
    gateway: GatewayProcesses,
) -> None:
    async with aiohttp.ClientSession() as session:
        before, seen = await gateway.members(session), gateway.count("restarted")
        url = gateway.addresses["http"]
        async with (
            calling(url, 4, keep=False, pause_s=0.005) as short,
            calling(url, 4, keep=True, pause_s=0.005) as kept,
        ):
            await clock.sleep(0.5)
            gateway.signal(signal.SIGHUP)
            await gateway.event("restarted", seen + 1)
            await clock.sleep(0.5)
        await gateway.until_members(session, **{name: one["pid"] for name, one in before.items()})
        members, ends = await gateway.members(session), await _ends(gateway, session)
    assert (short.refused, short.broken, short.others) == (0, [], {})
    assert (kept.refused, kept.broken, kept.others) == (0, [], {})
    assert short.statuses[200] > 100 and kept.statuses[200] > 100
    assert {name: one["ended"] for name, one in members.items()} == {name: one["ended"] for name, one in before.items()}
    assert ends == {name: one["ended"] for name, one in members.items()}


async def test_a_restart_with_a_broken_configuration_changes_nothing_and_says_why(gateway: GatewayProcesses) -> None:
    async with aiohttp.ClientSession() as session:
        before = {name: one["pid"] for name, one in (await gateway.members(session)).items()}
        gateway.configure(policy="dearest")
        gateway.signal(signal.SIGHUP)
        try:
            await gateway.event("restart_failed")
        finally:
            gateway.configure(policy="value")
        after = {name: one["pid"] for name, one in (await gateway.members(session)).items()}
        async with session.post(gateway.addresses["http"] + INFER, json=BODY, headers=HEADERS) as answer:
            assert answer.status == 200
    assert after == before
    assert "policy" in gateway.events[-1]["reason"] and "dearest" in gateway.events[-1]["reason"]


async def test_a_dead_keeper_costs_callers_nothing(gateway: GatewayProcesses) -> None:
    async with aiohttp.ClientSession() as session:
        before, seen = (await gateway.members(session))["keeper"], gateway.count("worker_ended")
        async with calling(gateway.addresses["http"], 4, keep=False, pause_s=0.01) as told:
            os.kill(before["pid"], signal.SIGKILL)
            await gateway.event("worker_ended", seen + 1)
            await gateway.until_members(session, keeper=before["pid"])
            await clock.sleep(1.5)
        state, ends = await gateway.members(session), await _ends(gateway, session)
    assert (told.refused, told.broken, told.others) == (0, [], {})
    assert state["keeper"]["ended"] == before["ended"] + 1
    assert "in_flight" in state["worker-1"]  # the new keeper hears the workers
    assert ends == {name: one["ended"] for name, one in state.items()}  # what the old one counted is not counted again


async def test_a_drain_answers_what_is_under_way_and_leaves_no_process(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, delay_s=2.0) as gateway, aiohttp.ClientSession() as session:
        pids = [one["pid"] for one in (await gateway.members(session)).values()]
        url = gateway.addresses["http"] + INFER
        asked = [asyncio.create_task(_status(session, url)) for _ in range(8)]
        await clock.sleep(1.0)
        gateway.signal(signal.SIGTERM)
        statuses = await asyncio.gather(*asked)
        code = await gateway.ended()
        ports = [port_of(gateway.addresses["http"]), int(gateway.addresses["grpc"].rpartition(":")[2])]
    assert code == 0
    assert statuses == [200] * 8
    assert not any(map(_lives, pids))
    assert all(is_free("127.0.0.1", port) for port in ports)


async def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    async with gateway_of(tmp_path) as gateway, aiohttp.ClientSession() as session:
        pids = [one["pid"] for one in (await gateway.members(session)).values()]
        gateway.signal(signal.SIGKILL)
        await gateway.ended()
        async with asyncio.timeout(20.0):
            while any(map(_lives, pids)):
                await clock.sleep(0.05)


async def test_the_next_gateway_sweeps_the_folder_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tempfile.mkdtemp(prefix="t")  # a short one, since sockets lie there
    monkeypatch.setenv("TMPDIR", place)
    async with gateway_of(tmp_path / "first") as gateway:
        gateway.signal(signal.SIGKILL)
        await gateway.ended()
    (left,) = os.listdir(place)
    async with gateway_of(tmp_path / "second"):
        async with asyncio.timeout(20.0):
            while left in os.listdir(place):
                await clock.sleep(0.05)
    os.rmdir(place)  # nothing is left in it


async def test_operators_see_one_gateway(tmp_path: Path) -> None:
    """Metrics, decisions, conditions and the log level, asked at one port."""
    async with gateway_of(tmp_path, tenants={"acme": {}}) as gateway, aiohttp.ClientSession() as session:
        url = gateway.addresses["http"] + INFER
        ids = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as callers:
            for number in range(40):
                async with callers.post(url, json={**BODY, "id": f"r{number}"}, headers=HEADERS) as answer:
                    assert answer.status == 200
                    ids.append(answer.headers["tidegate-request-id"])
        await clock.sleep(2.5)
        metrics = await (await session.get(gateway.addresses["metrics"] + "/metrics")).text()
        counted = sum(
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("tidegate_requests_total{")
        )
        admin = gateway.addresses["admin"]
        workers = (await (await session.get(admin + "/v1/workers")).json())["workers"]
        decisions = (await (await session.get(admin + "/debug/decisions?last=30")).json())["decisions"]
        slowest = (await (await session.get(admin + "/debug/decisions?slowest=5")).json())["decisions"]
        found = (await (await session.get(admin + f"/debug/decisions?id={ids[7]}")).json())["decisions"]
        async with session.get(admin + "/debug/recording?for=1") as recording:
            assert (recording.status, "workers: 1" in await recording.text()) == (501, True)
        live = await session.get(admin + "/console/live")
        snapshot = b""
        async for line in live.content:
            if line.startswith(b"data: ") and b'"verdict"' in line:
                snapshot = line
                break
        live.close()
    assert len({one.partition("-")[0] for one in ids}) == 2  # both have answered, each with numbers of its own
    assert counted == 40
    assert min(one["up_s"] for one in workers) >= 2.5, "it runs on while nothing changes"
    assert [one["id"] for one in decisions] == [f"r{number}" for number in range(39, 9, -1)]
    assert {one["process"] for one in decisions} == {"worker-1", "worker-2"}
    assert [one["elapsed_ms"] for one in slowest] == sorted((one["elapsed_ms"] for one in slowest), reverse=True)
    assert [one["answered_as"] for one in found] == [ids[7]]
    assert b'"asked":40' in snapshot


async def test_a_quota_holds_over_workers_without_a_broker(tmp_path: Path) -> None:
    rate = 40.0
    async with gateway_of(tmp_path, tenants={"acme": {"requests_per_s": rate}}) as gateway:
        url, headers = gateway.addresses["http"] + INFER, {**HEADERS, "tidegate-tenant": "acme"}

        async def asked(seconds: float) -> Counter[int]:
            statuses: Counter[int] = Counter()

            async def one(callers: aiohttp.ClientSession) -> None:
                async with callers.post(url, json=BODY, headers=headers) as answer:
                    statuses[answer.status] += 1

            until = clock.now() + seconds
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            async with aiohttp.ClientSession(connector=connector) as callers, asyncio.TaskGroup() as tasks:
                while clock.now() < until:
                    tasks.create_task(one(callers))
                    await clock.sleep(1.0 / (3.0 * rate))
            return statuses

        await asked(3.0)  # what was saved up is spent, and the shares have settled
        statuses = await asked(6.0)
    assert set(statuses) == {200, 429}
    assert 0.75 * rate * 6.0 <= statuses[200] <= 1.15 * rate * 6.0


async def test_grpc_callers_are_shared_too_and_see_no_restart(gateway: GatewayProcesses) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    failed: list[str] = []
    over = asyncio.Event()
    answered = 0

    async def caller() -> None:
        nonlocal answered
        async with grpc.aio.insecure_channel(gateway.addresses["grpc"], options=options) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            while not over.is_set():
                try:
                    await live(b"", timeout=20.0)
                    answered += 1
                except grpc.aio.AioRpcError as error:
                    failed.append(f"{error.code().name}: {error.details()}")
                await clock.sleep(0.005)

    callers = [asyncio.create_task(caller()) for _ in range(6)]
    await clock.sleep(0.5)
    seen = gateway.count("restarted")
    gateway.signal(signal.SIGHUP)
    await gateway.event("restarted", seen + 1)
    await clock.sleep(0.5)
    over.set()
    await asyncio.gather(*callers)
    assert failed == []
    assert answered > 100


async def test_a_taken_port_and_a_part_that_cannot_start_end_the_start_with_the_reason(
    gateway: GatewayProcesses, tmp_path: Path
) -> None:
    other = GatewayProcesses(tmp_path)
    other.configure(http_port=port_of(gateway.addresses["http"]))
    with pytest.raises(AssertionError, match="key 'http_port'"):
        await other.__aenter__()
    assert await other.ended() == 1
    other.events.clear()
    other.configure(http_port=0, metrics_port=port_of(gateway.addresses["metrics"]))
    with pytest.raises(AssertionError, match="key 'metrics_port'"):
        await other.__aenter__()
    assert await other.ended() == 1
    assert "metrics_port" in other.events[-1]["reason"]
