"""Sends a scenario's requests at their instants over real HTTP, however the last ones fared, and notes each answer.

The requests are the simulator's own: same scenario and seed, same instants, classes and lengths (`simulator/arrivals`).
Each is one OIP call with binary tensors of token ids (from a stream of real text where one is given) and its class's
budget and priority. Connections are kept and made as needed, so an answer that is late holds nobody up. A caller of a
class with `retries` asks again at once, so often, whenever it got no answer; with `leaving`, that share of callers goes
before its answer.

A process of its own that speaks the harness's JSON lines: a command names the scenario file, rate, seconds, seed, port
and where to write; the answer says how late requests were sent, since an open loop that lags is none.
"""

from __future__ import annotations

import asyncio
import gc
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import quantiles

from simulator.scenarios.scenario_file import load
from simulator.world.arrivals import SimulatedRequest, requests
from tidegate import clock

LEFT = -1
_LEAVES_WITHIN = 0.5  # of its budget, at most
_GRACE_S = 2.0  # beyond its budget, until a silent request counts as lost
_LEAD_S = 0.5  # from the command to the first instant
_SENTENCE = 512  # distinct made-up tokens, where no text is given


@dataclass(frozen=True, slots=True)
class Answer:
    """What one caller saw of its last try; times in seconds. `status` 0: no answer; LEFT: it did not wait for one."""

    number: int
    at: float
    kind: str
    units: float
    budget_s: float
    status: int
    latency_s: float
    served_by: str = ""
    left_s: float = 0.0  # of the budget, by the gateway's clock
    compute_s: float = 0.0
    link_s: float = 0.0
    hedged: bool = False
    tries: int = 1
    decided_s: float = 0.0  # what placing it took
    output: Sequence[float] = ()  # the first, if that is kept; it is float32


_Heard = tuple[int, dict[str, str], bytes]  # status, headers, body


class Callers:
    """Connections to one gateway; `call` takes a free one or makes one."""

    def __init__(
        self,
        port: int,
        model: str,
        tokens: Sequence[int],
        leaving: float = 0.0,
        *,
        keep_outputs: bool = False,
        key: str = "",
    ) -> None:
        self._port = port
        self._credential = f"Authorization: Bearer {key}\r\n" if key else ""
        self._leaving = leaving
        self._keep_outputs = keep_outputs
        self._model = model
        self._tokens = tokens
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.late_s: list[float] = []

    async def call(self, request: SimulatedRequest, began_at: float) -> Answer:
        await clock.sleep_until(began_at + request.at)
        sent_at = clock.now()
        self.late_s.append(sent_at - began_at - request.at)
        budget_s = request.kind.budget_ms / 1e3
        words, leaves_in_s = self._words(request), self._leaves_in_s(request)
        tries = 0
        while tries <= request.kind.retries:
            tries += 1
            sent_at = clock.now()
            status, headers, body = await self._try(words, budget_s + _GRACE_S, leaves_in_s)
            if status in (200, LEFT):
                break
        stages = _stages(headers.get("server-timing", ""))
        return Answer(
            request.number,
            request.at,
            request.kind.name,
            request.units,
            budget_s,
            status,
            clock.now() - sent_at,
            headers.get("tidegate-served-by", ""),
            float(headers.get("tidegate-budget-left-ms", "0")) / 1e3,
            stages.get("compute", 0.0),
            stages.get("link", 0.0),
            "hedged=1" in headers.get("tidegate-route", ""),
            tries,
            stages.get("classify", 0.0),
            _floats(headers, body) if self._keep_outputs and status == 200 else (),
        )

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    def _leaves_in_s(self, request: SimulatedRequest) -> float | None:
        draw = Random(request.number)
        leaves, share = draw.random() < self._leaving, draw.random()
        return share * _LEAVES_WITHIN * request.kind.budget_ms / 1e3 if leaves else None

    async def _try(self, words: bytes, patience_s: float, leaves_in_s: float | None) -> _Heard:
        try:
            async with asyncio.timeout(patience_s if leaves_in_s is None else leaves_in_s):
                return await self._exchange(words)
        except TimeoutError:
            return 0 if leaves_in_s is None else LEFT, {}, b""
        except (OSError, asyncio.IncompleteReadError):
            return 0, {}, b""

    async def _exchange(self, words: bytes) -> _Heard:
        reader, writer = self._kept() or await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(words)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return int(first.split()[1]), headers, body

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A free connection that the gateway has not closed meanwhile, since nothing came over it for long."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    def _words(self, request: SimulatedRequest) -> bytes:
        shape = [request.kind.rows, request.length]
        count = request.kind.rows * request.length
        ids = ids_of(request.number, count, self._tokens)
        raw = struct.pack(f"<{count}q", *ids), struct.pack(f"<{count}q", *([1] * count))
        inputs = [
            {"name": name, "shape": shape, "datatype": "INT64", "parameters": {"binary_data_size": len(one)}}
            for name, one in zip(("input_ids", "attention_mask"), raw, strict=True)
        ]
        wanted = {"binary_data_output": True, "priority": request.kind.priority}
        head = json.dumps({"id": str(request.number), "inputs": inputs, "parameters": wanted}).encode()
        return (
            f"POST /v2/models/{self._model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"tidegate-budget-ms: {request.kind.budget_ms:g}\r\nContent-Type: application/octet-stream\r\n"
            f"{self._credential}"
            f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + 16 * count}\r\n\r\n"
        ).encode() + b"".join((head, *raw))


def ids_of(number: int, count: int, tokens: Sequence[int]) -> list[int]:
    """The tokens of this request."""
    start = number * 7 % len(tokens)
    return [tokens[(start + place) % len(tokens)] for place in range(count)]


def _floats(headers: Mapping[str, str], body: bytes) -> tuple[float, ...]:
    raw = body[int(headers["inference-header-content-length"]) :]
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def _stages(text: str) -> dict[str, float]:
    """Of a Server-Timing header, in seconds."""
    parts = (part.strip().partition(";dur=") for part in text.split(",") if part)
    return {name: float(ms) / 1e3 for name, _, ms in parts}


async def run(
    scenario: str,
    rate: float,
    seconds: float,
    seed: int,
    port: int,
    model: str,
    tokens: list[int],
    began_at: float | None = None,
    leaving: float = 0.0,
    keep_outputs: bool = False,
    key: str = "",
) -> tuple[list[Answer], dict[str, float]]:
    """One run: every answer, in the order of the requests, and how late they were sent.

    Args:
        began_at: the first instant, on this machine's monotonic clock; None: soon.
        key: what callers show to be let in.
    """
    wanted = load(scenario).scenario.lasting(seconds).with_rate(rate)
    due = list(requests(wanted, seed))
    source = Random(seed)
    made_up = [source.randrange(1000, 30000) for _ in range(_SENTENCE)]
    callers = Callers(port, model, tokens or made_up, leaving, keep_outputs=keep_outputs, key=key)
    gc.collect()
    gc.freeze()
    began_at = clock.now() + _LEAD_S if began_at is None else began_at
    found = await asyncio.gather(*[callers.call(request, began_at) for request in due])
    callers.close()
    late = quantiles(callers.late_s, n=100) if len(callers.late_s) > 1 else [0.0] * 99
    return found, {"requests": len(found), "late_p50_s": late[49], "late_p99_s": late[98]}


async def main() -> None:
    print(json.dumps({"event": "ready"}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        path = Path(command.pop("answers"))
        answers, late = await run(**command)
        await loop.run_in_executor(None, path.write_text, json.dumps([asdict(one) for one in answers]))
        print(json.dumps(late), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
