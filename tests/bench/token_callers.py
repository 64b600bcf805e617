"""Callers of streamed completions over HTTP, as light as Python allows, so that what is measured is what they call.

Commands come as lines of JSON: where to, how many streams, how long an answer. Each caller has a connection of its own
and sends the next request when its answer has ended. Of an answer only the events are told apart: every one but the
last two (the reason of the end, `[DONE]`) is a token, and what is missing of those that were asked for came with none.
The answers are those of `generate_engine.py`.

    python -m tests.bench.token_callers MODEL
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from itertools import count
from time import perf_counter
from typing import cast

import uvloop

from tests.bench.load_generator import tell
from tests.bench.token_times import TokenTimes
from tidegate import clock

_NUMBERS = count(1)
_PATH = "/v1/completions"


class StreamCaller(asyncio.Protocol):
    """One connection, one answer after the other."""

    def __init__(self, head: str, model: str, prompt: int, tokens: int, times: TokenTimes) -> None:
        self._head, self._model, self._prompt, self._tokens = head, model, prompt, tokens
        self._times = times
        self._transport: asyncio.Transport | None = None
        self._number = 0
        self._left = 0
        self._tail = b""  # of what came: an event may be cut anywhere
        self._stopping = False
        self.stopped = asyncio.get_running_loop().create_future()
        self.fault = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        seen = self._tail + data
        events = seen.count(b"data: {") - self._tail.count(b"data: {")
        over = b"data: [DONE]" in seen
        self._tail = seen[-16:]
        made = min(events, self._left)
        if made:
            self._left -= made
            self._times.tokens(self._number, made, now)
        failed = b"HTTP/1.1 4" in seen or b"HTTP/1.1 5" in seen or b'"error"' in data
        if failed:
            self.fault = data[:400]
        if over and not failed and self._left:
            # Tokens that are no text, as the end of one that is written on, came without an event of their own.
            self._times.tokens(self._number, self._left, now)
        if over or failed:
            self._times.ended(self._number, now, failed=failed)
            self._tail = b""
            if self._stopping or failed:
                self._close()
            else:
                self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)

    def stop(self) -> None:
        self._stopping = True
        self._close()

    def _close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def _send(self) -> None:
        assert self._transport is not None
        self._number, self._left = next(_NUMBERS), self._tokens
        ids = [(self._number * 7919 + place) % 250 + 3 for place in range(self._prompt)]
        words = {
            "model": self._model, "prompt": ids, "max_tokens": self._tokens, "stream": True, "ignore_eos": True,
            "temperature": 0,
        }  # fmt: skip
        body = json.dumps(words)
        self._times.sent(self._number, perf_counter())
        self._transport.write(f"{self._head}content-length: {len(body)}\r\n\r\n{body}".encode())


async def measure(
    model: str, port: int, streams: int, prompt: int, tokens: int, warmup_s: float, seconds: float
) -> None:
    loop, times = asyncio.get_running_loop(), TokenTimes()
    head = (
        f"POST {_PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        "tidegate-budget-ms: 60000\r\n"
    )
    callers = [
        (await loop.create_connection(lambda: StreamCaller(head, model, prompt, tokens, times), "127.0.0.1", port))[1]
        for _ in range(streams)
    ]
    await clock.sleep(warmup_s)
    tell(event="begin")
    times.begin(perf_counter())
    await clock.sleep(seconds)
    fault = next((one.fault.decode("utf-8", "replace") for one in callers if one.fault), "")
    tell(event="end", **times.figures(perf_counter()), fault=fault)
    for one in callers:
        one.stop()
    await asyncio.gather(*[one.stopped for one in callers])


async def main() -> None:
    model = sys.argv[1]
    gc.collect()
    gc.freeze()
    tell(event="ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        await measure(model, **json.loads(line))


if __name__ == "__main__":
    uvloop.run(main())
