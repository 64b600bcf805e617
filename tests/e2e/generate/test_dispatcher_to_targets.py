"""A generating model behind a whole gateway: tokens from an edge and from a pool, each with a worker of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from gateway.app import Gateway
from gateway.config.targets import TargetConfig
from tests.support.gateway.app import config_over, until
from tests.support.models.talking import talker_repository
from tidegate import clock
from tidegate.config import load
from tidegate.generate.request import GenerateRequest, ids_of, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import usage_of
from tidegate.outcome import PeerError
from tidegate.types import Call, Reply

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@dataclass
class Fleet:
    gateway: Gateway
    edge: EdgeApp
    pool: PoolApp

    def ask(self, stream: TokenStream | None, max_tokens: int, *, budget_s: float = 30.0, **words: Any) -> Any:
        """The reply's task; the stream ends with it."""
        now = clock.now()
        request = infer_request("talker", GenerateRequest((1, 2, 3), max_tokens))
        call = Call(request, "oip-grpc", now, now + budget_s, tokens=stream, **words)

        async def infer() -> Reply:
            try:
                return await self.gateway.dispatcher.infer(call)
            finally:
                if stream is not None:
                    stream.end()

        return asyncio.create_task(infer())


@asynccontextmanager
async def fleet(folder: Path, **pace: Any) -> AsyncIterator[Fleet]:
    models = talker_repository(folder / "models", **pace)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        edge = await enter(
            EdgeApp(
                load(
                    EdgeConfig,
                    name="till",
                    grpc_port=0,
                    http_port=None,
                    model_repository=models,
                    state_dir=folder / "state",
                    warmup_budget_s=0.5,
                ),
                draw=lambda: 0.1,
            )
        )
        pool = await enter(
            PoolApp(load(PoolConfig, grpc_port=0, model_repository=models, warmup_budget_s=0.5), draw=lambda: 0.1)
        )
        targets = (
            TargetConfig(name="till", tier="edge", address=edge.addresses["grpc"]),  # type: ignore[call-arg]
            TargetConfig(name="pool", tier="pool", address=pool.address),  # type: ignore[call-arg]
        )
        gateway = await enter(Gateway(config_over(models, *targets)))
        await gateway.static_targets_tried(30.0)
        yield Fleet(gateway, edge, pool)


async def read_all(stream: TokenStream) -> list[int]:
    ids: list[int] = []
    while taken := await stream.take():
        ids += [id for batch in taken for id in batch.ids]
    return ids


def output_ids(reply: Reply) -> list[int]:
    return list(ids_of(reply.response.outputs[0]))


async def test_the_same_tokens_come_from_an_edge_and_from_a_pool_as_they_are_made(tmp_path: Path) -> None:
    async with fleet(tmp_path) as one:
        answers = []
        for where, pin in (("edge/till", "edge"), ("pool/pool", "any")):
            stream = TokenStream(window=16)
            if where == "pool/pool":
                one.edge.host.drain()
            task = one.ask(stream, 100, pin=pin)
            first = await stream.take()
            assert first and not task.done()
            ids = [id for batch in first for id in batch.ids] + await read_all(stream)
            reply = await task
            assert ids == output_ids(reply) and len(ids) == 100
            assert reply.route is not None and reply.route.served_by == where
            usage = usage_of(reply.response)
            assert (usage.prompt_tokens, usage.completion_tokens, usage.finish_reason) == (3, 100, "length")
            assert reply.first_token_s is not None and 0.0 < reply.first_token_s < sum(reply.stages.values())
            answers.append(ids)
        assert answers[0] == answers[1]


def worker_at(app: EdgeApp | PoolApp) -> int:
    """The process id of its generating worker."""
    if isinstance(app, EdgeApp):
        (runner,) = app.deployment.serving.runners
        return runner.pid or 0
    (replica,) = app.generating.replicas
    (worker,) = replica.workers.values()
    return worker.pid or 0


async def test_a_worker_that_is_killed_after_the_first_token_ends_the_answer_with_an_error(tmp_path: Path) -> None:
    async with fleet(tmp_path, step_ms=20.0) as one:
        stream = TokenStream()
        task = one.ask(stream, 400, pin="edge")
        await stream.take()
        os.kill(worker_at(one.edge), signal.SIGKILL)
        with pytest.raises(PeerError, match="killed by SIGKILL"):
            await task
        assert len(await read_all(stream)) < 400

        again = TokenStream()
        reply = await one.ask(again, 20)
        assert await read_all(again) == output_ids(reply) and reply.route is not None


async def test_a_worker_that_is_killed_before_the_first_token_costs_nothing_but_time(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefill_ms=300.0) as one:
        stream = TokenStream()
        task = one.ask(stream, 20)
        await until(lambda: one.edge.host.load_report().in_flight == 1)
        os.kill(worker_at(one.edge), signal.SIGKILL)

        reply = await task
        assert await read_all(stream) == output_ids(reply) and len(output_ids(reply)) == 20
        assert reply.route is not None and reply.route.served_by == "pool/pool" and reply.route.fallback
