"""How connections over a link end: half closed, reset, abandoned, and what becomes of the bytes on their way."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from tests.support.loop import on_virtual_time
from tests.tidegate.netsim.proxy.ends import CLEAR, Client, Recorder, linked, pattern, source
from tidegate import clock
from tidegate.netsim.links.stream import LimitSpec, StreamProfile


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
async def test_a_partition_that_resets_also_ends_connections_in_the_making() -> None:
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
async def test_a_client_that_leaves_while_the_link_is_silent_is_forgotten() -> None:
    async with linked(profile=CLEAR) as link:
        link.partition("silent")
        async with Client(link) as client:
            await client.hears_nothing_for(1.0)
        await clock.sleep(1.0)
        assert link.mute_connections == 0


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
async def test_a_connection_is_over_when_one_end_ended_unseen_and_the_other_seen() -> None:
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
