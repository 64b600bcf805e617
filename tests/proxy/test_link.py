"""Links in front of real sockets: each fault as a client sees it, and changes under live connections.

Most tests run on virtual time: the kernel hands loopback bytes on within the call that sends them, so nothing real is
waited for, and an outage of an hour takes no time.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import struct
from itertools import pairwise
from statistics import median

import pytest

from simulator.links.profile import Alternation, Jitter, Recording
from simulator.links.stream import LimitSpec, StreamProfile
from simulator.links.trace import Trace
from simulator.proxy.events import EventLog
from simulator.proxy.link import Link, LinkError
from tests.proxy.ends import CLEAR, Client, Recorder, echo, linked, pattern, source, upstream
from tests.support.loop import on_virtual_time
from tidegate import clock


@on_virtual_time
async def test_bytes_take_the_time_that_the_link_takes_both_ways() -> None:
    async with linked(profile=StreamProfile(delay_ms=35.0)) as link, Client(link) as client:
        assert await client.ask() == pytest.approx(0.07, abs=0.001)


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
    trace = Trace([0.1, 0.1, 0.25, 0.4])
    async with upstream(source(9_000)) as address, Link(address) as link:
        link.apply(
            StreamProfile(delay_ms=0.0, recording=Recording("a", "b", offset_s=0.0)), traces=(Trace([1e-3]), trace)
        )
        began_at = clock.now()
        async with Client(link) as client:
            at = []
            for _ in range(6):
                await client.reader.readexactly(1500)
                at.append(round(clock.now() - began_at, 3))
    assert at == [0.1, 0.1, 0.25, 0.4, 0.5, 0.5]


@on_virtual_time
async def test_at_every_instant_a_recorded_link_has_given_exactly_what_was_recorded() -> None:
    # However reads have cut the stream: a segment across two opportunities would be late by a part of a packet.
    trace = Trace([0.05 * number for number in range(1, 101)])
    async with linked(pour, CLEAR) as link:
        link.partition("blackhole", "from")
        async with Client(link) as client:
            await clock.sleep(1.0)
            recording = Recording("a", "b", offset_s=0.0)
            link.apply(StreamProfile(delay_ms=0.0, recording=recording), traces=(trace, trace))
            began_at, got = clock.now(), 0
            link.heal()
            while clock.now() - began_at < 20.0:
                got += len(await client.reader.read(65536))
                assert got == 1500 * round((clock.now() - began_at) / 0.05)


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(pattern(10_001))
        await writer.drain()


@on_virtual_time
async def test_a_blackhole_tells_nobody_and_gives_everything_back_when_healed() -> None:
    async with linked(profile=StreamProfile(delay_ms=10.0)) as link, Client(link) as client:
        await client.ask()
        link.partition("blackhole")
        client.writer.write(b"are you there")
        async with Client(link) as newcomer:
            newcomer.writer.write(b"anybody?")
            assert await client.hears_nothing_for(3600.0)
            assert await newcomer.hears_nothing_for(1.0)

            healed_at = clock.now()
            link.heal()

            assert await client.reader.readexactly(13) == b"are you there"
            assert await newcomer.reader.readexactly(8) == b"anybody?"
            assert clock.now() - healed_at < 0.1


@on_virtual_time
async def test_a_blackhole_holds_what_was_on_its_way() -> None:
    async with linked(profile=StreamProfile(delay_ms=100.0)) as link, Client(link) as client:
        client.writer.write(b"x")
        await clock.sleep(0.05)
        link.partition("blackhole")
        assert await client.hears_nothing_for(10.0)


@on_virtual_time
async def test_on_a_half_open_link_requests_arrive_and_answers_vanish() -> None:
    recorder = Recorder()
    async with linked(recorder, CLEAR) as link, Client(link) as client:
        link.partition("blackhole", "from")
        client.writer.write(b"request")
        await recorder.until(lambda: recorder.got == [b"request"])
        assert await client.hears_nothing_for(60.0)


@on_virtual_time
async def test_a_closed_end_is_not_heard_of_through_a_blackhole() -> None:
    recorder = Recorder()
    async with linked(recorder, CLEAR) as link:
        async with Client(link) as client:
            client.writer.write(b"last words")
            await recorder.until(lambda: recorder.got == [b"last words"])
            link.partition("blackhole")
        await clock.sleep(600.0)
        assert recorder.ends == []
        link.heal()
        await recorder.until(lambda: recorder.ends == ["eof"])


@pytest.mark.parametrize(
    ("kind", "old", "new"), [("reset", "reset", "reset"), ("close", "eof", "eof"), ("refuse", "reset", "refused")]
)
@on_virtual_time
async def test_resets_closes_and_refusals_are_told_apart_by_a_client(kind: str, old: str, new: str) -> None:
    async with linked(profile=StreamProfile(delay_ms=5.0)) as link, Client(link) as client:
        await client.ask()

        link.partition(kind)  # type: ignore[arg-type]

        assert await client.end() == old
        assert await _newcomer(link) == new
        link.heal()
        async with Client(link) as after:
            await after.ask()


async def _newcomer(link: Link) -> str:
    try:
        async with Client(link) as client:
            return await client.end()
    except ConnectionRefusedError:
        return "refused"
    except ConnectionResetError:
        return "reset"


@on_virtual_time
async def test_a_silent_server_accepts_and_never_answers_while_old_connections_live() -> None:
    # nice-grpc #904: the connection is there, HTTP/2's SETTINGS never come, and a client without a limit waits for ever
    async with linked(profile=CLEAR) as link, Client(link) as old:
        await old.ask()
        link.partition("silent")
        async with Client(link) as new:
            new.writer.write(b"PRI * HTTP/2.0")
            assert await new.hears_nothing_for(600.0)
            await old.ask()
            link.heal()
            assert await new.hears_nothing_for(600.0)
        async with Client(link) as healed:
            await healed.ask()


@pytest.mark.slow
async def test_connecting_to_a_deaf_port_times_out_and_works_again_after_healing() -> None:
    async with linked(profile=CLEAR) as link, Client(link) as old:
        await old.ask()
        link.partition("deaf")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), Client(link):
                pass
        await old.ask()
        link.heal()
        async with Client(link) as new:
            await new.ask()
        assert link.accepted == 2


@on_virtual_time
async def test_an_upstream_that_refuses_resets_the_client() -> None:
    async with upstream(echo) as address:
        pass
    async with Link(address) as link:
        assert await _newcomer(link) == "reset"
        assert [event.what for event in link.log.events()][-2:] == ["refused", "close"]


@on_virtual_time
async def test_half_closed_connections_work() -> None:
    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = await reader.read()
        writer.write(f"{len(whole)} bytes".encode())
        writer.write_eof()

    async with linked(answer_at_the_end, StreamProfile(delay_ms=20.0)) as link, Client(link) as client:
        client.writer.write(pattern(300_000))
        client.writer.write_eof()
        assert await client.reader.read() == b"300000 bytes"


@on_virtual_time
async def test_the_end_of_a_stream_comes_behind_its_bytes_and_as_late_as_they() -> None:
    async with linked(source(1000), StreamProfile(delay_ms=400.0)) as link, Client(link) as client:
        began_at = clock.now()
        assert await client.reader.read() == pattern(1000)
        assert clock.now() - began_at == pytest.approx(0.4, abs=0.01)


@on_virtual_time
async def test_a_reset_of_one_end_is_a_reset_for_the_other_behind_what_was_sent_before() -> None:
    recorder = Recorder()
    async with linked(recorder, StreamProfile(delay_ms=30.0)) as link:
        async with Client(link) as client:
            client.writer.write(b"sent before")
            await clock.sleep(0.001)
            client.reset()
        await recorder.until(lambda: bool(recorder.ends))
    assert recorder.got == [b"sent before"]
    assert recorder.ends == ["reset"]


@pytest.mark.parametrize(("then", "end"), [("close", "eof"), ("reset", "reset")])
@pytest.mark.parametrize("size", [0, 1, 1499, 100_001])
@on_virtual_time
async def test_a_connection_breaks_at_the_exact_byte(size: int, then: str, end: str) -> None:
    recorder = Recorder()
    async with linked(recorder) as link:
        link.put("cut", StreamProfile(delay_ms=1.0, limit=LimitSpec(size, then)), "to")  # type: ignore[arg-type]
        async with Client(link) as client:
            client.writer.write(pattern(300_000))
            assert await client.end() == end
        await recorder.until(lambda: bool(recorder.ends))
    assert recorder.got == [pattern(300_000)[:size]]
    assert recorder.ends == [end]


@on_virtual_time
async def test_a_connection_that_stalls_at_a_byte_is_silent_afterwards_in_that_direction_only() -> None:
    async with linked(profile=CLEAR) as link:
        link.put("cut", StreamProfile(delay_ms=0.0, limit=LimitSpec(1000, "stall")), "to")
        async with Client(link) as client:
            client.writer.write(pattern(5000))
            assert await client.reader.readexactly(1000) == pattern(1000)
            assert await client.hears_nothing_for(3600.0)
        assert link.totals()["to"]["dropped"] == {"limit": 4000}


@on_virtual_time
async def test_a_nat_forgets_a_silent_connection_and_tells_nobody() -> None:
    recorder = Recorder()
    async with linked(recorder, StreamProfile(delay_ms=5.0, nat_idle_s=60.0)) as link, Client(link) as client:
        for _ in range(3):  # whoever pings within the minute is remembered
            client.writer.write(b"ping")
            await clock.sleep(59.0)
        await clock.sleep(2.0)

        client.writer.write(b"lost")
        await clock.sleep(600.0)

        assert recorder.got == [b"pingpingping"]
        assert recorder.ends == []
        assert [event.what for event in link.log.events("forgot")] == ["forgot"]
        assert link.totals()["to"]["dropped"] == {"nat": 4}


@on_virtual_time
async def test_a_flapping_link_holds_bytes_while_it_is_gone_and_loses_none() -> None:
    profile = StreamProfile(delay_ms=1.0, outages=Alternation(every_s=1.0, for_s=0.4, periodic=True))
    async with linked(profile=profile) as link, Client(link) as client:
        waits = []
        for _ in range(200):
            waits.append(await client.ask())
            await clock.sleep(0.03)
    assert min(waits) < 0.01
    assert max(waits) > 0.2
    assert median(waits) < 0.1


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


@on_virtual_time
async def test_a_sink_that_does_not_read_holds_its_sender_back_and_the_proxy_stays_small() -> None:
    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await clock.sleep(1e6)

    async with linked(never_reads, CLEAR, buffer_bytes=100_000) as link, Client(link) as client:
        client.writer.transport.set_write_buffer_limits(high=1)  # type: ignore[attr-defined]
        client.writer.write(bytes(20_000_000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await client.writer.drain()
        assert link.totals()["to"]["held"] <= 100_000 + 65536


@on_virtual_time
async def test_a_sink_that_reads_again_while_the_link_is_cut_does_not_spin() -> None:
    reads = asyncio.Event()

    async def reads_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await reads.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        while await reader.read(65536):
            pass

    async with linked(reads_later, CLEAR) as link, Client(link) as client:
        client.writer.write(bytes(20_000_000))
        await clock.sleep(1.0)
        link.partition("blackhole")
        reads.set()
        async with asyncio.timeout(5.0):  # virtual time stands still while anything spins
            await clock.sleep(1.0)
        link.heal()


@on_virtual_time
async def test_without_file_descriptors_newcomers_wait_until_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked(profile=CLEAR) as link:
        listener = link._door._listener
        assert listener is not None
        tries = []

        class Exhausted:
            def __getattr__(self, name: str) -> object:
                return getattr(listener, name)

            def accept(self) -> object:
                tries.append(clock.now())
                if len(tries) < 3:
                    raise OSError(errno.EMFILE, "Too many open files")
                return listener.accept()

        monkeypatch.setattr(link._door, "_listener", Exhausted())
        async with Client(link) as client:
            await client.ask()
        assert tries[1] - tries[0] >= 0.2  # and not at once, for ever


@on_virtual_time
async def test_shutdown_leaves_no_socket_no_task_and_no_timer() -> None:
    gc.collect()
    before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    async with upstream(echo) as address:
        async with Link(address) as link:
            link.apply(StreamProfile(delay_ms=1000.0))
            clients = [Client(link) for _ in range(5)]
            for client in clients:
                await client.__aenter__()
                client.writer.write(b"never comes")
            link.partition("silent")
            mute = Client(link)
            await mute.__aenter__()
            await clock.sleep(0.1)
        assert {await client.end() for client in [*clients, mute]} == {"reset"}
        for client in [*clients, mute]:
            await client.__aexit__()
    assert link.totals()["to"]["dropped"] == {"shutdown": 55}
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(asyncio.all_tasks()) == tasks


@on_virtual_time
async def test_over_its_limit_of_connections_a_link_resets_newcomers() -> None:
    async with linked(profile=CLEAR, max_connections=1) as link, Client(link) as first:
        await first.ask()
        assert await _newcomer(link) == "reset"
        await first.ask()


@on_virtual_time
async def test_orders_that_make_no_sense_are_refused_in_words() -> None:
    async with linked(profile=CLEAR) as link:
        with pytest.raises(LinkError, match="no partition 'tsunami'"):
            link.partition("tsunami")  # type: ignore[arg-type]
        with pytest.raises(LinkError, match="direction must be"):
            link.partition("blackhole", "up")  # type: ignore[arg-type]
        with pytest.raises(LinkError, match="reset has no direction"):
            link.partition("reset", "to")
        with pytest.raises(LinkError, match="no toxic 'slow'"):
            link.remove("slow")
        with pytest.raises(LinkError, match="'base' is the link itself"):
            link.put("base", CLEAR, "to")
        with pytest.raises(LinkError, match="files were not read"):
            link.apply(StreamProfile(recording=Recording("a", "b")))
        assert link.broken is None


@on_virtual_time
async def test_an_upstream_that_resets_in_the_middle_resets_the_client_behind_what_it_sent() -> None:
    async def says_and_resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half an ans")
        await reader.readexactly(1)
        taken: socket.socket = writer.get_extra_info("socket")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with linked(says_and_resets, StreamProfile(delay_ms=30.0)) as link, Client(link) as client:
        client.writer.write(b"x")
        assert await client.reader.readexactly(11) == b"half an ans"
        assert await client.end() == "reset"
        assert [event.fields["how"] for event in link.log.events("close")] == ["reset by the upstream"]


@on_virtual_time
async def test_bytes_for_an_end_that_has_left_are_accounted_for_and_the_other_end_hears_of_it() -> None:
    ended = asyncio.get_running_loop().create_future()

    async def sends_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(100_000))
                await writer.drain()
                await clock.sleep(0.01)
        except ConnectionError as error:
            ended.set_result(error)
            raise

    async with linked(sends_for_ever, StreamProfile(delay_ms=20.0)) as link:
        async with Client(link) as client:
            await client.reader.readexactly(1000)
            client.reset()
        async with asyncio.timeout(20.0):
            assert isinstance(await ended, ConnectionError)
        async with asyncio.timeout(20.0):
            while link.connections:
                await clock.sleep(0.01)
        totals = link.totals()["from"]
        assert totals["received"] == totals["delivered"] + sum(totals["dropped"].values())
        assert set(totals["dropped"]) <= {"gone"}


@on_virtual_time
async def test_a_partition_that_resets_also_ends_those_who_are_still_connecting() -> None:
    async with linked(profile=CLEAR) as link:
        link.partition("blackhole")
        async with Client(link) as waiting:
            await clock.sleep(1.0)
            assert link.connections == 1
            link.partition("reset")
            assert await waiting.end() == "reset"
            link.heal()
            await clock.sleep(1.0)
        assert link.connections == 0


@on_virtual_time
async def test_who_leaves_while_the_link_is_silent_is_forgotten() -> None:
    async with linked(profile=CLEAR) as link:
        link.partition("silent")
        async with Client(link) as client:
            await client.hears_nothing_for(1.0)
        await clock.sleep(1.0)
        assert not link._mute


@on_virtual_time
async def test_a_connection_that_both_ends_leave_after_the_nat_forgot_it_is_over() -> None:
    left = asyncio.Event()

    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()

    async with linked(leaves, StreamProfile(delay_ms=1.0, nat_idle_s=10.0)) as link:
        async with Client(link):
            await clock.sleep(20.0)
        left.set()
        await clock.sleep(1.0)
        assert link.connections == 0
        assert link.log.events("close")[0].fields["how"] == "both ends left unheard"


@on_virtual_time
async def test_a_connection_is_over_when_one_end_left_unheard_and_the_other_heard_of() -> None:
    left = asyncio.Event()

    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()

    async with linked(leaves) as link:
        link.put("cut", StreamProfile(delay_ms=1.0, limit=LimitSpec(0, "stall")), "to")
        async with Client(link):
            await clock.sleep(1.0)
        await clock.sleep(1.0)
        assert link.connections == 1
        left.set()
        await clock.sleep(1.0)
        assert link.connections == 0


@on_virtual_time
async def test_the_log_keeps_the_newest_and_counts_the_others() -> None:
    seen = []
    async with linked(profile=CLEAR, log=EventLog(seen.append, kept=3)) as link:
        for _ in range(4):
            link.partition("blackhole")
            link.heal()
        assert len(seen) == link.log.total == 10
        assert link.log.text().splitlines()[0] == "… 7 earlier events"
        assert link.log.text(newest=1).splitlines()[1].endswith("heal  kind=blackhole")
        assert repr(link.log) == "<EventLog 10 events>"
