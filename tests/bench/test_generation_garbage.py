"""What a generation held is freed when it ends, and not with the next garbage collection.

A reference cycle would keep all of it, some 20 kB, until thousands of generations later: a gateway collects rarely,
since each collection stops it for a moment.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.bench.calls import Window
from tests.bench.generate_overhead import MODEL, start_gateway, start_pool, write_model
from tidegate import clock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
ASKED = 6
_ROUNDS = 5
_REST_S = 0.5  # for what a caller who has left is still held by, on its way through both processes
_NUMBERS = count(1)


@dataclass(frozen=True)
class Asked:
    """Args: until: what is read before the caller leaves."""

    until: bytes
    tokens: int = 12
    budget_ms: int = 60_000


_ASKED = {
    "read to its end": Asked(b"[DONE]"),
    "left": Asked(b"data: "),
    "refused": Asked(b"deadline_exceeded", tokens=100, budget_ms=25),
    "late": Asked(b"deadline_exceeded", tokens=100, budget_ms=1000),  # it takes a second
}


@pytest.mark.parametrize("asked", _ASKED.values(), ids=_ASKED)
@pytest.mark.parametrize("counted", ["gateway", "pool"])
async def test_what_a_generation_held_is_freed_at_its_end(counted: str, asked: Asked, tmp_path: Path) -> None:
    out = tmp_path / "counted"
    through = ("tests.bench.call_counter", str(out))
    async with AsyncExitStack() as stack:
        write_model(tmp_path / "models")
        pool = await start_pool(stack, tmp_path, None, through if counted == "pool" else ())
        gateway, port = await start_gateway(stack, tmp_path, pool, None, through if counted == "gateway" else ())

        async def load(_seconds: float) -> int:
            for _ in range(_ROUNDS):
                await asyncio.gather(*[_ask(port, asked) for _ in range(ASKED)])
            await clock.sleep(_REST_S)
            return ASKED * _ROUNDS

        await load(0.0)
        found = await Window((gateway if counted == "gateway" else pool).pid, out).count(load)
    assert found.by_function or (counted, asked) == ("pool", _ASKED["refused"]), "nothing was counted"
    assert found.garbage < 1.0, f"only a garbage collection frees {found.garbage:.1f} objects of a generation"


async def _ask(port: int, asked: Asked) -> None:
    number = next(_NUMBERS)
    body = json.dumps({
        "model": MODEL, "prompt": [(number * 7919 + place) % 85 + 3 for place in range(16)],
        "max_tokens": asked.tokens, "stream": True, "ignore_eos": True,
    })  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        writer.write(
            f"{head}tidegate-budget-ms: {asked.budget_ms}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        await reader.readuntil(asked.until)
    finally:
        writer.close()
        await writer.wait_closed()
