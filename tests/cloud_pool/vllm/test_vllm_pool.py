"""A pool whose generating model is served by a server that replays vLLM's answers: over a link, and as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from gateway.targets.link import LinkTarget
from tests.support.models.replayed import replayed_repository
from tests.support.pool.replayed_vllm import misbehave, tokens_of, told, write_vllm
from tests.support.processes import has_ended
from tidegate import clock
from tidegate.config import load
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import usage_of
from tidegate.outcome import DeadlineExceeded, InvalidRequest, Overloaded, Unreachable
from tidegate.runtime.process import StartError
from tidegate.token_sink import TokenBatch
from tidegate.types import Reply

pytestmark = pytest.mark.slow

RECORDED_PROMPT = (504, 3575, 282, 4649, 314, 260)


def keys_of(folder: Path, **more: Any) -> dict[str, Any]:
    vllm = {"use": "always", "executable": str(folder / "v" / "vllm")} | more.pop("vllm", {})
    places = {"grpc_port": 0, "model_repository": folder / "models", "precision": "bf16", "warmup_budget_s": 0.5}
    return places | {"vllm": vllm} | more


@asynccontextmanager
async def pool(folder: Path, **keys: Any) -> AsyncIterator[PoolApp]:
    """Of a repository and a server that were written there."""
    async with PoolApp(load(PoolConfig, **keys_of(folder, **keys)), draw=lambda: 0.01) as app:
        yield app


@asynccontextmanager
async def linked(address: str) -> AsyncIterator[LinkTarget]:
    async with LinkTarget("pool", address, gateway_name="test", on_event=lambda _: None, draw=lambda: 0.1) as link:
        await until(lambda: link.connected)
        yield link


@asynccontextmanager
async def served(folder: Path, *, slots: int = 4, **misbehaves: Any) -> AsyncIterator[tuple[PoolApp, LinkTarget]]:
    write_vllm(folder / "v", **misbehaves)
    replayed_repository(folder / "models", slots=slots)
    async with pool(folder) as app, linked(app.address) as link:
        yield app, link


def ask(
    link: LinkTarget,
    max_tokens: int,
    stream: TokenStream | None = None,
    *prompt: int,
    budget_s: float = 30.0,
    **words: Any,
) -> asyncio.Task[Reply]:
    request = infer_request("talker", GenerateRequest(prompt or (1, 2, 3), max_tokens, **words))

    async def infer() -> Reply:
        try:
            return await link.infer(
                request,
                variant="bf16",
                budget_s=budget_s,
                priority=0,
                traceparent="",
                on_accepted=lambda _: None,
                tokens=stream,
            )
        finally:
            if stream is not None:
                stream.end()

    return asyncio.create_task(infer())


async def read_all(stream: TokenStream) -> list[TokenBatch]:
    batches: list[TokenBatch] = []
    while taken := await stream.take():
        batches += taken
    return batches


def ids_in(reply: Reply) -> list[int]:
    return list(ids_of(reply.response.outputs[0]))


async def until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await clock.sleep(0.01)


async def test_tokens_usage_and_log_probabilities_come_over_the_link(tmp_path: Path) -> None:
    async with served(tmp_path) as (app, link):
        stream = TokenStream(window=4)
        task = ask(link, 100, stream)
        batches = await read_all(stream)
        reply = await task
        assert [token for one in batches for token in one.ids] == ids_in(reply) == tokens_of([1, 2, 3], 100)
        usage = usage_of(reply.response)
        assert (usage.finish_reason, usage.prompt_tokens, usage.completion_tokens) == ("length", 3, 100)

        assert usage_of((await ask(link, 8, None, *range(1, 41))).response).cached_tokens == 32
        recorded = await ask(link, 16, None, *RECORDED_PROMPT)
        assert ids_in(recorded)[:6] == [3575, 282, 260, 3432, 5261, 30]

        stream = TokenStream()
        task = ask(link, 6, stream, *RECORDED_PROMPT, logprobs=3)
        batches = await read_all(stream)
        assert [len(top) for one in batches for top in one.top] == [3] * 6 == [3] * len(ids_in(await task))
        (offer,) = app.host.offers()
        assert offer.variants[0].slots == 4 and not offer.variants[0].schemas
        assert offer.sandbox == "all: vLLM runs outside of it"


async def test_a_caller_that_leaves_is_cancelled_in_the_server(tmp_path: Path) -> None:
    async with served(tmp_path, slots=1, step_s=0.01) as (app, link):
        stream = TokenStream()
        leaving = ask(link, 1500, stream)
        await stream.take()
        leaving.cancel()
        assert len(ids_in(await ask(link, 5))) == 5
        await until(lambda: told(tmp_path / "v")["cancelled"] == 1)
        assert app.host.load_report().in_flight == 0


async def test_an_answer_whose_time_is_over_is_ended_in_the_server_and_counted(tmp_path: Path) -> None:
    async with served(tmp_path, slots=1, step_s=0.02) as (app, link):
        with pytest.raises(DeadlineExceeded):
            await ask(link, 1500, TokenStream(), budget_s=1.0)
        assert len(ids_in(await ask(link, 5))) == 5, "its slot is free"
        await until(lambda: told(tmp_path / "v")["cancelled"] == 1 and told(tmp_path / "v")["running"] == 0)
        (state,) = [one.generating.state("talker") for one in app.generating.variants.values()]
        assert (state.running, state.waiting, state.slots, state.reserved_bytes) == (0, 0, 1, 0)
        assert app.generating.counts.tokens["talker", "wasted"] > 5


async def test_a_reader_that_does_not_read_keeps_no_more_than_its_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, link):
        stalled = TokenStream(window=8)
        slow = ask(link, 200, stalled)
        await until(lambda: stalled.received == 8)
        for _ in range(3):
            assert len(ids_in(await ask(link, 40))) == 40
        assert stalled.received == 8 and not slow.done()
        batches = await read_all(stalled)
        assert [token for one in batches for token in one.ids] == ids_in(await slow) == tokens_of([1, 2, 3], 200)


async def test_what_waits_is_begun_as_slots_become_free_and_what_is_too_much_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, slots=2) as (_, link):
        replies = await asyncio.gather(*[ask(link, 20, None, n + 1) for n in range(12)])
        assert [ids_in(one) for one in replies] == [tokens_of([n + 1], 20) for n in range(12)]
        with pytest.raises(InvalidRequest, match="context"):
            await ask(link, 2048)
        with pytest.raises(InvalidRequest):
            await ask(link, 5, None, 1 << 20)


async def test_a_server_that_is_killed_is_started_again_and_serves(tmp_path: Path) -> None:
    async with served(tmp_path, step_s=0.01) as (app, link):
        stream = TokenStream()
        running = ask(link, 1500, stream)
        await stream.take()
        first = told(tmp_path / "v")
        with capture_logs() as logs:
            os.kill(first["pid"], signal.SIGKILL)
            with pytest.raises(Unreachable):
                await running
            await until(lambda: any(entry["event"] == "worker back" for entry in logs))
        assert told(tmp_path / "v")["pid"] != first["pid"] and has_ended(first["engine"])
        assert len(ids_in(await ask(link, 5))) == 5
        (offer,) = app.host.offers()
        assert offer.worker is not None


async def test_a_server_that_dies_again_and_again_is_tried_ever_more_rarely(tmp_path: Path) -> None:
    async with served(tmp_path) as (app, link):
        misbehave(tmp_path / "v", exits=1)
        with capture_logs() as logs:
            os.kill(told(tmp_path / "v")["pid"], signal.SIGKILL)
            await until(lambda: [entry["event"] for entry in logs].count("worker lost") >= 3)
            with pytest.raises((Unreachable, Overloaded)):
                await ask(link, 5)
            misbehave(tmp_path / "v")
            await until(lambda: any(entry["event"] == "worker back" for entry in logs))
        lost = [entry for entry in logs if entry["event"] == "worker lost"]
        assert "RuntimeError: no room for the model" in lost[-1]["reason"]
        assert len(ids_in(await ask(link, 5))) == 5 and app.host.ready()


@pytest.mark.parametrize("successor_first", [True, False])
async def test_a_server_that_is_replaced_ends_what_it_has_begun(tmp_path: Path, successor_first: bool) -> None:
    async with served(tmp_path, step_s=0.01) as (app, link):
        (replica,) = app.generating.replicas
        first, stream = told(tmp_path / "v")["pid"], TokenStream()
        going_on = ask(link, 150, stream)
        await stream.take()
        assert await replica.recycle(successor_first=successor_first)
        assert len(ids_in(await going_on)) == 150
        assert told(tmp_path / "v")["pid"] != first and has_ended(first)
        assert len(ids_in(await ask(link, 5))) == 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"vllm": {"executable": "/no/vllm"}}, r"'/no/vllm' \(key 'vllm.executable'\)"),
        ({"sandbox": "require"}, "cannot run in the sandbox, which the key 'sandbox' requires"),
    ],
)
async def test_a_pool_that_cannot_have_what_it_is_told_says_so(
    tmp_path: Path, keys: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_pool.app.check_sandbox", lambda _: None)  # whatever this kernel can
    write_vllm(tmp_path / "v")
    replayed_repository(tmp_path / "models")
    with pytest.raises(StartError, match=words):
        async with pool(tmp_path, **keys):
            raise AssertionError("it started")


async def test_a_server_that_does_not_come_up_is_a_reason_not_to_start(tmp_path: Path) -> None:
    write_vllm(tmp_path / "v", exits=1)
    replayed_repository(tmp_path / "models")
    with pytest.raises(StartError, match=r"talker:1/bf16 cannot be served: .* no room for the model"):
        async with pool(tmp_path):
            raise AssertionError("it started")


def configured(folder: Path, **misbehaves: Any) -> str:
    """The configuration of a pool whose server and repository are written there."""
    write_vllm(folder / "v", **misbehaves)
    replayed_repository(folder / "models")
    config = folder / "pool.yaml"
    config.write_text(json.dumps(keys_of(folder) | {"model_repository": str(folder / "models")}))
    return str(config)


@asynccontextmanager
async def pool_process(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`tidegate pool` by itself, once it is ready, and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "cloud_pool", "--config", configured(folder, step_s=0.01)),
        stdout=PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60.0):
            while (event := json.loads(await process.stdout.readline()))["event"] != "ready":
                assert event["event"] != "failed", event
        yield process, event["addresses"]["grpc"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_process_outlives_the_pool_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    async with pool_process(tmp_path) as (process, address):
        said = told(tmp_path / "v")
        warden = psutil.Process(said["pid"]).ppid()
        async with linked(address) as link:
            stream = TokenStream()
            running = ask(link, 1500, stream)
            await stream.take()
            process.send_signal(number)
            await process.wait()
            await asyncio.gather(running, return_exceptions=True)
        await until(lambda: all(has_ended(pid) for pid in (said["pid"], said["engine"], warden)), within_s=10.0)
        await until(lambda: not Path(said["arguments"][1]).parent.exists(), within_s=5.0)


async def test_no_process_outlives_a_pool_that_is_killed_while_its_server_loads(tmp_path: Path) -> None:
    config = configured(tmp_path, load_s=60.0)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "cloud_pool", "--config", config), stdout=PIPE, cwd=Path(__file__).parents[3]
    )
    await until(lambda: "engine" in told(tmp_path / "v"), within_s=60.0)
    said = told(tmp_path / "v")
    process.kill()
    await process.wait()
    await until(lambda: has_ended(said["pid"]) and has_ended(said["engine"]), within_s=10.0)


async def test_no_process_outlives_the_pool_and_a_warden_that_is_killed(tmp_path: Path) -> None:
    async with pool_process(tmp_path) as (process, _):
        said = told(tmp_path / "v")
        os.kill(psutil.Process(said["pid"]).ppid(), signal.SIGKILL)
        await until(lambda: all(has_ended(pid) for pid in (said["pid"], said["engine"])), within_s=10.0)
        await until(lambda: told(tmp_path / "v")["pid"] != said["pid"])
        assert process.returncode is None
