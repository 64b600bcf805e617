"""A generating variant: what it asks of its queue, what it answers, and what it learns: on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.loop import on_virtual_time, settle
from tests.support.models.generative import COST, TALKER
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import Generated, Usage
from tidegate.metrics.generated import GeneratedCounts
from tidegate.models.work import work_of
from tidegate.outcome import DeadlineExceeded, InvalidRequest, Overloaded, Unreachable
from tidegate.serving.generation.generating_variant import GeneratingVariant
from tidegate.serving.generation.sequence_queue import SequenceQueue
from tidegate.serving.generation.sequence_scheduler import SequenceScheduler
from tidegate.serving.target_model import Computation, Computed
from tidegate.token_sink import TokenBatch, TokenSink
from tidegate.types import Accepted, Call, Datatype

STEP_S = 0.1
WEIGHT = COST.prompt_weight
POINTS = ((8 * WEIGHT + 1, STEP_S), (8 * WEIGHT + 16, 16 * STEP_S))


class SteadyWorkers:
    """One place: a token every STEP_S, `stops_at` of them."""

    def __init__(self) -> None:
        self.stops_at = 10**9
        self.intervals: list[tuple[float, float]] = []

    def unready(self) -> str:
        return "talker is loading here"

    async def generate(
        self,
        place: str,
        variant: str,
        request: GenerateRequest,
        sink: TokenSink,
        *,
        token_interval_s: float,
        first_token_s: float,
    ) -> Generated:
        self.intervals.append((token_interval_s, first_token_s))
        count = min(self.stops_at, request.max_tokens)
        credit = asyncio.Semaphore(sink.window)
        sink.on_credit(lambda tokens: [credit.release() for _ in range(tokens)] and None)
        began_at = clock.now()
        for at in range(count):
            await credit.acquire()
            await clock.sleep(STEP_S)
            if at == 0:
                sink.started(len(request.prompt), 0)
            sink.put(TokenBatch(at, (at,)))
        reason: Any = "length" if count == request.max_tokens else "stop"
        usage = Usage(reason, len(request.prompt), count, 0, STEP_S, clock.now() - began_at - STEP_S)
        return Generated(tuple(range(count)), usage)


class Bench:
    def __init__(self, *, slots: int = 1, **changes: Any) -> None:
        self.accepted: list[Accepted] = []
        self.workers = SteadyWorkers()
        self.counts = GeneratedCounts()
        self.scheduler = SequenceScheduler(SequenceQueue(max_size=2))
        self.manifest = replace(TALKER, **changes)
        self.variant = GeneratingVariant(
            self.manifest, self.manifest.variants[0], self.scheduler, self.workers, self.counts
        )
        self.variant.measured(POINTS)
        self.scheduler.open("w", slots=slots)

    def ask(
        self, max_tokens: int, stream: TokenStream | None = None, *, budget_s: float = 100.0, **words: Any
    ) -> asyncio.Task[Computed]:
        request = infer_request("talker", GenerateRequest(tuple(range(3, 11)), max_tokens, **words))
        now = clock.now()
        call = Call(request, "link", now, now + budget_s, tokens=stream, on_accepted=self.accepted.append)
        work = work_of(self.manifest, request)
        computation = Computation(call, {}, self.manifest.variants[0], work, now + budget_s, None)
        return asyncio.create_task(self.variant.compute(computation))


@on_virtual_time
async def test_the_answer_has_its_tokens_its_times_and_what_it_took() -> None:
    bench = Bench()
    computed = await bench.ask(20)
    tensor = array_to_tensor("output_ids", computed.outputs["output_ids"], Datatype.INT32)
    assert ids_of(tensor) == tuple(range(20))
    assert (computed.queue_s, computed.compute_s, computed.batch_rows) == (0.0, pytest.approx(2.0), 1)
    assert computed.parameters["completion_tokens"] == 20 and computed.parameters["decode_us"] == 1_900_000
    assert computed.withheld == {"text_output"}
    assert computed.pace_s == pytest.approx(2.0 / (20 + 8 * WEIGHT))
    assert bench.counts.tokens == {("talker", "input"): 8, ("talker", "output"): 20, ("talker", "cached"): 0}
    interval_s, first_s = bench.workers.intervals[0]
    assert 20 * interval_s == pytest.approx(100.0 - first_s + interval_s)


@on_virtual_time
async def test_answers_that_end_early_shorten_the_wait_that_is_predicted_and_not_what_a_token_costs() -> None:
    bench = Bench()
    before_s = bench.variant.service.predict_s(20.0) if bench.variant.service else 0.0
    bench.workers.stops_at = 5
    for _ in range(40):
        await bench.ask(20)
    assert bench.variant.service is not None
    assert bench.variant.service.predict_s(20.0) == pytest.approx(before_s, rel=0.3)
    bench.workers.stops_at = 10**9
    running = bench.ask(20)
    await settle()
    wait_s = bench.scheduler.queue_delay_s(clock.now())
    assert 0.3 < wait_s < 1.0  # a quarter of the tokens, and not all 20
    whole = bench.ask(20, ignore_stop=True)
    await asyncio.gather(running, whole)


@on_virtual_time
async def test_a_readers_pause_is_neither_the_engines_nor_learned() -> None:
    bench = Bench()
    stream = TokenStream(window=4)
    task = bench.ask(20, stream)
    await clock.sleep(30.0)
    ended = asyncio.create_task(read(stream))
    computed = await task
    stream.end()
    await ended
    assert computed.compute_s > 30.0 and computed.parameters["decode_us"] < 2_500_000
    assert bench.variant.service is not None and bench.variant.service.residual.factor < 1.5


async def read(stream: TokenStream) -> None:
    while await stream.take():
        pass


@on_virtual_time
async def test_a_crowd_that_was_slow_does_not_prove_that_the_next_one_is_late() -> None:
    bench = Bench()
    assert bench.variant.service is not None
    for _ in range(200):
        bench.variant.service.record(10.0, 100.0)
    assert bench.variant.service.predict_s(10.0) > 10.0

    assert (await bench.ask(2, budget_s=1.0)).parameters["completion_tokens"] == 2


@on_virtual_time
async def test_a_request_that_wants_every_token_needs_time_for_them() -> None:
    bench = Bench()
    with pytest.raises(DeadlineExceeded, match="cannot be done in time"):
        await bench.ask(16, budget_s=0.5, ignore_stop=True)
    stream = TokenStream()
    with pytest.raises(DeadlineExceeded, match="ran out of time after 4 of up to 16 tokens"):
        await bench.ask(16, stream, budget_s=0.45)
    assert bench.counts.tokens["talker", "wasted"] == 4

    endless = Bench(generative=replace(TALKER.generative, stop_tokens=()))  # type: ignore[type-var]
    with pytest.raises(DeadlineExceeded, match="cannot be done in time"):
        await endless.ask(16, budget_s=0.5)


@on_virtual_time
async def test_what_is_refused_begins_nothing() -> None:
    bench = Bench()
    with pytest.raises(InvalidRequest, match="ask for 504 at most"):
        await bench.ask(505)
    first = bench.ask(50)
    await settle()
    waiting = [bench.ask(1), bench.ask(1)]
    await settle()
    with pytest.raises(Overloaded, match="2 generations wait"):
        await bench.ask(1)
    bench.scheduler.close("w", "gone")
    for one in waiting:
        with pytest.raises(Unreachable, match="gone"):
            await one
    with pytest.raises(Unreachable, match="talker is loading here"):
        await bench.ask(1)
    await first
    assert len(bench.workers.intervals) == 1
