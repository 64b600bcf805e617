"""Deferred requests that cannot be computed or told of yet: each rests before it is tried again."""

from __future__ import annotations

import asyncio
import sqlite3
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gateway.ingest import deferred
from gateway.ingest.deferred import DeferredWorker
from gateway.ingest.receiver import Ingest
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.arrays import array_to_tensor
from tidegate.fleet.stored import DeferredAnswer, Forwarded, Receipt, encode_stored
from tidegate.models.manifest import Manifest
from tidegate.oip.grpc.codec import message_from_request
from tidegate.outcome import ModelNotFound
from tidegate.types import Call, Datatype, InferRequest, InferResponse, Reply


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


@pytest.mark.slow
async def test_a_model_that_a_gateway_does_not_know_yet_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "FIRST_WAIT_S", 0.05)
    known: list[Manifest] = []
    told: list[DeferredAnswer] = []

    def manifest_of(_name: str, _version: str) -> Manifest:
        if not known:
            raise ModelNotFound("no model is called 'minilm'")
        return known[0]

    async def answers(call: Call) -> Reply:
        return Reply(InferResponse("minilm", call.request.model_version, ()), variant="fp32")

    def send(_device: str, receipt: Receipt) -> bool:
        told.extend(receipt.answers)
        return True

    async def outcome(number: int) -> DeferredAnswer:
        async with asyncio.timeout(30.0):
            while not (found := [one for one in told if one.id == f"{number:032x}"]):
                await clock.sleep(0.01)
        return found[0]

    ids = array_to_tensor("input_ids", np.ones((1, 3), dtype=np.int64), Datatype.INT64)
    body = message_from_request(InferRequest("minilm", (ids, replace(ids, name="attention_mask")), "1"))

    def asked(number: int) -> bytes:
        item = Forwarded("a", f"{number:032x}", "request", 0, body.SerializeToString(), model="minilm")
        return encode_stored(item)

    ingest = Ingest(tmp_path / "ingest.db", "main", max_bytes=2**20, max_seen=1000)
    ingest.send = send
    async with ingest:
        async with DeferredWorker(ingest, answers, manifest_of, lambda *_: True):
            ingest.message("a", asked(1))
            async with asyncio.timeout(30.0):
                while (await ingest.state())["deferred"] == 0:
                    await clock.sleep(0.01)
            await clock.sleep(0.3)
            assert told == []  # as after a start: it has not learned of all models yet

            known.append(minilm())
            assert (await outcome(1)).code == ""

        known.clear()
        monkeypatch.setattr(deferred, "UNKNOWN_S", 0.3)
        async with DeferredWorker(ingest, answers, manifest_of, lambda *_: True):
            ingest.message("a", asked(2))
            assert (await outcome(2)).code == "model_not_found"
