"""A closed loop of callers over one link stream, or by unary OIP on one channel, as light as Python allows.

Commands and answers are those of `load_generator.py`. What goes out is encoded beforehand; of an answer its number and
its length are looked at. Answers that come in one Envelope are followed by the next requests in one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from time import perf_counter

import grpc
import uvloop

from tests.bench import workload
from tests.bench.load_generator import summary, tell
from tidegate import clock
from tidegate.link import frames
from tidegate.link.frames import Greeting
from tidegate.link.streams import DIAL_OPTIONS, PATH
from tidegate.oip.grpc.codec import message_from_request

_MESSAGE = message_from_request(workload.request()).SerializeToString()
_ENOUGH = len(workload.EMBEDDING)  # every good answer carries the vector
_BUDGET_S = 10.0


class Tally:
    """The answers since the last `begin`."""

    def __init__(self) -> None:
        self.stopping = False
        self.latencies_s: list[float] = []
        self.errors = 0

    def begin(self) -> None:
        self.latencies_s.clear()
        self.errors = 0

    def answered(self, sent_at: float, size_bytes: int) -> None:
        self.latencies_s.append(perf_counter() - sent_at)
        self.errors += size_bytes < _ENOUGH


async def over_link(channel: grpc.aio.Channel, connections: int, tally: Tally) -> None:
    """`connections` requests under way on one stream, until the tally stops."""
    call = channel.stream_stream(PATH, None, None)()
    await call.write(frames.hello(Greeting("gateway/bench", 1, "")))
    sent_at: dict[int, float] = {}
    number = 0

    def requests(count: int) -> list[bytes]:
        nonlocal number
        out = []
        for _ in range(count):
            number += 1
            sent_at[number] = perf_counter()
            out.append(frames.request(number, _MESSAGE, budget_s=_BUDGET_S, priority=0, variant="fp32", traceparent=""))
        return out

    await call.write(b"".join(requests(connections)))
    while sent_at:
        envelope = await call.read()
        if not isinstance(envelope, bytes):
            raise RuntimeError(f"the stream ended: {await call.details()}")
        out: list[bytes] = []
        over = 0
        for frame in frames.parse(envelope):
            kind = frame.WhichOneof("kind")
            if kind == "answer":
                over += 1
                tally.answered(sent_at.pop(frame.answer.id), len(frame.answer.message))
            elif kind == "refused":
                over += 1
                tally.answered(sent_at.pop(frame.refused.id), 0)
            elif kind == "ping":
                out.append(frames.pong(frame.ping.sent_at_us))
        if over and not tally.stopping:
            out += requests(over)
        if out:
            await call.write(b"".join(out))
    await call.done_writing()
    call.cancel()


async def over_unary(channel: grpc.aio.Channel, connections: int, tally: Tally) -> None:
    """`connections` callers on one channel, until the tally stops."""
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)

    async def caller() -> None:
        while not tally.stopping:
            sent_at = perf_counter()
            try:
                answer = await call(_MESSAGE, timeout=_BUDGET_S)
            except grpc.aio.AioRpcError:
                answer = b""
            tally.answered(sent_at, len(answer))

    await asyncio.gather(*[caller() for _ in range(connections)])


async def measure(transport: str, address: str, connections: int, warmup_s: float, seconds: float) -> None:
    tally = Tally()
    options = [*DIAL_OPTIONS, ("grpc.max_receive_message_length", 2**26)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        run = over_link if transport == "link" else over_unary
        calls = asyncio.create_task(run(channel, connections, tally))
        await _pass(warmup_s, calls)
        tell(event="begin")
        tally.begin()
        began_at = perf_counter()
        await _pass(seconds, calls)
        elapsed_s = perf_counter() - began_at
        tell(event="end", elapsed_s=elapsed_s, errors=tally.errors, **summary(tally.latencies_s))
        tally.stopping = True
        await calls


async def _pass(seconds: float, calls: asyncio.Task[None]) -> None:
    """Wait, and raise what has ended the calls meanwhile."""
    waiting = asyncio.create_task(clock.sleep(seconds))
    await asyncio.wait((waiting, calls), return_when=asyncio.FIRST_COMPLETED)
    if calls.done():
        await calls


async def main() -> None:
    gc.collect()
    gc.freeze()
    tell(event="ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        await measure(**json.loads(line))


if __name__ == "__main__":
    uvloop.run(main())
