"""The fetcher's partial files are read back beside the event loop, and its servers are told apart."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import psutil
import pytest

from edge_agent.core.fetch_retry import DownloadBudget
from edge_agent.delivery.fetching import ArtefactFetcher, session
from edge_agent.delivery.model_store import ModelStore
from tests.support.edge.rollouts import ArtefactServer, Made, eventually, made
from tests.support.loop import settle
from tidegate.rollout.plan import Net
from tidegate.runtime.owned_task import cancel_and_wait


class SlowCard:
    """A disk on which a partial file is read back once `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        touch = Path.touch  # the first thing that is done to a partial file

        def slowly(path: Path) -> None:
            self.begun.set()
            assert self.go_on.wait(10.0), "the event loop is held up"
            touch(path)

        monkeypatch.setattr(Path, "touch", slowly)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    store = ModelStore(tmp_path)
    store.prepare()
    return store


async def fetch(store: ModelStore, one: Made, *urls: str) -> None:
    plan = one.plan()
    async with session() as http:
        fetcher = ArtefactFetcher(http, store, hindrance=lambda: "", draw=lambda: 0.0)
        await fetcher.fetch(plan, urls, DownloadBudget(Net(), plan.max_bytes, len(urls)))


@pytest.mark.slow
async def test_the_loop_goes_on_while_a_partial_file_is_read_back(
    store: ModelStore, server: ArtefactServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, card = made("2"), SlowCard(monkeypatch)
    server.add(one)
    fetching = asyncio.create_task(fetch(store, one, server.url))
    await eventually(card.begun.is_set)
    card.go_on.set()
    await fetching
    assert store.is_complete(one.plan())


async def test_a_fetch_that_is_cancelled_while_it_reads_back_leaves_the_file_closed_and_as_it_was(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, card = made("2"), SlowCard(monkeypatch)
    path = store.partial(one.files[0].sha256)
    path.write_bytes(rot := bytes(one.files[0].size_bytes))
    fetching = asyncio.create_task(fetch(store, one, "http://artefacts.invalid"))
    await eventually(card.begun.is_set)
    ending = asyncio.create_task(cancel_and_wait(fetching))
    await settle()
    card.go_on.set()
    await ending
    assert fetching.cancelled()
    assert str(path) not in {file.path for file in psutil.Process().open_files()}
    assert path.read_bytes() == rot


async def test_a_server_that_refuses_twice_is_not_all_servers(store: ModelStore, server: ArtefactServer) -> None:
    one = made("2", padding_bytes=200_000)
    server.add(one)
    server.cut_after = [100] * 2  # within the first chunk of it
    with ArtefactServer() as empty:
        await fetch(store, one, empty.url, server.url)
    assert store.is_complete(one.plan())
