"""A closed loop of HTTP callers, as light as Python allows, so that what is measured is what it calls.

Commands come as JSON lines: where to, how many connections, how long. The answers: `begin` when the warm-up is over,
and at the end the requests that began and ended within the measurement with their latencies. Each connection sends
one prepared request after another; each answer's status and length are checked, because a fast error is no
throughput.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from statistics import quantiles
from time import perf_counter
from typing import Any, cast

import uvloop

from tests.bench import workload
from tidegate import clock

_ENOUGH = len(workload.EMBEDDING)  # every good answer carries the vector


class Caller(asyncio.Protocol):
    """One connection. `latencies_s` of the answers since the last `begin`."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._length = 0
        self._sent_at = 0.0
        self._stopping = False
        self.stopped = asyncio.get_running_loop().create_future()
        self.latencies_s: list[float] = []
        self.errors = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one only by its methods
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._length:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._length = end + 4 + _content_length(self._received[:end])
        if len(self._received) >= self._length:
            self._answered()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.stopped.done():
            self.errors += not self._stopping
            self.stopped.set_result(None)

    def begin(self) -> None:
        self.latencies_s.clear()
        self.errors = 0

    def stop(self) -> None:
        """Send nothing more; `stopped` when the last answer is here."""
        self._stopping = True

    def _answered(self) -> None:
        self.latencies_s.append(perf_counter() - self._sent_at)
        if not self._received.startswith(b"HTTP/1.1 200") or self._length < _ENOUGH:
            self.errors += 1
        self._received, self._length = b"", 0
        if not self._stopping:
            self._send()
            return
        assert self._transport is not None
        self._transport.close()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_at = perf_counter()
        self._transport.write(self._request)


async def measure(port: int, connections: int, warmup_s: float, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    request = workload.http_request(f"127.0.0.1:{port}")
    callers = [
        (await loop.create_connection(lambda: Caller(request), "127.0.0.1", port))[1] for _ in range(connections)
    ]
    await clock.sleep(warmup_s)
    tell(event="begin")
    for caller in callers:
        caller.begin()
    began_at = perf_counter()
    await clock.sleep(seconds)
    elapsed_s = perf_counter() - began_at
    latencies_s = [latency for caller in callers for latency in caller.latencies_s]
    errors = sum(caller.errors for caller in callers)
    tell(event="end", elapsed_s=elapsed_s, errors=errors, **summary(latencies_s))
    for caller in callers:
        caller.stop()
    await asyncio.gather(*[caller.stopped for caller in callers])


def summary(latencies_s: list[float]) -> dict[str, float]:
    cuts = quantiles(latencies_s, n=100) if len(latencies_s) > 1 else [0.0] * 99
    return {"requests": len(latencies_s), "p50_s": cuts[49], "p99_s": cuts[98]}


def tell(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def _content_length(head: bytes) -> int:
    """Of a response's own header, not of OIP's Inference-Header-Content-Length."""
    lowered = head.lower()
    at = lowered.index(b"\r\ncontent-length:") + 17
    return int(lowered[at:].partition(b"\r\n")[0])


async def main() -> None:
    gc.collect()
    gc.freeze()
    tell(event="ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        await measure(**json.loads(line))


if __name__ == "__main__":
    uvloop.run(main())
