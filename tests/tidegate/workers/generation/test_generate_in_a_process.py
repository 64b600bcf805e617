"""Generations with a real worker process: streams, slots, credit, cancellation, and the worker's end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.paced_generation import KEY, asking, generative, write_pace
from tidegate import clock
from tidegate.generate.token_stream import TokenStream
from tidegate.outcome import InternalError, InvalidRequest, TooLarge
from tidegate.token_sink import TokenBatch
from tidegate.workers.process import WorkerDied, WorkerProcess

pytestmark = pytest.mark.slow


async def read_all(stream: TokenStream) -> list[TokenBatch]:
    """All batches, until `end`."""
    batches: list[TokenBatch] = []
    while taken := await stream.take():
        batches += taken
    return batches


async def until(condition: object, within_s: float = 20.0) -> None:
    """Wait until a function says true."""
    assert callable(condition)
    async with asyncio.timeout(within_s):
        while not condition():
            await clock.sleep(0.005)


async def test_tokens_come_one_after_another_and_all_of_them_at_the_end(tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        assert (await worker.load(generative(write_pace(tmp_path)))).slots == 4
        stream = TokenStream(window=8)
        reader = asyncio.create_task(read_all(stream))

        generated = await worker.generate(KEY, asking(40), stream, token_interval_s=0.05)
        stream.end()

        batches = await reader
        assert [batch.first for batch in batches] == list(range(40))
        assert tuple(token for batch in batches for token in batch.ids) == generated.ids
        assert (stream.prompt_tokens, stream.cached_tokens) == (3, 0)
        usage = generated.usage
        assert (usage.finish_reason, usage.prompt_tokens, usage.completion_tokens) == ("length", 3, 40)
        assert usage.prefill_s > 0.0 and usage.decode_s >= 39 * 0.0005
        assert "sequences" not in repr(worker)


async def test_as_many_run_at_a_time_as_there_are_slots_and_each_gets_what_it_gets_alone(tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        await worker.load(generative(write_pace(tmp_path), slots=2))
        alone = [await worker.generate(KEY, asking(20, n), None, token_interval_s=0.05) for n in range(5)]
        tasks = [
            asyncio.create_task(worker.generate(KEY, asking(20, n), None, token_interval_s=0.05)) for n in range(5)
        ]
        await clock.sleep(0)
        await clock.sleep(0)
        assert ", 2 sequences" in repr(worker)

        assert [(await task).ids for task in tasks] == [one.ids for one in alone]


async def test_a_reader_that_stops_pauses_its_own_sequence_and_no_other(tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        await worker.load(generative(write_pace(tmp_path)))
        stalled = TokenStream(window=8)
        slow = asyncio.create_task(worker.generate(KEY, asking(64), stalled, token_interval_s=0.05))

        await worker.generate(KEY, asking(300), None, token_interval_s=0.05)

        assert repr(stalled) == "<TokenStream 8 of 8 tokens not read>" and not slow.done()
        assert worker.silent_s == 0.0  # it owes nothing
        reader = asyncio.create_task(read_all(stalled))
        assert len((await slow).ids) == 64
        stalled.end()
        assert sum(len(batch.ids) for batch in await reader) == 64


async def test_a_cancelled_generation_frees_its_slot_between_two_steps(tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        await worker.load(generative(write_pace(tmp_path, step_ms=((1.0, 20.0),)), slots=1))
        stream = TokenStream()
        endless = asyncio.create_task(worker.generate(KEY, asking(10**6), stream, token_interval_s=0.05))
        await stream.take()
        waiting = asyncio.create_task(worker.generate(KEY, asking(1), None, token_interval_s=0.05))
        waiting_in_vain = asyncio.create_task(worker.generate(KEY, asking(1), None, token_interval_s=0.05))
        await clock.sleep(0.01)
        waiting_in_vain.cancel()

        endless.cancel()
        assert len((await waiting).ids) == 1
        for one in (endless, waiting_in_vain):
            with pytest.raises(asyncio.CancelledError):
                await one
        assert "sequences" not in repr(worker)


async def test_calls_of_another_engine_are_answered_between_the_steps(tmp_path: Path) -> None:
    from tests.cloud_pool.workers_support import text, write_text_model
    from tidegate.workers.process import EngineSpec

    async with WorkerProcess("w") as worker:
        await worker.load(generative(write_pace(tmp_path)))
        await worker.load(EngineSpec("text", "onnx", write_text_model(tmp_path / "text.onnx"), ("sum", "twice")))
        stream = TokenStream()
        endless = asyncio.create_task(worker.generate(KEY, asking(10**6), stream, token_interval_s=0.05))
        await stream.take()
        for n in range(1, 20):
            assert (await worker.infer("text", text(n))).outputs["sum"].tolist() == [[float(n)]]
        assert not endless.done() and len(await stream.take()) > 0
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless


async def test_what_an_engine_refuses_is_said_and_the_worker_lives_on(tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        await worker.load(generative(write_pace(tmp_path, context=10), slots=1))
        with pytest.raises(InvalidRequest, match="the prompt has 10 tokens"):
            await worker.generate(KEY, asking(5, *range(10)), None, token_interval_s=0.05)
        with pytest.raises(InternalError, match="no generating engine is loaded under 'other'"):
            await worker.generate("other", asking(5), None, token_interval_s=0.05)
        with pytest.raises(TooLarge, match="a prompt has from 1 to 1048576 tokens, not 1048577"):
            await worker.generate(KEY, asking(5, *[1] * (2**20 + 1)), None, token_interval_s=0.05)
        with pytest.raises(TooLarge, match="over the limits"):
            await worker.generate(KEY, asking(5, schema="x" * 2**20), None, token_interval_s=0.05)
        with pytest.raises(InternalError, match="no engine is loaded under"):
            await worker.infer(KEY, {})
        assert len((await worker.generate(KEY, asking(7), None, token_interval_s=0.05)).ids) == 7


async def test_all_generations_fail_at_once_when_the_worker_is_killed(tmp_path: Path) -> None:
    async with WorkerProcess("w") as worker:
        await worker.load(generative(write_pace(tmp_path)))
        streams = [TokenStream(window=10**6) for _ in range(6)]  # two of them wait for a slot
        tasks = [
            asyncio.create_task(worker.generate(KEY, asking(10**6), stream, token_interval_s=0.05))
            for stream in streams
        ]
        await streams[0].take()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(10.0):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [(type(end), str(end)) for end in ends] == [(WorkerDied, "worker w was killed by SIGKILL")] * 6
        with pytest.raises(WorkerDied):
            await worker.generate(KEY, asking(1), None, token_interval_s=0.05)
