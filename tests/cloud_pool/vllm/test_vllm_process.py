"""A server in place of a worker process: a real one that replays vLLM's answers, with what may happen to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cloud_pool.vllm.vllm_config import VllmConfig
from cloud_pool.vllm.vllm_process import VllmProcess
from cloud_pool.workers.device_worker import DeviceWorker
from tests.support.models.replayed import CONTEXT, STOP, VOCABULARY_SIZE, write_replayed_folder
from tests.support.paced_generation import asking
from tests.support.pool.replayed_vllm import misbehave, tokens_of, told, write_vllm
from tests.support.processes import has_ended
from tidegate import clock
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.generate.token_stream import TokenStream
from tidegate.outcome import InternalError, InvalidRequest, Unreachable
from tidegate.token_sink import TokenBatch
from tidegate.workers.process import EngineSpec, WorkerDied

pytestmark = pytest.mark.slow

KEY = "talker:1/bf16"
INTERVAL_S = 0.05
RECORDED_PROMPT = (504, 3575, 282, 4649, 314, 260)


def spec(weights: Path, *, slots: int = 4) -> EngineSpec:
    limits = GenerationLimits(slots=slots, context=CONTEXT, stop_tokens=(STOP,), vocabulary_size=VOCABULARY_SIZE)
    return EngineSpec(KEY, "transformers", weights, (), 1, "cpu", generation=limits)


def process(folder: Path, *, arguments: tuple[str, ...] = (), start_timeout_s: float = 30.0) -> VllmProcess:
    keys = {"executable": str(folder / "vllm"), "arguments": arguments, "start_timeout_s": start_timeout_s}
    return VllmProcess("w", VllmConfig.model_validate(keys), cache_bytes=1 << 22, token_bytes=1024, on_cpu=True)


@asynccontextmanager
async def served(folder: Path, *, slots: int = 4, **misbehaves: Any) -> AsyncIterator[VllmProcess]:
    write_vllm(folder, **misbehaves)
    weights = write_replayed_folder(folder / "model")
    async with process(folder) as server:
        assert (await server.load(spec(weights, slots=slots))).slots == slots
        yield server


async def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await clock.sleep(0.01)


def nothing_left(folder: Path) -> bool:
    """Whether the server and its engine are gone, and so is their folder."""
    said = told(folder)
    at = said["arguments"].index("--uds")
    return has_ended(said["pid"]) and has_ended(said["engine"]) and not Path(said["arguments"][at + 1]).parent.exists()


async def read_all(stream: TokenStream) -> list[TokenBatch]:
    batches: list[TokenBatch] = []
    while taken := await stream.take():
        batches += taken
    return batches


async def test_tokens_come_one_after_another_and_all_of_them_at_the_end(tmp_path: Path) -> None:
    async with served(tmp_path / "v") as server:
        stream = TokenStream(window=8)
        reader = asyncio.create_task(read_all(stream))
        generated = await server.generate(KEY, asking(40), stream, token_interval_s=INTERVAL_S)
        stream.end()
        assert [token for batch in await reader for token in batch.ids] == list(generated.ids)
        assert list(generated.ids) == tokens_of([1, 2, 3], 40)
        usage = generated.usage
        assert (usage.finish_reason, usage.prompt_tokens, usage.completion_tokens) == ("length", 3, 40)
        assert usage.prefill_s > 0.0 and usage.decode_s > 0.0
        assert server.silent_s == 0.0 and server.pid == told(tmp_path / "v")["pid"]
    assert nothing_left(tmp_path / "v")


async def test_what_a_real_vllm_said_is_what_a_caller_gets(tmp_path: Path) -> None:
    async with served(tmp_path / "v") as server:
        greedy = await server.generate(KEY, asking(16, *RECORDED_PROMPT), None, token_interval_s=INTERVAL_S)
        assert greedy.ids[:6] == (3575, 282, 260, 3432, 5261, 30) and greedy.usage.completion_tokens == 16
        stopped = await server.generate(KEY, asking(32, 28, 30, 281, 1000, 2000), None, token_interval_s=INTERVAL_S)
        assert stopped.usage.finish_reason == "stop" and stopped.usage.completion_tokens == len(stopped.ids) + 1
        stream = TokenStream()
        await server.generate(KEY, asking(6, *RECORDED_PROMPT, logprobs=3), stream, token_interval_s=INTERVAL_S)
        stream.end()
        batches = await read_all(stream)
        assert all(len(top) == 3 for batch in batches for top in batch.top)
        assert [batch.ids[0] for batch in batches] == list(greedy.ids[:6])


async def test_what_a_cache_had_is_told_at_the_end(tmp_path: Path) -> None:
    async with served(tmp_path / "v") as server:
        done = await server.generate(KEY, asking(4, *range(1, 41)), None, token_interval_s=INTERVAL_S)
        assert (done.usage.prompt_tokens, done.usage.cached_tokens) == (40, 32)


async def test_the_server_sees_the_checked_files_and_no_others(tmp_path: Path) -> None:
    async with served(tmp_path / "v"):
        said = told(tmp_path / "v")
        folder = Path(said["arguments"][1])
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert said["environment"]["VLLM_NO_USAGE_STATS"] == "1"


async def test_as_many_are_asked_for_at_a_time_as_there_are_slots(tmp_path: Path) -> None:
    async with served(tmp_path / "v", slots=2, step_s=0.01) as server:
        tasks = [
            asyncio.create_task(server.generate(KEY, asking(20, n + 1), None, token_interval_s=INTERVAL_S))
            for n in range(5)
        ]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, told(tmp_path / "v").get("running", 0))
            await clock.sleep(0.002)
        assert most == 2
        assert [list((await task).ids) for task in tasks] == [tokens_of([n + 1], 20) for n in range(5)]


async def test_a_caller_that_leaves_frees_its_slot_and_the_server_makes_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    async with served(folder, slots=1, step_s=0.01) as server:
        stream = TokenStream()
        leaving = asyncio.create_task(server.generate(KEY, asking(1500), stream, token_interval_s=INTERVAL_S))
        while stream.received < 5:
            await stream.take()
        leaving.cancel()
        next_one = await server.generate(KEY, asking(5), None, token_interval_s=INTERVAL_S)
        assert len(next_one.ids) == 5
        await until(lambda: told(folder)["cancelled"] == 1)
        made = told(folder)["made"]
        assert made < 5 + stream.received + 50, "it goes on for a moment, and no longer"


async def test_a_reader_that_stops_holds_up_no_other_and_loses_nothing(tmp_path: Path) -> None:
    async with served(tmp_path / "v") as server:
        stalled = TokenStream(window=8)
        slow = asyncio.create_task(server.generate(KEY, asking(64), stalled, token_interval_s=INTERVAL_S))
        await server.generate(KEY, asking(300, 4, 5), None, token_interval_s=INTERVAL_S)
        await until(lambda: told(tmp_path / "v")["running"] == 0)
        assert repr(stalled) == "<TokenStream 8 of 8 tokens not read>" and not slow.done()
        assert server.silent_s == 0.0, "it owes nothing"
        reader = asyncio.create_task(read_all(stalled))
        generated = await slow
        stalled.end()
        assert [token for batch in await reader for token in batch.ids] == list(generated.ids)
        assert list(generated.ids) == tokens_of([1, 2, 3], 64)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((VOCABULARY_SIZE,), "tokens that are not from 0 to 49151"),
        (tuple(range(CONTEXT)), "a context of 2048"),
    ],
)
async def test_what_the_server_could_die_of_is_not_sent_there(
    tmp_path: Path, prompt: tuple[int, ...], words: str
) -> None:
    async with served(tmp_path / "v") as server:
        asked = told(tmp_path / "v").get("asked", 0)
        with pytest.raises(InvalidRequest, match=words):
            await server.generate(KEY, asking(4, *prompt), None, token_interval_s=INTERVAL_S)
        with pytest.raises(InvalidRequest, match="JSON schema"):
            await server.generate(KEY, asking(4, schema="{}"), None, token_interval_s=INTERVAL_S)
        assert told(tmp_path / "v").get("asked", 0) == asked


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("garbage", "an event that cannot be read"),
        ("no event", "where an event was due"),
        ("endless event", "an event of over 1048576 bytes"),
        ("foreign token", "vocabulary has 49152"),
        ("too many", "at most 40 were asked for"),
        ("ends early", "without saying so"),
        ("aborts", "an end for 'abort'"),
        ("miscounts", "a count of 41 tokens, of which 40 came"),
        ("refuses", "not like this"),
    ],
)
async def test_an_answer_that_is_wrong_fails_itself_after_its_good_tokens_and_no_other(
    tmp_path: Path, broken: str, words: str
) -> None:
    folder = tmp_path / "v"
    async with served(folder, step_s=0.01) as server:
        well = asyncio.create_task(server.generate(KEY, asking(40, 4, 5), None, token_interval_s=INTERVAL_S))
        await until(lambda: told(folder)["running"] == 1)
        misbehave(folder, broken=broken)
        stream = TokenStream()
        failing = asyncio.create_task(server.generate(KEY, asking(40), stream, token_interval_s=INTERVAL_S))
        await until(failing.done)
        misbehave(folder)
        with pytest.raises(InternalError, match=words):
            await failing
        stream.end()
        good = [token for batch in await read_all(stream) for token in batch.ids]
        assert good == tokens_of([1, 2, 3], 40)[: len(good)] and len(good) >= 5
        with_it = await asyncio.gather(well, return_exceptions=True)
        assert with_it[0] is not None
        after = await server.generate(KEY, asking(5), None, token_interval_s=INTERVAL_S)
        assert len(after.ids) == 5 and server.alive


@pytest.mark.parametrize("broken", ["closes", "engine dead"])
async def test_a_server_that_is_not_well_is_ended_and_its_generations_with_it(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "v"
    async with served(folder, broken=broken) as server:
        with pytest.raises(WorkerDied, match="killed by SIGKILL"):
            await server.generate(KEY, asking(40), None, token_interval_s=INTERVAL_S)
        assert "SIGKILL" in await server.died() and not server.alive
        with pytest.raises(WorkerDied):
            await server.generate(KEY, asking(4), None, token_interval_s=INTERVAL_S)
        await until(lambda: has_ended(told(folder)["pid"]) and has_ended(told(folder)["engine"]))


async def test_a_server_that_is_killed_fails_what_it_had_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    async with served(folder, step_s=0.01) as server:
        stream = TokenStream()
        running = asyncio.create_task(server.generate(KEY, asking(1500), stream, token_interval_s=INTERVAL_S))
        await stream.take()
        os.kill(told(folder)["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
            await running
        await until(lambda: has_ended(told(folder)["engine"]))


async def test_a_server_that_stops_in_the_midst_is_given_up_as_hung_and_killed(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    async with served(folder) as server:
        worker = DeviceWorker(server, device="cpu", threads=1, hang_timeout_s=5.0)
        for _ in range(3):  # steps are known then
            await worker.generate(KEY, asking(20), None, token_interval_s=INTERVAL_S)
        misbehave(folder, broken="stops")
        began_at = clock.now()
        with pytest.raises(Unreachable, match="hung"):
            await worker.generate(KEY, asking(400), None, token_interval_s=INTERVAL_S)
        assert "hung" in await worker.end() and clock.now() - began_at < 5.0
        ended_at = clock.now()
    assert clock.now() - ended_at < 5.0, "nobody waits for one that hangs to end by itself"
    assert nothing_left(folder)


async def test_a_server_that_ignores_being_asked_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_pool.vllm.server_process._STOP_GRACE_S", 0.3)
    async with served(tmp_path / "v", ignores_sigterm=True):
        pass
    assert nothing_left(tmp_path / "v")


async def load_fails(folder: Path, kind: type[Exception], words: str, **how: Any) -> None:
    weights = write_replayed_folder(folder / "model")
    async with process(folder, **how) as server:
        with pytest.raises(kind, match=words):
            await server.load(spec(weights))


async def test_a_server_that_refuses_to_start_says_why(tmp_path: Path) -> None:
    write_vllm(tmp_path, exits=3)
    await load_fails(tmp_path, WorkerDied, "exited with status 3; its last words: RuntimeError: no room for the model")
    assert nothing_left(tmp_path)


async def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    await load_fails(tmp_path, WorkerDied, "vllm cannot be started: .*No such file")


async def test_a_server_that_is_not_ready_in_time_is_ended_with_what_it_was_at(tmp_path: Path) -> None:
    write_vllm(tmp_path, load_s=60.0)
    await load_fails(tmp_path, WorkerDied, "start_timeout_s, 3 s; .*INFO loading the model", start_timeout_s=3.0)
    assert nothing_left(tmp_path)


async def test_a_server_may_take_its_time_to_load_and_tells_what_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_pool.vllm.readiness._TELL_EVERY_S", 0.3)
    with capture_logs() as logs:
        async with served(tmp_path / "v", load_s=1.5) as server:
            assert server.alive
    told_of = [entry for entry in logs if entry["event"] == "vllm is loading"]
    assert "INFO loading the model, as a server does" in [entry["line"] for entry in told_of]
    assert any(entry["event"] == "vllm ready" and entry["version"] == "0.32.0" for entry in logs)


@pytest.mark.parametrize("how", [{"route": False}, {"broken": "another form"}])
async def test_a_server_that_speaks_otherwise_is_refused_with_its_version_and_the_way_out(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    write_vllm(tmp_path, version="0.9.1", **how)
    words = r"vLLM 0\.9\.1 does not answer .* as 0\.32 does: .*install vLLM 0\.32"
    await load_fails(tmp_path, InternalError, words)
    assert nothing_left(tmp_path)


async def test_what_a_server_prints_is_bounded(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with served(tmp_path / "v", prints_bytes=3_000_000):
            pass
    lines = [entry["line"] for entry in logs if entry["event"] == "server says"]
    assert lines and max(map(len, lines)) <= 2000 and sum(map(len, lines)) < 10_000


async def test_a_context_that_the_caches_have_no_room_for_is_told_with_its_key(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    weights = write_replayed_folder(tmp_path / "model")
    config = VllmConfig.model_validate({"executable": str(tmp_path / "vllm")})
    async with VllmProcess("w", config, cache_bytes=1024, token_bytes=1024, on_cpu=True) as server:
        with pytest.raises(InternalError, match="generation_cache_bytes"):
            await server.load(spec(weights))


@pytest.mark.parametrize("config", ["[]", "{nonsense", json.dumps({"vocab_size": "x"})])
async def test_a_configuration_of_a_model_that_says_nothing_is_lived_with_or_named(tmp_path: Path, config: str) -> None:
    write_vllm(tmp_path)
    weights = write_replayed_folder(tmp_path / "model")
    (weights.parent / "config.json").write_text(config)
    async with process(tmp_path) as server:
        if config.startswith('{"'):
            assert (await server.load(spec(weights))).slots == 4  # the manifest says what it leaves out
        else:
            with pytest.raises(InternalError, match=r"config\.json: is no"):
                await server.load(spec(weights))
