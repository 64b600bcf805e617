"""A real, tiny language model on an edge and in a pool: both serve what their engines give, and survive hard use."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from tests.support.gateway.app import until
from tests.support.gateway.edge_pair import EdgePair, edge_pair
from tests.support.models.tiny_llama import CONTEXT
from tidegate import clock
from tidegate.config import load
from tidegate.generate.request import GenerateRequest, Sampling, ids_of, infer_request
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.usage import usage_of
from tidegate.outcome import InvalidRequest
from tidegate.tools.build.cli import model
from tidegate.types import Call, Reply

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
PROMPT = tuple(range(10, 40))


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tiny model in both variants."""
    pytest.importorskip("onnxruntime_genai", reason="the extra edge-llm is not installed")
    root = tmp_path_factory.mktemp("real-engines")
    source = root / "source"
    shutil.copytree(tiny_llama, source)
    words = ["add", "tiny", "--generative", str(source), "--repository", str(root / "models")]
    result = CliRunner().invoke(model, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return root / "models"


def ask(
    app: EdgeApp | PoolApp, max_tokens: int, stream: TokenStream | None = None, prompt: tuple[int, ...] = PROMPT
) -> asyncio.Task[Reply]:
    now = clock.now()
    request = infer_request("tiny", GenerateRequest(prompt, max_tokens, Sampling(), ignore_stop=True))

    async def infer() -> Reply:
        try:
            return await app.host.infer(Call(request, "link", now, now + 60.0, tokens=stream))
        finally:
            if stream is not None:
                stream.end()

    return asyncio.create_task(infer())


async def ids_from(stream: TokenStream) -> list[int]:
    ids: list[int] = []
    while taken := await stream.take():
        ids += [id for batch in taken for id in batch.ids]
    return ids


async def served(app: EdgeApp | PoolApp) -> None:
    """What an app with the tiny model is held to."""
    stream = TokenStream(window=8)
    task = ask(app, 60, stream)
    ids = await ids_from(stream)
    reply = await task
    assert ids == list(ids_of(reply.response.outputs[0])) and len(ids) == 60
    usage = usage_of(reply.response)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 60) and usage.decode_s > 0.0

    crowd = [ask(app, 20, prompt=tuple(range(5, 6 + n))) for n in range(12)]
    for one in crowd[::3]:
        one.cancel()
    ends = await asyncio.gather(*crowd, return_exceptions=True)
    kept = [end for n, end in enumerate(ends) if n % 3]
    assert all(isinstance(end, Reply) and len(ids_of(end.response.outputs[0])) == 20 for end in kept), ends
    with pytest.raises(InvalidRequest, match="more than the model's context"):
        await ask(app, CONTEXT)
    whole = await ask(app, CONTEXT - len(PROMPT))
    assert len(ids_of(whole.response.outputs[0])) == CONTEXT - len(PROMPT)

    left = TokenStream()
    leaving = ask(app, 200, left)
    await left.take()
    leaving.cancel()
    assert list(ids_of((await ask(app, 60)).response.outputs[0])) == ids
    report = app.host.load_report()
    assert (report.queued, report.in_flight) == (0, 0)


async def test_an_edge_serves_what_onnxruntime_genai_generates(models: Path, tmp_path: Path) -> None:
    places = {"grpc_port": 0, "http_port": None, "state_dir": tmp_path / "state", "model_repository": models}
    async with EdgeApp(load(EdgeConfig, name="till", warmup_budget_s=2.0, **places), draw=lambda: 0.1) as app:
        await served(app)


async def test_a_pool_serves_what_transformers_generates(models: Path) -> None:
    keys = {"grpc_port": 0, "model_repository": models, "device": "cpu", "threads": 1, "warmup_budget_s": 2.0}
    async with PoolApp(load(PoolConfig, **keys), draw=lambda: 0.1) as app:
        await served(app)


async def asked(one: EdgePair, sampling: Sampling, *, kill_after: int = 0) -> tuple[list[int], Reply]:
    """An answer through the gateway; the worker that makes it is killed after so many tokens."""
    now, stream = clock.now(), TokenStream(window=4)
    request = infer_request("tiny", GenerateRequest(PROMPT, 120, sampling, ignore_stop=True))

    async def infer() -> Reply:
        try:
            return await one.gateway.dispatcher.infer(Call(request, "oip-grpc", now, now + 60.0, tokens=stream))
        finally:
            stream.end()

    asking, ids = asyncio.create_task(infer()), list[int]()
    while taken := await stream.take():
        ids += [id for batch in taken for id in batch.ids]
        if 0 < kill_after <= len(ids):
            kill_after = 0
            (lost,) = one.busy
            os.kill(one.worker(lost), signal.SIGKILL)
    return ids, await asking


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, 0, seed=11)], ids=["greedy", "seeded"])
async def test_an_answer_whose_edge_dies_is_the_one_that_it_would_have_given(
    models: Path, tmp_path: Path, sampling: Sampling
) -> None:
    async with edge_pair(tmp_path, models) as one:
        whole, _ = await asked(one, sampling)
        for kill_after in (9, 40, 77):
            await until(lambda: len(list(one.gateway.fleet.offered("tiny", "1"))) == 2)
            ids, reply = await asked(one, sampling, kill_after=kill_after)
            assert ids == list(ids_of(reply.response.outputs[0])) == whole
            assert reply.route is not None
            (resumed,) = reply.route.resumed
            assert resumed.grade == "exact" and kill_after <= resumed.at <= kill_after + 8
            usage = usage_of(reply.response)
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 120)
