"""A target process in miniature, and a `Target` of each kind connected to it over loopback."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from edge_agent.core.dial_policy import DialPlan
from edge_agent.fleet.dialling import GatewayDialler
from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.targets.device import DeviceTarget
from gateway.targets.dial_in import DialInServer
from gateway.targets.link import LinkTarget
from gateway.targets.target import Target
from gateway.targets.unary import UnaryTarget
from gateway.workers.dial_in_relay import DialInRelay
from gateway.workers.relayed_links import RelayedLinks
from tests.support.gateway.small_target import SmallTarget
from tests.support.serving.hosts import EchoHost, echo_request
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.link.session import KeepaliveTiming
from tidegate.link.streams import MAX_ENVELOPE_BYTES
from tidegate.oip.grpc.server import server_options
from tidegate.types import InferRequest, LoadReport, Reply

MAX_MESSAGE_BYTES = 65 * 1024 * 1024
MIB = 1024 * 1024
AT_ONCE_S = 30.0  # half the budget of whoever shall hear at once, on whatever machine
GROWING_S = (0.2, 2.0, 20.0)  # budgets that run out; on a machine that stands still a short one may before it got there
OFFERS = (ModelOffer("echo", "3", (VariantOffer("fp32", "fp32"),)),)


class Server(SmallTarget):
    """What a target of each kind is connected to."""

    def __init__(self, name: str = "pool/a") -> None:
        load = LoadReport(7, 1, 0, 0, 0.0)
        super().__init__(
            name, EchoHost(), OFFERS, epoch=load.epoch, load=lambda: load, max_message_bytes=MAX_MESSAGE_BYTES
        )


class Caller(Server):
    """The same host on a device that cannot be dialled: it dials `to`."""

    def __init__(self) -> None:
        super().__init__("edge/a")
        self.to = ""
        self._dialling: GatewayDialler | None = None

    async def start(self) -> None:
        self._dialling = GatewayDialler(
            self.make_link(), DialPlan("always"), {self.to: ""}, dict, tls=None, draw=lambda: 0.5
        )
        await self._dialling.__aenter__()

    async def kill(self) -> None:
        if self._dialling is not None:
            await self._dialling.__aexit__(None, None, None)
            self._dialling = None


@dataclass
class Bench:
    """A server, a target for it, and what the target told."""

    kind: str
    server: Server
    target: Target
    events: list[LinkEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, event: LinkEvent) -> None:
        self.events.append(event)
        self.changed.set()

    async def until(self, holds: Callable[[], bool], within_s: float = 30.0) -> None:
        """Return once `holds`, looked at after every event."""
        async with asyncio.timeout(within_s):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def ups(self) -> int:
        return sum(isinstance(event, LinkUp) for event in self.events)

    def downs(self) -> int:
        return sum(isinstance(event, LinkDown) for event in self.events)

    async def ask(self, request: InferRequest | None = None, *, budget_s: float = 10.0, **words: Any) -> Reply:
        options: dict[str, Any] = {"variant": "", "priority": 0, "traceparent": "", "on_accepted": lambda _word: None}
        options |= words
        return await self.target.infer(request or echo_request(), budget_s=budget_s, **options)


@asynccontextmanager
async def called(dialled_in: DialInServer) -> AsyncIterator[str]:
    """A gateway's link port; its address."""
    server = grpc.aio.server(options=server_options(MAX_ENVELOPE_BYTES))
    dialled_in.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def dialled() -> AsyncIterator[Bench]:
    caller = Caller()
    bench = Bench("dialled", caller, None)  # type: ignore[arg-type]
    dialled_in = DialInServer(gateway_name="test", max_streams=4, heartbeat=KeepaliveTiming(0.1, 300))
    async with AsyncExitStack() as stack:
        target = DeviceTarget(TargetSpec("edge/a", "edge", "-", static=False), None, bench.tell)
        bench.target = await stack.enter_async_context(target)
        dialled_in.on_in = target.accept
        dialled_in.on_left = lambda link: target.left(link, link.why_not, in_order=False)
        caller.to = await stack.enter_async_context(called(dialled_in))
        stack.push_async_callback(caller.kill)
        await caller.start()
        await bench.until(lambda: bench.ups() > 0)
        yield bench


@asynccontextmanager
async def relayed() -> AsyncIterator[Bench]:
    """A device that has dialled one process of a gateway, as another process of it uses the device."""
    caller = Caller()
    bench = Bench("relayed", caller, None)  # type: ignore[arg-type]
    dialled_in = DialInServer(gateway_name="test", max_streams=4, heartbeat=KeepaliveTiming(0.1, 300))
    relay = DialInRelay(dialled_in.links, caller.host.manifest)
    dialled_in.on_left = relay.left
    came = asyncio.Event()
    dialled_in.on_in = lambda _link: came.set()
    async with AsyncExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "dial-in.sock"
        target = DeviceTarget(TargetSpec("edge/a", "edge", "-", static=False), None, bench.tell)
        bench.target = await stack.enter_async_context(target)
        caller.to = await stack.enter_async_context(called(dialled_in))
        await stack.enter_async_context(relay.opened(path, MAX_MESSAGE_BYTES))
        links = RelayedLinks(path, gateway_name="test", max_message_bytes=MAX_MESSAGE_BYTES)
        links.on_in = target.accept
        links.on_left = lambda link: target.left(link, link.why_not, in_order=False)
        await stack.enter_async_context(links)
        stack.push_async_callback(caller.kill)
        await caller.start()
        await came.wait()
        links.dialled({"edge/a": 0.04})
        await bench.until(lambda: bench.ups() > 0)
        yield bench


@asynccontextmanager
async def connected(kind: str) -> AsyncIterator[Bench]:
    if kind == "dialled":
        async with dialled() as bench:
            yield bench
        return
    if kind == "relayed":
        async with relayed() as bench:
            yield bench
        return
    server = Server()
    await server.start()
    bench = Bench(kind, server, None)  # type: ignore[arg-type]  # the target tells events to the bench it belongs to
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.kill)
        bench.target = await stack.enter_async_context(target_of(kind, server.address, bench.tell))
        await bench.until(lambda: bench.ups() > 0)
        yield bench


def target_of(kind: str, address: str, tell: Callable[[LinkEvent], None]) -> LinkTarget | UnaryTarget:
    if kind == "link":
        return LinkTarget(
            "pool/a",
            address,
            gateway_name="test",
            on_event=tell,
            draw=lambda: 0.5,
            ping_interval_s=0.1,
            silent_pings=10,
        )
    return UnaryTarget(
        "pool/a", address, foreign=kind == "foreign", models=("echo",), on_event=tell, probe_interval_s=0.1
    )
