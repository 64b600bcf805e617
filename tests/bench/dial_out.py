"""A device that dials, against one that is dialled: what the other road costs, and how soon it is back.

    python -m tests.bench.dial_out [--quick]

    hop      a small request there and back, one at a time, by both roads in turns: the ratio is what dialling out costs
    beside   the same while bodies of 8 MiB cross on the same stream: how long a small one waits, and by both roads
    return   the link swallows everything for a while, or refuses every connection: seconds from its return to the
             first answer over it

Both roads end in one process, over real gRPC; the link of `return` is the simulator's proxy. Aims: a hop at most 1.1
times the direct one, and half of all returns within a second.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import grpc

from edge_agent.core.dial_policy import DialPlan
from edge_agent.fleet.dialling import GatewayDialler
from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.targets.device import DeviceTarget
from gateway.targets.dial_in import DialInServer
from gateway.targets.link import LinkTarget
from gateway.targets.target import Target
from tests.bench.harness import Goal, Report, Spread, parser, ratios, table
from tests.support.serving.hosts import EchoHost, echo_request
from tidegate.link.service import LinkService
from tidegate.link.streams import MAX_ENVELOPE_BYTES, METHOD, SERVICE
from tidegate.netsim.proxy.link import LinkProxy
from tidegate.oip.grpc.server import server_options
from tidegate.types import LoadReport

HOP_AIM, RETURN_AIM_S = 1.1, 1.0
_LARGE: Final = bytes(8 * 2**20)


@asynccontextmanager
async def serving(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[int]:
    server = grpc.aio.server(options=server_options(MAX_ENVELOPE_BYTES))
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


class Device:
    """A host behind a link service that can be dialled, and that dials."""

    def __init__(self) -> None:
        load = LoadReport(1, 1, 0, 0, 0.0)
        self.link = LinkService(EchoHost(), name="edge/a", epoch=lambda: 1, offers=tuple, load=lambda: load)

    def add_to(self, server: grpc.aio.Server) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self.link.exchange)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    def dialling(self, port: int) -> GatewayDialler:
        gateways = {f"127.0.0.1:{port}": ""}
        return GatewayDialler(self.link, DialPlan("always"), gateways, dict, tls=None, draw=random.random)


class Watch:
    """Whether a target is up, as its events say."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.down = asyncio.Event()

    def tell(self, event: LinkEvent) -> None:
        if isinstance(event, LinkUp):
            self.up.set()
            self.down.clear()
        elif isinstance(event, LinkDown):
            self.down.set()
            self.up.clear()


@asynccontextmanager
async def both_roads() -> AsyncIterator[dict[str, Target]]:
    async with AsyncExitStack() as stack:
        device, dialled_in = Device(), DialInServer(gateway_name="main", max_streams=4)
        watches = Watch(), Watch()
        port = await stack.enter_async_context(serving(device.add_to))
        direct = LinkTarget(
            "edge/a", f"127.0.0.1:{port}", gateway_name="main", on_event=watches[0].tell, draw=random.random
        )
        dialled = DeviceTarget(TargetSpec("edge/a", "edge", "-", static=False), None, watches[1].tell)
        dialled_in.on_in = dialled.accept
        link_port = await stack.enter_async_context(serving(dialled_in.add_to))
        await stack.enter_async_context(direct)
        await stack.enter_async_context(device.dialling(link_port))
        for watch in watches:
            await watch.up.wait()
        yield {"direct": direct, "dialled out": dialled}


async def ask(target: Target, raw: bytes = b"hello") -> None:
    await target.infer(
        echo_request(raw), variant="", budget_s=60.0, priority=0, traceparent="", on_accepted=lambda _word: None
    )


async def each_us(work: Callable[[], Awaitable[None]], count: int) -> float:
    began_at = time.perf_counter()
    for _ in range(count):
        await work()
    return (time.perf_counter() - began_at) / count * 1e6


async def slowest_ms(target: Target, count: int) -> float:
    """Of small requests while large ones cross on the same stream."""
    large = [asyncio.create_task(ask(target, _LARGE)) for _ in range(2)]
    slowest = 0.0
    for _ in range(count):
        began_at = time.perf_counter()
        await ask(target)
        slowest = max(slowest, time.perf_counter() - began_at)
        if all(task.done() for task in large):
            break
    await asyncio.gather(*large)
    return slowest * 1e3


async def returns_s(cuts: int, longest_s: float) -> list[float]:
    """Seconds from a link's return to the first answer over it, one for each cut."""
    chance, found = random.Random(1), []
    device, dialled_in, watch = Device(), DialInServer(gateway_name="main", max_streams=4), Watch()
    target = DeviceTarget(TargetSpec("edge/a", "edge", "-", static=False), None, watch.tell)
    dialled_in.on_in = target.accept
    dialled_in.on_left = lambda link: target.left(link, link.why_not, in_order=False)
    async with serving(dialled_in.add_to) as port, LinkProxy(("127.0.0.1", port)) as link, device.dialling(link.port):
        await watch.up.wait()
        for _ in range(cuts):
            # In turns: packets are swallowed on a connection that stands; nobody listens at all.
            link.partition("blackhole" if len(found) % 2 else "reset")
            await watch.down.wait()  # both sides know, and the device knocks in vain
            await asyncio.sleep(chance.uniform(0.5, longest_s))  # noqa: TID251 - real time is what is measured
            link.heal()
            healed_at = time.perf_counter()
            await watch.up.wait()
            await ask(target)
            found.append(time.perf_counter() - healed_at)
    return found


async def measured(repeats: int, count: int, cuts: int) -> dict[str, Any]:
    hops: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    async with both_roads() as roads:
        for target in roads.values():
            await each_us(lambda target=target: ask(target), 200)  # type: ignore[misc]  # warm
        for _ in range(repeats):
            for name, target in roads.items():
                hops.setdefault(name, []).append(await each_us(lambda target=target: ask(target), count))  # type: ignore[misc]
            for name, target in roads.items():
                beside.setdefault(name, []).append(await slowest_ms(target, 1000))
    return {
        "hop_us": {name: Spread.of(samples) for name, samples in hops.items()},
        "hop_ratio": ratios(hops["dialled out"], hops["direct"]),
        "slowest_beside_large_ms": {name: Spread.of(samples) for name, samples in beside.items()},
        "return_s": Spread.of(await returns_s(cuts, 6.0)),
    }


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    repeats, count, cuts = (3, 500, 4) if chosen.quick else (chosen.repeats or 9, 2000, 16)
    found = asyncio.run(measured(repeats, count, cuts))
    rows = [[f"{figure}, {name}", f"{spread:.1f}"] for figure in ("hop_us", "slowest_beside_large_ms")
            for name, spread in found[figure].items()]  # fmt: skip
    table(["figure", "median (lowest..highest)"], [*rows, ["return_s", f"{found['return_s']:.2f}"]])
    report = Report("dial_out", {"repeats": repeats, "count": count, "cuts": cuts}, found)
    report.goal(Goal("dial_out_hop_ratio", found["hop_ratio"].median, HOP_AIM, "<="))
    report.goal(Goal("dial_out_return_s", found["return_s"].median, RETURN_AIM_S, "<="))
    report.write()


if __name__ == "__main__":
    main()
