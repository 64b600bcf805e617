"""Deferred requests whose outcome cannot be told: each rests before it is computed again."""

from __future__ import annotations

import asyncio
import sqlite3
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.ingest import deferred
from gateway.ingest.deferred import DeferredWorker
from gateway.ingest.receiver import Ingest
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.fleet.stored import Forwarded, encode_stored
from tidegate.oip.grpc.codec import message_from_request
from tidegate.outcome import ModelNotFound
from tidegate.types import Call, InferRequest, Reply


@pytest.mark.slow
async def test_a_job_whose_failure_cannot_be_recorded_is_not_computed_over_and_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "RETRY_S", 0.2)
    asked: list[float] = []

    async def refuses(call: Call) -> Reply:
        raise ModelNotFound("no such model")

    async def broken(*_: Any, **__: Any) -> None:
        raise sqlite3.IntegrityError("a defect")

    async def cannot_answer(*_: Any, **__: Any) -> None:
        asked.append(clock.now())
        await broken()

    ingest = Ingest(tmp_path / "ingest.db", "main", max_bytes=2**20, max_seen=1000)
    async with ingest, DeferredWorker(ingest, refuses, lambda *_: minilm(), lambda *_: True):
        taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ingest.send = lambda _device, receipt: taken.done() or taken.set_result(receipt.taken) is None
        monkeypatch.setattr(ingest, "answered", cannot_answer)
        monkeypatch.setattr(ingest, "postpone", broken)
        body = message_from_request(InferRequest("minilm", (), "1")).SerializeToString()
        ingest.message("a", encode_stored(Forwarded("a", f"{1:032x}", "request", 0, body, model="minilm")))
        assert await asyncio.wait_for(taken, 10.0)
        async with asyncio.timeout(30.0):
            while len(asked) < 4:
                await clock.sleep(0.02)
    assert all(later - sooner >= 0.19 for sooner, later in pairwise(asked))
