"""What a first token costs where nothing is decided, sent on or computed: tokens by aiohttp, at a model's instants.

A process that has waited for a second answers more slowly than one that is busy: its memory is in no cache, and its
core is at rest. How much more is the machine's, and `generate_overhead` tells what it is on this one.

    python -m tests.bench.token_echo FIRST_MS STEP_MS
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Final

import uvloop
from aiohttp import web

from tests.bench.load_generator import tell
from tidegate import clock

_EVENT: Final = b'data: {"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'


async def serve(first_ms: float, step_ms: float) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        due_at = clock.now() + 1e-3 * first_ms
        tokens = json.loads(await request.read())["max_tokens"]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the caller has left
            for _ in range(tokens):
                await clock.sleep(max(0.0, due_at - clock.now()))
                await response.write(_EVENT)
                due_at += 1e-3 * step_ms
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    tell(event="ready", port=runner.addresses[0][1])
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    uvloop.run(serve(float(sys.argv[1]), float(sys.argv[2])))


if __name__ == "__main__":
    main()
