"""What an edge and a pool both promise of a generating model, over a real link and with real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.core.fleet.link_events import LinkEvent
from gateway.targets.link import LinkTarget
from tests.support.models.talking import talker_repository
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.config import load
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import usage_of
from tidegate.outcome import (
    DeadlineExceeded,
    InvalidRequest,
    NotSupported,
    Overloaded,
    PeerError,
    ServeError,
    Unreachable,
)
from tidegate.runtime.process import StartError
from tidegate.types import Accepted, Datatype, InferRequest, Reply, RequestedOutput, Tensor

pytestmark = pytest.mark.slow
PROMPT = (5, 6, 7)
ENDLESS = 500  # tokens, of 20 ms each


class Served:
    """A target that serves `talker`, and a gateway's end of a link to it."""

    def __init__(self, app: EdgeApp | PoolApp, life: AsyncExitStack, link: LinkTarget) -> None:
        self.app = app
        self.life = life  # of the app, which ends with it
        self.link = link
        self.accepted: list[Accepted] = []

    @property
    def load(self) -> tuple[int, int]:
        """Generations (and other calls) that wait, and that run."""
        report = self.app.host.load_report()
        return report.queued, report.in_flight

    def ask(
        self,
        max_tokens: int = 20,
        stream: TokenStream | None = None,
        *,
        prompt: tuple[int, ...] = PROMPT,
        budget_s: float = 30.0,
        priority: int = 0,
        request: InferRequest | None = None,
        variant: str = "paced",
        **sampling: Any,
    ) -> asyncio.Task[Reply]:
        """The task of a generation; its stream ends with it."""
        request = request or infer_request("talker", GenerateRequest(prompt, max_tokens, **sampling))

        async def infer() -> Reply:
            try:
                return await self.link.infer(
                    request,
                    variant=variant,
                    budget_s=budget_s,
                    priority=priority,
                    traceparent="",
                    on_accepted=self.accepted.append,
                    tokens=stream,
                )
            finally:
                if stream is not None:
                    stream.end()

        return asyncio.create_task(infer())

    async def endless(self, **more: Any) -> tuple[asyncio.Task[Reply], TokenStream]:
        """A generation that has begun and takes ten seconds."""
        stream = TokenStream()
        task = self.ask(ENDLESS, stream, **more)
        await stream.take()
        return task, stream


@asynccontextmanager
async def edge(folder: Path, keys: dict[str, Any]) -> AsyncIterator[EdgeApp]:
    places = {"grpc_port": 0, "http_port": None, "state_dir": folder / "state"}
    async with EdgeApp(load(EdgeConfig, name="till", warmup_budget_s=0.5, **places, **keys), draw=lambda: 0.1) as app:
        yield app


@asynccontextmanager
async def pool(folder: Path, keys: dict[str, Any]) -> AsyncIterator[PoolApp]:
    async with PoolApp(load(PoolConfig, grpc_port=0, warmup_budget_s=0.5, **keys), draw=lambda: 0.1) as app:
        yield app


Serving = Callable[..., Any]


@pytest.fixture(params=["edge", "pool"])
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Serving:
    """Serves `talker` with these values of its pace and keys of the configuration."""
    which = {"edge": edge, "pool": pool}[request.param]

    @asynccontextmanager
    async def open_target(*, keys: dict[str, Any] | None = None, **pace: Any) -> AsyncIterator[Served]:
        models = talker_repository(tmp_path / "models", **pace)
        events: list[LinkEvent] = []
        async with AsyncExitStack() as life, AsyncExitStack() as stack:
            app = await life.enter_async_context(which(tmp_path, {"model_repository": models, **(keys or {})}))
            address = app.address if isinstance(app, PoolApp) else app.addresses["grpc"]
            link = LinkTarget(
                app.host.server_name, address, gateway_name="test", on_event=events.append, draw=lambda: 0.1
            )
            await stack.enter_async_context(link)
            await eventually(lambda: link.connected)
            yield Served(app, life, link)

    return open_target


async def eventually(true: Callable[[], bool]) -> None:
    """Wait for what another process or socket is about to do."""
    async with asyncio.timeout(30.0):
        while not true():
            await clock.sleep(0.002)


async def read_all(stream: TokenStream) -> list[int]:
    ids: list[int] = []
    while taken := await stream.take():
        ids += [id for batch in taken for id in batch.ids]
    return ids


def ids_in(reply: Reply) -> list[int]:
    return list(ids_of(reply.response.outputs[0]))


def worker_of(served: Served) -> psutil.Process:
    """The one worker process of this one."""
    (worker,) = [child for child in psutil.Process().children() if "tidegate.workers.child" in child.cmdline()]
    return worker


async def test_a_small_window_does_not_lose_a_token_and_a_unary_caller_gets_the_same(serving: Serving) -> None:
    async with serving() as served:
        stream = TokenStream(window=4)
        streamed = served.ask(100, stream)
        ids = await read_all(stream)
        reply = await streamed
        assert ids == ids_in(reply) == ids_in(await served.ask(100)) and len(ids) == 100
        assert reply.stages["compute"] > reply.stages["queue"] >= 0.0
        assert [output.name for output in reply.response.outputs] == ["output_ids"]
        assert usage_of(reply.response).completion_tokens == 100
        assert served.accepted[0].queue_ahead == 0 and served.accepted[0].finish_in_s > 0.0
        (offer,) = served.app.host.offers()
        assert offer.variants[0].slots == 4 and len(offer.variants[0].cost) >= 2


async def test_no_more_begin_than_there_are_slots_and_a_place_is_free_when_its_caller_leaves(serving: Serving) -> None:
    async with serving(slots=2, step_ms=20.0) as served:
        first, _ = await served.endless()
        second, _ = await served.endless()
        waiting, leaving = served.ask(3), served.ask(3)
        await eventually(lambda: served.load == (2, 2))

        leaving.cancel()
        await eventually(lambda: served.load == (1, 2))
        first.cancel()
        assert len(ids_in(await waiting)) == 3
        assert waiting.result().stages["queue"] > 0.0

        second.cancel()
        await asyncio.wait({first, second, leaving})
        await eventually(lambda: served.load == (0, 0))
        assert len(ids_in(await served.ask(3))) == 3


async def test_a_reader_that_stalls_holds_up_nobody_else_and_is_not_taken_for_a_hang(serving: Serving) -> None:
    async with serving(keys={"hang_timeout_s": 1.0}, step_ms=1.0) as served:
        worker = worker_of(served)
        stalled = TokenStream(window=8)
        slow = served.ask(60, stalled)
        await eventually(lambda: "8 of 8 tokens not read" in repr(stalled))

        began_at = clock.now()
        while clock.now() < began_at + 1.5:
            assert len(ids_in(await served.ask(50))) == 50

        assert "8 of 8 tokens not read" in repr(stalled) and not slow.done()
        assert len(await read_all(stalled)) == 60
        usage = usage_of((await slow).response)
        assert usage.decode_s < 1.0, "the time in which nobody read is not the engine's"
        assert slow.result().stages["compute"] > 1.5
        assert worker.is_running() and worker_of(served).pid == worker.pid


async def test_a_worker_that_is_killed_ends_its_streams_with_an_error_and_the_next_call_works(serving: Serving) -> None:
    async with serving(step_ms=20.0) as served:
        worker = worker_of(served)
        task, stream = await served.endless()
        with capture_logs() as logs:
            worker.send_signal(signal.SIGKILL)
            with pytest.raises(Unreachable, match="killed by SIGKILL"):
                await task
            await read_all(stream)
            await eventually(lambda: any(entry["event"] == "worker back" for entry in logs))
        assert len(ids_in(await served.ask(5))) == 5
        assert served.load == (0, 0)


async def test_while_there_is_no_worker_a_call_is_refused_at_once(serving: Serving) -> None:
    async with serving(step_ms=20.0) as served:
        task, _ = await served.endless()
        with capture_logs() as logs:
            worker_of(served).kill()
            with pytest.raises(Unreachable):
                await task
            with pytest.raises(PeerError):
                await served.ask(5)
            await eventually(lambda: any(entry["event"] == "worker back" for entry in logs))


async def test_a_worker_that_hangs_is_ended_and_replaced(serving: Serving) -> None:
    async with serving(step_ms=20.0, keys={"hang_timeout_s": 1.0}) as served:
        worker = worker_of(served)
        task, _ = await served.endless()
        with capture_logs() as logs:
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(Unreachable, match=r"hung for .* s and is restarted"):
                await task
            await eventually(lambda: any(entry["event"] == "worker back" for entry in logs))
        assert not worker.is_running()
        assert len(ids_in(await served.ask(5))) == 5


async def test_a_deadline_ends_a_generation_and_what_was_streamed_stays(serving: Serving) -> None:
    async with serving(step_ms=20.0) as served:
        stream = TokenStream()
        task = served.ask(ENDLESS, stream, budget_s=0.5)
        ids = await read_all(stream)
        with pytest.raises(DeadlineExceeded):
            await task
        assert 0 < len(ids) < 30
        await eventually(lambda: served.load == (0, 0))


async def test_what_cannot_be_done_is_refused_with_numbers_and_a_way_out(serving: Serving) -> None:
    async with serving(cache_bytes=2**14, keys={"generation_cache_bytes": 2**21}) as served:

        async def refusal(**asked: Any) -> ServeError:
            with pytest.raises(ServeError) as caught:
                await served.ask(**asked)
            return caught.value

        too_long = await refusal(max_tokens=500, prompt=tuple(range(3, 23)))
        assert isinstance(too_long, InvalidRequest) and "ask for 492 at most" in too_long.message
        strange = await refusal(prompt=(5, 1000))
        assert isinstance(strange, InvalidRequest) and "has 1000 at 1" in strange.message
        empty = await refusal(prompt=())
        assert isinstance(empty, InvalidRequest)
        large = await refusal(max_tokens=200)
        assert isinstance(large, Overloaded) and f"{203 * 2**14} bytes, and there are {2**21}" in large.message
        late = await refusal(budget_s=0.0005, prompt=tuple(range(3, 103)), max_tokens=20)
        assert isinstance(late, DeadlineExceeded)

        schema = await refusal(schema='{"type": "object"}')
        assert isinstance(schema, InvalidRequest) and "follows no JSON schema" in schema.message

        text = Tensor("text_input", Datatype.BYTES, (1,), b"\x02\x00\x00\x00hi")
        for wrong in (
            InferRequest("talker", (text,)),
            InferRequest(
                "talker", (Tensor("input_ids", Datatype.INT32, (1,), b"\x05\0\0\0"),), parameters={"max_tokens": 0}
            ),
            InferRequest("talker", (array_to_tensor("input_ids", np.ones(3, np.int64), Datatype.INT64),)),
        ):
            with pytest.raises(InvalidRequest):
                await served.ask(request=wrong)
        named = infer_request("talker", GenerateRequest(PROMPT, 3))
        with pytest.raises(NotSupported, match="token ids"):
            await served.ask(
                request=InferRequest(
                    named.model_name,
                    named.inputs,
                    outputs=(RequestedOutput("text_output"),),
                    parameters=named.parameters,
                )
            )
        assert served.load == (0, 0)
        assert len(ids_in(await served.ask(20))) == 20


async def test_caches_are_reserved_for_the_whole_of_an_answer(serving: Serving) -> None:
    async with serving(
        slots=4, cache_bytes=2**14, step_ms=20.0, keys={"generation_cache_bytes": 2**23}
    ) as served:  # 512 tokens
        task, _ = await served.endless()
        waiting = served.ask(100)
        await eventually(lambda: served.load == (1, 1))
        small = served.ask(2)  # would fit, and passes nobody
        await eventually(lambda: served.load == (2, 1))
        task.cancel()
        assert [len(ids_in(await one)) for one in (waiting, small)] == [100, 2]


async def test_the_full_queue_refuses_and_the_more_urgent_begins_first(serving: Serving) -> None:
    async with serving(slots=1, step_ms=20.0) as served:
        task, _ = await served.endless()
        order: list[str] = []
        calls = []
        for name, words in (
            ("late", {"budget_s": 29.0}),
            ("soon", {"budget_s": 20.0}),
            ("high", {"budget_s": 29.5, "priority": 1}),
        ):
            calls.append(served.ask(2, **words))  # type: ignore[arg-type]
            calls[-1].add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
            await eventually(lambda: served.load[0] == len(calls))
        task.cancel()
        await asyncio.gather(*calls)
        assert order == ["soon", "high", "late"]


async def test_a_target_that_drains_answers_what_has_begun(serving: Serving) -> None:
    async with serving(step_ms=5.0, keys={"drain_s": 20.0}) as served:
        stream = TokenStream()
        task = served.ask(100, stream)
        await stream.take()

        await served.life.aclose()

        assert task.done() and len(ids_in(await task)) == 100


async def test_nothing_is_left_of_a_crowd_that_comes_and_goes_and_reads_slowly(serving: Serving) -> None:
    async with serving(slots=8, step_ms=0.5, cache_bytes=2**10, keys={"generation_cache_bytes": 2**20}) as served:
        chance = Random(7)
        before, ends = len(asyncio.all_tasks()), Counter[str]()
        room = asyncio.Semaphore(40)

        async def caller(number: int) -> None:
            async with room:
                stream, kind = TokenStream(window=chance.choice([4, 16, 256])), chance.random()
                prompt = tuple(chance.randrange(3, 999) for _ in range(chance.randint(1, 64)))
                budget_s = chance.choice([0.05, 5.0, 30.0])
                asked = served.ask(
                    chance.randint(1, 100), stream, prompt=prompt, budget_s=budget_s, priority=number % 5
                )
                if kind < 0.33:
                    await clock.sleep(0.1 * chance.random())
                    asked.cancel()
                while await stream.take():
                    await clock.sleep(0.02 * chance.random() if kind > 0.9 else 0.0)
                (end,) = await asyncio.gather(asked, return_exceptions=True)
                ends[type(end).__name__] += 1

        await asyncio.gather(*[caller(number) for number in range(200)])
        assert set(ends) <= {"Reply", "CancelledError", "DeadlineExceeded", "Overloaded"} and ends["Reply"] > 40, ends
        await eventually(lambda: served.load == (0, 0))
        await eventually(lambda: len(asyncio.all_tasks()) <= before)
        assert len(ids_in(await served.ask(20))) == 20


async def test_an_artefact_that_does_not_load_is_a_reason_not_to_start(serving: Serving) -> None:
    with pytest.raises(StartError, match=r"talker:1.* cannot be served: .*key 'prefill_chunk': must be 1 or more"):
        async with serving(prefill_chunk=0):
            raise AssertionError("it started")
    assert not [one for one in psutil.Process().children() if "tidegate.workers.child" in one.cmdline()]


async def test_each_variant_has_slots_of_its_own_and_the_one_that_is_demanded_answers(serving: Serving) -> None:
    async with serving(slots=1, step_ms=10.0, twin="spare") as served:
        first, _ = await served.endless()
        assert len(ids_in(await served.ask(3, variant="spare"))) == 3
        assert not first.done()
        (offer,) = served.app.host.offers()
        assert [(one.name, one.slots) for one in offer.variants] == [("paced", 1), ("spare", 1)]
        with pytest.raises((NotSupported, InvalidRequest)):
            await served.ask(3, variant="other")
        first.cancel()
