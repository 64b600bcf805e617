"""Thousands of streams, of which a third are left at a random point and a tenth are read slowly: what is left of them.

    callers (this process) ──HTTP, events──▶ gateway ──link──▶ pool ──▶ worker (`engine: paced`, 64 slots)

Each caller asks for 32 to 96 tokens and reads them to the end, or leaves after so many of them, or takes a few bytes
at a time with pauses. Some ask for more than they give time for. Afterwards nothing may be left: no slot and no token
of the attention caches that is reserved, nobody who waits, no connection or descriptor at gateway, pool or worker, and
no memory that grows with the number of streams. Every answer is whole, or its stream says how it ended.

The slope of memory is that of a line through the second half, in bytes a stream. Records, histograms and the
allocator's own pools grow to their bounds first, which took 15,000 streams (and 148.4 MB at the gateway, as after
26,000). So a full run begins with that many.

    python -m tests.bench.generate_soak [--streams 10000] [--quick]
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from statistics import linear_regression
from typing import Any, Final

import psutil
import yaml

from tests.bench.generate_overhead import MODEL, write_model
from tests.bench.harness import Child, Goal, Report, parser
from tidegate import clock

CALLERS: Final = 96
LEAVES, READS_SLOWLY, IN_A_HURRY = 0.33, 0.10, 0.03
LOOKS: Final = 100
MAX_SLOPE_BYTES: Final = 64.0  # histograms and caches settle; what a stream leaves for good is hundreds of bytes
REST_S: Final = 30.0
FILLS: Final = 15_000  # streams after which all that is bounded is full
ENOUGH: Final = 5000  # streams for a slope
_ZERO: Final = (
    "tidegate_pool_sequences_running", "tidegate_pool_sequences_waiting", "tidegate_pool_cache_reserved_bytes",
    "nv_inference_pending_request_count",
)  # fmt: skip


class StreamCallers:
    """So many in a loop until together they have asked for so many streams."""

    def __init__(self, port: int, most: int) -> None:
        self.begun = 0
        self.ends: Counter[str] = Counter()
        self._port = port
        self._most = most
        self._draw = Random(16)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._call_on())

    async def _call_on(self) -> None:
        while self.begun < self._most:
            self.begun += 1
            try:
                end = await self._stream()
            except (ConnectionError, asyncio.IncompleteReadError):
                end = "connection lost"
            self.ends[end] += 1

    async def _stream(self) -> str:
        draw = self._draw
        tokens, chance = draw.randrange(32, 97), draw.random()
        leaves_at = draw.randrange(tokens) if chance < LEAVES else None
        slowly = LEAVES <= chance < LEAVES + READS_SLOWLY
        hurry = chance > 1.0 - IN_A_HURRY
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4096 if slowly else 2**16)
        try:
            writer.write(self._words(tokens, 15 if hurry else 60_000))
            return await self._read(reader, tokens, leaves_at, slowly=slowly)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, tokens: int, leaves_at: int | None, *, slowly: bool) -> str:
        seen, made = b"", 0
        while True:
            if leaves_at is not None and made >= leaves_at:
                return "left"
            data = await reader.read(200 if slowly else 2**16)
            if not data:
                return f"cut after {made}"
            if slowly and self._draw.random() < 0.05:
                await clock.sleep(0.2)
            seen = seen[-16:] + data
            made += data.count(b"data: {")
            if b"[DONE]" in seen:
                # one event more says why it ended; an event that two reads share is not counted
                return "whole" if made >= tokens // 2 else f"short: {made} of {tokens}"
            if b'"error"' in seen:
                return "refused" if made <= 1 else "broken off"

    def _words(self, tokens: int, budget_ms: int) -> bytes:
        number = self.begun
        body = json.dumps({
            "model": MODEL, "prompt": [(number * 7919 + place) % 85 + 3 for place in range(16)],
            "max_tokens": tokens, "stream": True, "ignore_eos": True, "user": f"user-{number}",
        }).encode()  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"tidegate-budget-ms: {budget_ms}\r\ntidegate-tenant: tenant-{number % 500}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def open_files(processes: dict[str, psutil.Process]) -> dict[str, int]:
    return {name: one.num_fds() for name, one in processes.items()}


def workers_of(pool: psutil.Process) -> dict[str, psutil.Process]:
    """Those that are there now: one may have been replaced."""
    return {f"worker {number}": one for number, one in enumerate(pool.children())}


def scraped(address: str) -> dict[str, float]:
    """The values that have to come back to 0, by metric, all labels together."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"http://{address.removeprefix('http://')}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in _ZERO:
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


async def at_rest(addresses: list[str]) -> float:
    """What is left of everything that is counted, when it has had `REST_S` to go."""
    ends_at = clock.now() + REST_S
    while True:
        left = sum([sum((await asyncio.to_thread(scraped, one)).values()) for one in addresses])
        if left == 0.0 or clock.now() > ends_at:
            return left
        await clock.sleep(0.25)


async def start(stack: AsyncExitStack, scratch: Path) -> tuple[Child, Child]:
    """The pool and the gateway before it, both with a port for metrics."""
    write_model(scratch / "models")
    fixed = {"name": "soak", "model_repository": str(scratch / "models"), "log_level": "error", "metrics_port": 0}
    (scratch / "pool.yaml").write_text(
        yaml.safe_dump({**fixed, "grpc_port": 0, "device": "cpu", "warmup_budget_s": 0.5})
    )
    pool = Child("pool", "-m", "cloud_pool", "--config", str(scratch / "pool.yaml"), log=scratch / "pool.log")
    await stack.enter_async_context(pool)
    while pool.ready["event"] != "ready":
        pool.ready = await pool.line()
    targets = [{"name": "pool", "tier": "pool", "address": pool.ready["addresses"]["grpc"]}]
    words = {**fixed, "http_port": 0, "grpc_port": 0, "admin_port": 0, "targets": targets}
    (scratch / "gateway.yaml").write_text(yaml.safe_dump(words))
    gateway = Child("gateway", "-m", "gateway", "--config", str(scratch / "gateway.yaml"), log=scratch / "gateway.log")
    await stack.enter_async_context(gateway)
    return pool, gateway


async def watch(
    processes: dict[str, psutil.Process], pool: str, callers: StreamCallers, most: int
) -> list[tuple[int, int]]:
    """(streams, bytes of gateway and pool together) as they go. Raises RuntimeError where nothing is counted."""
    looks, every = [], max(1, most // LOOKS)
    while True:
        if len(looks) == LOOKS // 2:
            counted = await asyncio.to_thread(scraped, pool)
            if not all(counted.get(name) for name in _ZERO[:1] + _ZERO[2:]):
                raise RuntimeError(f"in the middle of it the pool counts {counted}")
        looks.append((callers.begun, sum(one.memory_info().rss for one in processes.values())))
        aim = callers.begun + every
        while callers.begun < min(aim, most):
            await clock.sleep(0.05)
        if callers.begun >= most:
            return looks


async def bench(streams: int) -> Report:
    report = Report("generate_soak", {"streams": streams, "callers": CALLERS, "leaves": LEAVES, "slow": READS_SLOWLY})
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        pool, gateway = await start(stack, scratch)
        port = int(gateway.ready["addresses"]["http"].rpartition(":")[2])
        addresses = [one.ready["addresses"]["metrics"] for one in (pool, gateway)]
        processes = {"gateway": psutil.Process(gateway.pid), "pool": psutil.Process(pool.pid)}
        await StreamCallers(port, FILLS if streams >= ENOUGH else 2 * CALLERS).run()
        await at_rest(addresses)
        before = open_files(processes | workers_of(processes["pool"]))
        callers = StreamCallers(port, streams)
        watching = asyncio.create_task(watch(processes, addresses[0], callers, streams))
        await callers.run()
        looks = await watching
        left = await at_rest(addresses)
        await clock.sleep(1.0)
        after = open_files(processes | workers_of(processes["pool"]))
        more = {name: count - before[name] for name, count in after.items()}
    ends: dict[str, Any] = dict(callers.ends)
    half = looks[len(looks) // 2 :]
    slope = linear_regression([count for count, _ in half], [rss for _, rss in half]).slope if len(half) > 2 else 0.0
    lost = sum(count for end, count in ends.items() if end not in ("whole", "left", "refused", "broken off"))
    print(f"{callers.begun} streams: {ends}; open files more than before: {more}")
    report.figures |= {"ends": ends, "left": left, "files": more, "slope_bytes": slope, "lost": lost}
    report.goal(Goal("slots_caches_and_waiters_left", left, 0, "<="))
    report.goal(Goal("descriptors_left", max(0, *more.values()), 0, "<="))
    report.goal(Goal("streams_without_a_declared_end", lost, 0, "<="))
    enough = streams >= ENOUGH
    report.goal(
        Goal(
            "memory_bytes_a_stream",
            slope if enough else None,
            MAX_SLOPE_BYTES,
            "<=",
            why="" if enough else "only a full run has a slope",
        )
    )
    return report


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--streams", type=int, help="how many in all")
    chosen = options.parse_args()
    asyncio.run(bench(chosen.streams or (1000 if chosen.quick else 10_000))).write()


if __name__ == "__main__":
    main()
