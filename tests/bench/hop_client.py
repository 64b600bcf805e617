"""One hop without a gateway around it: requests straight into a `LinkTarget` or a `UnaryTarget`, in a closed loop.

Same commands and answers as the load generator; this process is what is measured.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from time import perf_counter

import uvloop

from gateway.targets.link import LinkTarget
from gateway.targets.target import Target
from gateway.targets.unary import UnaryTarget
from tests.bench import workload
from tests.bench.load_generator import summary, tell
from tidegate import clock
from tidegate.types import Accepted


class Loop:
    """`connections` callers, each with one request under way."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._request = workload.request()
        self._stopping = False
        self.latencies_s: list[float] = []

    async def call(self) -> None:
        while not self._stopping:
            sent_at = perf_counter()
            await self._target.infer(
                self._request, variant="", budget_s=10.0, priority=0, traceparent="", on_accepted=_ignore
            )
            self.latencies_s.append(perf_counter() - sent_at)

    async def measure(self, connections: int, warmup_s: float, seconds: float) -> None:
        calls = [asyncio.create_task(self.call()) for _ in range(connections)]
        await clock.sleep(warmup_s)
        tell(event="begin")
        self.latencies_s.clear()
        began_at = perf_counter()
        await clock.sleep(seconds)
        tell(event="end", elapsed_s=perf_counter() - began_at, errors=0, **summary(self.latencies_s))
        self._stopping = True
        await asyncio.gather(*calls)


def _ignore(_word: Accepted) -> None:
    """The gateway's machine would fold it."""


async def main(transport: str, port: int) -> None:
    up = asyncio.Event()
    address = f"127.0.0.1:{port}"
    link = LinkTarget("pool/0", address, gateway_name="hop", on_event=lambda _event: up.set(), draw=random.random)
    async with link if transport == "link" else UnaryTarget("pool/0", address, foreign=True) as target:
        if transport == "link":
            await up.wait()
        gc.collect()
        gc.freeze()
        tell(event="ready")
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await Loop(target).measure(**json.loads(line))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
