"""What every `Target` promises, over real gRPC on loopback: one suite for the link stream, dialled from either end, and
for plain OIP calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio
from msgspec.structs import replace

from edge_agent.core.roads import Roads
from edge_agent.dialling import Dialling
from gateway.core.events import LinkDown, LinkEvent, LinkLoad, LinkRtt, LinkUp
from gateway.core.target import TargetSpec
from gateway.upstream.dialled_in import DialledIn
from gateway.upstream.link import LinkTarget
from gateway.upstream.roads import DeviceTarget
from gateway.upstream.target import Target
from gateway.upstream.unary import UnaryTarget
from simulator.proxy.link import Link
from tests.support.hosts import ECHO, EchoHost, echo_request
from tidegate import clock
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.link.asker import Asker
from tidegate.link.service import LinkService, add_link_service
from tidegate.link.session import Heartbeat
from tidegate.link.streams import MAX_ENVELOPE_BYTES
from tidegate.oip.grpc_server import add_oip_service, server_options
from tidegate.outcome import (
    ERRORS,
    BadAnswer,
    DeadlineExceeded,
    Disconnected,
    InternalError,
    ModelNotFound,
    Overloaded,
    ServeError,
    TooLarge,
    Unreachable,
)
from tidegate.types import Accepted, InferRequest, LoadReport, Parameter, Reply

pytestmark = pytest.mark.slow

MAX_MESSAGE_BYTES = 65 * 1024 * 1024
MIB = 1024 * 1024
OFFERS = (ModelOffer("echo", "3", (VariantOffer("fp32", "fp32"),)),)


class Server:
    """A target process in miniature: OIP and link service on one port, over a host that the test steers."""

    def __init__(self) -> None:
        self.host = EchoHost()
        self.link: LinkService | None = None
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
        add_oip_service(self._server, self.host, max_message_bytes=MAX_MESSAGE_BYTES)
        self.link = add_link_service(
            self._server,
            self.host,
            name="pool/a",
            epoch=lambda: 7,
            offers=lambda: OFFERS,
            load=lambda: LoadReport(7, 1, 0, 0, 0.0),
            heartbeat=Heartbeat(0.1, 10),
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        """Connections are cut at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


class Caller(Server):
    """The same host on a device that cannot be dialled: it dials `to`."""

    def __init__(self) -> None:
        super().__init__()
        self.to = ""
        self._dialling: Dialling | None = None

    async def start(self) -> None:
        self.link = LinkService(
            self.host,
            name="edge/a",
            epoch=lambda: 7,
            offers=lambda: OFFERS,
            load=lambda: LoadReport(7, 1, 0, 0, 0.0),
            heartbeat=Heartbeat(0.1, 10),
        )
        self._dialling = Dialling(self.link, Roads("always"), {self.to: ""}, dict, tls=None, draw=lambda: 0.5)
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

    async def until(self, holds: Callable[[], bool], within_s: float = 10.0) -> None:
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
async def called(dialled_in: DialledIn) -> AsyncIterator[str]:
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
    dialled_in = DialledIn(gateway_name="test", max_streams=4, heartbeat=Heartbeat(0.1, 10))
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
async def connected(kind: str) -> AsyncIterator[Bench]:
    if kind == "dialled":
        async with dialled() as bench:
            yield bench
        return
    server = Server()
    await server.start()
    bench = Bench(kind, server, None)  # type: ignore[arg-type]  # the target tells events to the bench it belongs to
    address = f"127.0.0.1:{server.port}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.kill)
        bench.target = await stack.enter_async_context(target_of(kind, address, bench.tell))
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


@pytest_asyncio.fixture(params=["link", "dialled", "unary", "foreign"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with connected(request.param) as bench:
        yield bench


@pytest_asyncio.fixture(params=["link", "dialled"])
async def link(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with connected(request.param) as bench:
        yield bench


# answers


async def test_an_answer_comes_with_its_tensors_and_its_callers_id(bench: Bench) -> None:
    reply = await bench.ask(echo_request(b"hello", id="r-1"))

    [output] = reply.response.outputs
    assert (output.name, output.shape, bytes(output.raw)) == ("y", (5,), b"hello")
    assert (reply.response.model_name, reply.response.id) == ("echo", "r-1")


async def test_stage_times_are_known_of_targets_of_our_own(bench: Bench) -> None:
    reply = await bench.ask()

    expected = {} if bench.kind == "foreign" else {"queue": 0.002, "compute": 0.005}
    assert reply.stages == pytest.approx(expected)


async def test_the_far_side_is_told_budget_priority_and_trace(bench: Bench) -> None:
    await bench.ask(budget_s=4.0, priority=3, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

    [call] = bench.server.host.calls
    [budget_s] = bench.server.host.budgets_s
    assert budget_s is not None
    assert 2.0 < budget_s <= 4.0
    assert call.priority == 3
    assert call.headers["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")


async def test_a_demanded_variant_is_demanded_of_targets_of_our_own(bench: Bench) -> None:
    reply = await bench.ask(variant="fp32")

    assert bench.server.host.calls[0].variant == ("" if bench.kind == "foreign" else "fp32")
    assert reply.variant == "fp32"


async def test_the_callers_own_hints_do_not_outlive_this_hop(bench: Bench) -> None:
    hints: dict[str, Parameter] = {
        "timeout": 1,
        "priority": 9,
        "tidegate-variant": "fp64",
        "temperature": 0.5,
        "strict": True,
    }
    request = replace(echo_request(), parameters=hints)

    await bench.ask(request, budget_s=5.0, priority=2)

    [call] = bench.server.host.calls
    assert (call.priority, call.variant) == (2, "")
    assert bench.server.host.budgets_s[0] == pytest.approx(5.0, abs=2.0)
    assert call.request.parameters["temperature"] == 0.5


async def test_an_answer_to_another_request_is_a_bad_answer(bench: Bench) -> None:
    bench.server.host.answered_by = "impostor"

    with pytest.raises(BadAnswer, match="asked echo, answered by impostor"):
        await bench.ask()


# errors


@pytest.mark.parametrize("error_class", ERRORS)
async def test_an_error_of_the_far_side_is_raised_here_under_its_own_class(
    bench: Bench, error_class: type[ServeError]
) -> None:
    bench.server.host.error = error_class("it is so", retry_after_s=0.5)

    with pytest.raises(error_class, match="it is so") as refusal:
        await bench.ask()

    if error_class in (Overloaded, Unreachable):
        assert refusal.value.retry_after_s == pytest.approx(0.5)


async def test_a_defect_of_the_far_side_is_an_internal_error_without_its_details(bench: Bench) -> None:
    bench.server.host.error = ZeroDivisionError("secret")

    with pytest.raises(InternalError) as refusal:
        await bench.ask()

    assert "secret" not in str(refusal.value)


async def test_a_model_that_the_far_side_does_not_have_is_not_found(bench: Bench) -> None:
    with pytest.raises(ModelNotFound):
        await bench.ask(echo_request(model="nothing"))


# endings


async def test_cancelling_reaches_the_far_side(bench: Bench) -> None:
    bench.server.host.gate.clear()
    asking = asyncio.create_task(bench.ask())
    await bench.server.host.begun.acquire()

    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(5):
        await bench.server.host.left.acquire()
    assert bench.server.host.cancelled == 1


async def test_a_budget_that_runs_out_ends_the_call_here_and_there(bench: Bench) -> None:
    bench.server.host.gate.clear()
    asked_at = clock.now()

    with pytest.raises(DeadlineExceeded):
        await bench.ask(budget_s=0.2)

    assert 0.15 < clock.now() - asked_at < 2.0
    async with asyncio.timeout(5):
        await bench.server.host.left.acquire()
    assert bench.server.host.cancelled == 1


async def test_without_a_budget_nothing_is_asked(bench: Bench) -> None:
    with pytest.raises(DeadlineExceeded):
        await bench.ask(budget_s=-1.0)

    assert bench.server.host.calls == []


async def test_a_server_that_dies_under_a_request_is_noticed_at_once(bench: Bench) -> None:
    bench.server.host.gate.clear()
    asking = [asyncio.create_task(bench.ask(budget_s=60.0)) for _ in range(3)]
    for _ in asking:
        await bench.server.host.begun.acquire()
    killed_at = clock.now()

    await bench.server.kill()

    for task in asking:
        with pytest.raises(Unreachable):
            await task
    assert clock.now() - killed_at < 2.0


async def test_a_dead_server_is_unreachable_at_once_and_used_again_when_it_is_back(bench: Bench) -> None:
    await bench.server.kill()
    await bench.until(lambda: bench.downs() == 1)
    asked_at = clock.now()
    with pytest.raises(Unreachable):
        await bench.ask(budget_s=60.0)
    assert clock.now() - asked_at < 2.0

    await bench.server.start()
    await bench.until(lambda: bench.ups() == 2)

    await bench.ask()
    assert bench.downs() == 1, "told once per change"


@pytest.mark.parametrize("kind", ["link", "unary"])
async def test_a_server_that_was_never_there_is_told_as_down_once(kind: str, unused_tcp_port: int) -> None:
    bench = Bench(kind, Server(), None)  # type: ignore[arg-type]
    async with target_of(kind, f"127.0.0.1:{unused_tcp_port}", bench.tell) as target:
        bench.target = target
        await bench.until(lambda: bench.downs() == 1)

        with pytest.raises(Unreachable):
            await bench.ask()
        assert (bench.ups(), bench.downs()) == (0, 1)


# size


async def test_bodies_of_20_mib_cross_both_ways(bench: Bench) -> None:
    raw = bytes(range(256)) * (20 * MIB // 256)

    reply = await bench.ask(echo_request(raw), budget_s=60.0)

    assert bytes(reply.response.outputs[0].raw) == raw


async def test_a_request_over_the_limit_is_refused_and_the_next_request_works(bench: Bench) -> None:
    with pytest.raises(TooLarge):
        await bench.ask(echo_request(bytes(MAX_MESSAGE_BYTES + 1)), budget_s=60.0)

    await bench.ask()


async def test_an_answer_over_the_limit_is_refused_and_the_next_request_works(bench: Bench) -> None:
    bench.server.host.answer_bytes = MAX_MESSAGE_BYTES + 1
    with pytest.raises(TooLarge):
        await bench.ask(budget_s=60.0)

    bench.server.host.answer_bytes = None
    await bench.ask()


# events


async def test_an_up_target_says_who_it_is_and_what_it_offers_and_its_round_trips_are_measured(bench: Bench) -> None:
    await bench.until(lambda: any(isinstance(event, LinkRtt) for event in bench.events))

    [up] = [event for event in bench.events if isinstance(event, LinkUp)]
    assert [(offer.name, offer.version) for offer in up.offers] == [("echo", "3")]
    if bench.kind == "link":
        assert (up.name, up.epoch, up.offers) == ("pool/a", 7, OFFERS)
    assert all(0.0 < event.rtt_s < 1.0 for event in bench.events if isinstance(event, LinkRtt))
    if bench.kind == "dialled":
        assert (up.name, up.epoch, up.offers, up.road) == ("edge/a", 7, OFFERS, "dialled out")
        assert repr(bench.target).startswith("<DeviceTarget edge/a dialled out: ")
    else:
        assert repr(bench.target).startswith(f"<{type(bench.target).__name__} pool/a at 127.0.0.1:")


# only the link


def asker_of(target: Target) -> Asker | None:
    if isinstance(target, DeviceTarget):
        assert target._accepted is not None
        return target._accepted._asker
    assert isinstance(target, LinkTarget)
    return target._asker


async def test_small_requests_pass_a_large_one_on_the_link(link: Bench) -> None:
    large = asyncio.create_task(link.ask(echo_request(bytes(40 * MIB)), budget_s=60.0))
    await clock.sleep(0)
    passed = 0
    while not large.done():
        await link.ask()
        passed += 1

    assert len((await large).response.outputs[0].raw) == 40 * MIB
    assert passed >= 5  # each waits for some Envelopes, not for the whole of it


async def test_an_accepted_request_is_told_so_before_its_answer(link: Bench) -> None:
    link.server.host.gate.clear()
    words: asyncio.Queue[Accepted] = asyncio.Queue()
    asking = asyncio.create_task(link.ask(on_accepted=words.put_nowait))

    assert await words.get() == Accepted(0, 0.25)

    link.server.host.gate.set()
    reply = await asking
    assert (reply.batch_size, reply.variant, reply.load) == (4, "fp32", LoadReport(7, 1, 0, 0, 0.0))


async def test_load_is_told_without_a_request(link: Bench) -> None:
    await link.until(lambda: LinkLoad(link.target.id, LoadReport(7, 1, 0, 0, 0.0), None) in link.events)


async def test_requests_of_one_moment_share_envelopes(link: Bench) -> None:
    asker = asker_of(link.target)
    assert asker is not None
    session = asker.session
    before = session.envelopes_sent

    await asyncio.gather(*[link.ask() for _ in range(100)])

    assert session.envelopes_sent - before < 30


@pytest.mark.parametrize(("steady_s", "waits"), [(0.0, 0), (3600.0, 1)], ids=["steady", "flapping"])
async def test_only_a_link_that_flaps_is_dialled_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, steady_s: float, waits: int
) -> None:
    monkeypatch.setattr("gateway.upstream.link.STEADY_S", steady_s)
    drawn: list[float] = []

    def draw() -> float:
        drawn.append(clock.now())
        return 0.1

    server = Server()
    await server.start()
    async with Link(("127.0.0.1", server.port)) as proxy:
        bench = Bench("link", server, None)  # type: ignore[arg-type]
        address = f"127.0.0.1:{proxy.port}"
        async with LinkTarget("pool/a", address, gateway_name="test", on_event=bench.tell, draw=draw) as target:
            bench.target = target
            await bench.until(lambda: bench.ups() == 1)
            server.host.gate.clear()
            asking = asyncio.create_task(bench.ask())
            await server.host.begun.acquire()

            proxy.partition("reset")
            proxy.heal()

            with pytest.raises(Disconnected):
                await asking
            assert bench.downs() == 1, "whoever looks for another place knows already that this one is gone"
            await bench.until(lambda: bench.ups() == 2)
    await server.kill()
    assert len(drawn) == waits


async def test_a_half_open_link_is_found_by_its_silence_and_replaced_on_a_new_connection() -> None:
    server = Server()
    await server.start()
    async with Link(("127.0.0.1", server.port)) as proxy:
        bench = Bench("link", server, None)  # type: ignore[arg-type]
        target = LinkTarget(
            "pool/a",
            f"127.0.0.1:{proxy.port}",
            gateway_name="test",
            on_event=bench.tell,
            draw=lambda: 0.5,
            ping_interval_s=0.1,
            silent_pings=3,
        )
        async with target:
            bench.target = target
            await bench.until(lambda: bench.ups() == 1)
            server.host.gate.clear()
            asking = asyncio.create_task(bench.ask(budget_s=60.0))
            await server.host.begun.acquire()
            frozen_at = clock.now()

            proxy.partition("blackhole")

            with pytest.raises(Unreachable, match="silent for 3 heartbeats"):
                await asking
            assert clock.now() - frozen_at < 2.0
            assert not target.connected

            proxy.heal()
            server.host.gate.set()
            await bench.until(lambda: bench.ups() == 2)
            await bench.ask()
            assert proxy.accepted >= 2
    await server.kill()


async def test_a_link_that_leaves_is_down_at_once_and_answers_what_it_has(link: Bench) -> None:
    link.server.host.gate.clear()
    asking = asyncio.create_task(link.ask())
    await link.server.host.begun.acquire()
    assert link.server.link is not None

    draining = asyncio.create_task(link.server.link.drain("update"))
    await link.until(lambda: link.downs() == 1)

    with pytest.raises(Unreachable, match="update"):
        await link.ask()
    link.server.host.gate.set()
    assert (await asking).response.model_name == "echo"
    async with asyncio.timeout(5):
        await draining
    assert link.downs() == 1


async def test_leaving_the_target_ends_what_is_pending_and_everything_behind_it() -> None:
    async with connected("link") as bench:
        bench.server.host.gate.clear()
        asking = asyncio.create_task(bench.ask())
        await bench.server.host.begun.acquire()
        assert isinstance(bench.target, LinkTarget)

        await bench.target.__aexit__(None, None, None)

        with pytest.raises(Unreachable):
            await asking
        async with asyncio.timeout(5):
            await bench.server.host.left.acquire()
        assert bench.server.host.cancelled == 1


# only plain OIP


async def test_a_foreign_server_is_described_as_a_manifest_with_open_lengths() -> None:
    async with connected("foreign") as bench:
        assert isinstance(bench.target, UnaryTarget)

        [manifest] = await bench.target.describe(["echo"])

        assert (manifest.name, manifest.version) == ("echo", "3")
        [x] = manifest.inputs
        assert (x.name, x.datatype, x.shape) == ("x", ECHO.inputs[0].datatype, ("x.0",))
        assert [variant.name for variant in manifest.variants] == ["default"]
        with pytest.raises(ModelNotFound):
            await bench.target.describe(["nothing"])
