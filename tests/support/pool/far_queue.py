"""How soon a far-side queue notices that its callers are gone, as seen by the queue position of a second client.

Callers fill the pool's queue through the gateway with requests that each take a batch of their own, and all hang up, or
whatever else ends them happens.
Meanwhile somebody else asks the pool on a link of its own, hears in the acknowledgement how many are ahead, and leaves
again; with the latest deadline of all it stands behind everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.core.fleet.link_events import LinkEvent, LinkUp
from gateway.targets.link import LinkTarget
from tidegate import clock
from tidegate.types import Accepted, Datatype, InferRequest, Tensor

CALLERS = 8
SHAPE = (32, 128)  # rows and tokens that fill a batch
_WITHIN_S = 30.0


async def freed_after_s(
    gateway_port: int,
    pool_address: str,
    model: str,
    *,
    shape: tuple[int, int] = SHAPE,
    go: Callable[[], object] = lambda: None,
) -> float:
    """Seconds from the end of all callers until only the batch that runs is ahead of a newcomer.

    Args:
        shape: rows and tokens of each request; it shall fill a batch.
        go: ends them, before they hang up by themselves.

    Raises TimeoutError: the queue never filled, or never emptied.
    """
    async with _client(pool_address) as pool, asyncio.timeout(2 * _WITHIN_S):
        callers = [await _call(gateway_port, model, *shape) for _ in range(CALLERS)]
        try:
            while await _ahead(pool, model) < CALLERS - 2:
                await clock.sleep(0.005)
            left_at = clock.now()
            go()
        finally:
            for writer in callers:
                writer.close()
        while await _ahead(pool, model) > 1:
            await clock.sleep(0.002)
        return clock.now() - left_at


async def until_idle(pool_address: str, model: str) -> None:
    """Return once no request is ahead of a new one. Raises TimeoutError."""
    async with _client(pool_address) as pool, asyncio.timeout(_WITHIN_S):
        while await _ahead(pool, model) > 0:
            await clock.sleep(0.02)


@asynccontextmanager
async def _client(address: str) -> AsyncIterator[LinkTarget]:
    up = asyncio.Event()

    def heard(event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            up.set()

    async with LinkTarget("pool/seen", address, gateway_name="onlooker", on_event=heard, draw=lambda: 0.5) as target:
        async with asyncio.timeout(_WITHIN_S):
            await up.wait()
        yield target


async def _ahead(pool: LinkTarget, model: str) -> int:
    """How many are ahead of a request that comes now; it leaves as soon as it knows."""
    told: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()

    def accepted(word: Accepted) -> None:
        if not told.done():
            told.set_result(word)

    asking = asyncio.create_task(
        pool.infer(_request(model), variant="fp32", budget_s=60.0, priority=4, traceparent="", on_accepted=accepted)
    )
    await asyncio.wait((told, asking), return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    return told.result().queue_ahead


def _request(model: str) -> InferRequest:
    raw = struct.pack("<8q", *([1] * 8))
    return InferRequest(
        model, tuple(Tensor(name, Datatype.INT64, (1, 8), raw) for name in ("input_ids", "attention_mask"))
    )


async def _call(port: int, model: str, rows: int, length: int) -> asyncio.StreamWriter:
    """A caller that has sent a request that fills a batch, and waits."""
    count = rows * length
    inputs = [
        {"name": name, "shape": [rows, length], "datatype": "INT64", "parameters": {"binary_data_size": 8 * count}}
        for name in ("input_ids", "attention_mask")
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"tidegate-variant": "fp32"}}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\ntidegate-budget-ms: 20000\r\n"
        f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(head)}\r\n"
        f"Content-Length: {len(head) + 16 * count}\r\n\r\n".encode()
        + head
        + struct.pack(f"<{count}q", *([1] * count)) * 2
    )
    await writer.drain()
    return writer
