"""What a link takes, on virtual time: delay, capacity, loss and change, for every connection over it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from tests.support.loop import on_virtual_time
from tests.tidegate.netsim.proxy.ends import CLEAR, Client, Recorder, linked, pattern, pour, source, upstream
from tidegate import clock
from tidegate.netsim.links.profile import CapacityRecording, Jitter
from tidegate.netsim.links.stream import StreamProfile
from tidegate.netsim.links.trace import CapacityTrace
from tidegate.netsim.proxy.link import LinkProxy


@on_virtual_time
async def test_bytes_take_the_time_that_the_link_takes_both_ways() -> None:
    async with linked(profile=StreamProfile(delay_ms=35.0)) as link, Client(link) as client:
        assert await client.ask() == pytest.approx(0.07, abs=0.001)


@pytest.mark.slow
@on_virtual_time
async def test_a_delay_takes_no_capacity() -> None:
    async with linked(profile=StreamProfile(delay_ms=500.0)) as link, Client(link) as client:
        assert await client.ask(pattern(2_000_000)) == pytest.approx(1.0, abs=0.01)


@on_virtual_time
async def test_a_slow_link_spreads_bytes_over_time() -> None:
    async with linked(source(1_000_000), StreamProfile(delay_ms=0.0, from_mbit=8.0)) as link, Client(link) as client:
        began_at, got = clock.now(), 0
        seen: list[tuple[float, int]] = []
        while piece := await client.reader.read(65536):
            got += len(piece)
            seen.append((clock.now() - began_at, got))
    assert got == 1_000_000
    assert all(abs(total - at * 1e6) < 4000 for at, total in seen)  # the line of 8 Mbit/s, never off by 4 ms


@pytest.mark.slow
@on_virtual_time
async def test_connections_share_the_capacity_and_do_not_each_have_it() -> None:
    async with (
        linked(profile=StreamProfile(delay_ms=0.0, to_mbit=8.0, queue_kbyte=64)) as link,
        Client(link) as one,
        Client(link) as other,
    ):
        took = await asyncio.gather(one.ask(pattern(500_000)), other.ask(pattern(500_000)))
    assert max(took) == pytest.approx(1.0, abs=0.02)
    assert min(took) > 0.9  # and none is starved by the other


@on_virtual_time
async def test_a_full_queue_delays_everybody_by_its_length() -> None:
    profile = StreamProfile(delay_ms=0.0, to_mbit=8.0, queue_kbyte=200)
    recorder = Recorder()
    async with linked(recorder, profile) as link, Client(link) as bulk:
        bulk.writer.write(pattern(1_000_000))
        await clock.sleep(0.3)
        async with Client(link) as small:
            began_at = clock.now()
            small.writer.write(b"hello")
            await recorder.until(lambda: len(recorder.got) == 2 and len(recorder.got[1]) == 5)
            assert clock.now() - began_at == pytest.approx(0.2, abs=0.03)  # 200 kB at 1 MB/s


@on_virtual_time
async def test_a_recorded_link_gives_each_opportunity_at_its_time_and_begins_anew() -> None:
    trace = CapacityTrace([0.1, 0.1, 0.25, 0.4])
    async with upstream(source(9_000)) as address, LinkProxy(address) as link:
        link.apply(
            StreamProfile(delay_ms=0.0, recording=CapacityRecording("a", "b", offset_s=0.0)),
            traces=(CapacityTrace([1e-3]), trace),
        )
        began_at = clock.now()
        async with Client(link) as client:
            at = []
            for _ in range(6):
                await client.reader.readexactly(1500)
                at.append(round(clock.now() - began_at, 3))
    assert at == [0.1, 0.1, 0.25, 0.4, 0.5, 0.5]


@pytest.mark.slow
@on_virtual_time
async def test_at_every_instant_a_recorded_link_has_given_exactly_what_was_recorded() -> None:
    # However reads have cut the stream: a segment across two opportunities would be late by a part of a packet.
    trace = CapacityTrace([0.05 * number for number in range(1, 101)])
    async with linked(pour, CLEAR) as link:
        link.partition("blackhole", "from")
        async with Client(link) as client:
            await clock.sleep(1.0)
            recording = CapacityRecording("a", "b", offset_s=0.0)
            link.apply(StreamProfile(delay_ms=0.0, recording=recording), traces=(trace, trace))
            began_at, got = clock.now(), 0
            link.heal()
            while clock.now() - began_at < 20.0:
                got += len(await client.reader.read(65536))
                assert got == 1500 * round((clock.now() - began_at) / 0.05)


@on_virtual_time
async def test_loss_stalls_the_stream_and_removes_no_byte() -> None:
    # Toxiproxy's proposed packet loss (PR 739) removes bytes from the stream, which no network does to TCP.
    async with linked(profile=StreamProfile(delay_ms=5.0, loss=0.2)) as link, Client(link) as client:
        waits = [await client.ask(pattern(500)) for _ in range(60)]
        assert link.state()["losses"] > 0
    assert min(waits) == pytest.approx(0.01, abs=0.002)
    assert max(waits) >= 0.2  # a retransmission timeout


@on_virtual_time
async def test_what_one_connection_lost_does_not_hold_up_another_on_the_same_radio() -> None:
    profile = StreamProfile(delay_ms=1.0, loss=0.3, to_mbit=50.0)
    async with linked(profile=profile) as link, Client(link) as one, Client(link) as other:

        async def asks(client: Client) -> list[float]:
            return [await client.ask(b"x") for _ in range(40)]

        waits, others = await asyncio.gather(asks(one), asks(other))
    assert min(waits) < 0.01
    assert min(others) < 0.01
    assert any(earlier < 0.01 and later > 0.2 for earlier, later in pairwise(waits))


@on_virtual_time
async def test_a_change_reaches_every_live_connection_at_once() -> None:
    # Toxiproxy #148: a toxic added after the proxy reaches old connections only with their next read.
    async with linked(profile=StreamProfile(delay_ms=5.0)) as link:
        clients = [Client(link) for _ in range(20)]
        for client in clients:
            await client.__aenter__()
            await client.ask()

        link.apply(StreamProfile(delay_ms=200.0))

        waits = await asyncio.gather(*(client.ask() for client in clients))
        assert min(waits) >= 0.4
        for client in clients:
            await client.__aexit__()


@on_virtual_time
async def test_bytes_on_their_way_keep_their_instant_and_bytes_in_the_queue_take_the_new_link() -> None:
    profile = StreamProfile(delay_ms=100.0, to_mbit=0.8)  # 100 kB/s
    recorder = Recorder()
    async with linked(recorder, profile) as link, Client(link) as client:
        client.writer.write(pattern(100_000))
        await clock.sleep(0.25)
        link.apply(StreamProfile(delay_ms=0.0))
        began_at = clock.now()
        await recorder.until(lambda: len(recorder.got[0]) == 100_000)
        assert clock.now() - began_at == pytest.approx(0.1, abs=0.02)  # behind the last of those on their way
        assert recorder.got[0] == pattern(100_000)


@pytest.mark.slow
@on_virtual_time
async def test_a_link_that_changes_all_the_time_loses_nothing_and_starves_nobody() -> None:
    recorder, profile = Recorder(), StreamProfile(delay_ms=100.0, to_mbit=8.0, queue_kbyte=64)
    async with linked(recorder, profile) as link, Client(link) as client:
        client.writer.write(pattern(1_000_000))
        client.writer.write_eof()
        for number in range(60):
            await clock.sleep(0.05)
            if number % 3 == 0:
                link.put("worse", StreamProfile(delay_ms=20.0, loss=0.01), "to")
            elif number % 3 == 1:
                link.remove("worse")
            else:
                link.apply(profile)
        await recorder.until(lambda: recorder.ends == ["eof"])
        assert recorder.got == [pattern(1_000_000)]


@on_virtual_time
async def test_a_toxic_on_one_direction_leaves_the_other_alone() -> None:
    recorder = Recorder()
    async with linked(recorder, StreamProfile(delay_ms=0.0, from_mbit=8.0)) as link, Client(link) as client:
        link.put("slow upload", StreamProfile(delay_ms=300.0), "to")
        began_at = clock.now()
        client.writer.write(b"x")
        await recorder.until(lambda: recorder.got == [b"x"])
        assert clock.now() - began_at == pytest.approx(0.3, abs=0.01)
        assert link.toxics == ("slow upload",)
        link.remove("slow upload")
        assert link.toxics == ()


@on_virtual_time
async def test_the_same_seed_gives_the_same_link_and_another_seed_another() -> None:
    async def waits(seed: int) -> list[float]:
        profile = StreamProfile(delay_ms=10.0, jitter=Jitter("lognormal", 5.0, 1.0, correlation=0.5), loss=0.05)
        async with linked(profile=profile, seed=seed) as link, Client(link) as client:
            return [round(await client.ask(), 6) for _ in range(30)]

    first = await waits(7)
    assert await waits(7) == first
    assert await waits(8) != first


@on_virtual_time
async def test_one_connection_s_chance_does_not_depend_on_the_others() -> None:
    async def waits(busy: bool) -> list[float]:
        profile = StreamProfile(delay_ms=10.0, jitter=Jitter("lognormal", 5.0))
        async with linked(profile=profile) as link, Client(link) as client, Client(link) as other:
            if busy:
                await other.ask()
                await other.ask()
            return [round(await client.ask(), 4) for _ in range(10)]

    assert await waits(busy=False) == await waits(busy=True)
