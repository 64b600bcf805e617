"""Whom the load generator asks: one row in, its embedding out, whatever protocol lies between.

    link     our pool, over the stream that a gateway keeps to it: the product's usual way
    oip      our pool, by OIP gRPC, as tritonclient would
    triton   the same protocol, but shapes must be equal to share a batch there: rows are padded to a few lengths
    mosec    raw int64 over HTTP/1.1 with kept connections

Ours gets the caller's budget, which is part of its protocol; to the others nobody can say one, so there a budget is
only what an answer is counted by.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.core.fleet.link_events import LinkUp
from gateway.targets.link import LinkTarget
from gateway.targets.target import Target
from gateway.targets.unary import UnaryTarget
from tests.bench.batching.texts import Row
from tidegate.outcome import CapacityError, ServeError
from tidegate.types import Accepted, Datatype, InferRequest, Tensor

BUCKETS: Final = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PATIENCE_S: Final = 3.0  # with those who know no budget


@dataclass(frozen=True, slots=True)
class Seen:
    """What came back. `refused`: the server said no, and not merely nothing; `embedding` is raw FP32."""

    embedding: Any = None
    refused: bool = False
    queue_s: float = 0.0
    compute_s: float = 0.0
    batch_size: int = 0

    @property
    def answered(self) -> bool:
        return self.embedding is not None


class Asked(Protocol):
    """Somebody to ask."""

    async def ask(self, row: Row, budget_s: float) -> Seen: ...


class Oip:
    """A target of the gateway's own kind. `padded`: rows are filled up to a bucket."""

    def __init__(self, target: Target, model: str, *, padded: bool = False) -> None:
        self._target = target
        self._model = model
        self._padded = padded

    async def ask(self, row: Row, budget_s: float) -> Seen:
        return await self.ask_request(self._request(row), PATIENCE_S if self._padded else budget_s)

    async def ask_request(self, request: InferRequest, budget_s: float) -> Seen:
        try:
            reply = await self._target.infer(
                request,
                variant="",
                budget_s=budget_s,
                priority=0,
                traceparent="",
                on_accepted=_ignore,
            )
        except ServeError as error:
            return Seen(refused=isinstance(error, CapacityError))
        stages = reply.stages
        return Seen(
            reply.response.outputs[0].raw,
            queue_s=stages.get("queue", 0.0),
            compute_s=stages.get("compute", 0.0),
            batch_size=reply.batch_size,
        )

    def _request(self, row: Row) -> InferRequest:
        length = next(size for size in BUCKETS if size >= len(row)) if self._padded else len(row)
        filling = [0] * (length - len(row))
        tensors = [
            Tensor(name, Datatype.INT64, (1, length), struct.pack(f"<{length}q", *values, *filling))
            for name, values in (("input_ids", row), ("attention_mask", [1] * len(row)))
        ]
        return InferRequest(self._model, tuple(tensors))


class Mosec:
    """Raw bodies over kept connections: a free one is taken, or made."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, row: Row, budget_s: float) -> Seen:
        body = struct.pack(f"<{len(row)}q", *row)
        head = f"POST /inference HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        try:
            async with asyncio.timeout(PATIENCE_S):
                status, answer = await self._exchange(head + body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return Seen()
        return Seen(answer) if status == 200 else Seen(refused=True)

    async def _exchange(self, words: bytes) -> tuple[int, bytes]:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(words)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            headers = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
            answer = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return int(first.split()[1]), answer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def opened(kind: str, port: int, model: str) -> AbstractAsyncContextManager[Asked]:
    """A target of this kind, connected while inside."""
    if kind == "mosec":
        return _mosec(port)
    return _link(port, model) if kind == "link" else _unary(port, model, foreign=kind == "triton")


@asynccontextmanager
async def _mosec(port: int) -> AsyncIterator[Asked]:
    target = Mosec(port)
    try:
        yield target
    finally:
        target.close()


@asynccontextmanager
async def _unary(port: int, model: str, *, foreign: bool) -> AsyncIterator[Asked]:
    async with UnaryTarget("pool/bench", f"127.0.0.1:{port}", foreign=foreign) as target:
        yield Oip(target, model, padded=foreign)


@asynccontextmanager
async def _link(port: int, model: str) -> AsyncIterator[Asked]:
    up = asyncio.Event()

    def heard(event: object) -> None:
        if isinstance(event, LinkUp):
            up.set()

    async with LinkTarget(
        "pool/bench", f"127.0.0.1:{port}", gateway_name="bench", on_event=heard, draw=random.random
    ) as target:
        async with asyncio.timeout(10):
            await up.wait()
        yield Oip(target, model)


def _ignore(_word: Accepted) -> None:
    """A gateway's machine would fold it."""
