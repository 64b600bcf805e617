"""Callers of streamed completions at one port, with as little between as Python allows. See `schedule.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from tests.bench.generate_routing.schedule import Ask, Asked, Heard, serve


def ask_of(words: dict[str, Any]) -> Ask:
    port = int(words["port"])

    async def ask(asked: Asked, heard: Heard, elapsed: Callable[[], float]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request_words(asked, port))
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            _read_head(head, heard)
            if not head.split(" ", 2)[1].startswith("200"):
                heard.error = f"{head.splitlines()[0]} {(await reader.read(400)).decode('utf-8', 'replace')}"
                return
            await _read_events(reader, heard, elapsed)
        finally:
            writer.close()

    return ask


def request_words(asked: Asked, port: int) -> bytes:
    body = json.dumps(asked.body()).encode()
    lines = [
        "POST /v1/completions HTTP/1.1", f"host: 127.0.0.1:{port}", "content-type: application/json",
        "connection: close", f"content-length: {len(body)}",
        *(f"{key}: {value}" for key, value in asked.headers().items()),
    ]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def _read_head(head: str, heard: Heard) -> None:
    headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
    heard.served_by, heard.route = headers.get("tidegate-served-by", ""), headers.get("tidegate-route", "")


async def _read_events(reader: asyncio.StreamReader, heard: Heard, elapsed: Callable[[], float]) -> None:
    """Lines of chunked events: sizes of chunks and empty lines are passed by."""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            said = json.loads(line[6:])
            if "error" in said:
                heard.error = str(said["error"])[:300]
                return
            for choice in said.get("choices", ()):
                if choice.get("text"):
                    heard.tokens_at.append(elapsed())
                heard.whole = heard.whole or choice.get("finish_reason") is not None
        elif line.startswith(b": tidegate-resumed"):
            heard.resumed += 1
        elif line.startswith(b"data: [DONE]"):
            return


if __name__ == "__main__":
    asyncio.run(serve(ask_of))
