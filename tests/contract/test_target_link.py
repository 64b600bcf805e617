"""What only targets on the link stream promise: passing, news without a request, redialling, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.core.fleet.link_events import LinkDown, LinkEvent, LinkLoad, LinkUp, RedialFailed
from gateway.core.fleet.target import TargetSpec
from gateway.targets.device import DeviceTarget
from gateway.targets.link import LinkTarget
from gateway.targets.target import Target
from tests.support.gateway.app import until
from tests.support.gateway.targets import AT_ONCE_S, MIB, Bench, Server, connected
from tests.support.serving.hosts import echo_request
from tidegate import clock
from tidegate.link.client import LinkClient
from tidegate.netsim.proxy.link import LinkProxy
from tidegate.outcome import Disconnected, Unreachable
from tidegate.types import Accepted, LoadReport

pytestmark = pytest.mark.slow


def client_of(target: Target) -> LinkClient | None:
    if isinstance(target, DeviceTarget):
        assert target.accepted is not None
        return target.accepted.client
    assert isinstance(target, LinkTarget)
    return target.client


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
    client = client_of(link.target)
    assert client is not None
    session = client.session
    before = session.envelopes_sent

    await asyncio.gather(*[link.ask() for _ in range(100)])

    assert session.envelopes_sent - before < 30


@pytest.mark.parametrize(("steady_s", "waits"), [(0.0, 0), (3600.0, 1)], ids=["steady", "flapping"])
async def test_only_a_link_that_flaps_is_dialled_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, steady_s: float, waits: int
) -> None:
    monkeypatch.setattr("gateway.targets.link.STEADY_S", steady_s)
    drawn: list[float] = []

    def draw() -> float:
        drawn.append(clock.now())
        return 0.1

    server = Server()
    await server.start()
    async with LinkProxy(("127.0.0.1", server.port)) as proxy:
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


@pytest.mark.parametrize("as_device", [False, True])
async def test_a_dial_that_fails_after_a_link_was_lost_is_told(as_device: bool) -> None:
    server = Server()
    await server.start()
    events: list[LinkEvent] = []

    def make(tell: Callable[[LinkEvent], None]) -> LinkTarget:
        address = f"127.0.0.1:{server.port}"
        return LinkTarget("edge/a", address, gateway_name="test", on_event=tell, draw=lambda: 0.1)

    spec = TargetSpec("edge/a", "edge", f"127.0.0.1:{server.port}")
    async with DeviceTarget(spec, make, events.append) if as_device else make(events.append):
        await until(lambda: any(isinstance(one, LinkUp) for one in events))
        await server.kill()
        await until(lambda: any(isinstance(one, RedialFailed) for one in events))
        kinds = [type(one) for one in events if isinstance(one, LinkDown | RedialFailed)]
    assert kinds[:2] == [LinkDown, RedialFailed]


async def test_a_half_open_link_is_found_by_its_silence_and_replaced_on_a_new_connection() -> None:
    server = Server()
    await server.start()
    async with LinkProxy(("127.0.0.1", server.port)) as proxy:
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
            assert clock.now() - frozen_at < AT_ONCE_S
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
    async with asyncio.timeout(30):
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
        async with asyncio.timeout(30):
            await bench.server.host.left.acquire()
        assert bench.server.host.cancelled == 1
