"""A pool whose workers share a GPU: it answers, knows its memory, and goes on when one of them is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from tests.bench.batching.targets import opened
from tests.bench.gpu.networks import Network, Size, draw_rows, padded, write_network
from tests.support.gateway.app import until
from tidegate import clock
from tidegate.config import load

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.cuda, pytest.mark.slow]

TINY = Size("tiny", 2, 64, 4, 128)


@pytest.fixture(scope="module")
def network(cuda: None, tmp_path_factory: pytest.TempPathFactory) -> Network:
    return write_network(TINY, tmp_path_factory.mktemp("pool"))


@pytest.fixture
async def app(network: Network) -> AsyncIterator[PoolApp]:
    config = load(
        PoolConfig, grpc_port=0, model_repository=network.folder.parents[1], device="cuda", workers=2, precision="bf16"
    )
    async with PoolApp(config, draw=lambda: 0.1) as running:
        yield running


def true(network: Network, row: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    import torch

    with torch.inference_mode():
        given = padded([np.array(row, np.int64)])
        return np.asarray(network.module(*map(torch.from_numpy, given.values()))[0].numpy())


async def test_texts_at_once_are_each_answered_with_their_own(app: PoolApp, network: Network) -> None:
    rows = [row.tolist() for row in draw_rows(96)]
    async with opened("link", int(app.address.rpartition(":")[2]), TINY.name) as asked:
        for _ in range(3):  # the shapes come again, and are replayed
            seen = await asyncio.gather(*[asked.ask(row, 10.0) for row in rows])
            for row, one in zip(rows, seen, strict=True):
                assert one.answered
                told = np.frombuffer(one.embedding, np.float32)
                assert float(np.dot(told, true(network, row))) > 0.995
        assert max(one.batch_size for one in seen) > 1


async def test_a_worker_that_is_killed_costs_no_answer(app: PoolApp) -> None:
    rows = [row.tolist() for row in draw_rows(200)]
    workers = _workers()
    assert len(workers) == 2
    async with opened("link", int(app.address.rpartition(":")[2]), TINY.name) as asked:
        asking = [asyncio.create_task(asked.ask(row, 20.0)) for row in rows]
        await clock.sleep(0.02)
        workers[0].kill()
        assert all(one.answered for one in await asyncio.gather(*asking))
        await until(lambda: not workers[0].is_running() and len(_workers()) == 2, 60.0)
        assert (await asked.ask(rows[0], 20.0)).answered


def _workers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if "tidegate.workers.child" in one.cmdline()]
