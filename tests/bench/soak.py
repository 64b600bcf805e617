"""Row 25 at speed: a million requests through one gateway, and nothing is left of them.

    callers (this process) ──HTTP──▶ gateway (this process) ──link──▶ an edge and a pool that echo (this process)

Everything shares a process, so that nothing limits the rate but Python, and its memory is all there is to watch; the
fleet of real processes has its own row (`fault_rows/soak.py`), at a hundredth of the rate. Requests differ in whatever
callers may choose: ids, tenants, lengths, budgets that nobody can make, models that are not there; some leave before
their answer. What a structure keeps of any of these without a bound shows as a slope by the request.

The slope is that of a line through the second half, where caches are full, per 100,000 requests. With `--trace`,
tracemalloc says which lines hold more at the end than after a third of the way; it makes all this four times as slow.

    python -m tests.bench.soak [--requests 1000000] [--trace] [--quick]
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import linear_regression
from typing import Final

import psutil

from gateway.app import Gateway
from tests.bench.harness import Goal, Report, parser
from tests.support.gateway.app import Far, configured, target
from tests.support.serving.hosts import ECHO
from tidegate import clock
from tidegate.types import Accepted, Call, InferResponse, Reply, Tensor

_CALLERS: Final = 32
_LOOKS: Final = 200
_IDLE_S: Final = 2.0
_TOP: Final = 25
_LEAST: Final = 100_000


class Callers:
    """So many in a loop, each with a connection of its own, until together they have sent so many requests."""

    def __init__(self, port: int, most: int) -> None:
        self.sent = 0
        self.statuses: dict[int, int] = {}
        self._port = port
        self._most = most
        self._draw = Random(25)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(_CALLERS):
                group.create_task(self._call_on())

    async def _call_on(self) -> None:
        connection = None
        while self.sent < self._most:
            self.sent += 1
            reader, writer = connection or await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._words())
            connection = None
            if self._draw.random() < 0.02:  # leaves
                await asyncio.sleep(0)  # noqa: TID251  # lets the words go out, and no more
                writer.close()
                continue
            status = await _status(reader)
            self.statuses[status] = self.statuses.get(status, 0) + 1
            connection = reader, writer
        if connection is not None:
            connection[1].close()

    def _words(self) -> bytes:
        draw, length = self._draw, self._draw.randrange(1, 2000)
        model = "echo" if draw.random() < 0.98 else f"no-model-{self.sent}"
        budget_ms = 2000 if draw.random() < 0.95 else 0.01
        head = json.dumps({
            "id": f"request-{self.sent}",
            "inputs": [
                {"name": "x", "shape": [length], "datatype": "UINT8", "parameters": {"binary_data_size": length}}
            ],
        }).encode()  # fmt: skip
        return (
            (
                f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\ntidegate-budget-ms: {budget_ms}\r\n"
                f"tidegate-tenant: tenant-{self.sent % 5000}\r\nContent-Type: application/octet-stream\r\n"
                f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + length}\r\n\r\n"
            ).encode()
            + head
            + bytes(length)
        )


class Quiet:
    """A host that answers at once with what came, and keeps nothing."""

    server_name = "quiet"

    def __init__(self, whole: object) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> object:
        return getattr(self._whole, name)

    async def infer(self, call: Call) -> Reply:
        if call.on_accepted is not None:
            call.on_accepted(Accepted(queue_ahead=0, finish_in_s=0.002))
        await asyncio.sleep(0)  # noqa: TID251  # a turn of the loop, as any host needs
        raw = call.request.inputs[0].raw
        output = Tensor("y", call.request.inputs[0].datatype, (len(raw),), bytes(raw))
        stages = {"queue": 0.0, "compute": 0.002}
        return Reply(InferResponse("echo", ECHO.version, (output,), id=call.request.id), stages=stages, variant="fp32")


class Looks:
    """What this process uses, as requests go by."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.rss_mib: list[float] = []
        self.fds: list[int] = []
        self._process = psutil.Process()

    def look(self, requests: int) -> None:
        self.requests.append(requests)
        self.rss_mib.append(self._process.memory_info().rss / 2**20)
        self.fds.append(self._process.num_fds())

    def slope(self) -> float:
        """MiB for each 100,000 requests, over the second half."""
        half = len(self.requests) // 2
        return 1e5 * linear_regression(self.requests[half:], self.rss_mib[half:]).slope

    def more_fds(self) -> int:
        half = len(self.fds) // 2
        return max(self.fds[half:]) - max(self.fds[:half])

    def __repr__(self) -> str:
        return f"<Looks {len(self.requests)}>"


async def soak(folder: Path, most: int, *, trace: bool) -> tuple[Looks, dict[int, int], int, float]:
    """What was seen, the callers' statuses, what was in flight at the end, and requests a second."""
    fars = Far("edge/attic", variant="int8"), Far("pool/main")
    for far in fars:
        far.host = Quiet(far.host)  # type: ignore[assignment]
        await far.start()
    config = configured(folder, *(target(far) for far in fars), log_level="error")
    async with Gateway(config) as gateway:
        await gateway.static_targets_tried(5.0)
        callers, looks = Callers(int(gateway.addresses["http"].rpartition(":")[2]), most), Looks()
        began_at, running = clock.now(), asyncio.create_task(callers.run())
        await _watch(running, callers, looks, most, trace=trace)
        rate = most / (clock.now() - began_at)
        await clock.sleep(_IDLE_S)
        in_flight = gateway.admission.in_flight + sum(
            one.queue_estimate.in_flight for one in gateway.fleet.targets.values()
        )
    for far in fars:
        await far.kill()
    return looks, callers.statuses, in_flight, rate


async def _watch(running: asyncio.Task[None], callers: Callers, looks: Looks, most: int, *, trace: bool) -> None:
    first = None
    due = itertools.count(most // _LOOKS, most // _LOOKS)
    next_look = next(due)
    while not running.done():
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 0.02)
        if callers.sent >= next_look:
            looks.look(callers.sent)
            next_look = next(due)
        if trace and first is None and callers.sent >= most // 3:
            gc.collect()
            tracemalloc.start()
            first = tracemalloc.take_snapshot()
    await running
    if first is not None:
        gc.collect()
        for line in tracemalloc.take_snapshot().compare_to(first, "lineno")[:_TOP]:
            print(line)
        tracemalloc.stop()


async def _status(reader: asyncio.StreamReader) -> int:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    length = next(line.partition(":")[2] for line in lines if line.lower().startswith("content-length"))
    await reader.readexactly(int(length))
    return int(first.split()[1])


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--requests", type=int, default=1_000_000)
    options.add_argument("--trace", action="store_true", help="which lines hold more at the end")
    chosen = options.parse_args()
    most = 20_000 if chosen.quick else chosen.requests
    report = Report("soak", {"requests": most, "callers": _CALLERS, "trace": chosen.trace})
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        looks, statuses, in_flight, rate = asyncio.run(soak(Path(scratch), most, trace=chosen.trace))
    print(f"{rate:.0f} requests a second; {dict(sorted(statuses.items()))}; RSS {looks.rss_mib[::20]}")
    report.figures |= {"rate": rate, "rss_mib": looks.rss_mib[-1]}
    slope: float | None = looks.slope()
    why = ""
    if chosen.trace or most < _LEAST:
        slope, why = None, f"it takes {_LEAST} requests without tracemalloc to tell a slope from caches that fill"
    report.goal(Goal("soak_mib_per_100k", slope, 1.0, "<=", why=why))
    report.goal(Goal("soak_more_fds", looks.more_fds(), 8, "<="))
    report.goal(Goal("soak_in_flight_at_idle", in_flight, 0, "<="))
    report.write()


if __name__ == "__main__":
    main()
