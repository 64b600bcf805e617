"""How true is a simulated link? Volume, volume per second, delay, and what it costs.

    python -m tests.bench.link_accuracy [--quick]

The link runs alone in a process; this one is both its ends. For each recording a source sends as fast as it can, and
what arrives is held against what the recording allows from the instant at which it began: the whole volume, and each
second's, where that second allows over 0.5 Mbit/s. What may come up to 2 ms late (the goal of delay) may come on either
side of a second's border, and one packet is over 1 % of a slow second: so the error of a second is what no such
lateness explains; the table also has the plain mean. Lateness is measured one way, with instants written into the bytes
(all processes share the monotonic clock): what comes later or earlier than the delay that was asked for.

Synthetic recordings from 0.16 to 20 Mbit/s are always measured, steady and in steps; the recorded drives of the folder
of `TIDEGATE_TRACES`, or of ../shared/traces, where they are.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

from tests.bench.harness import Child, Goal, Report, parser, table
from tidegate import clock
from tidegate.netsim.links.trace import OPPORTUNITY_BYTES, CapacityTrace

DELAY_MS = 40.0
LATE_S = 0.002
COUNTED_BYTES_PER_S = 0.5 * 125e3
STAMP = struct.Struct("!d")
RECORDED = ("Verizon-LTE-short", "ATT-LTE-driving-2016", "TMobile-UMTS-driving")
FOLDERS = (os.environ.get("TIDEGATE_TRACES", ""), str(Path(__file__).parents[3] / "shared" / "traces"))


def recordings() -> dict[str, CapacityTrace]:
    """By name; synthetic ones first."""
    found = {
        f"steady {mbit:g}": CapacityTrace.of_rates([(0, mbit), (20, mbit)]) for mbit in (0.16, 0.64, 2.5, 10.0, 20.0)
    }
    steps = [0.16, 20.0, 1.0, 0.0, 5.0, 12.0, 0.6, 8.0]
    found["steps"] = CapacityTrace.of_rates([*((0.7 * place, mbit) for place, mbit in enumerate(steps)), (5.6, 0.0)])
    for name in (f"{name}.{way}" for name in RECORDED for way in ("down", "up")):
        path = next((Path(one) / name for one in FOLDERS if one and (Path(one) / name).is_file()), None)
        if path is not None:
            found[name] = CapacityTrace.parse(path.read_text())
    return found


class Ends:
    """A server that does as `serve` says with its one connection at a time, and this side's connection to it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def serve(self, work: Callable[[socket.socket], None]) -> threading.Thread:
        """In a thread that ends with the connection."""

        def run() -> None:
            connection, _ = self._listener.accept()
            with connection, suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                work(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._listener.close()


def pour(connection: socket.socket) -> None:
    piece = bytes(65536)
    while True:
        connection.sendall(piece)


def arrivals(client: socket.socket, until: Callable[[], float]) -> list[tuple[float, int]]:
    """(instant, bytes) of what comes, until then."""
    seen: list[tuple[float, int]] = []
    client.settimeout(0.05)
    while clock.now() < until():
        with suppress(TimeoutError):
            size = len(client.recv(65536))
            seen.append((clock.now(), size))
    return seen


async def follow(child: Child, ends: Ends, trace: CapacityTrace, seconds: float) -> dict[str, float]:
    """One recording for so long: shares of its volume, and CPU."""
    await child.command(hold=True)
    await child.line()
    pouring = ends.serve(pour)
    with socket.create_connection(("127.0.0.1", child.ready["port"])) as client:
        end = [float("inf")]
        reading = asyncio.create_task(asyncio.to_thread(arrivals, client, lambda: end[0]))
        await clock.sleep(0.3)  # the source fills what there is to fill
        profile = {
            "delay_ms": 0.0,
            "queue_kbyte": 256,
            "recording": {"to_target": "", "from_target": "", "offset_s": 0},
        }
        await child.command(be=profile, traces=[trace.times_s, trace.times_s])
        began_at, cpu_s = (await child.line())["at"], child.cpu_s()
        end[0] = began_at + seconds
        seen = await reading
        cpu_s = child.cpu_s() - cpu_s
    await asyncio.to_thread(pouring.join, 5.0)
    return {**compare(seen, trace, began_at, seconds), "cores": cpu_s / seconds}


def compare(
    seen: Sequence[tuple[float, int]], trace: CapacityTrace, began_at: float, seconds: float
) -> dict[str, float]:
    """What came against what the recording allows, in all and second by second."""
    instants, totals, total = [], [], 0
    for at, size in seen:
        total += size
        instants.append(at - began_at)
        totals.append(total)

    def came(by_s: float) -> int:
        place = bisect_right(instants, by_s)
        return totals[place - 1] if place else 0

    plain, unexplained = [], []
    for second in (float(one) for one in range(int(seconds))):
        allowed = allows(trace, second + 1.0) - allows(trace, second)
        if allowed >= COUNTED_BYTES_PER_S:
            least = came(second + 1.0) - came(second + LATE_S)
            most = came(second + 1.0 + LATE_S) - came(second)
            plain.append(abs(came(second + 1.0) - came(second) - allowed) / allowed)
            unexplained.append(max(0, least - allowed, allowed - most) / allowed)
    return {
        "volume": came(seconds) / max(1, allows(trace, seconds)),
        "mean_error": mean(plain) if plain else 0.0,
        "worst_error": max(unexplained, default=0.0),
    }


def allows(trace: CapacityTrace, by_s: float) -> int:
    """Bytes that can have left by then."""
    around, rest_s = divmod(by_s, trace.period_s)
    whole = int(around) * len(trace.times_s) + bisect_right(trace.times_s, rest_s)
    return whole * OPPORTUNITY_BYTES


async def lateness_s(child: Child, ends: Ends, seconds: float) -> list[float]:
    """How much later than asked for each of many small messages came, one way."""

    def stamps(connection: socket.socket) -> None:
        pause = threading.Event()
        end = clock.now() + seconds
        while clock.now() < end:
            connection.sendall(STAMP.pack(clock.now()))
            pause.wait(0.01)

    def read(client: socket.socket) -> list[float]:
        late = []
        with client.makefile("rb") as stream:
            while len(stamp := stream.read(STAMP.size)) == STAMP.size:
                late.append(clock.now() - STAMP.unpack(stamp)[0] - DELAY_MS / 1e3)
        return late

    await child.command(be={"delay_ms": DELAY_MS})
    await child.line()
    stamping = ends.serve(stamps)
    with socket.create_connection(("127.0.0.1", child.ready["port"])) as client:
        late = await asyncio.to_thread(read, client)
    await asyncio.to_thread(stamping.join, 5.0)
    return late


async def bench(seconds: float, quick: bool) -> Report:
    traces = recordings()
    report = Report("link_accuracy", {"seconds": seconds, "delay_ms": DELAY_MS, "recordings": list(traces)})
    ends = Ends()
    found: dict[str, dict[str, float]] = {}
    async with Child("link", "-m", "tests.bench.link_server", str(ends.port)) as child:
        late = sorted(await lateness_s(child, ends, 2.0 if quick else 10.0))
        for name, trace in traces.items():
            found[name] = await follow(child, ends, trace, seconds)
            print(f"  {name}: {found[name]['volume']:.2%} of the volume", flush=True)
    ends.close()
    report.figures = {
        "links": found,
        "late_p50_ms": quantile(late, 0.5) * 1e3,
        "late_p99_ms": quantile(late, 0.99) * 1e3,
    }
    table(
        ("recording", "Mbit/s", "volume", "plain mean error a second", "worst unexplained", "cores"),
        [
            (name, f"{traces[name].mean_bytes_per_s * 8e-6:.2f}", f"{one['volume']:.2%}", f"{one['mean_error']:.2%}",
             f"{one['worst_error']:.2%}", f"{one['cores']:.3f}")
            for name, one in found.items()
        ],
    )  # fmt: skip
    report.goal(Goal("volume_least", min(one["volume"] for one in found.values()), 0.995))
    report.goal(Goal("volume_most", max(one["volume"] for one in found.values()), 1.005, "<="))
    report.goal(Goal("per_second_error", max(one["worst_error"] for one in found.values()), 0.01, "<="))
    report.goal(Goal("delay_error_p99_ms", quantile([abs(one) for one in late], 0.99) * 1e3, 2.0, "<="))
    report.goal(Goal("cores_at_20_mbit", found["steady 20"]["cores"], 0.10, "<="))
    return report


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    seconds = chosen.seconds or (4.0 if chosen.quick else 30.0)
    asyncio.run(bench(seconds, chosen.quick)).write()


if __name__ == "__main__":
    main()
