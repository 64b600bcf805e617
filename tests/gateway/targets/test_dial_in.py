"""A gateway's link port over real gRPC: cut links, NATs that forget, two paths to one device, and hostile diallers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from structlog.testing import capture_logs

from edge_agent.core.dial_policy import DialPlan
from edge_agent.core.name_dispute import NameDispute
from edge_agent.fleet.dialling import REDIAL_CAP_S, GatewayDialler
from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkUp
from gateway.core.fleet.target import TargetSpec
from gateway.targets.device import DeviceTarget
from gateway.targets.dial_in import DialInServer
from gateway.targets.link import LinkTarget
from tests.support.serving.hosts import EchoHost, echo_request
from tidegate import clock
from tidegate.link import frames
from tidegate.link.frames import Greeting
from tidegate.link.service import LinkService
from tidegate.link.session import KeepaliveTiming
from tidegate.link.streams import MAX_ENVELOPE_BYTES, DialledStream, LinkLost
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.proxy.link import LinkProxy
from tidegate.oip.grpc.server import server_options
from tidegate.types import LoadReport

pytestmark = pytest.mark.slow

BEAT = KeepaliveTiming(0.1, 3)
WITHIN_S = 30.0
FLOODS = 400


class Gateway:
    """A link port with one target per device that has dialled."""

    def __init__(self, dialled_in: DialInServer) -> None:
        self.dialled_in = dialled_in
        self.port = 0
        self.events: list[LinkEvent] = []
        self.targets: dict[str, DeviceTarget] = {}
        dialled_in.on_in = lambda link: self.target(link.id).accept(link)
        dialled_in.on_left = lambda link: self.target(link.id).left(link, link.why_not, in_order=False)

    def target(self, id: str) -> DeviceTarget:
        spec = TargetSpec(id, "edge", "-", static=False)
        return self.targets.setdefault(id, DeviceTarget(spec, None, self.events.append))

    def ups(self) -> int:
        return sum(isinstance(event, LinkUp) for event in self.events)


@asynccontextmanager
async def gateway(**options: object) -> AsyncIterator[Gateway]:
    one = Gateway(DialInServer(gateway_name="main", **{"max_streams": 8, "heartbeat": BEAT, **options}))  # type: ignore[arg-type]
    server = grpc.aio.server(options=server_options(MAX_ENVELOPE_BYTES))
    one.dialled_in.add_to(server)
    one.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield one
    finally:
        await server.stop(None)


def service(name: str = "edge/a", epoch: int = 1, *, beat: KeepaliveTiming = BEAT) -> LinkService:
    load = LoadReport(epoch, 1, 0, 0, 0.0)
    return LinkService(EchoHost(), name=name, epoch=lambda: epoch, offers=tuple, load=lambda: load, heartbeat=beat)


def dialling(
    link: LinkService, *ports: int, roads: DialPlan | None = None, dispute: NameDispute | None = None
) -> GatewayDialler:
    gateways = {f"127.0.0.1:{port}": "" for port in ports}
    return GatewayDialler(
        link, roads or DialPlan("always"), gateways, dict, tls=None, draw=lambda: 0.5, dispute=dispute
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await clock.sleep(0.01)


async def ask(target: DeviceTarget) -> None:
    await target.infer(
        echo_request(), variant="", budget_s=WITHIN_S, priority=0, traceparent="", on_accepted=lambda _word: None
    )


@asynccontextmanager
async def dialled(port: int) -> AsyncIterator[DialledStream]:
    """A stream whose frames the test writes itself."""
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    stream = DialledStream(channel)
    try:
        yield stream
    finally:
        stream.close()
        await channel.close(None)


async def ended(stream: DialledStream) -> str:
    """Why the gateway ended it."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while await stream.read() is not None:
                pass
    except LinkLost as lost:
        return str(lost)
    return "closed"


# the link comes and goes


async def test_a_device_is_served_again_after_its_link_was_cut_and_after_it_fell_silent() -> None:
    async with gateway() as main, LinkProxy(("127.0.0.1", main.port)) as link, dialling(service(), link.port):
        await until(lambda: main.ups() == 1)
        await ask(main.target("edge/a"))
        for number, kind in enumerate(("reset", "blackhole", "close"), start=2):
            link.partition(kind)  # type: ignore[arg-type]
            await until(lambda: isinstance(main.events[-1], LinkDown))
            link.heal()
            await until(lambda number=number: main.ups() == number)  # type: ignore[misc]
            await ask(main.target("edge/a"))
        assert len(main.dialled_in.links) == 1


async def test_what_a_nat_has_forgotten_is_found_by_its_silence_and_dialled_again() -> None:
    forgetful = StreamProfile(delay_ms=1.0, nat_idle_s=0.05)  # sooner than the pings that keep a binding
    async with (
        gateway() as main,
        LinkProxy(("127.0.0.1", main.port)) as link,
        dialling(service(), link.port),
    ):
        link.apply(forgetful)
        await until(lambda: main.ups() >= 3)
        assert link.accepted >= 3, "each time on a new connection, and so a new binding"
        assert len(main.dialled_in.links) <= 1


async def test_a_path_as_long_as_a_satellites_comes_up() -> None:
    async with gateway(heartbeat=KeepaliveTiming(1.0, 10)) as main, LinkProxy(("127.0.0.1", main.port)) as link:
        link.apply(StreamProfile(delay_ms=300.0))
        async with dialling(service(beat=KeepaliveTiming(1.0, 10)), link.port):
            await until(lambda: main.ups() == 1)
            await ask(main.target("edge/a"))


async def test_a_device_serves_every_gateway_it_is_told_of() -> None:
    link = service()
    async with gateway() as one, gateway() as two, dialling(link, one.port, two.port):
        await until(lambda: one.ups() == two.ups() == 1)
        await asyncio.gather(ask(one.target("edge/a")), ask(two.target("edge/a")))
        assert link.streams == 2
        assert link.callers == frozenset(), "both were dialled by the device"


# two agents


async def test_of_two_agents_that_dial_under_one_name_the_longer_running_one_stays_and_the_other_backs_off() -> None:
    kept, refused = NameDispute(lambda: 0.0), NameDispute(lambda: 0.0)
    first = agent("boot-a", epoch=1, uptime_s=100.0)  # the lesser epoch: its clock was never set
    second = agent("boot-b", epoch=7, uptime_s=1.0)
    with capture_logs() as lines:
        async with gateway() as main, dialling(first, main.port, dispute=kept):
            await until(lambda: main.ups() == 1)
            async with dialling(second, main.port, dispute=refused):
                await until(lambda: refused.standing_down(clock.now()))
                await until(lambda: first.streams == 1 and second.streams == 0)
                await ask(main.target("edge/a"))
                (conflict,) = main.dialled_in.claims.standing(clock.now())
                assert (conflict.kept.boot, conflict.refused.boot) == ("boot-a", "boot-b")
                assert (conflict.kept.epoch, conflict.refused.epoch) == (1, 7)
                assert not kept.standing_down(clock.now())
                ups = main.ups()
                await clock.sleep(2.5 * REDIAL_CAP_S)
                assert main.ups() == ups and first.streams == 1, "it does not dial again at once"
    (told,) = [line for line in lines if line["event"].startswith("another agent has this device's name")]
    assert told["device"] == "edge/a" and told["epoch"] == 7 and "epoch 1" in told["reason"]


async def test_an_agent_that_is_restarted_again_and_again_is_no_conflict() -> None:
    async with gateway() as main:
        for start in range(1, 5):
            async with dialling(agent(f"boot-{start}", epoch=start, uptime_s=0.0), main.port):
                await until(lambda start=start: main.ups() == start)  # type: ignore[misc]
        assert main.dialled_in.claims.standing(clock.now()) == []


def agent(boot: str, *, epoch: int, uptime_s: float) -> LinkService:
    load, began_at = LoadReport(epoch, 1, 0, 0, 0.0), clock.now() - uptime_s
    return LinkService(
        EchoHost(), name="edge/a", epoch=lambda: epoch, offers=tuple, load=lambda: load, heartbeat=BEAT, boot=boot,
        uptime_s=lambda: clock.now() - began_at,
    )  # fmt: skip


# two roads


async def test_with_both_paths_there_is_one_target_that_prefers_the_direct_one_and_falls_back() -> None:
    host = EchoHost()
    load = LoadReport(1, 1, 0, 0, 0.0)
    link = LinkService(host, name="edge/a", epoch=lambda: 1, offers=tuple, load=lambda: load, heartbeat=BEAT)
    device = grpc.aio.server(options=server_options(MAX_ENVELOPE_BYTES))
    link.add_to(device)
    port = device.add_insecure_port("127.0.0.1:0")
    await device.start()
    async with gateway() as main, LinkProxy(("127.0.0.1", port)) as direct:
        direct.partition("reset")
        spec = TargetSpec("edge/a", "edge", f"127.0.0.1:{direct.port}", static=False)

        def make(tell: Callable[[LinkEvent], None]) -> LinkTarget:
            return LinkTarget(
                "edge/a", spec.address, gateway_name="main", on_event=tell, draw=lambda: 0.1, ping_interval_s=0.1
            )

        target = main.targets["edge/a"] = DeviceTarget(spec, make, main.events.append)
        async with target, dialling(link, main.port):
            await until(lambda: main.ups() == 1)
            assert [event.path_kind for event in main.events if isinstance(event, LinkUp)] == ["dialled out"]

            direct.heal()
            await until(lambda: main.ups() == 2)
            assert link.streams == 2
            before = len(main.events)
            await ask(target)
            assert not any(isinstance(event, LinkDown) for event in main.events[1:before])

            direct.partition("reset")
            await until(lambda: main.ups() == 3)
            roads = [event.path_kind for event in main.events if isinstance(event, LinkUp)]
            assert roads == ["dialled out", "direct", "dialled out"]
            await ask(target)
    await device.stop(None)


async def test_a_device_leaves_the_stream_it_dialled_once_the_gateway_comes_by_itself() -> None:
    host = EchoHost()
    device = grpc.aio.server(options=server_options(MAX_ENVELOPE_BYTES))
    load = LoadReport(1, 1, 0, 0, 0.0)
    link = LinkService(host, name="edge/a", epoch=lambda: 1, offers=tuple, load=lambda: load, heartbeat=BEAT)
    link.add_to(device)
    port = device.add_insecure_port("127.0.0.1:0")
    await device.start()
    roads = DialPlan("auto", patience_s=0.0, steady_s=0.1)
    async with gateway() as main, dialling(link, main.port, roads=roads) as out:
        await until(lambda: main.ups() == 1)
        host.gate.clear()
        asking = asyncio.create_task(ask(main.target("edge/a")))
        await host.begun.acquire()

        direct = LinkTarget(
            "edge/a", f"127.0.0.1:{port}", gateway_name="main", on_event=lambda _event: None, draw=lambda: 0.5
        )
        async with direct:
            await until(lambda: link.callers == {"gateway/main"})
            await until(lambda: isinstance(main.events[-1], LinkDown))
            assert not asking.done(), "what was asked on the road that is left is answered there"
            host.gate.set()
            await asking
            await until(lambda: not out.up and link.streams == 1)
    await device.stop(None)


# hostile


async def test_an_older_session_is_refused_while_a_newer_is_here_and_a_newer_takes_the_place() -> None:
    async with gateway() as main:
        async with dialling(service(epoch=5), main.port):
            await until(lambda: main.ups() == 1)
            async with dialled(main.port) as old:
                await old.write(frames.hello(Greeting("edge/a", 4, "")))
                assert "a newer session of edge/a is here" in await ended(old)
            async with dialled(main.port) as new:
                await new.write(frames.hello(Greeting("edge/a", 6, "")))
                await until(lambda: main.dialled_in.links["edge/a"].greeting.epoch == 6)  # type: ignore[union-attr]
        assert len(main.targets) == 1


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("pool/a", True, "only devices dial here"),
        ("edge/../x", True, "only devices dial here"),
        ("edge/a", False, "not known to this fleet"),
    ],
)
async def test_who_is_not_let_in_hears_why_and_leaves_nothing_behind(name: str, known: bool, words: str) -> None:
    async with gateway(known=lambda _id: known) as main, dialled(main.port) as stream:
        await stream.write(frames.hello(Greeting(name, 1, "")))
        assert words in await ended(stream)
        assert not main.dialled_in.links
        assert not main.events


async def test_a_flood_of_hellos_on_one_stream_ends_that_stream() -> None:
    """Many times, for what counts is whether the gateway's own hello is still being written when a stream ends."""
    async with gateway() as main:

        async def flood(number: int) -> str:
            async with dialled(main.port) as stream:
                await stream.write(frames.hello(Greeting(f"edge/{number}", 1, "")) * 1000)
                return await ended(stream)

        for first in range(0, FLOODS, 8):
            assert await asyncio.gather(*map(flood, range(first, first + 8))) == ["closed"] * 8
        await until(lambda: not main.dialled_in.links)


async def test_streams_that_say_nothing_are_bounded_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.targets.dial_in.MAX_UNGREETED", 2)
    monkeypatch.setattr("gateway.targets.dial_in.GREET_WITHIN_S", 0.5)
    async with gateway() as main, dialled(main.port) as one, dialled(main.port) as two:
        await one.write(b"")
        await two.write(b"")
        await until(lambda: main.dialled_in.ungreeted == 2)
        async with dialled(main.port) as three:
            assert "RESOURCE_EXHAUSTED" in await ended(three)

        async def chatter(stream: DialledStream) -> None:
            """Envelopes without a frame: not silent, and never a hello."""
            with contextlib.suppress(LinkLost):
                while True:
                    await stream.write(b"")
                    await clock.sleep(0.05)

        talking = asyncio.create_task(chatter(one))
        await ended(one)
        await until(lambda: main.dialled_in.ungreeted == 0)
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


async def test_refused_diallers_do_not_fill_the_log() -> None:
    async with gateway(known=lambda _id: False) as main:
        with capture_logs() as logs:
            for _ in range(20):
                async with dialled(main.port) as stream:
                    await stream.write(frames.hello(Greeting("edge/a", 1, "")))
                    assert "not known to this fleet" in await ended(stream)
        said = [one for one in logs if one["event"] == "refused a device that dialled"]
        assert len(said) + sum(one["unsaid"] for one in said) + main.dialled_in.unsaid == 20


async def test_devices_beyond_the_most_are_refused_and_come_in_when_one_has_left() -> None:
    async with gateway(max_streams=1) as main:
        async with dialled(main.port) as first:
            await first.write(frames.hello(Greeting("edge/a", 1, "")))
            await until(lambda: "edge/a" in main.dialled_in.links)
            async with dialled(main.port) as second:
                await second.write(frames.hello(Greeting("edge/b", 1, "")))
                assert "max_dialled_in" in await ended(second)
        async with dialling(service("edge/b"), main.port):
            await until(lambda: "edge/b" in main.dialled_in.links)
